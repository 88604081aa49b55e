"""`from_checkpoint(..., keep_quantized=True)`: the stored bytes, and the values of the dequantised layer."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.quantization import dequantize_experts_, quantize_experts_
from moe_layers.experts.stored import QuantizedExperts

from .golden import Golden
from .test_from_checkpoint import copy_case

BLOCK = (8, 16)  # the golden models are smaller than a block of 128


def float8_case(tmp_path, block=BLOCK, dtype=torch.float32):
    """Write Qwen3-MoE with random float8 experts and scales. Return the number of its layer."""
    generator = torch.Generator().manual_seed(0)

    def quantise(tensors):
        for name in [name for name in tensors if ".mlp.experts." in name]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            grid = -(-rows // block[0]), -(-columns // block[1])
            tensors[f"{name}_scale_inv"] = torch.rand(grid, generator=generator).to(dtype)

    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    return copy_case("qwen3_moe", tmp_path, quantise, {"quantization_config": settings}).layer


def gpt_oss_case(tmp_path):
    return copy_case("gpt_oss_mxfp4", tmp_path).layer


@pytest.mark.parametrize("make", [float8_case, gpt_oss_case])
def test_the_values_are_those_of_the_dequantised_layer(make, tmp_path):
    number = make(tmp_path)
    # In PyTorch, because kernels that decode weights add in another order.
    options = {"dtype": torch.float32, "return_report": True, "implementation": "reference"}
    kept, report = MoEFeedForward.from_checkpoint(tmp_path, number, keep_quantized=True, **options)
    plain, _ = MoEFeedForward.from_checkpoint(tmp_path, number, **options)
    assert isinstance(kept.experts.w_up, QuantizedExperts) and isinstance(kept.experts.w_down, QuantizedExperts)
    x = torch.randn(7, plain.d_model, generator=torch.Generator().manual_seed(1))
    assert torch.equal(kept(x), plain(x)) and kept(x).any()
    name = {"float8_case": "fp8 (8x16)", "gpt_oss_case": "mxfp4 (1x32)"}[make.__name__]
    assert report.kept_format == name and f"experts kept as {name}" in str(report)
    assert not [name for name in report.dtype_changes if "experts" in name and "bias" not in name]
    again = copy.deepcopy(plain)
    quantize_experts_(again, kept.experts.w_up.format)
    again.load_state_dict(kept.state_dict())
    assert torch.equal(again(x), kept(x))
    dequantize_experts_(kept)
    assert torch.equal(kept.experts.w_up, plain.experts.w_up)
    assert torch.equal(kept.experts.w_down, plain.experts.w_down)


def test_the_bytes_are_those_on_disk(tmp_path):
    number = float8_case(tmp_path, dtype=torch.bfloat16)
    layer = MoEFeedForward.from_checkpoint(tmp_path, number, keep_quantized=True)
    disk = load_file(tmp_path / "model.safetensors")
    prefix = Golden("qwen3_moe").prefix
    for expert in range(layer.num_experts):
        for part, held in (("down_proj", layer.experts.w_down), ("gate_proj", layer.experts.w_up)):
            numbers = disk[f"{prefix}experts.{expert}.{part}.weight"].view(torch.uint8)
            scales = disk[f"{prefix}experts.{expert}.{part}.weight_scale_inv"].view(torch.uint8)
            assert torch.equal(held.values[expert][: len(numbers)], numbers)
            assert torch.equal(held.scales[expert][: len(scales)], scales)


def test_some_experts_with_adapters(tmp_path):
    number = float8_case(tmp_path)
    whole = MoEFeedForward.from_checkpoint(tmp_path, number, keep_quantized=True, dtype=torch.float32)
    x = torch.randn(7, whole.d_model, generator=torch.Generator().manual_seed(1))
    half = whole.num_experts // 2
    parts = [
        MoEFeedForward.from_checkpoint(tmp_path, number, keep_quantized=True, dtype=torch.float32, experts=experts)
        for experts in (range(half), range(half, whole.num_experts))
    ]
    torch.testing.assert_close(sum(part(x) for part in parts), whole(x))
    parts[0].add_lora(LoRA(2, 2))
    parts[0](x).sum().backward()
    assert parts[0].experts.lora["default"].up_b.grad.any()


def mixed_case(tmp_path):
    """Write float8 experts whose gates and ups are packed float4."""
    number = float8_case(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_proj.weight", "up_proj.weight"))]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.zeros(rows, columns // 2, dtype=torch.int8)
        tensors[f"{name}_scale_inv"] = torch.zeros(rows, columns // 32, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    return number


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mixed_case, r"needs experts in one format, got fp8 \(8x16\), mxfp4 \(1x32\)"),
        (lambda path: float8_case(path, (32, 16)), r"cannot place the scales of .* as fp8 \(32x16\)"),
        (lambda path: float8_case(path, (12, 16)), "blocks of fp8 must have sizes that are powers of two, got 12x16"),
        (lambda path: copy_case("qwen3_moe", path), "keep_quantized needs experts in float8_e4m3fn by blocks"),
    ],
)
def test_what_cannot_be_kept(make, message, tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        MoEFeedForward.from_checkpoint(tmp_path, Golden("qwen3_moe").layer, keep_quantized=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_must_be_finite(bad, tmp_path):
    number = float8_case(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("3.up_proj.weight_scale_inv"))
    tensors[name][0, 1] = bad
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the scales of .*experts\.3\.up_proj\.weight must be finite"):
        MoEFeedForward.from_checkpoint(tmp_path, number, keep_quantized=True)
