"""`save_checkpoint` of a layer with quantised experts: `from_checkpoint(keep_quantized=True)` reads the same bits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_kernels import Activation, RouterSpec
from moe_kernels.quantization.quantize import quantize
from moe_kernels.types import WeightFormat
from moe_layers import LoRA, MoEFeedForward
from moe_layers.checkpoint.model.convert import convert
from moe_layers.experts.quantization import dequantize_experts_, quantize_experts_
from moe_layers.experts.stored import QuantizedExperts, replace_weight

from ..layers import moe_layer
from .golden import FASTEST
from .test_from_checkpoint import same_state
from .test_kept_weights import float8_case, gpt_oss_case
from .test_save import GATED, refuses_to_save

FP8 = WeightFormat("fp8", (16, 16))
MXFP4 = WeightFormat("mxfp4", (1, 32))
# Layouts that can hold the scales. Scales of FP8 need rows in order, those of MXFP4 need rows that are not transposed.
PLACES = {
    FP8: [name for name in GATED if name not in ("interleaved", "stacked_w13", "flat")],
    MXFP4: [name for name in [*GATED, "mxfp4"] if name not in ("interleaved", "transposed", "transposed_fc", "flat")],
}


def make_layer(format, dtype=torch.float32, **options):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 32, "num_experts": 3, "top_k": 2, "implementation": FASTEST}
    layer = moe_layer(**{**sizes, **options}).to(dtype)
    quantize_experts_(layer, format)
    return layer


def reload(directory, layer=0, **options):
    return MoEFeedForward.from_checkpoint(directory, layer, keep_quantized=True, return_report=True, **options)


def assert_same_bits(actual, expected):
    """Compare stored bits and dtypes. State dicts hold the bits as integers, those of MXFP4 in one of two shapes."""
    ours, theirs = (
        {name: tensor.flatten(2) if name.endswith(".values") else tensor for name, tensor in layer.state_dict().items()}
        for layer in (actual, expected)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    for name in ("w_up", "w_down"):
        a, b = (getattr(layer.experts, name) for layer in (actual, expected))
        assert (a.format, a.dtype, a.weight().scales.dtype) == (b.format, b.dtype, b.weight().scales.dtype)


@pytest.mark.parametrize(
    ("make", "encoding"), [(float8_case, "weight_scale_inv"), (gpt_oss_case, "gate_up_proj_scales")]
)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_names_and_bytes_of_the_source(make, encoding, dtype, tmp_path):
    number = make(tmp_path / "in")
    layer, _ = reload(tmp_path / "in", number, dtype=dtype)
    layer.save_checkpoint(tmp_path / "out")
    disk, written = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    experts = [name for name in disk if ".mlp.experts." in name and "bias" not in name]
    assert any(encoding in name for name in experts)
    for name in experts:
        assert written[name].dtype == disk[name].dtype and torch.equal(written[name], disk[name]), name
    assert written.keys() == {name for name in disk if name.startswith(layer.checkpoint_source.prefix)}
    again, report = reload(tmp_path / "out", number)
    assert report.kept_format == str(layer.experts.w_up.format)
    assert_same_bits(again, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("format", "layout"), [(format, layout) for format, layouts in PLACES.items() for layout in [None, *layouts]]
)
def test_every_layout(format, layout, dtype, tmp_path):
    layer = make_layer(format, dtype)
    layer.save_checkpoint(tmp_path / "out", layout=layout)
    again, report = reload(tmp_path / "out", implementation=FASTEST)
    assert report.layout == (layout or "per_expert")
    assert_same_bits(again, layer)
    x = torch.randn(2, 5, 64).to(dtype)
    assert torch.equal(again(x), layer(x))


OPTIONS = {
    "bias": {"bias": True, "activation": Activation("gpt_oss", limit=2.0), "router": RouterSpec(logit_bias=True)},
    "plain": {"activation": "relu_squared"},
    "latent": {"latent_dim": 96, "shared_d_ff": 7},
    "selection": {"router": RouterSpec.deepseek_v3(3, 2, scale=2.5), "shared_d_ff": 7, "shared_gate": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("format", [FP8, MXFP4], ids=str)
def test_other_parts_of_a_layer(format, options, tmp_path):
    layer = make_layer(format, torch.bfloat16, **options)
    layer.router.weight = nn.Parameter(layer.router.weight.float())
    layer.save_checkpoint(tmp_path / "out", layout="fused")
    assert_same_bits(reload(tmp_path / "out")[0], layer)


@pytest.mark.parametrize("format", [FP8, MXFP4], ids=str)
def test_read_without_keeping(format, tmp_path):
    layer = make_layer(format)
    layer.save_checkpoint(tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "converted", "fused", dtype=torch.float32)
    dequantize_experts_(layer)
    for name in ("out", "converted"):
        assert same_state(MoEFeedForward.from_checkpoint(tmp_path / name), layer)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    block = {"weight_block_size": [16, 16]} if format == FP8 else {}
    assert config["quantization_config"] == {"quant_method": format.name, **block}
    assert config["dtype"] == "float32"


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_dtypes_of_scales(scales, tmp_path):
    layer = make_layer(FP8)
    for name in ("w_up", "w_down"):
        weight = quantize(getattr(layer.experts, name).dequantize(), FP8)
        exponents = torch.full_like(weight.scales, 120, dtype=torch.uint8)
        other = exponents.view(scales) if scales.itemsize == 1 else weight.scales.to(scales)
        replace_weight(layer.experts, name, QuantizedExperts(weight._replace(scales=other), torch.float32))
    layer.save_checkpoint(tmp_path / "out")
    assert_same_bits(reload(tmp_path / "out")[0], layer)


def test_names_of_scales_of_deepseek_v4(tmp_path):
    """DeepSeek-V4 stores packed float4 with scales called "w1.scale"."""
    make_layer(MXFP4).save_checkpoint(tmp_path / "own", layout="per_expert_w123")
    file = tmp_path / "own" / "model.safetensors"
    dotted = {name.replace(".weight_scale_inv", ".scale"): tensor for name, tensor in load_file(file).items()}
    assert any(name.endswith("experts.2.w3.scale") for name in dotted)
    save_file(dotted, file)
    layer, _ = reload(tmp_path / "own")
    layer.save_checkpoint(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == dotted.keys() and all(torch.equal(written[name], dotted[name]) for name in dotted)
    layer.save_checkpoint(tmp_path / "fused", layout="fused")
    assert_same_bits(reload(tmp_path / "fused")[0], layer)


def test_dequantised_experts_are_written_plain(tmp_path):
    layer, _ = reload(tmp_path / "in", gpt_oss_case(tmp_path / "in"))
    dequantize_experts_(layer)
    layer.save_checkpoint(tmp_path / "out")
    again, report = MoEFeedForward.from_checkpoint(tmp_path / "out", return_report=True)
    assert report.quantization == () and report.layout == "per_expert"
    assert same_state(again, layer)


@pytest.mark.parametrize("format", ["nf4", "nf4_nested", "int8"])
def test_formats_that_are_not_published(format, tmp_path):
    layer = make_layer(format, num_experts=4)
    message = rf"no published checkpoint has experts in {format[:3]}.*; call dequantize_experts_ first"
    refuses_to_save(layer, tmp_path / "out", message)


@pytest.mark.parametrize(
    ("format", "layout", "options"),
    [
        (FP8, "interleaved", {}),
        (FP8, "flat", {}),
        (FP8, "per_expert", {"d_ff": 24}),
        (WeightFormat("fp8", (16, 32)), "transposed", {}),
        (MXFP4, "transposed", {}),
        (MXFP4, "flat", {}),
    ],
)
def test_layouts_without_a_place_for_scales(format, layout, options, tmp_path):
    message = rf"layout '{layout}' cannot place the scales of .*; choose another"
    refuses_to_save(make_layer(format, **options), tmp_path / "out", message, layout=layout)


@pytest.mark.parametrize("quantised", [True, False])
def test_the_layout_of_gpt_oss_needs_mxfp4(quantised, tmp_path):
    layer = make_layer(FP8)
    if not quantised:
        dequantize_experts_(layer)
    refuses_to_save(layer, tmp_path / "out", r"layout must be one of .*, got 'mxfp4'", layout="mxfp4")


def test_adapters_must_be_merged_first(tmp_path):
    layer = make_layer(FP8)
    layer.add_lora(LoRA(2, 2))
    refuses_to_save(layer, tmp_path / "out", "merge_lora or remove_lora must come first")


def test_sharded_experts_are_refused(tmp_path):
    layer = make_layer(FP8)
    layer.experts.w_up.values.device_mesh = None  # as fully_shard leaves a DTensor there
    refuses_to_save(layer, tmp_path / "out", "must hold all experts, got experts sharded over ranks")
