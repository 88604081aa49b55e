"""Layers whose expert weights stay quantised: bits, state, conversions, adapters, merging, bad input."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_kernels.experts import row_products
from moe_kernels.quantization.formats import FORMATS
from moe_kernels.types import WeightFormat
from moe_layers import LoRA
from moe_layers.experts.quantization import dequantize_experts_, quantize_experts_
from moe_layers.experts.stored import QuantizedExperts

from .. import layers
from ..dtypes import DTYPES
from .test_fp8_layer import step
from .test_lora import with_effect
from .test_saved_bytes import seen_bytes

SMALL_BLOCKS = WeightFormat("fp8", (16, 32))
FORMATS_HERE = {**FORMATS, "fp8_small": SMALL_BLOCKS}
SIZES = {"d_model": 64, "d_ff": 32, "num_experts": 4, "top_k": 2}


def make_layer(device, format=None, implementation="reference", dtype=torch.float32, **options):
    torch.manual_seed(0)
    kind = {"implementation": implementation, "device": device, "dtype": dtype}
    layer = layers.moe_layer(**{**SIZES, "init_std": 0.3, **options}, **kind)
    if format is not None:
        quantize_experts_(layer, FORMATS_HERE[format])
    return layer


def with_adapter(layer, std=0.3, targets=("up", "down")):
    layer.add_lora(LoRA(3, 6, targets=targets))
    return with_effect(layer, std)


def dequantized(layer):
    plain = copy.deepcopy(layer)
    dequantize_experts_(plain)
    assert not plain.experts.w_up.requires_grad and not plain.experts.w_down.requires_grad
    return plain


def make_x(device, dtype=torch.float32):
    return layers.make_x(device, (9, 64), dtype=dtype).requires_grad_()


@pytest.mark.parametrize(
    ("format", "implementation"), [*((format, "reference") for format in FORMATS_HERE), ("fp8_small", "triton")]
)
def test_a_step_has_the_bits_of_the_dequantised_layer(format, implementation, device, monkeypatch):
    """tests/unit/experts/test_quantized_experts.py tests the kernels of every format."""
    monkeypatch.setattr(row_products, "MAX_ROWS", 0)  # GEMMs that decode weights add in another order
    layer = with_adapter(make_layer(device, format, implementation, DTYPES[-1]))
    x = make_x(device, DTYPES[-1])
    actual, expected = step(layer, x), step(dequantized(layer), x)
    assert len(actual) == 2 + 4
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert expected["out"].any() and expected["x"].any()


def test_the_rest_of_the_layer_trains_over_quantised_experts(device):
    layer = make_layer(device, "int8", shared_d_ff=16, bias=True)
    gradients = step(layer, make_x(device))
    assert {"router.weight", "experts.b_up", "experts.b_down", "shared_expert.w_up"} <= gradients.keys()
    assert not [name for name in gradients if "experts.w_" in name]


@pytest.mark.parametrize("format", FORMATS_HERE)
def test_files_hold_the_stored_bytes(format, tmp_path, device):
    layer = make_layer(device, format)
    state = layer.state_dict()
    save_file(state, tmp_path / "layer.safetensors")
    read = load_file(tmp_path / "layer.safetensors", device)
    assert read.keys() == state.keys() and {"experts.w_up.values", "experts.w_down.scales"} <= state.keys()
    empty = make_layer("meta")
    quantize_experts_(empty, FORMATS_HERE[format])
    empty.to_empty(device=device).load_state_dict(read)
    x = make_x(device)
    assert torch.equal(empty(x), layer(x))
    stored = sum(t.numel() * t.element_size() for name, t in state.items() if "experts.w_" in name)
    assert stored < 0.6 * 4 * 3 * 4 * 64 * 32  # 0.6 of the bytes in float32


@pytest.mark.parametrize("assign", [False, True])
def test_bits_of_another_dtype_are_an_error(assign, device):
    layer = make_layer(device, "fp8")
    state = layer.state_dict()
    powers = state["experts.w_down.scales"].view(torch.float32).to(torch.float8_e8m0fnu).view(torch.uint8)
    message = r"experts\.w_down\.scales must be torch.int32 with the bits of torch.float32, got torch.uint8"
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state | {"experts.w_down.scales": powers}, assign=assign)


@pytest.mark.parametrize("format", FORMATS_HERE)
def test_conversions_keep_the_stored_bits(format, device):
    layer = make_layer(device, format)
    stored = layer.experts.w_up.state_dict()
    for other in (copy.deepcopy(layer).bfloat16(), copy.deepcopy(layer).double(), layers.pickled(layer)):
        for (name, a), b in zip(other.experts.w_up.state_dict().items(), stored.values(), strict=True):
            assert a.dtype == b.dtype, name
            assert torch.equal(*(bits.flatten().view(torch.uint8) for bits in (a, b))), name
    half = copy.deepcopy(layer).bfloat16()
    assert half.experts.w_up.dtype == torch.bfloat16 and half(make_x(device, torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_computes_in_its_dtype(device):
    layer = make_layer(device, "mxfp4")
    x = make_x(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out = layer(x)
        expected = dequantized(layer)(x)
    assert torch.equal(out, expected)


def test_dropout_of_adapters(device):
    layer = make_layer(device, "nf4")
    layer.add_lora(LoRA(3, 6, dropout=0.5))
    x, results = make_x(device), []
    for each in (layer, dequantized(layer)):
        torch.manual_seed(5)
        results.append(each(x))
    assert torch.equal(*results)


def test_some_experts_of_a_quantised_layer(device):
    layer = make_layer(device, "fp8")
    half, rest = copy.deepcopy(layer), copy.deepcopy(layer)
    half.keep_local_experts(range(2))
    rest.keep_local_experts(range(2, 4))
    assert list(half.experts.w_up.shape) == [2, 64, 64] and len(half.experts.w_down.scales) == 2
    x = make_x(device)
    torch.testing.assert_close(half(x) + rest(x), layer(x))


def test_saved_bytes_count_no_weight(device):
    layer = with_adapter(make_layer(device, "mxfp4", "triton", DTYPES[-1]))
    x = make_x(device, DTYPES[-1])
    assert layer.saved_bytes(9) == seen_bytes(layer, x) <= dequantized(layer).saved_bytes(9)


def test_the_format_is_named():
    shown = repr(make_layer("cpu", "mxfp4").experts)
    assert "weights=mxfp4 (1x32)" in shown and "QuantizedExperts(mxfp4 (1x32), shape=[4, 64, 64]" in shown


def test_merging_gives_plain_weights_by_default(device):
    layer = with_adapter(make_layer(device, "mxfp4"))
    plain = dequantized(layer)
    assert layer.merge_lora(keep_base=True) == {} and plain.merge_lora() == {}
    for name in ("w_up", "w_down"):
        assert torch.equal(getattr(layer.experts, name), getattr(plain.experts, name))
    layer.unmerge_lora()
    assert isinstance(layer.experts.w_up, QuantizedExperts)
    reference = with_adapter(make_layer(device, "mxfp4"))
    x = make_x(device)
    assert torch.equal(layer(x), reference(x))


@pytest.mark.parametrize("target", ["up", "down"])
def test_merging_one_projection_makes_both_weights_plain(target, device):
    layer, x = with_adapter(make_layer(device, "mxfp4"), targets=[target]), make_x(device)
    before, plain = layer(x), dequantized(layer)
    plain.merge_lora()
    layer.merge_lora(keep_base=True)
    assert torch.equal(layer(x), plain(x))
    layer.unmerge_lora()
    assert torch.equal(layer(x), before) and isinstance(layer.experts.w_down, QuantizedExperts)
    layer.merge_lora(keep_base=True, requantize=True, least_kept=0.0)
    dequantize_experts_(layer)  # so that `unmerge_lora` would restore the format of one weight only
    with pytest.raises(ValueError, match=f"unmerge_lora: w_{target} must be as it was merged, mxfp4 .*, got plain"):
        layer.unmerge_lora()


def test_weights_quantised_after_a_merge_cannot_be_unmerged(device):
    layer = with_adapter(make_layer(device))
    layer.merge_lora(keep_base=True)
    quantize_experts_(layer, "mxfp4")
    with pytest.raises(ValueError, match=r"unmerge_lora: w_up must be as it was merged, plain .*, got mxfp4"):
        layer.unmerge_lora()


def test_merging_into_the_format_reports_what_survives(device):
    layer = with_adapter(make_layer(device, "mxfp4"), std=0.5)
    x = make_x(device)
    kept = layer.merge_lora(requantize=True)
    assert kept.keys() == {"up", "down"} and all(0.5 < share < 1 for share in kept.values())
    assert layer.experts.w_up.format.name == "mxfp4" and layer.experts.lora is None

    small = with_adapter(make_layer(device, "mxfp4"), std=0.01)
    before = small(x)
    with pytest.raises(ValueError, match=r"merge_lora: at least 0.5 of the change must survive mxfp4 .*, got 0.0"):
        small.merge_lora(requantize=True)
    assert torch.equal(small(x), before)
    kept = small.merge_lora(requantize=True, least_kept=0.0)
    assert kept == {"up": 0.0, "down": 0.0} and small.experts.w_up.format.name == "mxfp4"


@pytest.mark.parametrize(
    ("make", "format", "error", "message"),
    [
        (make_layer, "awq", NotImplementedError, "quantize_experts_: the format 'awq' is not supported"),
        (make_layer, "nvfp4", NotImplementedError, "quantize_experts_: the format 'nvfp4' is not supported"),
        (make_layer, "fp3", ValueError, "quantize_experts_: format must be one of"),
        (make_layer, torch.float8_e4m3fn, ValueError, "format must be one of .*, got torch.float8_e4m3fn"),
        (partial(make_layer, d_ff=24), "mxfp4", ValueError, "mxfp4 needs rows of whole blocks of 32"),
        (partial(make_layer, d_model=6, d_ff=5), "nf4", ValueError, "nf4 must be whole blocks of 64"),
        (partial(make_layer, format="fp8"), "fp8", ValueError, "experts must not be quantised yet, got w_up as fp8"),
        (lambda device: nn.Linear(2, 2), "fp8", ValueError, "the module must hold GroupedExperts, got Linear without"),
    ],
)
def test_what_cannot_be_quantised(make, format, error, message, device):
    with pytest.raises(error, match=message):
        quantize_experts_(make(device), format)


def test_bad_use(device):
    layer = make_layer(device, "fp8")
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        layer.experts.w_up.values.requires_grad_(True)
    with pytest.raises(ValueError, match="reset_parameters: weights must not be quantised, got fp8"):
        layer.experts.reset_parameters()
    with pytest.raises(ValueError, match="dequantize_experts_: the module must hold quantised experts, got none"):
        dequantize_experts_(make_layer(device))
    nested = make_layer(device, "nf4_nested")  # a block has 256 scales, an expert 4096 / 64
    with pytest.raises(ValueError, match="keep_local_experts: each expert must hold whole blocks of nf4"):
        nested.keep_local_experts(range(2))
    stale = make_layer(device, "fp8")
    stale.experts.w_up.scales = nn.Parameter(stale.experts.w_up.scales[:, :0], requires_grad=False)
    with pytest.raises(ValueError, match=r"the scales of w_up must be"):
        stale(make_x(device))
    mixed = make_layer(device, "fp8")
    mixed.experts.w_down = make_layer(device, "int8").experts.w_down
    with pytest.raises(ValueError, match=r"fused_experts: .*format"):
        mixed(make_x(device))
    plain = with_adapter(make_layer(device))
    with pytest.raises(ValueError, match="merge_lora: requantize needs quantised weights, got plain ones"):
        plain.merge_lora(requantize=True)
