"""benchmarks/fp8_convergence.py on a model and a text small enough for seconds."""

import json
from functools import partial
from itertools import islice

import pytest

from benchmarks import fp8_convergence
from benchmarks.common import results_file

from ..docs import examples
from ..docs.test_example_language_model import TINY
from ..tiers import slow


@pytest.fixture
def call_main(monkeypatch, tmp_path, device):
    """Call main on the tiny model, with its files in tmp_path."""
    start = partial(fp8_convergence.example.start_run, implementation=examples.implementation_of(device))
    monkeypatch.setattr(fp8_convergence.example, "start_run", start)
    monkeypatch.setitem(fp8_convergence.PRESETS, "gpu" if device == "cuda" else "cpu", TINY)
    monkeypatch.setattr(fp8_convergence.example, "load_text", lambda root, device: examples.small_text(device))
    files = ["--output", str(tmp_path / "losses.json"), "--checkpoints", str(tmp_path / "checkpoints")]
    return lambda *options: fp8_convergence.main([*files, *options])


@slow
def test_goes_on_where_time_ran_out(call_main, tmp_path, monkeypatch, capsys):
    runs = ["--precisions", "bfloat16", "fp8", "--seeds", "1"]
    call_main(*runs)
    path = tmp_path / "losses.json"
    unbroken = json.loads(path.read_text())
    keys = [(row["seed"], row["precision"], row["step"]) for row in unbroken]
    assert keys == [(1, p, step) for p in ("bfloat16", "fp8") for step in range(1, 9)]
    assert not (tmp_path / "checkpoints").exists()
    assert "fp8        mean" in capsys.readouterr().out and path.with_suffix(".png").exists()

    path.unlink()
    measure = results_file.ResultsFile.measure
    with monkeypatch.context() as patch:
        patch.setattr(results_file.ResultsFile, "measure", lambda self, tasks: measure(self, islice(tasks, 11)))
        call_main(*runs)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["fp8_1.safetensors"]
    call_main(*runs, "--resume")
    resumed = json.loads(path.read_text())
    losses = ("precision", "seed", "step", "held_out_loss", "training_losses")
    assert [[row[name] for name in losses] for row in resumed] == [[row[name] for name in losses] for row in unbroken]
    assert len({row["held_out_loss"] for row in unbroken}) == len(unbroken)
