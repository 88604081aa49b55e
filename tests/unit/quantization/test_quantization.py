"""Formats of quantised weights: dequantisation has the bits of the projects that defined them."""

import pytest
import torch

from moe_kernels.quantization.decode import decode_weight
from moe_kernels.quantization.formats import FORMATS, INT8, MXFP4, NF4, NF4_NESTED, check_quantized
from moe_kernels.quantization.ops import _dequantize_op, dequantize
from moe_kernels.quantization.quantize import quantize
from moe_kernels.types import QuantizedWeight, WeightFormat

from ...dtypes import DTYPES
from ...tiers import slow

OUTPUTS = [torch.float32, torch.float16, torch.bfloat16]
EXTREME = [1e-45, 1e-42, 1e-38, 6e-8, 1.0, -1.5, 65504.0, 1e5, 3e38, float("inf"), float("nan"), 0.0, -0.0]
SHAPES = {"blocks": (2, 130, 192), "odd": (3, 5, 38), "tiny": (2, 3, 7), "one_row": (1, 1, 576)}


def assert_same_bits(actual, expected):
    """Check that bits are equal, signs of zeros included, where any NaN equals any other."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
    difference = actual.view(bits) != expected.view(bits)
    assert not (difference & ~nan).any(), (actual[difference & ~nan][:5], expected[difference & ~nan][:5])


def every_code(name):
    """Return a weight of every code under every kind of scale."""
    if name == "fp8":
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(1, len(EXTREME), 1)
        scales = torch.tensor(EXTREME).view(1, -1, 1)
        return QuantizedWeight(values, scales, WeightFormat("fp8", (1, 256)), values.shape)
    if name == "int8":
        values = torch.arange(-128, 128).to(torch.int8).repeat(1, len(EXTREME), 1)
        return QuantizedWeight(values, torch.tensor(EXTREME), INT8, values.shape)
    if name == "mxfp4":
        values = torch.arange(256, dtype=torch.uint8).repeat(1, 256, 1)
        scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
        return QuantizedWeight(values, scales, MXFP4, torch.Size((1, 256, 512)))
    like = quantize(torch.zeros(1, len(EXTREME), 512), name)
    values = torch.arange(256, dtype=torch.uint8).repeat(len(EXTREME))
    if name == "nf4":
        return like._replace(values=values, scales=torch.tensor(EXTREME).repeat_interleave(8))
    stored = torch.arange(len(EXTREME) * 8).to(torch.uint8)
    return like._replace(values=values, scales=stored, nested_offset=torch.tensor(0.3), nested_scales=torch.ones(1) / 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_decodes_every_code_and_scale(name, dtype, device):
    weight = on(every_code(name), device)
    assert_same_bits(dequantize(weight, dtype, implementation="triton"), decode_weight(weight, dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_and_reference_agree_on_any_size(name, shape, device):
    shape = SHAPES[shape]
    if name == "mxfp4" and shape[2] % 32:
        pytest.skip("mxfp4 needs rows of whole blocks")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = quantize(weight, name)
    expected = dequantize(stored, torch.float16, implementation="reference")
    assert torch.equal(dequantize(on(stored, device), torch.float16, implementation="triton").cpu(), expected)
    expected = dequantize(stored, torch.float32, implementation="reference")
    # Rounding to the nearest code errs by at most half of the widest step, relative to the largest value of a block.
    step = {"fp8": 1 / 28, "mxfp4": 1 / 3, "int8": 1 / 250}.get(name, 0.16)
    assert (expected - weight).abs().max() <= step * weight.abs().max()


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
def test_fp8_equals_transformers(dtype, scale, device):
    pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = every_code("fp8")
    if scale.itemsize == 1:
        stored = torch.tensor([0, 1, 2, 64, 100, 126, 127, 128, 200, 252, 253, 254, 255], dtype=torch.uint8)
        weight = weight._replace(scales=stored.view(1, -1, 1).view(scale))
    else:
        weight = weight._replace(scales=weight.scales.to(scale))
    expected = Fp8Dequantize(None)._dequantize_one(weight.values, weight.scales, dtype)
    assert_same_bits(dequantize(weight, dtype, implementation="reference"), expected)
    if dtype in DTYPES:
        assert_same_bits(dequantize(on(weight, device), dtype, implementation="triton").cpu(), expected)


def test_fp8_codes_equal_those_of_transformers():
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    weight = torch.randn(2, 256, 128, generator=torch.Generator().manual_seed(0))
    weight[1, 128:] = 0
    expected = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("w", weight)
    stored = quantize(weight, "fp8")
    assert torch.equal(stored.values.view(torch.uint8), expected["w"].view(torch.uint8))
    assert torch.equal(stored.scales, expected["w_scale_inv"])


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
def test_mxfp4_equals_transformers(dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    weight = every_code("mxfp4")
    # Some versions of `ldexp` multiply by a power in float32, which has none for 255, the NaN of e8m0.
    last = 256 if torch.ldexp(torch.zeros(1), torch.tensor([128])).isfinite().all() else 255
    blocks, scales = weight.values.view(1, 256, 16, 16), weight.scales
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2).contiguous()
    actual = dequantize(weight, dtype, implementation="reference")
    assert_same_bits(actual[:, :last].contiguous(), expected[:, :last].contiguous())
    assert_same_bits(dequantize(weight._replace(values=blocks), dtype, implementation="reference"), actual)


def test_mxfp4_by_hand():
    """Section 6.3 of the specification: a block with a largest magnitude in [4, 8) has the scale 1, and ties go to the
    even code."""
    row = torch.zeros(1, 1, 32)
    row[0, 0, :8] = torch.tensor([0.25, 0.75, 1.25, 5.0, -2.5, 7.0, -0.2, 3.6])
    stored = quantize(row, "mxfp4")
    assert stored.scales.item() == 127
    assert dequantize(stored, torch.float32)[0, 0, :8].tolist() == [0.0, 1.0, 1.0, 4.0, -2.0, 6.0, -0.0, 4.0]


@slow  # importing bitsandbytes takes seconds
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_equals_bitsandbytes(nested):
    functional = pytest.importorskip("bitsandbytes").functional
    for shape in ((3, 20, 128), (3, 5, 38), (1, 3, 21)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.1
        values, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=nested)
        ours = quantize(weight, "nf4_nested" if nested else "nf4")
        assert torch.equal(ours.values, values.flatten()) and torch.equal(ours.codes, state.code)
        tables = ()
        if nested:
            tables = state.state2.code, state.state2.absmax, state.offset
            assert torch.equal(ours.nested_codes, tables[0])
        theirs = QuantizedWeight(values, state.absmax, ours.format, weight.shape, state.code, *tables)
        for dtype in OUTPUTS:
            state.dtype = dtype
            expected = functional.dequantize_4bit(values, state)
            assert_same_bits(dequantize(theirs, dtype, implementation="reference"), expected)


@slow
@pytest.mark.parametrize("name", ["nf4", "nf4_nested"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nf4_of_every_code_equals_bitsandbytes(name, dtype):
    """bfloat16 is left out, because the CPU instruction by which bitsandbytes rounds makes subnormal numbers zero."""
    functional = pytest.importorskip("bitsandbytes").functional
    weight = every_code(name)
    state = functional.QuantState(
        weight.scales, shape=weight.shape, code=weight.codes, blocksize=64, quant_type="nf4", dtype=dtype
    )
    if name == "nf4_nested":
        state.state2 = functional.QuantState(
            weight.nested_scales, code=weight.nested_codes, blocksize=256, dtype=torch.float32
        )
        state.offset, state.nested = weight.nested_offset, True
    expected = functional.dequantize_4bit(weight.values.view(-1, 1), state)
    assert_same_bits(dequantize(weight, dtype, implementation="reference"), expected)


@slow
def test_int8_equals_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes").functional
    weight = every_code("int8")
    expected = functional.int8_vectorwise_dequant(weight.values[0], weight.scales)
    assert_same_bits(dequantize(weight, torch.float32, implementation="reference")[0], expected)
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).half()
    values, largest, _ = functional.int8_vectorwise_quant(rows)
    ours = quantize(rows.view(2, 3, 50), "int8")
    assert torch.equal(ours.values.view(6, 50), values) and torch.equal(ours.scales.flatten(), largest)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_empty_weights(name, device):
    zeros = on(quantize(torch.zeros(2, 3, 64), name), device)
    assert not dequantize(zeros, torch.float32).any()
    if name != "nf4_nested":  # the mean of no scales
        empty = on(quantize(torch.zeros(0, 3, 64), name), device)
        assert dequantize(empty, torch.float32).shape == (0, 3, 64)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_not_finite_stay_so(name, value, device):
    weight = torch.ones(2, 128, 128, device=device)
    weight[0, 5, 7] = value
    for implementation in ("triton", "reference"):
        decoded = dequantize(quantize(weight, name), torch.float32, implementation=implementation)
        assert not decoded[0, 5, 7].isfinite()
        if name != "nf4_nested":  # the mean of all scales is a part of each
            torch.testing.assert_close(decoded[1], weight[1], rtol=0.1, atol=0)


@pytest.mark.parametrize("block", [(64, 32), (1, 128), (256, 256)])
def test_fp8_blocks_of_other_sizes(block, device):
    stored = on(quantize(torch.randn(2, 70, 300), WeightFormat("fp8", block)), device)
    assert stored.scales.shape == (2, -(-70 // block[0]), -(-300 // block[1]))
    assert torch.equal(dequantize(stored, torch.float16), decode_weight(stored, torch.float16))


def test_num_bytes():
    weight = torch.randn(2, 128, 256)
    bits = {name: quantize(weight, name).num_bytes * 8 / weight.numel() for name in ("fp8", "mxfp4", "nf4", "int8")}
    tables = 64 * 8 / weight.numel()
    assert bits == {"fp8": 8 + 32 / 128**2, "mxfp4": 4.25, "nf4": 4.5 + tables, "int8": 8 + 32 / 256}


@pytest.mark.parametrize("name", ["fp8", "nf4_nested"])
def test_opcheck(name, device):
    weight = on(quantize(torch.randn(2, 4, 64), name), device)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # The test of the schema compares tensors by products, which float8 lacks.
    tests = tests if name == "fp8" else ("test_schema", *tests)
    torch.library.opcheck(
        _dequantize_op.overload, _dequantize_op.schema_arguments(weight, torch.float32), test_utils=tests
    )


def test_compiles(device):
    stored = on(quantize(torch.randn(2, 4, 64), "mxfp4"), device)
    compiled = torch.compile(lambda: dequantize(stored, torch.float32, implementation="triton"), fullgraph=True)
    assert torch.equal(compiled(), dequantize(stored, torch.float32))


@pytest.mark.parametrize("name", ["awq", "gptq", "nvfp4", "fp4"])
def test_formats_of_other_projects_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"'{name}' is not supported"):
        quantize(torch.randn(1, 4, 64), name)
    foreign = quantize(torch.ones(1, 4, 64), "fp8")._replace(format=WeightFormat(name, (1, 32)))
    with pytest.raises(NotImplementedError, match=f"'{name}' is not supported"):
        check_quantized("op", "w_up", foreign)


FP8_ZEROS = torch.zeros(2, 130, 256, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", {"format": WeightFormat("fp6", (1, 32))}, "format must be one of"),
        ("fp8", {"format": WeightFormat("fp8", (100, 128))}, "powers of two, got 100x128"),
        ("fp8", {"format": WeightFormat("fp8", (64, 128))}, r"scales of w_up must be \[2, 3, 2\]"),
        ("fp8", {"scales": torch.ones(1, 2, 2)}, r"scales of w_up must be \[2, 2, 2\] for fp8"),
        ("fp8", {"scales": torch.ones(2, 2, 2).double()}, "scales of w_up must be .*got torch.float64"),
        ("fp8", {"scales": torch.ones(2, 2, 2).mT}, "scales of w_up must be contiguous"),
        ("fp8", {"values": FP8_ZEROS[:, 1:]}, r"values of w_up must be \[2, 130, 256\]"),
        ("fp8", {"values": FP8_ZEROS.view(torch.int8)}, "must be torch.float8_e4m3fn"),
        ("fp8", {"codes": torch.ones(16)}, "has no codes"),
        ("fp8", {"shape": torch.Size((130, 256))}, r"must have the shape \[E, out, in\]"),
        ("mxfp4", {"shape": torch.Size((2, 4, 72))}, "whole blocks of 32"),
        ("mxfp4", {"values": torch.zeros(2, 4, 31, dtype=torch.uint8)}, r"must be \[2, 4, 32\] or \[2, 4, 2, 16\]"),
        ("nf4", {"codes": None}, "needs codes"),
        ("nf4", {"values": torch.zeros(255, dtype=torch.uint8)}, "must be 256 bytes"),
        ("nf4", {"format": NF4_NESTED}, "scales of w_up must be torch.uint8"),
        ("nf4", {"format": WeightFormat("nf4", (1, 48))}, "power of two from 32, got 1x48"),
        ("nf4_nested", {"nested_scales": torch.ones(2)}, r"nested_scales of w_up must be \[1\]"),
        ("nf4_nested", {"format": NF4}, "must be torch.float32, got torch.uint8"),
        ("int8", {"scales": torch.ones(7)}, r"scales of w_up must be \[2, 4, 1\]"),
        ("int8", {"format": WeightFormat("int8", (1, 64))}, "blocks of int8 must be 1x0"),
    ],
)
def test_bad_weights(name, change, message):
    weight = quantize(torch.randn(FP8_ZEROS.shape if name == "fp8" else (2, 4, 64)), name)
    check_quantized("op", "w_up", weight)
    with pytest.raises(ValueError, match=message):
        check_quantized("op", "w_up", weight._replace(**change))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"must be \[E, out, in\] of floating point"):
        quantize(torch.randn(4, 64), "fp8")
    with pytest.raises(ValueError, match="whole blocks of 32"):
        quantize(torch.randn(1, 4, 65), "mxfp4")
    with pytest.raises(ValueError, match="format must be one of"):
        quantize(torch.randn(1, 4, 64), "int3")
    stored = quantize(torch.randn(1, 4, 64), "nf4")
    with pytest.raises(ValueError, match="dtype must be of floating point"):
        dequantize(stored, torch.int32)
    with pytest.raises(ValueError, match="frozen, got one that requires a gradient"):
        dequantize(stored._replace(scales=stored.scales.requires_grad_()), torch.float32)
    with pytest.raises(ValueError, match="must be a QuantizedWeight, got Tensor"):
        dequantize(torch.ones(1, 4, 64), torch.float32)


def on(weight, device):
    return weight._replace(**{name: tensor.to(device) for name, tensor in weight.tensors.items()})
