"""The kernels that stream weights of few rows: sizes that tiles do not divide, every code and scale bit by bit."""

import dataclasses

import pytest
import torch

from moe_kernels import GroupedGemmArguments, get_kernels, reference
from moe_kernels.gemm.arguments.decoding import DecodingGemmArguments, QuantizedMatrices
from moe_kernels.gemm.kernel import StreamingDesign
from moe_kernels.quantization.decode import decode_weight
from moe_kernels.quantization.formats import FP8, MXFP4
from moe_kernels.quantization.quantize import quantize
from moe_kernels.testing import assert_accurate, to_float64
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.types import QuantizedWeight

from ...tiers import default_tier
from .kernel_arguments import check_forward, name_of, shuffled

KERNELS = get_kernels(metadata_filter=lambda metadata: isinstance(metadata.design, StreamingDesign))
PLAIN = [kernel for kernel in KERNELS if kernel.arguments_class is GroupedGemmArguments]
DECODING = {form: [kernel for kernel in KERNELS if getattr(kernel, "form", None) == form] for form in ("fp8", "mxfp4")}
# Groups that need several passes or none, several tiles of a table, and rows without a group; 16 rows on average.
SIZES, TAIL = [3, 0, 8, 9, 33, 1, 140, 0, 2, 1, 0, 5, 1], 5
SIZE_K, SIZE_N = 416, 200  # not whole steps, not whole blocks


def runnable(kernel, args):
    """Return the arguments. Skip the test if the kernel cannot run on this machine."""
    if not (status := kernel.supports(args)):
        assert kernel.would_support(args) or kernel.obstacle is not None, status.error
        pytest.skip(status.error)
    return args


def draw_rows(size_k, dtype, device, gather):
    """Return rows in expert order, offsets, the operand A and its index; rows without a group are NaN."""
    rows = torch.randn(sum(SIZES) + TAIL, size_k, device=device, generator=torch.Generator(device).manual_seed(0))
    rows[sum(SIZES) :] = torch.nan
    rows, offsets = rows.to(dtype), torch.tensor(SIZES, device=device).cumsum(0).int()
    return rows, offsets, *(shuffled(rows) if gather else (rows, None))


@pytest.mark.parametrize(
    ("gather", "has_bias"),
    default_tier([(False, False), (False, True), (True, False), (True, True)], [(False, True), (True, False)]),
)
@pytest.mark.parametrize("kernel", PLAIN, ids=name_of)
def test_plain_weights(kernel, gather, has_bias, device):
    dtype, epilogue = kernel.metadata.operands.A.dtype, kernel.metadata.epilogue
    rows, offsets, a, index = draw_rows(SIZE_K, dtype, device, gather)
    generator = torch.Generator(device).manual_seed(1)
    w = torch.randn(len(SIZES), SIZE_N, SIZE_K, device=device, generator=generator).mul_(SIZE_K**-0.5).to(dtype)
    bias = torch.randn(len(SIZES), SIZE_N, device=device, generator=generator).to(dtype) if has_bias else None
    product = torch.full((len(rows), SIZE_N), torch.nan, dtype=dtype, device=device)
    out = product if epilogue is None else product[:, : SIZE_N // 2].clone()
    args = GroupedGemmArguments(a, w.mT, out, row_to_token=index, offsets=offsets, epilogue=epilogue, bias=bias)
    args = dataclasses.replace(args, preactivation=None if epilogue is None else product)
    kernel.run(runnable(kernel, args))
    check_forward(args, rows.nan_to_num(), w.mT, offsets, bias)


@pytest.mark.parametrize("cc", [80, 90, 100])
def test_the_rule_reads_weights_of_few_rows_once(cc):
    def tile_of(rows, size_k):
        key = f"grouped_gemm B=column gather=none epilogue=none bfloat16 G=4 K={size_k} N=4096 rows={rows}"
        (design, *_) = (kernel.metadata.design for kernel in get_kernels(arguments_of(key, "meta"), cc=cc))
        return design.tile_shape if isinstance(design, StreamingDesign) else None

    assert [tile_of(rows, 4096) for rows in (1, 4, 8)] == 3 * [(16, 32, 256)]
    assert tile_of(1, 768) == (16, 32, 128)
    assert [tile_of(rows, 4096) for rows in (16, 32, 64)] == [(32, 64, 128), (64, 64, 64), None]


def decoding(kernel, weight, a, offsets, index=None, bias=None, block_rows=128):
    """Run a kernel on rows that all have a group, and return its result."""
    num_rows = len(a) if index is None else len(index)
    out = torch.full((num_rows, weight.shape[1]), torch.nan, dtype=torch.bfloat16, device=a.device)
    table = reference.tile_table(offsets, num_rows, block_rows)
    options = {"tile_table": table, "row_to_token": index, "bias": bias}
    args = DecodingGemmArguments.of(a, QuantizedMatrices(weight, True), out, **options)
    kernel.run(runnable(kernel, args))
    return out


@pytest.mark.parametrize("block_rows", [16, 128])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("kernel", [*DECODING["fp8"], *DECODING["mxfp4"]], ids=name_of)
def test_quantised_weights(kernel, gather, block_rows, device):
    rows, offsets, a, index = draw_rows(SIZE_K, torch.bfloat16, device, gather)
    end, generator = sum(SIZES), torch.Generator(device).manual_seed(1)
    rows, a, index = rows[:end], a if gather else a[:end], None if index is None else index[:end]
    weight = quantize(torch.randn(len(SIZES), SIZE_N, SIZE_K, device=device, generator=generator), kernel.form)
    bias = torch.randn(len(SIZES), SIZE_N, device=device, generator=generator).bfloat16() if gather else None
    out = decoding(kernel, weight, a, offsets, index, bias, block_rows)
    operands = rows, decode_weight(weight, torch.bfloat16).mT, offsets
    exact = reference.grouped_gemm(*to_float64(operands), bias=None if bias is None else bias.double())
    assert_accurate(out, reference.grouped_gemm(*operands, bias=bias), exact, "out")


def read_back(kernel, weight, device):
    """Return the values that a kernel decodes: the product with the identity matrix."""
    size_k = weight.shape[2]
    rows = torch.eye(size_k, dtype=torch.bfloat16, device=device).repeat(weight.shape[0], 1)
    offsets = torch.arange(1, weight.shape[0] + 1, device=device).int() * size_k
    return decoding(kernel, weight, rows, offsets).view(weight.shape[0], size_k, -1).mT


@pytest.mark.parametrize("kernel", DECODING["mxfp4"], ids=name_of)
def test_every_mxfp4_code_and_scale(kernel, device):
    exponents = torch.arange(252, device=device)  # larger ones overflow, which the product with zero turns to NaN
    values = torch.arange(256, device=device).repeat(252 * 16 // 256 + 1)[: 252 * 16]
    weight = QuantizedWeight(
        values.to(torch.uint8).view(1, 84, 48), exponents.to(torch.uint8).view(1, 84, 3), MXFP4, torch.Size([1, 84, 96])
    )
    assert torch.equal(read_back(kernel, weight, device), decode_weight(weight, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("kernel", DECODING["mxfp4"], ids=name_of)
def test_the_largest_mxfp4_scale(kernel, dtype, device):
    # The number 0.5 in every place; each row has one scale of 255.
    values = torch.full((1, 8, 64), 0x11, dtype=torch.uint8, device=device)
    scales = torch.full((1, 8, 4), 127, dtype=torch.uint8, device=device)
    scales[0, torch.arange(8), torch.arange(8) % 4] = 255
    weight = QuantizedWeight(values, scales.view(dtype), MXFP4, torch.Size([1, 8, 128]))
    rows, offsets = torch.ones(1, 128, dtype=torch.bfloat16, device=device), torch.ones(1, device=device).int()
    out = decoding(kernel, weight, rows, offsets)
    expected = decode_weight(weight, torch.float32).double().sum(2).to(torch.bfloat16)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert expected.isnan().all() == (dtype != torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", DECODING["fp8"], ids=name_of)
def test_every_fp8_code(kernel, dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes[(codes & 127) == 127] = 0
    values = torch.stack([codes.roll(i) for i in range(200)]).view(torch.float8_e4m3fn)[None]
    scales = torch.tensor([[[0.3, 1.7e-3], [-2.5e2, 0.0]]], device=device).to(dtype)
    weight = QuantizedWeight(values, scales, FP8, torch.Size([1, 200, 256]))
    # A sum from +0 never gives -0.
    assert torch.equal(read_back(kernel, weight, device), decode_weight(weight, torch.bfloat16) + 0.0)


@pytest.mark.parametrize("kernel", DECODING["fp8"], ids=name_of)
def test_fp8_nan_stays_nan(kernel, device):
    weight = quantize(torch.ones(1, 64, 128, device=device), "fp8")
    weight.values.view(torch.uint8)[0, 3, 5] = 0x7F
    weight.values.view(torch.uint8)[0, 60, 127] = 0xFF
    rows, offsets = torch.ones(2, 128, dtype=torch.bfloat16, device=device), torch.full((1,), 2, device=device).int()
    is_nan = decoding(kernel, weight, rows, offsets).isnan()
    assert is_nan[:, [3, 60]].all() and is_nan.sum() == 4


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_what_is_left_to_other_kernels(form, device):
    rows, offsets, a, _ = draw_rows(SIZE_K, torch.bfloat16, device, False)
    kernel, table = DECODING[form][0], reference.tile_table(offsets, len(rows), 128)
    weight = quantize(torch.ones(len(SIZES), SIZE_N, SIZE_K, device=device), form)

    def error(weight, a=a, size_n=SIZE_N, transposed=True, **options):
        out = rows.new_empty(len(rows), size_n)
        return kernel.takes(
            DecodingGemmArguments.of(a, QuantizedMatrices(weight, transposed), out, tile_table=table, **options)
        ).error

    other = "mxfp4" if form == "fp8" else "fp8"
    assert error(weight) is None
    assert f"decodes {form}" in error(quantize(torch.ones(len(SIZES), SIZE_N, SIZE_K, device=device), other))
    low, up = rows.new_empty(len(rows), 8), rows.new_empty(len(SIZES), 8, SIZE_N)
    assert "extra_a" in error(weight, extra_a=low, extra_b=up)
    wide = rows.new_empty(len(rows), SIZE_N)
    assert "along `in`" in error(weight, wide, SIZE_K, transposed=False)
    if form == "fp8":
        small_blocks = QuantizedWeight(
            weight.values,
            torch.ones(len(SIZES), -(-SIZE_N // 64), -(-SIZE_K // 64), device=device),
            dataclasses.replace(FP8, block=(64, 64)),
            weight.shape,
        )
        assert "128x128" in error(small_blocks)
