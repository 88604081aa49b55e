"""`fused_experts` over quantised weights, dequantised before each GEMM or decoded by it."""

import gc
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from moe_kernels import Activation, fused_experts, get_kernels, reference
from moe_kernels.experts import row_products as rows_module
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.experts.row_products import Rows
from moe_kernels.gemm import rule, selection
from moe_kernels.gemm.arguments.decoding import DecodingGemmArguments
from moe_kernels.gemm.kernel import StreamingDesign
from moe_kernels.gemm.kernels.pointer_decoding import MAX_ROWS
from moe_kernels.quantization.decode import decode_weight
from moe_kernels.quantization.formats import FORMATS, WeightFormat
from moe_kernels.quantization.quantize import quantize
from moe_kernels.testing import Case, check_accuracy, run_with_grads
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.tools.tune import check
from moe_kernels.types import ExpertAdapters, QuantizedWeight

from ...dtypes import DTYPES
from ...gpu import assert_never_waits, captured
from ...ops import CountedOps
from ...tiers import default_tier, slow
from ..compiled import assert_compiles
from ..saved import saved_tensors
from .test_expert_adapters import SCALE
from .test_expert_adapters import draw as draw_adapted
from .test_experts import flat_operands

NAMES = ("out", "dtokens", "dweights", "dup_a", "dup_b", "ddown_a", "ddown_b")
ODD = Case(11, 38, 22, 3, 2)  # rows of no whole block, except for mxfp4
BLOCKS = Case(11, 64, 32, 3, 2)
WIDE = Case(40, 192, 160, 3, 2)  # several steps and column tiles
SIZES = {
    "wide": WIDE,
    "higher_than_a_tile": Case(24, 40, 24, 4, 1, "first"),
    "40_rows": Case(80, 40, 24, 2, 1, "zipf"),
    "100_rows": Case(200, 40, 24, 2, 1, "zipf"),
}
VARIANTS = {
    "recompute": {"recompute": "up"},
    "batch_invariant": {"batch_invariant": True},
    "weight_on_input": {"weight_on_input": True},
    "gpt_oss": {"activation": Activation("gpt_oss", limit=0.5)},
    "relu": {"activation": "relu"},
}


@pytest.fixture(params=["decode", "dequantize"])
def path(request, monkeypatch):
    """Run a test twice: GEMMs of few rows decode the weights, or read dequantised weights."""
    if request.param == "dequantize":
        monkeypatch.setattr(rows_module, "MAX_ROWS", 0)
    return request.param


def draw(case, dtype, device, seed=0, *, activation="swiglu"):
    """Return tokens, routing weights, experts, the weights to quantise, biases, and the factors of adapters."""
    operands = draw_adapted(case, dtype, device, seed, activation=activation)
    generator = torch.Generator(device).manual_seed(seed + 10)
    sizes = operands[3].shape[1], case.d_model
    biases = (torch.randn(case.num_experts, size, device=device, generator=generator) * size**-0.5 for size in sizes)
    return *operands[:5], *(bias.to(dtype) for bias in biases), *operands[5:]


def draw_stored(case, format, dtype, device):
    """Return tokens, routing weights, a permutation and the two stored weights."""
    tokens, weights, experts, w_up, w_down, *_ = draw(case, dtype, device)
    permutation = reference.sort_by_expert(experts, case.num_experts)
    return tokens, weights, permutation, [quantize(weight, format) for weight in (w_up, w_down)]


FROZEN = (3, 4, 5, 6)  # weights and biases


def call(op, operands, matrices, **options):
    """Call an op on the operands of `draw`, with other matrices in place of w_up and w_down."""
    tokens, weights, experts, w_up, _, b_up, b_down, *factors = operands
    permutation = reference.sort_by_expert(experts, len(w_up))
    if factors:
        options["adapters"] = ExpertAdapters(*factors, SCALE)
    return op(tokens, weights, permutation, *matrices, b_up=b_up, b_down=b_down, **options)


def run(*operands, format, implementation="triton", **options):
    stored = (quantize(weight, format) for weight in operands[3:5])
    return call(fused_experts, operands, stored, implementation=implementation, **options)


def run_dequantised(*operands, format, dtype=None, op=fused_experts, **options):
    """Call an op on weights that are dequantised to `dtype`, by default to that of the tokens."""
    like = operands[0].dtype
    dense = (decode_weight(quantize(weight, format), dtype or like).to(like) for weight in operands[3:5])
    return call(op, operands, dense, **options)


def run_reference(*operands, **options):
    kept = {name: options[name] for name in ("activation", "weight_on_input", "format", "dtype") if name in options}
    return run_dequantised(*operands, op=reference.fused_experts, **kept)


def case_for(format):
    return BLOCKS if format == "mxfp4" else ODD


@pytest.mark.parametrize("dtype", default_tier(DTYPES, {torch.float16}), ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_formats_match_reference(format, dtype, device):
    check_accuracy(
        partial(run, format=format),
        partial(run_reference, format=format, dtype=dtype),
        partial(draw, case_for(format), dtype, device),
        NAMES,
        FROZEN,
    )


@pytest.mark.parametrize("variant", default_tier(VARIANTS, {"gpt_oss"}))
def test_variants_match_reference(variant, device):
    options = VARIANTS[variant]
    check_accuracy(
        partial(run, format="nf4", **options),
        partial(run_reference, format="nf4", dtype=torch.float32, **options),
        partial(draw, ODD, torch.float32, device, activation=options.get("activation", "swiglu")),
        NAMES,
        FROZEN,
    )


@pytest.mark.parametrize(
    ("format", "sizes"),
    default_tier(
        [*((format, "wide") for format in FORMATS), *(("int8", sizes) for sizes in SIZES if sizes != "wide")],
        {("fp8", "wide"), ("mxfp4", "wide"), ("int8", "higher_than_a_tile")},
    ),
)
def test_steps_and_tiles_without_adapters(format, sizes, device):
    check_accuracy(
        partial(run, format=format),
        partial(run_reference, format=format, dtype=torch.float16),
        lambda seed: draw(SIZES[sizes], torch.float16, device, seed)[:7],
        NAMES[:3],
        FROZEN,
    )


DECODING = get_kernels(
    metadata_filter=lambda m: m.kernel_class.arguments_class is DecodingGemmArguments and m.operands.A.dtype in DTYPES
)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("kernel", DECODING, ids=lambda kernel: kernel.metadata.kernel_name)
def test_every_kernel_that_decodes(kernel, layout, device):
    dtype = str(kernel.metadata.operands.A.dtype)[6:]
    form = getattr(kernel, "form", "nf4_nested")
    args = arguments_of(f"decoding_gemm weight={form} B={layout} gather=A {dtype} G=2 K=160 N=160 rows=16", device)
    if form != "nf4_nested" and not (status := kernel.supports(args)):
        pytest.skip(status.error)
    check(kernel, args)


@pytest.mark.parametrize(("rows", "tile"), [(1, (16, 64)), (16, (16, 64)), (64, (64, 64)), (128, (128, 128))])
def test_the_rule_decodes_each_weight_as_rarely_as_rows_allow(rows, tile):
    for layout, depth in (("row", 64), ("column", 128)):
        key = f"decoding_gemm weight=fp8 B={layout} gather=A bfloat16 G=2 K=256 N=256 rows={rows}"
        first, *_ = get_kernels(arguments_of(key, "meta"), cc=80)
        tile_k = depth if rows <= 16 else 64  # the length along the stored rows, if tiles are short
        assert first.metadata.design.tile_shape == (*tile, tile_k)


def test_the_rule_streams_weights_of_few_rows_on_hopper():
    def is_streaming(weight, rows):
        key = f"decoding_gemm weight={weight} B=column gather=A bfloat16 G=2 K=256 N=256 rows={rows}"
        args = arguments_of(key, "meta")
        kernels = [k for k in get_kernels(cc=90) if k.takes(args)]
        return isinstance(rule.best_first(kernels, args, None)[0].metadata.design, StreamingDesign)

    for weight, most in (("fp8", 8), ("mxfp4", 16), ("nf4", 0)):
        assert [rows for rows in (1, 2, 4, 8, 16, 32, 64) if is_streaming(weight, rows)] == [
            rows for rows in (1, 2, 4, 8, 16) if rows <= most
        ]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("form", default_tier([*FORMATS, *VARIANTS], {*FORMATS, "batch_invariant"}))
def test_dequantised_weights_give_the_same_bits(form, implementation, device, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_ROWS", 0)
    format, options = (form, {}) if form in FORMATS else ("int8", VARIANTS[form])
    options = options | {"implementation": implementation}
    operands = draw(case_for(format), DTYPES[-1], device, activation=options.get("activation", "swiglu"))
    ops = (partial(op, format=format, **options) for op in (run, run_dequantised))
    assert all(map(torch.equal, *(run_with_grads(op, operands, frozen=FROZEN) for op in ops)))


def test_sizes_alone_decide(device):
    """From 512 rows per expert on, and with batch invariance, weights are dequantised."""
    weight = quantize(torch.zeros(4, 8, 64), "fp8")
    for num_slots, batch_invariant, decodes in (
        (4 * MAX_ROWS - 2, False, True),
        (4 * MAX_ROWS, False, False),
        (8, True, False),
    ):
        experts = torch.zeros(num_slots // 2, 2, dtype=torch.int32, device=device)
        permutation = reference.sort_by_expert(experts, 4)
        rows = Rows.of(permutation, reserved_sms=0, batch_invariant=batch_invariant)
        assert rows.decodes(weight) == decodes


@pytest.mark.parametrize("block_rows", [16, 64, 256])
def test_tile_tables_of_any_height(block_rows, device):
    tokens, weights, experts, w_up, w_down, *_ = draw(Case(30, 32, 16, 2, 1, "first"), torch.float32, device)
    stored = quantize(w_up, "fp8"), quantize(w_down, "fp8")
    permutations = (reference.sort_by_expert(experts, 2, block_rows=height) for height in (128, block_rows))
    outputs = (fused_experts(tokens, weights, each, *stored, implementation="triton") for each in permutations)
    assert torch.equal(*outputs)


def test_copies_are_chosen_as_for_a_dequantised_weight(device):
    w_up = torch.empty(4, 64, 32, dtype=torch.float16, device=device)
    tokens = torch.empty(8, 32, dtype=torch.float16, device=device)
    shape = torch.empty(w_up.shape, dtype=w_up.dtype, device="meta")
    assert selection._copies_key(tokens, w_up, 32, 16) == selection._copies_key(tokens, shape, 32, 16)
    assert selection.choose_copies(tokens, shape, 32, 16) == selection.choose_copies(tokens, w_up, 32, 16)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("recompute", [None, "up"])
def test_saves_stored_bytes_only(recompute, implementation, path, device):
    """No tensor of the size of a dequantised weight is saved, and the tensors of the stored weights are saved as they
    are."""
    case = Case(8, 64, 48, 8, 1)
    tokens, weights, permutation, stored = draw_stored(case, "nf4_nested", torch.float32, device)
    leaves = tokens.requires_grad_(), weights.requires_grad_()
    with saved_tensors() as saved:
        fused_experts(*leaves, permutation, *stored, recompute=recompute, implementation=implementation)
    by_storage = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if t.numel()}
    own = {t.untyped_storage().data_ptr(): t.nbytes for weight in stored for t in weight.tensors.values()}
    assert own.keys() <= by_storage.keys()
    others = sum(size for pointer, size in by_storage.items() if pointer not in own)
    hidden = case.num_tokens * 2 * case.d_ff * 4 if recompute is None and implementation == "triton" else 0
    routing = 4096
    assert others <= tokens.nbytes + hidden + routing < stored[1].shape.numel() * tokens.itemsize


def test_dequantised_weights_do_not_outlive_their_gemm(device, monkeypatch):
    """When a weight is dequantised, no other dequantised one is alive."""
    monkeypatch.setattr(rows_module, "MAX_ROWS", 0)
    alive, most = [], []
    launch = rows_module.launch_dequantize

    def counted(weight, dtype):
        gc.collect()  # the interpreter's launches leave cycles that hold storages
        most.append(sum(not ref.expired() for ref in alive))
        out = launch(weight, dtype)
        alive.append(StorageWeakRef(out.untyped_storage()))
        return out

    monkeypatch.setattr(rows_module, "launch_dequantize", counted)
    tokens, weights, experts, w_up, w_down, b_up, b_down, *_ = draw(Case(3, 32, 32, 2, 1), torch.float32, device)
    out = run(tokens.requires_grad_(), weights, experts, w_up, w_down, b_up, b_down, format="mxfp4", recompute="up")
    torch.autograd.grad(out.sum(), tokens)
    gc.collect()
    assert most == [0] * 5 and all(ref.expired() for ref in alive)


def test_experts_without_rows_and_dropped_slots(path, device):
    """Stored weights of experts that no token chose are not read: NaN in their scales reaches nothing."""
    tokens, weights, experts, w_up, w_down, *_ = draw(Case(20, 64, 32, 4, 2, "first"), torch.float32, device)
    experts[3] = -1
    tokens[3] = float("nan")
    stored = [quantize(weight, "fp8") for weight in (w_up, w_down)]
    for weight in stored:
        weight.scales[2:] = float("nan")
    permutation = reference.sort_by_expert(experts, 4)
    leaves = [tokens.requires_grad_(), weights.requires_grad_()]
    out = fused_experts(*leaves, permutation, *stored, implementation="triton")
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(result.isfinite().all() for result in (out, *gradients)) and not out[3].any()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_no_tokens(implementation, path, device):
    operands = draw(Case(0, 64, 32, 4, 2), torch.float32, device)
    out = run(*(t[:0] if i < 3 else t for i, t in enumerate(operands)), format="fp8", implementation=implementation)
    assert out.shape == (0, 64)


def test_decides_without_waiting_for_data(path, device):
    """No op that reads a value back to the host runs, in forward and backward."""
    tokens, weights, permutation, stored = draw_stored(BLOCKS, "mxfp4", torch.float32, device)
    with CountedOps() as ops:
        out = fused_experts(tokens.requires_grad_(), weights, permutation, *stored, implementation="triton")
        torch.autograd.grad(out.sum(), tokens)
    seen = {name.partition("::")[2] for name in ops.counts}
    assert "fused_experts" in seen
    assert not seen & {"_local_scalar_dense", "nonzero", "item", "unique", "masked_select"}


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_captured_in_a_graph(format, path, device):
    tokens, weights, permutation, stored = draw_stored(WIDE, format, torch.bfloat16, device)
    tokens.requires_grad_()

    def step():
        out = fused_experts(tokens, weights, permutation, *stored, implementation="triton")
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), tokens)

    expected = step()
    assert_never_waits(step)
    replay, results = captured(step)
    replay()
    assert all(map(torch.equal, results, expected))


@slow  # seconds to trace
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_compiles_with_gradients(implementation, path, device):
    operands = draw(BLOCKS, torch.float32, device)
    stored = [quantize(weight, "fp8") for weight in operands[3:5]]
    permutation = reference.sort_by_expert(operands[2], 3)

    def step(tokens, weights, *factors):
        adapters = ExpertAdapters(*factors, SCALE)
        options = {"adapters": adapters, "implementation": implementation}
        return fused_experts(tokens, weights, permutation, *stored, **options)

    assert_compiles(step, (*operands[:2], *operands[7:]))


def test_meta_tensors():
    operands = draw_stored(BLOCKS, "nf4", torch.float32, "cpu")
    tokens, weights, permutation, stored = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), operands)
    out = fused_experts(tokens, weights, permutation, *stored)
    assert out.is_meta and out.shape == (11, 64)


@slow
def test_opcheck(device):
    tokens, weights, permutation, stored = draw_stored(Case(6, 64, 32, 3, 2), "nf4_nested", torch.float32, device)
    operands = flat_operands(tokens.requires_grad_(), weights.requires_grad_(), *stored, permutation)
    torch.library.opcheck(fused_experts_op.overload, operands)


def test_bad_weights_are_named(device):
    tokens, weights, experts, w_up, w_down, *_ = draw(BLOCKS, torch.float32, device)
    permutation = reference.sort_by_expert(experts, 3)
    fp8, int8 = ([quantize(weight, format) for weight in (w_up, w_down)] for format in ("fp8", "int8"))
    op = partial(fused_experts, tokens, weights, permutation)
    with pytest.raises(ValueError, match=r"of one format, got fp8 \(128x128\) and int8 \(1xrow\)"):
        op(fp8[0], int8[1])
    with pytest.raises(ValueError, match=r"of one format, got a tensor and int8"):
        op(w_up, int8[1])
    with pytest.raises(ValueError, match=r"of one format, got fp8 \(64x64\) and fp8 \(128x128\)"):
        op(quantize(w_up, WeightFormat("fp8", (64, 64))), fp8[1])
    with pytest.raises(ValueError, match="w_down is stored as fp8 and frozen, got one that requires a gradient"):
        op(fp8[0], fp8[1]._replace(scales=fp8[1].scales.clone().requires_grad_()))
    with pytest.raises(ValueError, match="scales of w_up must be"):
        op(fp8[0]._replace(scales=fp8[0].scales[:2]), fp8[1])
    with pytest.raises(ValueError, match=r"w_down must be \[E, D, F\] with .*, got \[3, 32, 64\]"):
        op(fp8[0], quantize(w_down.transpose(1, 2), "fp8"))
    foreign = QuantizedWeight(fp8[0].values, fp8[0].scales, WeightFormat("awq", (1, 128)), fp8[0].shape)
    with pytest.raises(NotImplementedError, match="'awq' is not supported: its groups have zero points"):
        op(foreign, foreign)
