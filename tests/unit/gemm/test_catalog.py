"""Each kernel of the catalog, chosen explicitly, on every case it supports."""

import dataclasses
from functools import partial

import pytest
import torch

from moe_kernels import (
    GemmArguments,
    GroupedGemmArguments,
    GroupedGemmListArguments,
    WgradArguments,
    get_kernels,
    reference,
)
from moe_kernels.activation.functions import EPILOGUES, PLAIN_EPILOGUES
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import PointerDesign, TmaDesign, WarpSpecializedDesign
from moe_kernels.gemm.rule import best_first
from moe_kernels.gemm.selection import find
from moe_kernels.runtime.gluon import KNOWS_GLUON
from moe_kernels.specs import is_gated
from moe_kernels.testing import assert_accurate, to_float64
from moe_kernels.tools.measurement_keys import arguments_of

from ...dtypes import DTYPES
from ...tiers import default_tier
from .kernel_arguments import check_forward, kernels_of, name_of, run_or_skip, shuffled, skip_unless_supported

FORWARD, WGRAD = kernels_of(GroupedGemmArguments, DTYPES), kernels_of(WgradArguments, DTYPES)

# (rows of each group, rows without a group, K, N)
CASES = {
    "ordinary": ([20, 30, 14], 0, 64, 128),
    "tile_edges": ([0, 1, 127, 128, 129], 0, 64, 64),
    "one_group_owns_all": ([0, 0, 150, 0], 0, 64, 64),
    "odd_sizes": ([5, 31, 17], 3, 97, 47),
    "multiples_of_eight": ([5, 131, 17], 3, 136, 200),
    "partial_column_tiles": ([0, 1, 127, 128, 129], 3, 136, 328),
    "tail": ([9, 0, 40], 21, 64, 72),
    "no_rows": ([0, 0], 0, 64, 32),
}
QUICK = {"odd_sizes", "tail", "no_rows", "tile_edges"}
# Enough reduction steps for all parts of an epilogue.
DEEP = {"deep": ([0, 1, 130, 70], 3, 648, 328)}
if torch.cuda.is_available():
    # Every program of a persistent kernel walks several tiles, of groups of different sizes. With this many steps,
    # tiles with rows only in their upper half take as long as others; with one step less they end early.
    uneven = [0, 700, 1, 64, 300, 0, 129, 1500, 63, 2, 640, 65]
    CASES["many_uneven_tiles"] = (uneven, 100, 1024, 1536)
    CASES["short_reduction"] = (uneven, 100, 960, 1536)
    # Many tiles per group, partial columns and steps; NaN follows the last row.
    CASES["long_reduction"] = ([959, 1090, 0, 1153], 100, 1032, 2064)


def draw(kernel, case, device, transposed=False):
    sizes, tail, size_k, size_n = (CASES | DEEP)[case]
    if is_gated(kernel.metadata.epilogue):
        size_n *= 2
    dtype = kernel.metadata.operands.A.dtype
    generator = torch.Generator(device).manual_seed(0)
    num_rows = sum(sizes) + tail

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    a, b, dout = normal(num_rows, size_k), normal(len(sizes), size_k, size_n), normal(num_rows, size_n)
    a[sum(sizes) :] = torch.nan
    dout[sum(sizes) :] = torch.nan
    if transposed:
        b = b.mT.contiguous().mT
    return a, b, dout, torch.tensor(sizes).cumsum(0).int().to(device)


def forward_arguments(kernel, case, device, transposed=None):
    """Return the arguments, and (a, b, offsets) for the reference. By default B is stored as the kernel needs it."""
    if transposed is None:
        transposed = kernel.metadata.operands.B.layout == "column"
    a, b, _, offsets = draw(kernel, case, device, transposed)
    tokens, row_to_token = shuffled(a) if kernel.metadata.design.gather else (a, None)
    epilogue = kernel.metadata.epilogue
    product = torch.full((len(a), b.shape[2]), torch.nan, dtype=a.dtype, device=device)
    args = GroupedGemmArguments(
        tokens,
        b,
        product if epilogue is None else product[:, : b.shape[2] // (1 + is_gated(epilogue))].clone(),
        offsets=offsets,
        row_to_token=row_to_token,
        epilogue=epilogue,
        preactivation=None if epilogue is None else product,
    )
    return args, (a.nan_to_num(), b, offsets)


@pytest.mark.parametrize("transposed", default_tier([False, True], [True]))
@pytest.mark.parametrize("case", default_tier(CASES, QUICK))
@pytest.mark.parametrize("kernel", FORWARD, ids=name_of)
def test_forward_kernel(kernel, case, transposed, device):
    args, operands = forward_arguments(kernel, case, device, transposed)
    run_or_skip(kernel, args)
    check_forward(args, *operands)


FUSED = [kernel for kernel in FORWARD if kernel.metadata.epilogue is not None]
WITH_EVERY_EPILOGUE = [
    *(kernel for kernel in FORWARD if kernel.metadata.epilogue is None),
    *(kernel.with_epilogue(name) for kernel in FUSED for name in kernel.epilogues),
]
TAKES_BIAS = [
    kernel
    for kernel in WITH_EVERY_EPILOGUE
    if "bias" in kernel.metadata.optional_operands and not isinstance(kernel.metadata.design, PointerDesign)
]


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["own", "float32"])
@pytest.mark.parametrize("case", default_tier(["multiples_of_eight", "deep"], ["multiples_of_eight"]))
@pytest.mark.parametrize("kernel", TAKES_BIAS, ids=name_of)
def test_forward_kernel_with_bias(kernel, case, bias_dtype, device):
    """Test biases. Pointer kernels support biases of any strides and have a separate test."""
    args, (a, b, offsets) = forward_arguments(kernel, case, device)
    generator = torch.Generator(device).manual_seed(1)
    bias = torch.randn(len(b), b.shape[2], device=device, generator=generator).to(bias_dtype or a.dtype)
    # NaN here reveals a read past the last column of a group.
    memory = torch.full((len(b) + 1, b.shape[2] + 8), torch.nan, dtype=bias.dtype, device=device)
    memory[: len(b), : b.shape[2]] = bias
    args = dataclasses.replace(args, bias=memory[: len(b), : b.shape[2]])
    run_or_skip(kernel, args)
    check_forward(args, a, b, offsets, bias)
    end = int(offsets[-1])
    assert not args.out[end:].any() and not args.product[end:].any()


@pytest.mark.parametrize(
    ("activation", "with_bias", "least"),
    [("relu", False, 193), ("silu", False, 577), ("gelu", True, 577), ("swiglu", False, 321), ("gpt_oss", True, 321)],
)
def test_no_more_parts_of_an_epilogue_than_steps_of_the_reduction(activation, with_bias, least):
    name = "grouped_gemm_ws_bfloat16_128x256x64_w12_s4_b_column_" + ("swiglu" if is_gated(activation) else "relu")
    (kernel,) = (kernel for kernel in get_kernels() if name_of(kernel) == name)
    kernel = kernel.with_epilogue(activation)

    def takes(depth):
        a, b = torch.empty(8, depth, dtype=torch.bfloat16), torch.empty(1, 64, depth, dtype=torch.bfloat16).mT
        out, offsets = a.new_empty(8, 64 // (1 + is_gated(activation))), torch.zeros(1, dtype=torch.int32)
        bias = a.new_empty(1, 64) if with_bias else None
        options = {"epilogue": activation, "preactivation": a.new_empty(8, 64), "bias": bias}
        return kernel.takes(GroupedGemmArguments(a, b, out, offsets=offsets, **options))

    assert takes(least + 7)  # a multiple of 8
    error = takes(least - 1).error
    assert error == f"Operand `A`: expected at least {least} columns with {activation}, got {least - 1}"


REFUSES_BIASES = [kernel for kernel in TAKES_BIAS if isinstance(kernel.metadata.design, WarpSpecializedDesign)]


@pytest.mark.parametrize("kernel", REFUSES_BIASES, ids=name_of)
def test_biases_that_a_kernel_refuses(kernel):
    args, (a, b, _) = forward_arguments(kernel, "deep", "cpu")
    zeros = torch.zeros(len(b), b.shape[2], dtype=a.dtype)
    gated = is_gated(kernel.metadata.epilogue)
    dtypes = f"{a.dtype}" if gated else f"{a.dtype} or torch.float32"
    assert bool(kernel.takes(dataclasses.replace(args, bias=zeros.float()))) != gated
    assert kernel.takes(dataclasses.replace(args, bias=zeros))
    if args.epilogue is None:
        narrow = dataclasses.replace(args, B=args.B[:, :, :-2], out=args.out[:, :-2])
        assert kernel.takes(narrow)
        error = kernel.takes(dataclasses.replace(narrow, bias=zeros[:, :-2])).error
        assert error == "Operand `bias`: expected rows of whole 16 bytes, got 326 columns"
    for bias, error in (
        (zeros.double(), f"Operand `bias`: expected {dtypes}, got torch.float64"),
        (zeros.T.contiguous().T, "Operand `bias`: expected axis -1 contiguous, got strides (1, "),
        (zeros[:, 16:], "Operand `bias`: expected shape"),
    ):
        assert kernel.takes(dataclasses.replace(args, bias=bias)).error.startswith(error)


@pytest.mark.parametrize(
    ("kernel", "activation"),
    [
        pytest.param(kernel, activation, id=f"{name_of(kernel)}-{activation}")
        for kernel in FUSED
        for activation in kernel.epilogues
    ],
)
def test_every_epilogue(kernel, activation, device):
    listed, kernel = kernel, kernel.with_epilogue(activation)
    assert name_of(kernel) == name_of(listed).replace(f"_{listed.metadata.epilogue}", f"_{activation}")
    args, operands = forward_arguments(kernel, "deep", device, transposed=True)
    run_or_skip(kernel, args)
    check_forward(args, *operands)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("listed", "activation"), [("swiglu", "reglu"), ("swiglu", "gpt_oss"), ("relu", "silu"), ("relu", "relu_squared")]
)
def test_an_epilogue_takes_the_kernel_that_the_listed_one_would(listed, activation, with_bias, device):
    dtype = DTYPES[-1]
    a, b = torch.zeros(256, 640, dtype=dtype, device=device), torch.zeros(2, 512, 640, dtype=dtype, device=device).mT
    out, preactivation = a.new_empty(256, 512 // (1 + is_gated(listed))), a.new_empty(256, 512)
    offsets, bias = torch.zeros(2, dtype=torch.int32, device=device), a.new_zeros(2, 512) if with_bias else None
    args = GroupedGemmArguments(a, b, out, offsets=offsets, epilogue=listed, preactivation=preactivation, bias=bias)
    base, derived = find(args), find(dataclasses.replace(args, epilogue=activation))
    assert (base is None) == (derived is None)
    if base is not None:
        assert derived.metadata.design == base.metadata.design and derived.metadata.epilogue == activation
    if device == "cuda" and torch.cuda.get_device_capability()[0] == 9 and KNOWS_GLUON:
        assert isinstance(base.metadata.design, WarpSpecializedDesign)
        assert base.metadata.design.tile_shape == (128, 256, 64)


def test_every_plain_activation_is_an_epilogue_of_a_warp_specialized_kernel():
    kernels = [
        kernel
        for kernel in kernels_of(GroupedGemmArguments)
        if isinstance(kernel.metadata.design, WarpSpecializedDesign) and kernel.metadata.epilogue == "relu"
    ]
    assert any(set(kernel.epilogues) == set(PLAIN_EPILOGUES) for kernel in kernels)
    assert not {name for kernel in kernels for name in kernel.epilogues} & set(EPILOGUES)


@pytest.mark.parametrize("kernel", FORWARD, ids=name_of)
def test_tail_is_left_alone_on_request(kernel, device):
    args, _ = forward_arguments(kernel, "tail", device)
    skip_unless_supported(kernel, args)
    kernel.run(dataclasses.replace(args, zero_tail=False))
    end = int(args.offsets[-1])
    assert args.out[end:].isnan().all() and args.out[:end].isfinite().all()


@pytest.mark.parametrize("kernel", FORWARD, ids=name_of)
def test_a_tile_touches_no_row_of_another_group(kernel, device):
    """With only one group's tiles in the table, the neighbouring groups' rows do not change."""
    args, (a, _, offsets) = forward_arguments(kernel, "tile_edges", device)
    skip_unless_supported(kernel, args)
    table = reference.tile_table(offsets, len(a), kernel.metadata.design.tile_shape[0])
    for group in (1, 2, 4):
        tiles = table.tiles[(table.tiles[:, 0] == group).nonzero().flatten()].contiguous()
        num_tiles = table.num_tiles.clone()
        num_tiles[:2] = len(tiles)
        for written in args.outputs:
            written.fill_(torch.nan)
        kernel.run(dataclasses.replace(args, tile_table=table._replace(tiles=tiles, num_tiles=num_tiles)))
        start, end = table.bounds[group : group + 2].tolist()
        for written in args.outputs:
            assert written[start:end].isfinite().all()
            assert written[:start].isnan().all() and written[end:].isnan().all()


@pytest.mark.parametrize("gathered", ["A", "dout"])
@pytest.mark.parametrize("case", default_tier(CASES, QUICK))
@pytest.mark.parametrize("kernel", WGRAD, ids=name_of)
def test_wgrad_kernel(kernel, case, gathered, device):
    a, b, dout, offsets = draw(kernel, case, device)
    operands, index = {"A": a, "dout": dout}, {}
    if kernel.metadata.design.gather:
        operands[gathered], index[f"{gathered.lower()}_row_to_token"] = shuffled(operands[gathered])
    args = WgradArguments(**operands, out=torch.full_like(b, torch.nan), offsets=offsets, **index)
    run_or_skip(kernel, args)
    a, dout = a.nan_to_num(), dout.nan_to_num()
    baseline = reference.grouped_gemm_wgrad(a, dout, offsets)
    assert_accurate(args.out, baseline, reference.grouped_gemm_wgrad(*to_float64((a, dout, offsets))))


def test_names_are_unique():
    names = [name_of(kernel) for kernel in get_kernels()]
    assert len(names) == len(set(names)) > 0


def test_with_a_compute_capability_the_device_is_ignored():
    a, b = torch.empty(512, 256, dtype=torch.bfloat16), torch.empty(8, 256, 128, dtype=torch.bfloat16)
    offsets = torch.arange(64, 513, 64, dtype=torch.int32)
    args = GroupedGemmArguments(a, b, torch.empty(512, 128, dtype=torch.bfloat16), offsets=offsets)
    hopper = get_kernels(args, cc=90)
    assert {type(kernel.metadata.design).__name__ for kernel in hopper} >= {"PointerDesign", "TmaDesign"}
    assert {type(kernel.metadata.design).__name__ for kernel in get_kernels(args, cc=80)} == {"PointerDesign"}
    assert all(kernel.takes(args) and kernel.supports_cc(90) and kernel.obstacle is None for kernel in hopper)
    assert get_kernels(args, cc=75) == []


@pytest.mark.parametrize("gather", ["none", "A"])
@pytest.mark.parametrize(
    "form", ["wgrad gather={}", *(f"grouped_gemm B={b} gather={{}} epilogue=none" for b in ("column", "row"))]
)
def test_data_center_blackwell_multiplies_through_tma(form, gather):
    args = arguments_of(f"{form.format(gather)} bfloat16 G=32 K=2048 N=1536 rows=512", "meta")
    for cc in (100, 103):
        assert isinstance(get_kernels(args, cc=cc)[0].metadata.design, TmaDesign)
    assert not any(kernel.metadata.design.tma for kernel in get_kernels(args, cc=120))


@pytest.mark.parametrize("form", ["wgrad gather={}", "grouped_gemm B=row gather={} epilogue=none"])
def test_the_rule_avoids_drifting_programs_in_long_gradients(form):
    def is_specialized(columns, rows, gather="none"):
        key = f"{form.format(gather)} bfloat16 G=32 K=2880 N={columns} rows={rows}"
        args = arguments_of(key, "meta")
        best, *_ = best_first([kernel for kernel in get_kernels() if kernel.takes(args)], args, measured=None)
        return isinstance(best.metadata.design, WarpSpecializedDesign)

    assert not is_specialized(2880, 4096)
    assert is_specialized(2880, 2048) and is_specialized(2816, 4096) and is_specialized(2880, 4096, gather="A")


def test_metadata_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORWARD[0].metadata.design.num_warps = 1


half = partial(torch.zeros, dtype=torch.float16)
MALFORMED = {
    "four axes of A": (GemmArguments(half(2, 2, 8, 8), half(8, 8), half(2, 2, 8, 8)), "Operand `A`: expected 2 or 3"),
    "one axis of out": (GemmArguments(half(8, 8), half(8, 8), half(8)), "Operand `out`"),
    "a matrix for B": (GroupedGemmArguments(half(8, 8), half(8, 8), half(8, 8)), "Operand `B`: expected 3 axes"),
    "a batch for A": (WgradArguments(half(1, 8, 8), half(8, 8), half(2, 8, 8)), "Operand `A`: expected 2 axes"),
    "no problems": (GroupedGemmListArguments([], [], []), "at least one problem"),
    "no B": (GroupedGemmListArguments([half(8, 8)], [], [half(8, 8)]), "as many A as B and out, got 1, 0 and 1"),
    "a vector": (GroupedGemmListArguments([half(8)], [half(8, 8)], [half(8)]), "expected a matrix"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_arguments_are_an_error_and_no_crash(case):
    args, message = MALFORMED[case]
    assert get_kernels(args) == []
    errors = [kernel.takes(args).error for kernel in get_kernels()]
    assert all(errors) and any(message in error for error in errors)


def test_supports_names_the_arguments_class():
    args = WgradArguments(torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(2, 8, 8))
    assert "expected GroupedGemmArguments, got WgradArguments" in FORWARD[0].supports(args).error


def test_no_kernel_is_remembered(monkeypatch):
    """A GPU without a fused kernel is asked once, not in every forward."""
    a, b, out = torch.zeros(40, 64), torch.zeros(3, 64, 48), torch.zeros(40, 48)
    args = GroupedGemmArguments(a, b, out, offsets=torch.zeros(3).int(), scale_a=torch.ones(40))
    assert not selection.run_if_supported(args)
    monkeypatch.setattr(selection, "get_kernels", lambda args: pytest.fail("asked again"))
    assert not selection.run_if_supported(args)
