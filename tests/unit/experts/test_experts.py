from functools import partial

import pytest
import torch

from moe_kernels import Activation, GroupedGemmArguments, WgradArguments, fused_experts, reference, sort_by_expert
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.experts.operands import ExpertOperands
from moe_kernels.experts.row_products import Rows
from moe_kernels.experts.steps import Experts
from moe_kernels.gemm import selection
from moe_kernels.specs import as_activation
from moe_kernels.testing import CASES, Case, check_accuracy, make_inputs, run_with_grads
from moe_kernels.types import ExpertWeights

from ...dtypes import DTYPES
from ...tiers import OP_CASES, default_tier, slow
from ..compiled import assert_compiles
from ..permutation.test_permutation import make_strided
from ..saved import saved_tensors

triton_experts = partial(fused_experts, implementation="triton")
NAMES = ("out", "dtokens", "dweights", "dw_up", "dw_down", "db_up", "db_down")


def draw(case, dtype, device, seed=0, activation="swiglu"):
    """Return (tokens, weights, experts, w_up, w_down) for a case."""
    inputs = make_inputs(case, dtype, device, seed)
    routed = reference.topk_routing(inputs.logits, case.top_k)
    w_up = inputs.w_up if as_activation("draw", activation).gated else inputs.w_up[:, : case.d_ff].contiguous()
    return inputs.tokens, routed.topk_weights, routed.topk_experts, w_up, inputs.w_down


def run(tokens, weights, experts, w_up, w_down, b_up=None, b_down=None, *, op=triton_experts, **options):
    permutation = reference.sort_by_expert(experts, len(w_up))
    return op(tokens, weights, permutation, w_up, w_down, b_up=b_up, b_down=b_down, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP_CASES)
def test_matches_reference(case, dtype, device):
    draws = partial(draw, CASES[case], dtype, device)
    check_accuracy(run, partial(run, op=reference.fused_experts), draws, NAMES[:5])


def test_saves_tokens_preactivation_and_routing_only(device):
    case = CASES["ordinary"]
    tokens, weights, experts, w_up, w_down = draw(case, torch.float32, device)
    leaves = [t.requires_grad_() for t in (tokens, weights, w_up, w_down)]
    permutation = sort_by_expert(experts, case.num_experts, implementation="triton")
    with saved_tensors() as saved:
        triton_experts(leaves[0], leaves[1], permutation, *leaves[2:])
    floats = {t.data_ptr(): t for t in saved if t.is_floating_point()}
    known = {leaf.data_ptr() for leaf in leaves}
    # Without adapters, an empty tensor takes the place of their products.
    (preactivation,) = (t for pointer, t in floats.items() if pointer not in known and t.numel())
    num_rows = case.num_tokens * case.top_k
    assert preactivation.shape == (num_rows, 2 * case.d_ff)
    integers = {t.data_ptr(): t.numel() for t in saved if not t.is_floating_point()}
    # slot_to_row, row_to_token and a table, which are small in comparison at real sizes.
    table = sum(t.numel() for t in permutation.tile_table[:4])
    assert sum(integers.values()) == 2 * num_rows + table


def test_frozen_weights_launch_no_weight_gradient(device, monkeypatch):
    monkeypatch.setattr("moe_kernels.experts.row_products.Rows.wgrad", None)  # a call would fail
    tokens, weights, chosen, w_up, w_down = draw(CASES["ordinary"], torch.float32, device)
    tokens.requires_grad_()
    run(tokens, weights, chosen, w_up, w_down).sum().backward()
    assert tokens.grad.isfinite().all()


def test_any_strides_of_the_permutation(device):
    tokens, weights, experts, w_up, w_down = draw(Case(7, 9, 5, 3, 2), torch.float32, device)
    permutation = sort_by_expert(experts, len(w_up), implementation="triton")
    operands = tokens, weights, w_up, w_down

    def results(permutation):
        return run_with_grads(lambda x, w, *matrices: triton_experts(x, w, permutation, *matrices), operands)

    assert all(map(torch.equal, results(make_strided(permutation)), results(permutation)))


def test_gradients_of_transposed_weights_lie_as_their_parameters(device):
    """Weights stored as [E, in, out], as in GPT-OSS, get gradients that autograd keeps without a copy."""
    case = CASES["odd_sizes"]

    def transposed(tokens, weights, experts, *stored, op=triton_experts):
        return run(tokens, weights, experts, *(weight.transpose(1, 2) for weight in stored), op=op)

    def draw_stored(seed):
        *given, w_up, w_down = draw(case, DTYPES[-1], device, seed)
        return *given, *(weight.transpose(1, 2).contiguous() for weight in (w_up, w_down))

    check_accuracy(transposed, partial(transposed, op=reference.fused_experts), draw_stored, NAMES[:5])
    *given, w_up, w_down = draw(case, DTYPES[-1], device)
    w_up, w_down = (w.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for w in (w_up, w_down))
    gradients = torch.autograd.grad(run(*given, w_up, w_down).sum(), (w_up, w_down))
    for gradient, weight in zip(gradients, (w_up, w_down), strict=True):
        assert gradient.stride() == weight.stride() and gradient.stride(1) == 1


def test_backward_twice_on_a_kept_graph(device):
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in draw(CASES["odd_sizes"], DTYPES[-1], device)]
    wanted = [t for t in leaves if t.requires_grad]
    out = run(*leaves).sum()
    first = torch.autograd.grad(out, wanted, retain_graph=True)
    second = torch.autograd.grad(out, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("form", ["gemm", "wgrad"])
def test_a_kernel_chosen_for_few_rows_is_not_kept_for_none(form, device):
    """Both sizes have the same power of two of rows per expert, but TMA copies need at least one row."""

    def arguments(num_rows):
        a, b = torch.ones(num_rows, 256, device=device).half(), torch.ones(2, 256, 512, device=device).half()
        out, offsets = a.new_empty(num_rows, 512), torch.full((2,), num_rows, dtype=torch.int32, device=device)
        if form == "gemm":
            return GroupedGemmArguments(a, b, out, offsets=offsets)
        return WgradArguments(a, out, b, offsets=offsets)

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels with TMA are for capability 9.0")
    some, none = arguments(1), arguments(0)
    assert selection.select(some).metadata.design.tma
    kernel = selection.select(none)
    assert kernel.supports(none)
    kernel.run(none)


def flat_operands(tokens, weights, *rest, activation="swiglu", reserved_sms=0, batch_invariant=False, **fields):
    """Return what the registered op takes. `rest` holds the experts' weights, then the permutation."""
    *of_experts, permutation = rest
    settings = {name: fields.pop(name) for name in ("adapters", "weight_on_input") if name in fields}
    experts = Experts.of(ExpertWeights(*of_experts), as_activation("test", activation), **settings)
    rows = Rows.of(permutation, reserved_sms=reserved_sms, batch_invariant=batch_invariant)
    return fused_experts_op.schema_arguments(ExpertOperands(tokens, experts, weights, rows=rows, **fields))


# Options of the op. "bias" adds biases to the drawn operands.
VARIANTS = {
    "plain": {},
    "geglu": {"activation": "geglu"},
    "gpt_oss": {"activation": Activation("gpt_oss", limit=0.5), "bias": True},
    "interleaved": {"activation": Activation("gpt_oss", limit=0.5, interleaved=True), "bias": True},
    "relu_squared": {"activation": "relu_squared"},
    "relu_bias": {"activation": "relu", "bias": True},
    "bias": {"bias": True},
    "weight_on_input": {"weight_on_input": True},
    "weight_on_input_bias": {"weight_on_input": True, "bias": True},
}


def draw_variant(case, variant, dtype, device, seed=0):
    """Return (tokens, weights, experts, w_up, w_down, b_up, b_down), without biases if the variant has none."""
    operands = draw(case, dtype, device, seed, VARIANTS[variant].get("activation", "swiglu"))
    if not VARIANTS[variant].get("bias"):
        return operands
    generator = torch.Generator(device).manual_seed(seed + 50)
    sizes = operands[3].shape[1], case.d_model
    biases = (torch.randn(case.num_experts, size, device=device, generator=generator).to(dtype) for size in sizes)
    return *operands, *biases


def run_variant(*operands, variant, op=triton_experts):
    return run(*operands, op=op, **{key: value for key, value in VARIANTS[variant].items() if key != "bias"})


ODD = Case(33, 21, 13, 4, 2)
TWO_EMPTY = Case(33, 21, 13, 4, 2, "first")


@pytest.mark.parametrize(
    ("variant", "case", "dtype"),
    [
        *((variant, ODD, torch.float32) for variant in VARIANTS if variant != "plain"),
        ("gpt_oss", TWO_EMPTY, torch.float32),
        ("weight_on_input_bias", TWO_EMPTY, torch.float32),
        ("gpt_oss", CASES["zero_tokens"], torch.float32),
        pytest.param("gpt_oss", ODD, DTYPES[-1], marks=slow),
        pytest.param("weight_on_input_bias", ODD, DTYPES[-1], marks=slow),
        ("relu_squared", ODD, DTYPES[-1]),
    ],
)
def test_variants_match_reference(variant, case, dtype, device):
    check_accuracy(
        partial(run_variant, variant=variant),
        partial(run_variant, variant=variant, op=reference.fused_experts),
        partial(draw_variant, case, variant, dtype, device),
        NAMES if VARIANTS[variant].get("bias") else NAMES[:5],
    )


@pytest.mark.parametrize("op", [triton_experts, reference.fused_experts])
@pytest.mark.parametrize("variant", ["gpt_oss", "weight_on_input_bias"])
def test_dropped_slots_add_no_bias(variant, op, device):
    tokens, weights, experts, *rest = draw_variant(Case(20, 16, 8, 8, 2), variant, torch.float32, device)
    leaves = [t.detach().requires_grad_() for t in (tokens, weights, *rest)]
    dropped = experts.clone()
    dropped[3, 0] = -1
    dropped[8] = 8
    out = run_variant(*leaves[:2], dropped, *leaves[2:], variant=variant, op=op)
    assert not out[8].any() and out[3].any()
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][8].any() and not gradients[1][8].any()
    assert gradients[1][3, 0] == 0 and gradients[1][3, 1] != 0
    expert = int(experts[3, 0])
    alone = torch.where(experts == expert, experts, -1)  # no other expert's bias gets a gradient
    out = run_variant(*leaves[:2], alone, *leaves[2:], variant=variant, op=op)
    for gradient in torch.autograd.grad(out.square().sum(), leaves[-2:]):
        assert gradient[expert].any() and not gradient[torch.arange(8, device=device) != expert].any()


def assert_frozen_operands_are_skipped(run, operands, chosen):
    """Check that gradients of the chosen operands, by index, do not depend on which others are frozen."""

    def gradients(wanted):
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(operands)]
        return dict(zip(wanted, torch.autograd.grad(run(*leaves).sum(), [leaves[i] for i in wanted]), strict=True))

    every = gradients([i for i, t in enumerate(operands) if t.is_floating_point()])
    for wanted in chosen:
        for i, gradient in gradients(wanted).items():
            assert torch.equal(gradient, every[i]), (wanted, i)


@pytest.mark.parametrize(
    "variant", default_tier(["plain", "gpt_oss", "weight_on_input_bias"], ["weight_on_input_bias"])
)
def test_frozen_operands_are_skipped(variant, device):
    operands = draw_variant(Case(5, 8, 4, 2, 2), variant, torch.float32, device)
    indices = [i for i in range(len(operands)) if i != 2]
    chosen = [[i for i in indices if i != frozen] for frozen in indices]
    assert_frozen_operands_are_skipped(partial(run_variant, variant=variant), operands, chosen)


@slow
def test_opcheck(device):
    tokens, weights, experts, *rest = draw_variant(Case(6, 8, 4, 3, 2), "gpt_oss", torch.float32, device)
    permutation = reference.sort_by_expert(experts, 3)
    operands = [t.requires_grad_() for t in (tokens, weights, *rest)]
    gpt_oss = Activation("gpt_oss", limit=0.5, alpha=1.702)
    transposed = [weight.detach().mT.contiguous().mT.requires_grad_() for weight in operands[2:4]]
    torch.library.opcheck(fused_experts_op.overload, flat_operands(*operands[:2], *transposed, permutation))
    torch.library.opcheck(fused_experts_op.overload, flat_operands(*operands, permutation, activation=gpt_oss))
    options = {"reserved_sms": 2, "weight_on_input": True, "recompute": True, "batch_invariant": True}
    torch.library.opcheck(fused_experts_op.overload, flat_operands(*operands, permutation, **options))


@pytest.mark.parametrize("variant", ["plain", "gpt_oss"])
def test_compiles_without_graph_break(variant, device):
    def layer(tokens, weights, experts, w_up, w_down, b_up=None, b_down=None):
        permutation = sort_by_expert(experts, 4, implementation="triton")
        options = {"b_up": b_up, "b_down": b_down, "activation": VARIANTS[variant].get("activation", "swiglu")}
        return triton_experts(tokens, weights, permutation, w_up, w_down, **options)

    assert_compiles(layer, draw_variant(ODD, variant, DTYPES[-1], device))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(6, 9)}, r"w_up must be \[E, 2F, D\] with E=3, D=9, got \[3, 8, 8\]"),
        ({"tokens": torch.zeros(7, 8)}, r"topk_weights must be \[T, K\] with T=7"),
        ({"w_up": torch.zeros(3, 6, 8)}, r"w_up must be \[E, 2F, D\] and w_down \[E, D, F\], got \[3, 6, 8\]"),
        ({"w_down": torch.zeros(2, 8, 4)}, r"w_down must be \[E, D, F\] with E=3, D=8, got \[2, 8, 4\]"),
        ({"w_up": torch.zeros(3, 8, 8).half()}, "one floating-point dtype"),
        ({"topk_weights": torch.zeros(6, 2).half()}, "topk_weights must be torch.float32"),
        ({"w_down": torch.zeros(3, 8, 4, device="meta")}, "one device"),
        ({"activation": "tanh"}, r"activation must be one of 'swiglu', .* and 11 more .*, got 'tanh'"),
        ({"activation": "relu"}, r"w_down must be \[E, D, F\] with E=3, D=8, F=8, got \[3, 8, 4\]"),
        ({"b_up": torch.zeros(3, 4)}, r"b_up must be \[E, 2F\] with E=3, 2F=8, got \[3, 4\]"),
        ({"b_down": torch.zeros(3, 4)}, r"b_down must be \[E, D\] with E=3, D=8, got \[3, 4\]"),
        ({"b_down": torch.zeros(3, 8).half()}, "one floating-point dtype"),
        ({"b_down": torch.zeros(3, 8, device="meta")}, "one device"),
        ({"reserved_sms": -1}, "reserved_sms must not be negative, got -1"),
        ({"recompute": "down"}, r"recompute must be one of \(None, 'up'\), got 'down'"),
    ],
)
def test_bad_input(changes, message):
    tokens, weights, experts, w_up, w_down = draw(Case(6, 8, 4, 3, 2), torch.float32, "cpu")
    operands = {"tokens": tokens, "topk_weights": weights, "permutation": reference.sort_by_expert(experts, 3)}
    with pytest.raises(ValueError, match=message):
        fused_experts(**{**operands, "w_up": w_up, "w_down": w_down, **changes})


@pytest.mark.parametrize("variant", default_tier(["weight_on_input", "gpt_oss", "relu_bias", "bias"], ["gpt_oss"]))
def test_recomputing_changes_no_bit_and_saves_no_preactivation(variant, device):
    operands = draw_variant(ODD, variant, DTYPES[-1], device)

    def results(recompute):
        op = partial(triton_experts, recompute=recompute)
        with saved_tensors() as saved:
            return saved, run_with_grads(partial(run_variant, variant=variant, op=op), operands)

    (saved, expected), (fewer, actual) = results(None), results("up")
    assert all(map(torch.equal, actual, expected))
    hidden = operands[2].numel(), operands[3].shape[1]
    assert any(t.shape == hidden for t in saved) and not any(t.shape == hidden for t in fewer)


def test_reserved_sms_change_no_bit(device):
    case = CASES["skewed"] if device == "cuda" else Case(9, 16, 8, 4, 2)
    operands = draw(case, DTYPES[-1], device)
    actual, expected = (run_with_grads(partial(run, reserved_sms=number), operands) for number in (2, 0))
    assert all(map(torch.equal, actual, expected))
