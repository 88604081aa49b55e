"""examples/fine_tune_hugging_face.py, on models and a text small enough for seconds."""

import argparse
import dataclasses
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")

# As in a script run: the example imports modules from its own folder.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
language_model = import_module("_language_model")
example = import_module("fine_tune_hugging_face")

TINY = dataclasses.replace(
    example.PRESETS["cpu"],
    width=32,
    num_heads=2,
    d_ff=16,
    num_experts=4,
    context=32,
    batch=4,
    steps=6,
    warmup_steps=2,
    log_every=2,
    held_out_windows=6,
)


@pytest.mark.parametrize("model_type", example.MODEL_TYPES)
def test_trains_both_models_alike(model_type, device, monkeypatch, capsys):
    parts = (Path(module.__file__).read_bytes() for module in (argparse, textwrap))
    text = language_model.Text(*(torch.frombuffer(bytearray(p), dtype=torch.uint8).to(device) for p in parts))
    monkeypatch.setattr(example, "load_text", lambda root, device: text)
    monkeypatch.setitem(example.PRESETS, "cpu", TINY)
    implementation = "triton" if device == "cuda" else "reference"
    example.main(["--preset", "cpu", "--model-type", model_type, "--implementation", implementation])

    out = capsys.readouterr().out
    assert "moe_layers computes the experts of 2 blocks" in out
    turns = re.findall(r"step (\d+): eager loss ([\d.]+), [\d,]+ tokens/s; moe_layers loss ([\d.]+), [\d,]+ tok", out)
    assert [int(step) for step, *_ in turns] == [2, 4, 6]
    for _, eager, ours in turns:
        assert float(ours) == pytest.approx(float(eager), rel=2e-2 if device == "cuda" else 1e-3)
    assert float(turns[-1][2]) < float(turns[0][2])
    held_out = re.findall(r"(\w+): held out ([\d.]+) nats per byte, [\d,]+ tokens/s", out)
    assert [name for name, _ in held_out] == ["eager", "moe_layers"]
    assert all(0 < float(loss) < 8 for _, loss in held_out)
