"""Whole models compute with our experts what they compute with their own."""

import copy

import pytest
import torch

from moe_layers.integrations.transformers import enable

from .models import assert_same_step, build, draw_tokens, step

# gpt_oss: biases, a clamp that acts, transposed and interleaved. nemotron_h: no gates. qwen2_moe: a shared expert.
MODELS = {
    "qwen3_moe": "swiglu",
    "mixtral": "swiglu",
    "gpt_oss": "gpt_oss(limit=1.5, alpha=1.702)",
    "openai_privacy_filter": "gpt_oss(limit=1.5, alpha=1.702)",
    "qwen2_moe": "swiglu",
    "olmoe": "swiglu",
    "deepseek_v3": "swiglu",
    "glm4_moe": "swiglu",
    "nemotron_h": "relu_squared",
}


@pytest.mark.parametrize("model_type", MODELS)
def test_step_is_the_models_own(model_type, device):
    model = build(model_type, device)
    tokens = draw_tokens(model)
    baseline = step(model, tokens)
    exact = step(copy.deepcopy(model).double(), tokens)
    report = enable(model)
    assert {activation for _, activation, _ in report.kinds} == {MODELS[model_type]}
    actual = step(model, tokens)
    assert_same_step(actual, baseline, exact)
    assert not torch.equal(actual[0], baseline[0])  # something else did compute it
