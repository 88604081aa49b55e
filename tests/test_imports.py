"""Imports point one way, and the packages import where Triton is missing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPS = {"routing", "sorting", "permutation", "activation", "grouped_gemm", "batched_gemm", "grouped_gemm_list"}
OPS |= {"jagged_gemm"}


def imports_of(path):
    """Absolute dotted names of the modules that a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
    return names


def files(package):
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("path", files("moe_kernels"), ids=lambda path: path.stem)
def test_kernels_import_no_layers(path):
    assert not {n for n in imports_of(path) if n.split(".")[0] in {"moe_layers", "tests", "benchmarks", "examples"}}


@pytest.mark.parametrize("path", files("moe_layers"), ids=lambda path: path.stem)
def test_layers_import_only_public_kernels(path):
    names = imports_of(path)
    assert not {n for n in names if n.split(".")[0] in {"tests", "benchmarks", "examples", "triton"}}
    assert not {n for n in names if n.startswith("moe_kernels.")}
    tree = ast.parse(path.read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "moe_kernels"
        for alias in node.names
    }
    import moe_kernels

    assert imported <= set(moe_kernels.__all__)


def test_reference_imports_only_torch_and_einops():
    facts = {"router_spec", "activation_spec"}
    names = imports_of(ROOT / "moe_kernels" / "reference.py") - {f"moe_kernels.{name}" for name in facts}
    assert {name.split(".")[0] for name in names} <= {"__future__", "collections", "typing", "torch", "einops"}
    for name in facts:
        assert imports_of(ROOT / "moe_kernels" / f"{name}.py") <= {"__future__", "dataclasses", "math", "typing"}


@pytest.mark.parametrize("op", sorted(OPS))
def test_ops_do_not_import_each_other(op):
    names = {name.removeprefix("moe_kernels.") for name in imports_of(ROOT / "moe_kernels" / f"{op}.py")}
    assert not names & (OPS - {op})


def test_public_names_are_listed():
    import moe_kernels
    import moe_layers

    for package in (moe_kernels, moe_layers):
        assert len(set(package.__all__)) == len(package.__all__)
        assert all(hasattr(package, name) for name in package.__all__)


WITHOUT_TRITON = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
sys.modules["triton"] = None
import torch
from moe_kernels import get_kernels, grouped_gemm
from moe_layers import MoEFeedForward
layer = MoEFeedForward(8, 4, 3, 2)
layer(torch.randn(5, 8)).sum().backward()
assert all(parameter.grad is not None for parameter in layer.parameters())
assert get_kernels()
try:
    grouped_gemm(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.ones(1).int(), implementation="triton")
except NotImplementedError as error:
    print(error)
"""


def test_runs_without_triton():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0, result.stderr
    assert "Triton is not installed" in result.stdout
