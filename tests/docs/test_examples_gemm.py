"""The short examples of grouped GEMM, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("grouped_gemm_list", ["--sizes", "40", "24", "8"], "3 products are right"),
        ("jagged_gemm", ["--rows", "5", "0", "70", "9", "--depth", "40", "--columns", "24"], "4 groups"),
    ],
)
def test_example(name, arguments, says):
    # Without a GPU, the example itself selects the interpreter.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert says in result.stdout
