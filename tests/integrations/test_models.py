"""Whole models compute the same with our experts and with their own."""

import copy

import pytest
import torch

from moe_kernels.testing import assert_accurate
from moe_layers.integrations.transformers import enable

from ..tiers import default_tier
from .models import build, check_change, draw_tokens, skip_old

# gpt_oss: biases, an active clamp, transposed and interleaved. nemotron_h: no gates. qwen2_moe: a shared expert.
INTERFACE = {
    "qwen3_moe": "swiglu",
    "mixtral": "swiglu",
    "gpt_oss": "gpt_oss(limit=1.5, alpha=1.702, interleaved)",
    "openai_privacy_filter": "gpt_oss(limit=1.5, alpha=1.702)",
    "qwen2_moe": "swiglu",
    "olmoe": "swiglu",
    "deepseek_v3": "swiglu",
    "glm4_moe": "swiglu",
    "nemotron_h": "relu_squared",
}
# dbrx: flat weights. jetmoe: sorted slots. llama4_text: weights on the input. longcat_flash: zero experts.
REPLACED = {
    "dbrx": "swiglu",
    "jetmoe": "swiglu",
    "llama4_text": "swiglu",
    "longcat_flash": "swiglu",
    "step3p7_text": "swiglu_clamped_after(limit=1.5)",
}


def assert_enabled_step_is_the_models_own(model, activation, path):
    report, actual, baseline = check_change(model, enable)
    assert {kind[1:] for kind in report.kinds} == {(activation, path)}
    assert not torch.equal(actual[0], baseline[0])  # the results differ in rounding, so other code did compute them


@pytest.mark.parametrize("model_type", default_tier(INTERFACE, ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"]))
def test_experts_by_the_interface(model_type, device):
    assert_enabled_step_is_the_models_own(build(model_type, device), INTERFACE[model_type], "experts interface")


@pytest.mark.parametrize("model_type", REPLACED)
def test_blocks_without_the_interface(model_type, device):
    skip_old(model_type)
    model = build(model_type, device)
    assert_enabled_step_is_the_models_own(model, REPLACED[model_type], "replaced forward")


@pytest.mark.parametrize("model_type", ["gpt_oss", "dbrx"])
def test_weights_that_are_inference_tensors(model_type, device):
    """The model is built in inference mode, in which PEFT's adapters make such weights, too."""
    skip_old(model_type)
    with torch.inference_mode():
        model = build(model_type, device)
        tokens = draw_tokens(model)
        baseline, exact = model(input_ids=tokens)[0], copy.deepcopy(model).double()(input_ids=tokens)[0]
        enable(model, implementation="reference")
        actual = model(input_ids=tokens)[0]
        assert_accurate(actual, baseline, exact)
        model.requires_grad_(False)
    assert torch.equal(model(input_ids=tokens)[0], actual)
