"""`generate` on enabled models: the tokens of the model's own experts, with every cache, compiled or not."""

import copy
import json

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


@pytest.mark.filterwarnings("ignore")  # of the compiler: on a GPU, transformers compiles models with a static cache
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
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model_with_a_static_cache(device):
    model = build("qwen3_moe", device)
    enable(model, implementation=FASTEST)
    tokens = draw_tokens(model, batch=2, length=5)
    expected = generate(model, tokens, "static")
    model.forward = torch.compile(model.forward)
    assert torch.equal(generate(model, tokens, "static"), expected)


@slow
def test_benchmark_of_small_sizes(device, tmp_path):
    from benchmarks import generate as benchmark

    path = tmp_path / "results.json"
    sizes = ["--shape", "tiny", "--batch", "1", "2", "--prompt", "4", "--new", "2", "--rounds", "1", "--round-ms", "1"]
    names = ["moe_layers", "grouped_mm", "batched_mm"]
    benchmark.main([*sizes, "--device", torch.device(device).type, "--output", str(path)])
    rows = json.loads(path.read_text())
    assert [(row["batch"], row["implementation"]) for row in rows] == [(b, name) for b in (1, 2) for name in names]
    assert all(row["tokens_per_s"] == pytest.approx(2e3 * row["batch"] / row["ms"]) for row in rows)
