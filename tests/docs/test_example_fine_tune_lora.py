"""examples/fine_tune_lora.py, on a model and texts small enough for seconds."""

import json
import re
from functools import partial
from importlib import import_module

import pytest

from ..tiers import slow
from .examples import language_model, make_tiny, small_text

pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")
pytest.importorskip("peft", minversion="0.19", reason="peft 0.19 or later is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

example = import_module("fine_tune_lora")


def test_documentation_is_split_by_page():
    text = example.load_documentation()
    assert len(text.training) > 4 * len(text.held_out) > 4 * 10_000
    assert bytes(text.held_out[:2000].tolist()) not in bytes(text.training.tolist())


@slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers and PEFT warn about their use of each other
def test_trains_saves_and_merges(monkeypatch, capfd, tmp_path):
    """The adapters lower the loss; loaded again and merged they give the same."""
    make_tiny(example, monkeypatch, d_ff=16, num_experts=4, steps=24, held_out_windows=8, peak_learning_rate=2e-2)
    monkeypatch.setattr(example, "load_documentation", lambda: language_model.Text(*reversed(small_text("cpu"))))
    # The interpreter would take minutes.
    monkeypatch.setattr(example, "enable", partial(example.enable, implementation="reference"))
    # In bfloat16, which the example uses on a GPU, the rounding of merged weights moves the loss by up to 2e-3.
    arguments = example.TrainingArguments
    monkeypatch.setattr(example, "TrainingArguments", lambda **options: arguments(**{**options, "bf16": False}))
    example.main(["--preset", "cpu", "--rank", "4", "--output", str(tmp_path)])

    out = capfd.readouterr().out
    losses = {name: float(loss) for name, loss in re.findall(r"^(\w+).*: ([\d.]+) nats per byte$", out, re.MULTILINE)}
    assert list(losses) == ["before", "after", "loaded", "merged"]
    assert losses["after"] < losses["before"] - 0.01
    assert losses["loaded"] == losses["after"] == pytest.approx(losses["merged"], abs=2e-4)
    assert "moe_layers computes the experts of 2 blocks" in out
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4 and set(settings["target_parameters"]) == set(example.EXPERTS)
    assert "auto_map" not in (tmp_path / "merged" / "config.json").read_text()
    assert (tmp_path / "merged" / "model.safetensors").is_file()
