"""`generate` on enabled models: the tokens of the model's own experts, with every cache, compiled or not."""

import copy

import pytest
import torch

from moe_layers.integrations.transformers import enable

from ..checkpoint.golden import FASTEST
from ..tiers import slow
from .models import build, draw_tokens

NEW = 6


def generate(model, tokens, cache):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), cache_implementation=cache, **options)


@pytest.mark.filterwarnings("ignore")  # the compiler warns: on a GPU, transformers compiles models with a static cache
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_tokens_are_those_of_the_models_own_experts(model_type, cache, device):
    model = build(model_type, device)
    enabled = copy.deepcopy(model)
    enable(enabled, implementation=FASTEST)
    tokens = draw_tokens(model, batch=2, length=5)
    expected = generate(model, tokens, cache)
    assert expected.shape == (2, 5 + NEW)
    assert torch.equal(generate(enabled, tokens, cache), expected)


@slow  # Inductor compiles for tens of seconds
@pytest.mark.filterwarnings("ignore")  # the compiler warns
def test_a_compiled_model_with_a_static_cache(device):
    model = build("qwen3_moe", device)
    enable(model, implementation=FASTEST)
    tokens = draw_tokens(model, batch=2, length=5)
    expected = generate(model, tokens, "static")
    model.forward = torch.compile(model.forward)
    assert torch.equal(generate(model, tokens, "static"), expected)
