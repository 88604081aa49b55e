"""The distribution: one version, typed packages, the console script."""

import importlib.util
import re
from pathlib import Path

import pytest

import moe_kernels
import moe_layers

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_both_packages_have_the_changelogs_version():
    assert moe_kernels.__version__ == moe_layers.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", moe_kernels.__version__)
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == moe_kernels.__version__


def test_both_packages_are_typed():
    for package in (moe_kernels, moe_layers):
        assert (Path(package.__file__).parent / "py.typed").is_file()
        assert re.search(rf'^{package.__name__} = \[.*"py\.typed"', PROJECT, re.MULTILINE)


def test_console_script_prints_the_commands(capsys):
    module, function = re.search(r'^moe-kernels = "([\w.]+):(\w+)"$', PROJECT, re.MULTILINE).groups()
    with pytest.raises(SystemExit, match=r"^0$"):
        getattr(importlib.import_module(module), function)(["--help"])
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("explain", "tune", "show", "verify"))


@pytest.mark.parametrize("package", ["moe_kernels", "moe_layers"])
def test_modules_state_the_version(package, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(f"{package}.__main__").main(["--version"])
    assert capsys.readouterr().out == f"moe-layers {moe_layers.__version__}\n"


def test_python_m_moe_layers_names_the_commands(capsys):
    importlib.import_module("moe_layers.__main__").main([])
    printed = capsys.readouterr().out
    for command in re.findall(r"python -m (moe_\S+\.?\w*) +\w", printed):
        spec = importlib.util.find_spec(command)
        is_package = spec.submodule_search_locations is not None
        assert not is_package or importlib.util.find_spec(f"{command}.__main__")
    assert "python -m moe_layers.checkpoint" in printed and "python -m moe_kernels" in printed
