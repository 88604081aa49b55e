"""`fused_experts(precision="fp8")` against the same recipe in PyTorch, and against the op without it."""

import warnings
from functools import partial

import pytest
import torch

from moe_kernels import ExpertAdapters, fused_experts, reference, reference_fp8, sort_by_expert
from moe_kernels.experts.fused import compute_experts
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.experts.operand_checks import check_fp8_gpu, warn_if_unmeasured
from moe_kernels.quantization.fp8_weights import launch_quantize_weight
from moe_kernels.quantization.quantize import quantize
from moe_kernels.testing import Case, run_with_grads, to_float64
from moe_kernels.types import ExpertWeights, ScaledForms

from ...dtypes import DTYPES
from ...gpu import assert_never_waits, captured
from ...tiers import default_tier, slow
from ..compiled import assert_compiles
from ..saved import saved_tensors
from .test_experts import NAMES, assert_frozen_operands_are_skipped, draw_variant, flat_operands, run_variant
from .test_experts import run as run_experts

SIXTEENS = Case(33, 48, 16, 4, 2)
BLOCKS = Case(12, 144, 128, 2, 1)
PARTIAL = Case(12, 144, 48, 2, 1)
TWO_EMPTY = Case(33, 48, 16, 4, 2, "first")
# "saved" is the plain variant with precision="fp8_saved"; the others are those of `test_experts.py`.
VARIANTS = ("plain", "saved", "geglu", "gpt_oss", "interleaved", "relu_squared", "weight_on_input_bias")
COMMON_VARIANTS = ("plain", "saved", "gpt_oss")  # of the default tier


def draw(case, variant, dtype, device, seed=0):
    """Return (tokens, weights, experts, w_up, w_down, b_up, b_down), without biases if the variant has none."""
    return draw_variant(case, "plain" if variant == "saved" else variant, dtype, device, seed)


def run(*operands, variant="plain", op=None, **options):
    precision = "fp8_saved" if variant == "saved" else "fp8"
    op = op or partial(fused_experts, precision=precision, implementation="triton")
    return run_variant(*operands, variant="plain" if variant == "saved" else variant, op=partial(op, **options))


@pytest.mark.parametrize(
    ("variant", "case", "dtype"),
    [
        *default_tier(((name, SIXTEENS, torch.float32) for name in VARIANTS), lambda row: row[0] in COMMON_VARIANTS),
        ("plain", BLOCKS, torch.float32),
        ("plain", PARTIAL, torch.float32),
        ("gpt_oss", TWO_EMPTY, torch.float32),
        ("plain", Case(0, 48, 16, 4, 2), torch.float32),
        ("plain", BLOCKS, DTYPES[-1]),
        pytest.param("gpt_oss", PARTIAL, DTYPES[-1], marks=slow),
        pytest.param("weight_on_input_bias", BLOCKS, DTYPES[-1], marks=slow),
    ],
)
def test_variants_match_the_recipe(variant, case, dtype, device):
    """Compare norms. A sum that rounds differently may cross the limit between two e4m3 numbers, which changes one
    operand by up to 1/8. The tests of each kernel allow no such difference."""
    operands = draw(case, variant, dtype, device)
    actual = results(operands, variant=variant)
    recipe = partial(reference_fp8.fused_experts, saves_fp8=variant == "saved")
    baseline, exact = (results(given, variant=variant, op=recipe) for given in (operands, to_float64(operands)))
    for name, a, b, e in zip(NAMES[: len(exact)], actual, baseline, exact, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.isnan(), e.isnan())
        limit = 2 * relative_error(b, e) + torch.finfo(dtype).eps + rare_error(device)
        assert relative_error(a, e) <= limit, name


def rare_error(device):
    """Return the relative error, in the norm, of operands that round differently.

    If sums differ by d, one in (s / d) crosses a limit between two numbers that are s apart, and then differs by s. The
    error in the norm is the root of d * s. e4m3 has s of 1/8 or less. Tensor cores of Hopper add products of e4m3
    numbers with 13 bits after the largest one's first, so d is about 2**-11. Three quantisations in sequence add up.
    """
    return 1e-3 if torch.device(device).type == "cpu" else (3 * 2**-11 / 8) ** 0.5


def relative_error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def results(operands, **options):
    """Return the output and all gradients."""
    return run_with_grads(partial(run, **options), operands)


DISTRIBUTIONS = ("normal", "outlier channels", "heavy tails")


@pytest.mark.parametrize(
    ("implementation", "distribution"), [("triton", "normal"), *(("reference", name) for name in DISTRIBUTIONS)]
)
def test_errors_against_unquantised_operands_are_below_nine_per_cent(implementation, distribution, device):
    case = Case(96, 256, 128, 4, 2) if implementation == "reference" else BLOCKS
    tokens, *others = draw(case, "plain", torch.float32, device)
    generator = torch.Generator(device).manual_seed(3)
    if distribution == "outlier channels":
        tokens[:, ::64] *= 30
    if distribution == "heavy tails":
        tokens = tokens / torch.rand(tokens.shape, device=device, generator=generator).clamp(min=0.01).sqrt()
    op = partial(fused_experts, precision="fp8", implementation=implementation)
    actual, expected = (results((tokens, *others), op=each) for each in (op, reference.fused_experts))
    for name, a, e in zip(NAMES, actual, expected, strict=False):
        assert 0.01 < (a - e).norm() / e.norm() < 0.09, name


OPTIONS = [{"recompute": "up"}, {"reserved_sms": 2}, {"batch_invariant": True}]


@pytest.mark.parametrize("options", default_tier(OPTIONS, OPTIONS[:1]), ids=str)
def test_options_change_no_bit(options, device):
    operands = draw(PARTIAL, "plain", DTYPES[-1], device)
    expected = results(operands, batch_invariant=options.get("batch_invariant", False))
    assert all(map(torch.equal, results(operands, **options), expected))


def test_copied_rows_give_the_same_bits(device, monkeypatch):
    operands = draw(PARTIAL, "plain", DTYPES[-1], device)
    expected = results(operands)
    monkeypatch.setattr("moe_kernels.experts.row_products.COLUMNS_WORTH_A_COPY", 0)
    assert all(map(torch.equal, results(operands), expected))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recompute", [None, "up"])
def test_given_forms_of_the_weights_give_the_same_bits(turned, recompute, device):
    operands = draw(PARTIAL, "plain", DTYPES[-1], device)
    up, down = (launch_quantize_weight(weight, transposed=turned) for weight in operands[3:5])
    forms = ScaledForms(*up, *down)

    def op(tokens, weights, permutation, w_up, w_down, **options):
        options = {name: option for name, option in options.items() if not name.startswith("b_")}
        given = ExpertWeights(w_up, w_down)
        return compute_experts(tokens, weights, permutation, given, precision="fp8", forms=forms, **options)

    options = {"recompute": recompute, "implementation": "triton"}
    assert all(map(torch.equal, results(operands, op=op, **options), results(operands)))


@pytest.mark.parametrize("variant", default_tier(["plain", "weight_on_input_bias"], {"weight_on_input_bias"}))
def test_frozen_operands_are_skipped(variant, device):
    operands = draw(Case(5, 16, 16, 2, 2), variant, torch.float32, device)
    indices = [i for i in range(len(operands)) if i != 2]
    chosen = [0], [1], [3], [4], indices[1:], indices[:-1]
    assert_frozen_operands_are_skipped(partial(run, variant=variant), operands, chosen)


def test_dropped_slots_and_experts_without_rows(device):
    """NaN in tokens that no expert reads and in weights of experts without rows reaches nothing."""
    tokens, weights, experts, w_up, w_down = draw(Case(20, 48, 32, 4, 2, "first"), "plain", torch.float32, device)
    experts[3], experts[5, 0] = -1, -1
    tokens[3], w_up[3], w_down[2] = torch.nan, torch.nan, torch.nan
    out, *gradients = results((tokens, weights, experts, w_up, w_down))
    assert all(result.isfinite().all() for result in (out, *gradients))
    assert not out[3].any() and not gradients[0][3].any() and not gradients[2][2:].any()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_token_without_finite_values_keeps_to_itself(implementation, device):
    """Outputs and gradients of other tokens do not change, as without FP8."""
    operands = draw(SIXTEENS, "plain", torch.float32, device)
    op = partial(fused_experts, precision="fp8", implementation=implementation)
    out, dtokens, dweights, *_ = results(operands, op=op)
    for value in (torch.nan, torch.inf):
        bad = operands[0].clone()
        bad[7, 3] = value
        got = results((bad, *operands[1:]), op=op)
        others = torch.arange(len(bad), device=device) != 7
        assert not got[0][7].isfinite().any() and not got[1][7].isfinite().all()
        for actual, expected in zip(got, (out, dtokens, dweights), strict=False):
            torch.testing.assert_close(actual[others], expected[others], rtol=0.0, atol=0.0)


def test_zero_tokens_and_zero_weights(device):
    tokens, weights, experts, w_up, w_down = draw(SIXTEENS, "plain", torch.float32, device)
    tokens[4] = 0.0
    out, *gradients = results((tokens, weights, experts, w_up, w_down))
    assert not out[4].any() and all(gradient.isfinite().all() for gradient in gradients)
    out, *gradients = results((tokens, weights, experts, torch.zeros_like(w_up), w_down))
    assert not out.any() and all(gradient.isfinite().all() for gradient in gradients)


def test_saves_what_the_op_saves_without_fp8(device):
    operands = [t.requires_grad_(t.is_floating_point()) for t in draw(BLOCKS, "plain", DTYPES[-1], device)]

    def saved_bytes(precision):
        with saved_tensors() as saved:
            run(*operands, op=partial(fused_experts, implementation="triton", precision=precision))
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in saved}.values())

    plain = saved_bytes(None)
    assert saved_bytes("fp8") == plain
    hidden = BLOCKS.num_tokens * BLOCKS.top_k * 2 * BLOCKS.d_ff
    scales = 4 * hidden // 128
    assert saved_bytes("fp8_saved") == plain - hidden * operands[0].element_size() + hidden + scales


@slow
def test_opcheck(device):
    tokens, weights, experts, *matrices = draw(Case(6, 32, 16, 3, 2), "gpt_oss", torch.float32, device)
    operands = [t.requires_grad_() for t in (tokens, weights, *matrices)] + [reference.sort_by_expert(experts, 3)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    flat = flat_operands(*operands, precision="fp8", forms=ScaledForms())
    torch.library.opcheck(fused_experts_op.overload, flat, test_utils=checks)
    # The test of the schema compares tensors by products, which float8 lacks.
    up, down = (launch_quantize_weight(weight.detach()) for weight in matrices[:2])
    forms = ScaledForms(*up, *down)
    for precision, options in (("fp8", {"forms": forms, "recompute": True}), ("fp8_saved", {"forms": ScaledForms()})):
        flat = flat_operands(*operands, precision=precision, **options)
        torch.library.opcheck(fused_experts_op.overload, flat, test_utils=checks[1:])


@pytest.mark.parametrize("implementation", default_tier(["triton", "reference"], {"triton"}))
def test_compiles_without_graph_break(implementation, device):
    def layer(tokens, weights, experts, w_up, w_down):
        permutation = sort_by_expert(experts, 4, implementation=implementation)
        options = {"precision": "fp8", "implementation": implementation}
        return fused_experts(tokens, weights, permutation, w_up, w_down, **options)

    assert_compiles(layer, draw(SIXTEENS, "plain", DTYPES[-1], device))


@pytest.mark.gpu
def test_never_waits_and_is_captured_in_a_graph():
    operands = draw(Case(300, 256, 128, 8, 2), "plain", torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in operands]
    permutation = sort_by_expert(operands[2], 8)
    dout = torch.randn_like(operands[0])

    def step():
        out = fused_experts(*leaves[:2], permutation, *leaves[3:], precision="fp8")
        return out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], dout)

    assert_never_waits(step)
    expected = [result.clone() for result in step()]
    replay, again = captured(step)
    replay()
    assert all(map(torch.equal, again, expected))


def test_bad_input():
    operands = draw(SIXTEENS, "plain", torch.float32, "cpu")
    op = partial(run_experts, op=fused_experts)
    with pytest.raises(ValueError, match=r"precision must be one of \(None, 'fp8', 'fp8_saved'\), got 'int8'"):
        op(*operands, precision="int8")
    with pytest.raises(ValueError, match="needs multiples of 16, got d_model=48 and d_ff=24"):
        op(*draw(Case(6, 48, 24, 4, 2), "plain", torch.float32, "cpu"), precision="fp8")
    tokens, weights, experts, w_up, w_down = operands
    stored, permutation = (quantize(w, "fp8") for w in (w_up, w_down)), reference.sort_by_expert(experts, 4)
    with pytest.raises(ValueError, match=r"quantises weights that are trained, got stored fp8 \(128x128\)"):
        fused_experts(tokens, weights, permutation, *stored, precision="fp8")
    with pytest.raises(NotImplementedError, match="takes no adapters"):
        op(*operands, precision="fp8", adapters=ExpertAdapters())
    with pytest.raises(NotImplementedError, match=r"needs a GPU of compute capability 9\.0, this one has 8\.9"):
        check_fp8_gpu(89)
    check_fp8_gpu(90)


UNMEASURED = [(90, 2048, 768, 512), (90, 1024, 768, 1024), (90, 2048, 512, 1024), (100, 4096, 1024, 2048)]


@pytest.mark.parametrize("sizes", UNMEASURED)
def test_warns_once_where_it_was_not_measured_to_be_faster(sizes):
    warn_if_unmeasured.cache_clear()
    with pytest.warns(RuntimeWarning, match="may be slower than without"):
        warn_if_unmeasured(*sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unmeasured(*sizes)
        warn_if_unmeasured(90, 2048, 768, 1024)
