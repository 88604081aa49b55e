"""Models of transformers whose experts are stored in FP8: inference and adapters over the stored bytes."""

import copy

import pytest
import torch
from torch import nn

from moe_kernels.quantization.ops import dequantize
from moe_kernels.quantization.quantize import quantize
from moe_kernels.types import WeightFormat
from moe_layers.experts.quantization import dequantize_experts_, quantize_experts_
from moe_layers.integrations.transformers import enable

from .models import build, draw_tokens, step

finegrained_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(finegrained_fp8, "FP8Experts"):
    pytest.skip("this version of transformers has no FP8Experts", allow_module_level=True)

BLOCK = (4, 8)  # divides the small sizes
FORMAT = WeightFormat("fp8", BLOCK)


def experts_of(model):
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


def pair(frozen=True):
    """Return a Qwen3-MoE whose experts transformers would load as FP8, and one with their dequantised values."""
    stored, plain = build("qwen3_moe"), build("qwen3_moe")
    for (name, experts), (_, target) in zip(experts_of(stored), experts_of(plain), strict=True):
        fp8 = finegrained_fp8.FP8Experts(stored.config, block_size=BLOCK)
        for key in ("gate_up_proj", "down_proj"):
            weight = quantize(getattr(experts, key).detach(), FORMAT)
            setattr(fp8, key, nn.Parameter(weight.values, requires_grad=not frozen))
            setattr(fp8, f"{key}_scale_inv", nn.Parameter(weight.scales, requires_grad=not frozen))
            getattr(target, key).data.copy_(dequantize(weight, torch.float32))
        stored.set_submodule(name, fp8)
    return stored, plain


def test_outputs_and_gradients_are_those_of_the_dequantised_model():
    stored, plain = pair()
    report = enable(stored, implementation="reference")
    enable(plain, implementation="reference")
    num_bytes = sum(p.numel() * p.element_size() for _, e in experts_of(stored) for p in e.parameters())
    assert report.quantized == {"fp8 (4x8)": num_bytes}
    assert f"{num_bytes:,} bytes of weights stay fp8 (4x8)" in str(report)
    for _, experts in experts_of(plain):
        experts.requires_grad_(False)
    tokens = draw_tokens(stored)
    actual, expected = step(stored, tokens), step(plain, tokens)
    assert torch.equal(actual[0], expected[0]) and actual[0].any()
    assert actual[2].keys() == expected[2].keys() and actual[2]
    for name, gradient in expected[2].items():
        assert torch.equal(actual[2][name], gradient), name


def test_packed_float4():
    """FP8Experts hold DeepSeek-V4's float4 numbers as int8, two in a byte."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    stored, plain = build("qwen3_moe", **sizes), build("qwen3_moe", **sizes)
    for (name, experts), (_, target) in zip(experts_of(stored), experts_of(plain), strict=True):
        packed = finegrained_fp8.FP8Experts(stored.config, block_size=BLOCK)
        for key in ("gate_up_proj", "down_proj"):
            weight = quantize(getattr(experts, key).detach(), "mxfp4")
            values, scales = weight.values.flatten(2).view(torch.int8), weight.scales.view(torch.float8_e8m0fnu)
            setattr(packed, key, nn.Parameter(values, requires_grad=False))
            setattr(packed, f"{key}_scale_inv", nn.Parameter(scales, requires_grad=False))
            getattr(target, key).data.copy_(dequantize(weight, torch.float32))
        stored.set_submodule(name, packed)
    assert list(enable(stored, implementation="reference").quantized) == ["mxfp4 (1x32)"]
    enable(plain, implementation="reference")
    tokens = draw_tokens(stored)
    with torch.no_grad():
        actual = stored(tokens).logits
        assert torch.equal(actual, plain(tokens).logits) and actual.any()


def test_unfrozen_weights_run_without_gradients_only():
    stored, plain = pair(frozen=False)
    enable(stored, implementation="reference")
    enable(plain, implementation="reference")
    tokens = draw_tokens(stored)
    with torch.no_grad():
        assert torch.equal(stored(tokens).logits, plain(tokens).logits)
    with pytest.raises(ValueError, match=r"gate_up_proj of FP8Experts is stored as fp8 and must be frozen"):
        stored(tokens)


def test_disable_and_copies():
    from moe_layers.integrations.transformers import disable

    stored, _ = pair()
    enable(stored, implementation="reference")
    tokens = draw_tokens(stored)
    copied = copy.deepcopy(stored)
    with torch.no_grad():
        assert torch.equal(copied(tokens).logits, stored(tokens).logits)
    disable(stored)
    assert all("forward" not in vars(experts) for _, experts in experts_of(stored))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e, "block_size", None), r"must be float8_e4m3fn in blocks, or packed float4"),
        (lambda e: setattr(e, "block_size", (3, 8)), r"blocks of fp8 must have sizes that are powers of two"),
        (
            lambda e: setattr(e, "down_proj_scale_inv", nn.Parameter(torch.ones(8, 1, 1), requires_grad=False)),
            r"enable: the scales of the down-projection of .*experts must be",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_changes(change, message):
    stored, _ = pair()
    change(experts_of(stored)[-1][1])
    with pytest.raises(ValueError, match=message):
        enable(stored, implementation="reference")
    assert all("forward" not in vars(experts) for _, experts in experts_of(stored))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft, of its use of transformers
@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_adapters_of_peft_over_stored_weights(order):
    """Equal to PEFT's own computation over the dequantised model. `order` says what was done to the model first."""
    peft_models = pytest.importorskip("tests.integrations.peft_models")
    stored, plain = pair()
    if order == "enabled":
        enable(stored, implementation="reference")
    adapted, golden = (peft_models.adapt(model, peft_models.lora()) for model in (stored, plain))
    if order == "adapted":
        report = enable(adapted, implementation="reference")
        assert len(report.adapted) == 4 and not report.adapted_by_wrapper
    tokens = draw_tokens(golden)
    actual, expected = step(adapted, tokens), step(golden, tokens)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    assert actual[2].keys() == expected[2].keys() and len(actual[2]) == 8
    for name, gradient in expected[2].items():
        torch.testing.assert_close(actual[2][name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


def test_an_enabled_model_is_not_quantised_by_us():
    model = build("qwen3_moe")
    enable(model, implementation="reference")
    cure = "got Qwen3MoeForCausalLM without; quantise a transformers model in .* and then call `enable`"
    for change in (lambda model: quantize_experts_(model, "fp8"), dequantize_experts_):
        with pytest.raises(ValueError, match=cure):
            change(model)
