"""examples/train_expert_parallel.py, on a model and a text small enough for seconds."""

import dataclasses
import json
from importlib import import_module

import pytest
import torch
from torch import distributed

from ..processes import ROOT, make_test, run_torchrun, shared_folder
from ..tiers import slow
from . import examples

language_model = examples.language_model
single, example = import_module("train_language_model"), import_module("train_expert_parallel")

TINY = dataclasses.replace(single.PRESETS["cpu"], **examples.SIZES, num_layers=2, d_ff=32, steps=4, held_out_windows=8)


def losses_equal_one_process(device):
    """Train with either dispatcher, with experts sharded over all ranks or replicated, and resume in between."""
    text, implementation = examples.small_text(device), examples.implementation_of(device)
    one = single.start_run(TINY, text, implementation)
    for _ in range(TINY.steps):
        single.train_step(one)
    expected = torch.tensor([*one.history.training_loss.tolist(), single.evaluate(one)])
    num_processes = distributed.get_world_size()
    folder = shared_folder()
    for dispatcher in ("alltoall", "allgather"):
        options = {"dispatcher": dispatcher, "implementation": implementation}
        first = example.start_run(TINY, text, num_processes, **options)
        example.train(first, stop_after=2)
        example.save_checkpoint(first, folder / dispatcher)
        second = example.start_run(dataclasses.replace(TINY, seed=1), text, 1, **options)
        second.settings = TINY
        example.load_checkpoint(second, folder / dispatcher)
        assert second.losses == pytest.approx(first.losses)
        for run in (first, second):
            example.train(run)
            actual = torch.tensor([*run.losses, example.evaluate(run)])
            torch.testing.assert_close(actual, expected, rtol=1e-4 if device.type == "cpu" else 2e-2, atol=0)
    with pytest.raises(ValueError, match="number of processes must divide batch=3 and held_out_windows=8, got 2"):
        example.start_run(dataclasses.replace(TINY, batch=3), text, 1)


test_two_processes = make_test([losses_equal_one_process], 2)


@pytest.mark.parametrize("count", ["2", "-1"])
def test_expert_processes_must_divide_the_processes(count, capsys, monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        example.main(["--expert-processes", count])
    assert f"--expert-processes must divide the number of processes, 1, got {count}" in capsys.readouterr().err


@slow  # its functions are called above; the imports of three processes take most of the time
def test_under_torchrun(tmp_path):
    """Run the command of its docstring in two processes."""
    script = ["examples/train_expert_parallel.py", "--preset", "cpu", "--steps", "1", "--output", str(tmp_path)]
    result = run_torchrun(script, 2, ROOT)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["processes"] == 2
    assert 5 < metrics["held_out_nats_per_byte"] < 6  # ln 256 is 5.55
    assert f"wrote {tmp_path}" in result.stdout
