"""examples/grpo_routing_replay.py, with few steps."""

import re
from importlib import import_module

import pytest
import torch

from moe_layers import RoutingReplay
from moe_layers.serving import iter_weights, pack

from . import examples  # noqa: F401  # puts the examples on the path

pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")

from moe_layers.integrations.transformers import enable

example = import_module("grpo_routing_replay")


def test_replay_closes_a_part_of_the_gap(capsys):
    example.main(["--steps", "1", "--implementation", "reference"])
    out = capsys.readouterr().out
    assert out.count("tokens with other experts") == 2
    share = float(re.search(r"^mean share of tokens with other experts: ([\d.]+) %$", out, re.MULTILINE)[1])
    without = float(re.search(r"^mean log-probability gap without replay: ([\d.]+)$", out, re.MULTILINE)[1])
    replayed = float(re.search(r"^mean log-probability gap with replay: ([\d.]+)$", out, re.MULTILINE)[1])
    assert share > 1 and replayed < 0.8 * without


def test_equal_numerics_have_no_gap():
    """A sampler in float32 chooses the trainer's experts, and replay changes nothing."""
    settings = example.Settings(num_prompts=2, group=2, new_tokens=6)
    model = example.make_model(settings, "cpu").eval()
    enable(model, implementation="reference")
    samples = example.sample(model, settings, *example.draw_prompts(settings, 0, "cpu"))
    assert [len(array) for array in samples.routed_experts] == (samples.mask.sum(1) - 1).tolist()
    record = RoutingReplay.from_rollouts(model, samples.routed_experts, attention_mask=samples.mask)
    comparison = example.compare(model, samples, record)
    assert comparison.other_experts == 0.0
    assert comparison.gap == comparison.replayed_gap < 1e-5


def test_the_sampler_gets_the_weights_of_the_trainer():
    settings = example.Settings(num_layers=2)
    trainer = example.make_model(settings, "cpu")
    sampler = example.make_model(example.Settings(num_layers=2, seed=1), "cpu").to(torch.bfloat16)
    for bucket in pack(iter_weights(trainer, "vllm"), 1000, checksums=True):
        example.load_weights(sampler, bucket.unpack())
    for name, parameter in trainer.named_parameters():
        assert torch.equal(sampler.get_parameter(name), parameter.bfloat16()), name


def test_advantages_are_relative_to_the_group():
    """Equal log-probabilities give ratios of one, whose gradient is minus the advantage."""
    settings = example.Settings(group=2)
    samples = example.Samples(torch.empty(0), torch.empty(0), torch.zeros(4, 1), [])
    log_probs = torch.zeros(4, 1, requires_grad=True)
    example.grpo_loss(log_probs, samples, torch.tensor([0.0, 2.0, 5.0, 5.0]), settings).backward()
    advantage = 1 / (2**0.5 + 1e-4)
    torch.testing.assert_close(4 * log_probs.grad[:, 0], torch.tensor([advantage, -advantage, 0.0, 0.0]))
