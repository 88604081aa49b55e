"""The comparison of two versions distinguishes them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ..processes import ROOT, run_python
from ..tiers import slow

SLOWER = """

class MoEFeedForward(MoEFeedForward):
    def forward(self, *args, **kwargs):
        import time

        time.sleep(0.05)
        return super().forward(*args, **kwargs)
"""

WRONG = """

correct = combine


def combine(*args, **kwargs):
    return 1.2 * correct(*args, **kwargs)
"""


def run(tree: Path, output: Path) -> subprocess.CompletedProcess:
    command = ["-m", "benchmarks.compare_commits", "--before", tree, "--output", output, "--shapes", "tiny"]
    return run_python([*command, "--routing", "even", "--device", "cpu", "--rounds", "1", "--round-ms", "20"])


@slow  # two processes that time layers for seconds
def test_a_slower_version_is_slower(tmp_path):
    for package in ("moe_kernels", "moe_layers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "moe_layers" / "__init__.py").open("a") as file:
        file.write(SLOWER)
    run(tmp_path, tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert row["before_ms"] > 50
        assert row["now_over_before"] == row["now_ms"] / row["before_ms"] < 0.9
    # Wrong results are not timed.
    with (tmp_path / "moe_kernels" / "reference.py").open("a") as file:
        file.write(WRONG)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(tmp_path, tmp_path / "wrong.json")
    assert not (tmp_path / "wrong.json").exists()
