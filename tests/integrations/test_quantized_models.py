"""Models of transformers whose experts are stored in FP8: inference and adapters over the stored bytes."""

import copy

import pytest
import torch
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

from moe_kernels.quantization.ops import dequantize
from moe_kernels.quantization.quantize import quantize
from moe_kernels.types import WeightFormat
from moe_layers.experts.quantization import dequantize_experts_, quantize_experts_
from moe_layers.integrations.transformers import disable, enable
from moe_layers.integrations.transformers.experts.experts_forward import ATTRIBUTE, NAME

from .models import assert_same_bits, build, draw_tokens, enabled_logits, experts_of, logits_of, step
from .test_experts_of_models import draw_routing

BLOCK = (2, 8)  # divides d_ff 18, so that gate and up are whole blocks
FORMAT = WeightFormat("fp8", BLOCK)


def fp8_experts(config, block=BLOCK):
    """Return an experts module as transformers makes it."""
    registry = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    made = use_experts_implementation(experts_class=finegrained_fp8.FP8Experts, experts_interface=registry)
    return made(config, block_size=block)


def pair(form=FORMAT, dtypes=(torch.float8_e4m3fn, torch.float32), frozen=True, **sizes):
    """Return a Qwen3-MoE with experts as transformers loads FP8, and one with their dequantised values.

    Args:
        form: the weight format.
        dtypes: the dtypes that transformers gives to the values and the scales.
    """
    stored, plain = build("qwen3_moe", **sizes), build("qwen3_moe", **sizes)
    for (name, experts), (_, target) in zip(experts_of(stored), experts_of(plain), strict=True):
        fp8 = fp8_experts(stored.config)
        for key in ("gate_up_proj", "down_proj"):
            weight = quantize(getattr(experts, key).detach(), form)
            values, scales = weight.values.flatten(2).view(dtypes[0]), weight.scales.view(dtypes[1])
            setattr(fp8, key, nn.Parameter(values, requires_grad=not frozen))
            setattr(fp8, f"{key}_scale_inv", nn.Parameter(scales, requires_grad=not frozen))
            getattr(target, key).data.copy_(dequantize(weight, torch.float32))
        stored.set_submodule(name, fp8)
    return stored, plain


def test_outputs_and_gradients_are_those_of_the_dequantised_model():
    stored, plain = pair()
    report = enable(stored, implementation="reference")
    enable(plain, implementation="reference")
    num_bytes = sum(p.numel() * p.element_size() for _, e in experts_of(stored) for p in e.parameters())
    assert report.quantized == {"fp8 (2x8)": num_bytes}
    assert f"{num_bytes:,} bytes of weights stay fp8 (2x8)" in str(report)
    for _, experts in experts_of(plain):
        experts.requires_grad_(False)
    tokens = draw_tokens(stored)
    actual = step(stored, tokens)
    assert_same_bits(actual, step(plain, tokens))
    assert actual[0].any() and actual[2]


def test_packed_float4():
    """FP8Experts hold DeepSeek-V4's float4 numbers as int8, two in a byte."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    stored, plain = pair("mxfp4", (torch.int8, torch.float8_e8m0fnu), **sizes)
    assert_chosen_by_name(stored)
    assert list(enable(stored, implementation="reference").quantized) == ["mxfp4 (1x32)"]
    enable(plain, implementation="reference")
    actual = logits_of(stored)
    assert torch.equal(actual, logits_of(plain)) and actual.any()


def assert_chosen_by_name(stored):
    """Check that `experts_implementation="moe_layers"` alone computes what `enable` computes."""
    enabled = copy.deepcopy(stored)
    stored.set_experts_implementation(NAME)
    enable(enabled)
    mine, expected = (experts_of(model)[0][1] for model in (stored, enabled))
    inputs = [operand[:2] for operand in draw_routing(mine, torch.float32)]
    with torch.no_grad():
        assert torch.equal(mine(*inputs), expected(*inputs))
    assert getattr(mine, ATTRIBUTE) == getattr(expected, ATTRIBUTE)


def test_experts_chosen_by_name(device):
    stored, _ = pair()
    assert_chosen_by_name(stored.to(device))
    experts = experts_of(stored)[1][1]
    inputs = [operand[:2] for operand in draw_routing(experts, torch.float32)]
    compiled = torch.compile(copy.deepcopy(experts), backend="aot_eager", fullgraph=True)  # recognised while traced
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), experts(*inputs))
    del experts.__dict__[ATTRIBUTE]
    experts.block_size = None
    with pytest.raises(ValueError, match="moe_layers: the weights of FP8Experts must be float8_e4m3fn in blocks"):
        experts(*inputs)


@pytest.mark.parametrize("d_ff", [8, 12, 28], ids=lambda d_ff: f"d_ff{d_ff}")
@pytest.mark.parametrize("by_name", [False, True])
def test_halves_that_are_no_whole_blocks_are_refused(by_name, d_ff):
    """A scale belongs to rows of gate or to rows of up. Blocks of both together would begin elsewhere."""
    stored = build("qwen3_moe", moe_intermediate_size=d_ff)
    for name, _ in experts_of(stored):
        stored.set_submodule(name, fp8_experts(stored.config, (16, 8)).requires_grad_(False))
    assert experts_of(stored)[0][1].gate_up_proj_scale_inv.shape[1] in (2, 4)
    with pytest.raises(
        ValueError, match=rf"gate and up of FP8Experts must be whole blocks of 16 rows.*got d_ff {d_ff}"
    ):
        if by_name:
            stored.set_experts_implementation(NAME)
            stored(draw_tokens(stored))
        else:
            enable(stored)


def test_unfrozen_weights_run_without_gradients_only():
    stored, plain = pair(frozen=False)
    assert torch.equal(*enabled_logits((stored, plain)))
    with pytest.raises(ValueError, match=r"gate_up_proj of FP8Experts is stored as fp8 and must be frozen"):
        stored(draw_tokens(stored))


def test_disable_and_copies():
    stored, _ = pair()
    enable(stored, implementation="reference")
    assert torch.equal(logits_of(copy.deepcopy(stored)), logits_of(stored))
    disable(stored)
    assert all("forward" not in vars(experts) for _, experts in experts_of(stored))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e, "block_size", None), r"must be float8_e4m3fn in blocks, or packed float4"),
        (lambda e: setattr(e, "block_size", (3, 8)), r"blocks of fp8 must have sizes that are powers of two"),
        (
            lambda e: setattr(e, "down_proj_scale_inv", nn.Parameter(torch.ones(8, 1, 1), requires_grad=False)),
            r"moe_layers: the scales of the down-projection of .*experts must be",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_changes(change, message):
    stored, _ = pair()
    change(experts_of(stored)[-1][1])
    with pytest.raises(ValueError, match=message):
        enable(stored, implementation="reference")
    assert all("forward" not in vars(experts) for _, experts in experts_of(stored))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT warns about its use of transformers
@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_adapters_of_peft_over_stored_weights(order):
    peft_models = pytest.importorskip("tests.integrations.peft_models")
    peft_models.assert_adapted_as_by_peft(*pair(), order, num_adapted=4)


def test_an_enabled_model_is_not_quantised_by_us():
    model = build("qwen3_moe")
    enable(model, implementation="reference")
    cure = "got Qwen3MoeForCausalLM without; quantise a transformers model in .* and then call `enable`"
    for change in (lambda model: quantize_experts_(model, "fp8"), dequantize_experts_):
        with pytest.raises(ValueError, match=cure):
            change(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_that_a_wrapper_adds_are_refused():
    """PEFT would add adapters to the stored numbers, without the scales, and round the sums to float8."""
    peft_models = pytest.importorskip("tests.integrations.peft_models")
    stored, _ = pair()
    adapted = peft_models.adapt(stored, peft_models.lora())
    stored.set_experts_implementation(NAME)
    with pytest.raises(ValueError, match=r"gate_up_proj of .*FP8Experts is stored as fp8, which no wrapper can change"):
        adapted(draw_tokens(stored))
    with adapted.disable_adapter():
        adapted(draw_tokens(stored, batch=1, length=1))
