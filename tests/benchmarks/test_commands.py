"""Every command of the benchmarks, on sizes small enough for seconds: it measures and writes its results file."""

import json
import math
import re

import pytest
import torch

from benchmarks.common.command import Command

from ..processes import ROOT, run_python
from ..tiers import default_tier
from .commands import COMMANDS, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# These compile for seconds, or run kernels, which without a GPU only the interpreter does.
SLOW = {"fp8", "grouped_gemm", "small_batches"}
KERNELS = {"fp8", "grouped_gemm"}
FILES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Return the folder with the results of all commands, which ran in one process as for a user: in plain PyTorch."""
    path = tmp_path_factory.mktemp("results")
    left_out = KERNELS if request.config.getoption("--all") else SLOW
    run_python(["-m", "tests.benchmarks.commands", path, DEVICE, *(name for name in COMMANDS if name not in left_out)])
    return path


@pytest.mark.parametrize("name", default_tier(COMMANDS, COMMANDS.keys() - SLOW))
def test_a_small_run_writes_a_results_file(name, folder):
    if name in KERNELS:
        run(name, DEVICE, folder)
    failure = folder / f"{name}.failed"
    assert not failure.exists(), failure.read_text()
    rows = json.loads((folder / f"{name}.json").read_text())
    assert rows and all(row["commit"] == "abc" and row["torch"] and row["date"] for row in rows)
    times = [value for row in rows for key, value in row.items() if re.search("(^|_)(ms|us|s)$", key)]
    times = [value for value in times if isinstance(value, float)]
    assert times and all(value > 0 and math.isfinite(value) for value in times)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_a_command_with_a_test(name):
    """Helpers of several commands are in a folder. A command that the small runs lack has a test file of its own."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert re.search(r"^main = Command\(", text, re.MULTILINE)
    others = re.findall(r"^from \.(?:(\w+))? import (.*)$", text, re.MULTILINE)
    assert not [module for module, names in others if {module, *names.split(", ")} & set(FILES)]
    own = ROOT / "tests" / "benchmarks" / f"test_{name}.py"
    assert name in COMMANDS or own.exists()


def test_options_that_read_measure_nothing(tmp_path):
    read = []
    command = Command("about", lambda parser: None, lambda options: iter(()), readers={"--show": read.extend})
    path = tmp_path / "some.json"
    assert command(["--device", "cpu", "--show", str(path), str(path)]) == [] and read == [path, path]


def test_tasks_are_closed_at_the_time_limit(tmp_path, capsys):
    """Closing ends temporary folders and groups of processes. Rows get what their task shares, and the constants."""
    ended = []

    def tasks(options):
        try:
            yield {"size": 1}, lambda: [{"ms": 2.0}]
            yield {"size": 2}, lambda: [{"ms": 3.0}]
        finally:
            ended.append(options.dtype)

    command = Command("about", lambda parser: None, tasks, constants=lambda options: {"a": 1})
    options = ["--device", "cpu", "--output", str(tmp_path / "some.json"), "--commit", "abc"]
    assert command([*options, "--time-limit-s", "0"]) == [] and ended == [torch.float32]
    assert "stopped after 0 s" in capsys.readouterr().out
    expected = [{"size": size, "ms": ms, "a": 1, "commit": "abc"} for size, ms in ((1, 2.0), (2, 3.0))]
    assert all(wanted.items() <= row.items() for wanted, row in zip(expected, command(options), strict=True))
