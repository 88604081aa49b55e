"""Low-rank adapters inside `fused_experts`. `tests/layer/test_lora.py` compares them with merged weights."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_kernels import Activation, fused_experts, reference, sort_by_expert
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.testing import Case, assert_accurate, check_accuracy
from moe_kernels.types import ExpertAdapters

from ...dtypes import DTYPES
from ...tiers import default_tier, slow
from ..compiled import assert_compiles
from ..saved import saved_tensors
from .test_experts import ODD, flat_operands, triton_experts
from .test_experts import draw as draw_experts

SCALE = 0.5
NAMES = ("out", "dtokens", "dweights", "dw_up", "dw_down", "dup_a", "dup_b", "ddown_a", "ddown_b")
VARIANTS = {
    "both": {},
    "recompute": {"recompute": "up"},
    "batch_invariant": {"batch_invariant": True},
    "weight_on_input": {"weight_on_input": True},
    "gpt_oss": {"activation": Activation("gpt_oss", limit=0.5)},
    "interleaved": {"activation": Activation("gpt_oss", limit=0.5, interleaved=True)},
    "relu": {"activation": "relu"},
}


def draw(case, dtype, device, seed=0, *, activation="swiglu", rank=3, shared=False):
    """Return tokens, weights, experts, w_up, w_down and the four factors."""
    operands = draw_experts(case, dtype, device, seed, activation)
    generator = torch.Generator(device).manual_seed(seed + 9)
    num_shared = 1 if shared else case.num_experts
    shapes = (
        (num_shared, rank, case.d_model),
        (case.num_experts, operands[3].shape[1], rank),
        (case.num_experts, rank, case.d_ff),
        (num_shared, case.d_model, rank),
    )
    factors = [torch.randn(s, device=device, generator=generator).mul(s[2] ** -0.5).to(dtype) for s in shapes]
    return *operands, *factors


def run(tokens, weights, experts, w_up, w_down, *factors, op=triton_experts, **options):
    permutation = reference.sort_by_expert(experts, len(w_up))
    adapters = ExpertAdapters(*factors, SCALE)
    return op(tokens, weights, permutation, w_up, w_down, adapters=adapters, **options)


def run_reference(*operands, **options):
    kept = {name: value for name, value in options.items() if name in ("activation", "weight_on_input")}
    return run(*operands, op=reference.fused_experts, **kept)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_reference(variant, device):
    options = VARIANTS[variant]
    draws = partial(draw, ODD, torch.float32, device, activation=options.get("activation", "swiglu"))
    check_accuracy(partial(run, **options), partial(run_reference, **options), draws, NAMES)


@pytest.mark.parametrize(
    ("rank", "dtype"), default_tier(product([1, 64], DTYPES), [(1, DTYPES[-1]), (64, torch.float32)]), ids=str
)
def test_ranks_and_dtypes_match_reference(rank, dtype, device):
    draws = partial(draw, Case(15, 12, 9, 3, 2), dtype, device, rank=rank)
    check_accuracy(run, run_reference, draws, NAMES)


def test_batch_invariant_reference(device):
    """Every token adds a term to the gradients of the factors."""
    op = partial(fused_experts, implementation="reference", batch_invariant=True)
    draws = partial(draw, Case(400, 12, 9, 2, 2), torch.bfloat16, device, rank=2)
    check_accuracy(partial(run, op=op), run_reference, draws, NAMES)


def test_factors_that_all_experts_share(device):
    check_accuracy(run, run_reference, partial(draw, ODD, torch.float32, device, shared=True), NAMES)


@pytest.mark.parametrize("only", ["up", "down"])
def test_adapters_of_one_projection(only, device):
    kept = slice(5, 7) if only == "up" else slice(7, 9)

    def of_one(op, tokens, weights, experts, w_up, w_down, a, b):
        factors = (a, b, None, None) if only == "up" else (None, None, a, b)
        return op(tokens, weights, experts, w_up, w_down, *factors)

    def draw_one(seed):
        operands = draw(ODD, torch.float32, device, seed)
        return *operands[:5], *operands[kept]

    check_accuracy(partial(of_one, run), partial(of_one, run_reference), draw_one, (*NAMES[:5], *NAMES[kept]))


@pytest.mark.parametrize("frozen", [True, False])
def test_float32_adapters_of_narrower_weights(frozen, device):
    dtype = DTYPES[-1]
    operands = draw(Case(40, 32, 16, 4, 2), dtype, device, rank=8)
    factors = [factor.float().requires_grad_() for factor in operands[5:]]
    base = [weight.requires_grad_(not frozen) for weight in operands[3:5]]
    out = run(*operands[:3], *base, *factors)
    assert out.dtype == dtype
    gradients = torch.autograd.grad(out.float().sum(), factors)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    exact, baseline = (
        run_reference(*(t.to(kind) if t.is_floating_point() else t for t in (*operands[:5], *factors)))
        for kind in (torch.float64, dtype)
    )
    assert_accurate(out, baseline, exact, "out")


def test_experts_without_tokens_get_zeros_and_padding_reaches_nothing(device):
    tokens, weights, experts, w_up, w_down, *factors = draw(Case(20, 16, 8, 4, 2, "first"), torch.float32, device)
    experts[3] = -1
    tokens[3] = float("nan")
    for factor in factors:
        factor.requires_grad_()
    out = run(tokens, weights, experts, w_up, w_down, *factors)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), factors):
        assert gradient[:2].abs().amin(0).any() and gradient.isfinite().all()
        assert not gradient[2:].any()  # of the experts that no token chose


def test_deterministic_and_frozen_base_needs_no_gradient_of_its_size(device):
    """Backward returns the same bits, allocates no weight gradient, and saves [R, r] beside tokens, H and routing."""
    case = Case(16, 32, 16, 4, 2)
    tokens, weights, experts, w_up, w_down, *factors = draw(case, torch.float32, device, rank=8)
    leaves = [t.requires_grad_() for t in (tokens, weights, *factors)]
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for result in tree_leaves(out):
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    largest = max(largest, result.numel())
            return out

    def once():
        out = run(*leaves[:2], experts, w_up, w_down, *leaves[2:])
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    with Sizes(), saved_tensors() as saved:
        first = once()
    num_rows = case.num_tokens * case.top_k
    assert largest <= num_rows * max(2 * case.d_ff, case.d_model) < w_down.numel()
    known = {t.data_ptr() for t in (*leaves, w_up, w_down)}
    kept = {t.data_ptr(): t for t in saved if t.is_floating_point() and t.numel() and t.data_ptr() not in known}
    shapes = sorted(tuple(t.shape) for t in kept.values() if t.shape[:1] == (num_rows,))
    assert shapes == [(num_rows, 8), (num_rows, 2 * case.d_ff)]
    assert all(map(torch.equal, once(), first))


@slow
@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck(recompute, device):
    tokens, weights, experts, w_up, w_down, *factors = draw(Case(6, 8, 4, 3, 2), torch.float32, device)
    leaves = [t.requires_grad_() for t in (tokens, weights, w_up, w_down)]
    options = {"adapters": ExpertAdapters(*factors, SCALE), "recompute": recompute}
    operands = flat_operands(*leaves, reference.sort_by_expert(experts, 3), **options)
    torch.library.opcheck(fused_experts_op.overload, operands)


def test_compiles_with_gradients(device):
    tokens, weights, experts, w_up, w_down, *factors = draw(ODD, torch.float32, device)
    permutation = reference.sort_by_expert(experts, len(w_up))

    def step(tokens, weights, *factors):
        return triton_experts(tokens, weights, permutation, w_up, w_down, adapters=ExpertAdapters(*factors, SCALE))

    assert_compiles(step, (tokens, weights, *factors))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"up_b": None}, "adapters must have up_a and up_b or neither"),
        ({"up_a": torch.zeros(4, 3, 20)}, r"up_a must be \[1, 3, 21\] or \[4, 3, 21\] .*, got \[4, 3, 20\]"),
        ({"up_a": torch.zeros(4, 0, 21)}, "up_a must be .* with a rank of at least 1"),
        ({"down_b": torch.zeros(4, 21, 2)}, r"down_b must be \[1, 21, 3\] or \[4, 21, 3\]"),
        ({"down_a": torch.zeros(1, 3, 13)}, r"down_a must be \[4, 3, 13\]"),
        ({"down_a": torch.zeros(4, 3, 13, dtype=torch.int32)}, "down_a must be of floating point"),
        ({"down_a": torch.zeros(4, 3, 13, device="meta")}, "down_a must be of floating point on cpu, got .* on meta"),
    ],
)
def test_adapters_that_do_not_fit_are_named(changes, error):
    tokens, weights, experts, w_up, w_down, *factors = draw(ODD, torch.float32, "cpu")
    adapters = ExpertAdapters(*factors)._replace(**changes)
    permutation = reference.sort_by_expert(experts, 4)
    with pytest.raises(ValueError, match=f"fused_experts: {error}"):
        fused_experts(tokens, weights, permutation, w_up, w_down, adapters=adapters)


def test_settings_are_no_adapters():
    tokens, topk_experts = torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int32)
    operands = (tokens, torch.ones(3, 1), sort_by_expert(topk_experts, 2), torch.zeros(2, 4, 4), torch.zeros(2, 4, 2))
    with pytest.raises(ValueError, match="fused_experts: adapters must be ExpertAdapters, got dict"):
        fused_experts(*operands, adapters={"rank": 8})
