"""examples/plot_expert_load.py, on a model and a text small enough for seconds."""

import argparse
import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

# As in a script run: the example imports modules from its own folder.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
language_model = import_module("_language_model")
example = import_module("plot_expert_load")

TINY = dataclasses.replace(
    example.SETTINGS, width=32, num_heads=2, d_ff=16, num_experts=4, context=32, batch=4, warmup_steps=2, log_every=2
)


@pytest.fixture
def text(device):
    source = bytearray(Path(argparse.__file__).read_bytes())
    part = torch.frombuffer(source, dtype=torch.uint8).to(device)
    return language_model.Text(part, part)


@pytest.fixture
def implementation(device):
    return "triton" if device == "cuda" else "reference"


def test_runs_start_alike_and_balance_by_what_they_are_told(text, implementation):
    models = [example.make_model(TINY, balancing, implementation) for balancing in example.BALANCINGS]
    weights = [dict(model.named_parameters()) for model in models]
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(other[name], parameter) for name, parameter in weights[0].items())
    layers = [model.blocks[1].feed_forward for model in models]
    assert [layer.balance_losses.any for layer in layers] == [False, True, False]
    assert [layer.router.selection_bias is not None for layer in layers] == [False, False, True]


def test_load_of_each_run(text, implementation):
    settings = dataclasses.replace(TINY, steps=6)
    loads = [example.train(settings, text, balancing, implementation) for balancing in example.BALANCINGS]
    for load in loads:
        assert load.steps == [2, 4, 6] and len(load.training_loss) == 3
        assert load.shares.shape == (3, 2, 4) and load.max_violation.shape == (3, 2)
        torch.testing.assert_close(load.shares.sum(-1), torch.ones(3, 2))
        torch.testing.assert_close(load.shares.amax(-1) * 4 - 1, load.max_violation)
    assert not torch.equal(loads[0].shares, loads[1].shares) and not torch.equal(loads[0].shares, loads[2].shares)


def test_main_writes_what_it_says(text, implementation, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "SETTINGS", TINY)
    monkeypatch.setattr(example, "load_text", lambda root, device: text)
    assert example.main(["--steps", "4", "--output", str(tmp_path), "--implementation", implementation]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "expert_load.json").read_text())
    assert list(report) == [balancing.name for balancing in example.BALANCINGS]
    assert f"loss {report['Switch loss']['training_loss']:.3f}" in printed
    assert all(f"wrote {tmp_path / name}" in printed for name in ("expert_load.json", "expert_load.png"))
    pixels = pytest.importorskip("matplotlib.image").imread(tmp_path / "expert_load.png")
    assert pixels.shape == (1080, 1080, 4)
    for first in (280, 540, 800):  # each map has colours
        assert len({tuple(pixel) for pixel in pixels[first : first + 200, 300].tolist()}) > 4
    with pytest.raises(SystemExit):
        example.main(["--steps", "1"])
    assert "--steps must be at least 2, got 1" in capsys.readouterr().err
