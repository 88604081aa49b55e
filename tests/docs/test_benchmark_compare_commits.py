"""The comparison of two versions distinguishes them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SLOWER = """

class MoEFeedForward(MoEFeedForward):
    def forward(self, *args, **kwargs):
        import time

        time.sleep(0.05)
        return super().forward(*args, **kwargs)
"""


def run(tree: Path, output: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.compare_commits", "--before", str(tree), "--output", str(output)]
    command += ["--shapes", "tiny", "--routing", "even", "--device", "cpu", "--rounds", "1", "--round-ms", "20"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def tree(tmp_path):
    for package in ("moe_kernels", "moe_layers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_slower_version_is_slower(tree):
    with (tree / "moe_layers" / "__init__.py").open("a") as file:
        file.write(SLOWER)
    result = run(tree, tree / "results.json")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tree / "results.json").read_text())
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert row["before_ms"] > 50
        assert row["now_over_before"] == row["now_ms"] / row["before_ms"] < 0.9


def test_another_result_is_not_timed(tree):
    source = tree / "moe_kernels" / "reference.py"
    assert "def combine(" in source.read_text()
    with source.open("a") as file:
        file.write(
            "\n\ncorrect = combine\n\n\ndef combine(*args, **kwargs):\n    return 1.2 * correct(*args, **kwargs)\n"
        )
    result = run(tree, tree / "results.json")
    assert result.returncode != 0 and "Tensor-likes are not close" in result.stderr
    assert not (tree / "results.json").exists()
