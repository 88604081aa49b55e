"""benchmarks/whole_model.py and the models that it times."""

import argparse
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")

from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from benchmarks import whole_model
from benchmarks.common import model_variants
from benchmarks.common.model_variants import ATTENTION, MODELS, draw_tokens, make_model, with_experts

from ..tiers import default_tier
from .commands import measure

# The compiler needs seconds.
CASES = default_tier(["eager", "compiled"], {"eager"})


def wrong_experts(*arguments):
    return 1.1 * batched_mm_experts_forward(*arguments)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # in compiled layers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("mode", CASES)
def test_small_run_writes_a_results_file(mode, tmp_path, monkeypatch):
    monkeypatch.setitem(ExpertsInterface._global_mapping, "wrong", wrong_experts)
    monkeypatch.setattr(whole_model, "CHECKED_TOKENS", 8)
    monkeypatch.setattr(model_variants, "VOCABULARY", 64)
    small = "--model tiny --layers 1 --tokens 2x8 --batch 1 --prompt 4 --new 2 --rank 2 --device cpu"
    options = [*small.split(), "--implementation", "reference", "--modes", mode]
    options += ["--training", "full"] if mode == "compiled" else []
    names = ["moe_layers", "eager", "wrong", "no_experts"]
    rows = measure(whole_model.main, tmp_path / "results.json", *options, "--implementations", *names)
    training = ("forward+backward", "training step")
    cases = [("full", which) for which in (*training, "generate")]
    cases += [("lora", which) for which in training if mode == "eager"]
    assert [(row["training"], row["pass"]) for row in rows[::4]] == cases
    assert [row["implementation"] for row in rows] == names * len(cases)
    for row in rows:
        assert row["commit"] == "abc" and row["transformers"] and row["peft"]
        assert row["mode"] == ("eager" if row["pass"] == "generate" else mode)
        assert (row["ms"] is None) == (row["error"] is not None) == (row["implementation"] == "wrong"), row
    assert all("relative error" in row["error"] for row in rows[2::4])
    for row in (rows[0], rows[3]):  # the bound is no implementation of transformers
        assert row["times_as_fast"] == rows[1]["ms"] / row["ms"] and row["tokens_per_s"] > 0
    assert all((row["host_ms"] is None) == (row["pass"] == "generate") for row in rows[::4])


def test_timed_calls_are_checked(monkeypatch):
    """A capture may go wrong where the eager call is right."""
    monkeypatch.setitem(ExpertsInterface._global_mapping, "wrong", wrong_experts)
    base, options = make_model("tiny", 1, "cpu", torch.float32), argparse.Namespace(implementation=None)
    measurement = whole_model.Measurement(base, "forward+backward", "eager", draw_tokens(1, 8, "cpu"), options)
    wanted = measurement.values(base, partial(measurement.run, base))
    measurement.prepare("batched_mm", wanted)
    with pytest.raises(AssertionError, match="differs by"):
        measurement.prepare("wrong", wanted)


def test_attention_without_masks_is_that_of_transformers(monkeypatch):
    """Sinks are further keys. `generate` asks for one new token after a prompt."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.5}
    monkeypatch.setitem(MODELS, "tiny-gpt-oss", ("GptOssConfig", sizes))
    monkeypatch.setattr(model_variants, "VOCABULARY", 64)
    found = []
    for attention in (ATTENTION, "eager"):
        monkeypatch.setattr(model_variants, "ATTENTION", attention)
        model = make_model("tiny-gpt-oss", 2, "cpu", torch.float32).double().eval()
        model.set_experts_implementation("eager")
        tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        sinks = model.model.layers[0].self_attn.sinks
        assert sinks.detach().abs().max() > 0.1
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, use_cache=True)
        found.append([loss.detach(), sinks.grad, model.model.embed_tokens.weight.grad, new])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


def test_copies_share_the_parameters():
    base = make_model("tiny", 1, "cpu", torch.float32)
    copies = [with_experts(base, name, "reference") for name in ("moe_layers", "eager")]
    for copy in copies:
        assert all(a is b for a, b in zip(copy.parameters(), base.parameters(), strict=True))
    names = [model.config._experts_implementation for model in (base, *copies)]
    assert len({id(model.config) for model in (base, *copies)}) == 3 and names[1:] == ["moe_layers", "eager"]


def test_sizes_are_those_of_published_models():
    sizes = {"qwen3-30b-a3b": (128, 1536, 2048), "gpt-oss-20b": (32, 2880, 5760), "olmoe-1b-7b": (64, 2048, 2048)}
    for name, size in sizes.items():
        model = make_model(name, 1, "meta", torch.bfloat16)
        assert model.model.layers[0].mlp.experts.gate_up_proj.shape == size, name
        assert len(model.model.layers) == 1 and model.dtype == torch.bfloat16
