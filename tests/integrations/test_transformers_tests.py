"""transformers' own modelling tests with our experts: none may fail only with them.

Opt-in, with the folder `tests` of the installed version's sources:

    TRANSFORMERS_TESTS=transformers/tests python -m pytest --all tests/integrations/test_transformers_tests.py

The tests of each MoE model run twice, which takes minutes.
"""

import os
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from ..processes import run_python
from ..tiers import slow
from .test_every_model import COMPUTED

_NAMED = os.environ.get("TRANSFORMERS_TESTS")
TESTS = Path(_NAMED).resolve() if _NAMED else None

# If `ours`, this package computes the experts by every implementation, and in blocks that `enable` would replace.
RUN = """
import importlib, sys
import pytest

file, folder, ours = sys.argv[1:]
calls = 0

def counted(forward, spec=None):
    def run(self, *args, **kwargs):
        global calls
        calls += 1
        if spec is not None and not hasattr(self, ATTRIBUTE):
            setattr(self, ATTRIBUTE, spec(self, None))
        return forward(self, *args, **kwargs)
    return run

if ours == "True":
    from transformers.integrations.moe import ExpertsInterface
    from moe_layers.integrations.transformers.experts.expert_classes import SWAPS
    from moe_layers.integrations.transformers.experts.experts_forward import ATTRIBUTE, experts_forward
    chosen = counted(experts_forward)
    names = ("batched_mm", "grouped_mm")
    ExpertsInterface._global_mapping.update(dict.fromkeys(names, chosen))  # tests put others of the same names here
    get = ExpertsInterface.get_interface
    ExpertsInterface.get_interface = lambda self, name, own: get(self, name, own) if name in self else chosen
    models = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for kind, swap in SWAPS.items():
        if hasattr(models, kind):
            getattr(models, kind).forward = counted(swap.forward, swap.spec)
        if hasattr(models, swap.caller):
            getattr(models, swap.caller).forward = swap.caller_forward

pytest.main(["-q", "-p", "no:cacheprovider", f"--junitxml={folder}.{ours}.xml", "-o", "junit_logging=no", file])
print(calls)
"""


class Run(NamedTuple):
    failed: set[str]
    passed: set[str]
    calls: int  # number of calls of our experts


def run_folder(tests: Path, folder: str, reports: Path, *, ours: bool) -> Run:
    """Run the modelling tests of a model in a process of their own."""
    file = tests / "models" / folder / f"test_modeling_{folder}.py"
    reports.mkdir(exist_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = run_python(["-c", RUN, file, folder, ours], cwd=reports, **environment)
    outcomes = {True: set(), False: set()}
    for case in ElementTree.parse(reports / f"{folder}.{ours}.xml").iter("testcase"):
        error = case.find("error")
        assert error is None or error.get("message") != "collection failure", error.text
        if case.find("skipped") is None:
            failed = any(case.find(kind) is not None for kind in ("failure", "error"))
            outcomes[failed].add(f"{case.get('classname')}::{case.get('name')}")
    return Run(outcomes[True], outcomes[False], int(result.stdout.split()[-1]))


def folders() -> list[str]:
    models = TESTS / "models" if TESTS else Path("missing")
    return [folder for folder in COMPUTED if (models / folder / f"test_modeling_{folder}.py").exists()]


@slow
@pytest.mark.skipif(TESTS is None, reason="TRANSFORMERS_TESTS names no folder")
@pytest.mark.parametrize("folder", folders())
def test_none_fails_only_with_ours(folder, tmp_path):
    ours = run_folder(TESTS, folder, tmp_path, ours=True)
    if not ours.calls:
        pytest.skip(f"no test of {folder} that runs here calls experts")
    assert not ours.failed - run_folder(TESTS, folder, tmp_path, ours=False).failed


MINIATURE = """
import unittest
import torch
import transformers
from ...common import SIZES

class ModelTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.model = transformers.%s(transformers.%s(**SIZES))
        self.tokens = torch.arange(8)[None]

    def test_finite(self):
        assert self.model(input_ids=self.tokens).logits.isfinite().all()

    def test_skipped(self):
        self.skipTest("a reason")

    def test_always_fails(self):
        assert self.model(input_ids=self.tokens).logits is None

    def test_experts_have_no_spec(self):
        self.model(input_ids=self.tokens)
        assert not any(hasattr(module, "_moe_layers_experts") for module in self.model.modules())
"""
SIZES = """
SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
             vocab_size=8, intermediate_size=8, moe_intermediate_size=8,
             num_experts=4, num_local_experts=4, num_experts_per_tok=2)
"""


@slow  # four processes that import transformers
@pytest.mark.parametrize(("folder", "name"), [("qwen3_moe", "Qwen3Moe"), ("jetmoe", "JetMoe")])
def test_a_miniature_of_their_folder(folder, name, tmp_path):
    """Qwen3-MoE has the experts interface, and JetMoE a replaced forward."""
    tests = tmp_path / "tests"
    (tests / "models" / folder).mkdir(parents=True)
    for package in (tests, tests / "models", tests / "models" / folder):
        (package / "__init__.py").touch()
    (tests / "common.py").write_text(SIZES)
    file = tests / "models" / folder / f"test_modeling_{folder}.py"
    file.write_text(MINIATURE % (f"{name}ForCausalLM", f"{name}Config"))
    prefix = f"tests.models.{folder}.test_modeling_{folder}.ModelTest::"
    theirs = run_folder(tests, folder, tmp_path, ours=False)
    assert theirs.failed == {f"{prefix}test_always_fails"} and len(theirs.passed) == 2 and theirs.calls == 0
    ours = run_folder(tests, folder, tmp_path, ours=True)
    assert ours.passed == {f"{prefix}test_finite"} and ours.calls == 3 * 2
    assert ours.failed - theirs.failed == {f"{prefix}test_experts_have_no_spec"}
