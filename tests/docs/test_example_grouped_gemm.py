"""The short examples run unchanged, with only a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("grouped_gemm", "an expert:"),
        ("kernel_catalog", "the result agrees with torch.nn.functional.grouped_mm"),
    ],
)
def test_example(name, last_line):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(last_line)
