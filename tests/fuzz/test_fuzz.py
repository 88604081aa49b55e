"""Random cases of every op and of the layer. `pytest --fuzz-cases N` sets their total number; `--all` draws more
than the default tier.

Each part has a fixed seed, so the cases are the same every time. A failing case is reduced to a minimal one and printed
as a command that checks it again.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from moe_kernels.runtime.triton import HAS_TRITON

from ..tiers import slow
from .case import Case
from .strategies import GPU, INTERPRETER, KINDS, REFERENCE

# Relative numbers of cases that run kernels, and of cases that run the float64 reference.
IN_THE_INTERPRETER = {
    "experts": (28, 340),
    "grouped_gemm": (120, 250),
    "grouped_gemm_wgrad": (80, 100),
    "grouped_gemm_list": (80, 100),
    "jagged_gemm": (40, 135),
    "batched_gemm": (80, 100),
    "routing": (30, 225),
    "layer": (18, 285),
}
ON_A_GPU = {
    "experts": (2400, 150),
    "grouped_gemm": (2000, 120),
    "grouped_gemm_wgrad": (1000, 80),
    "grouped_gemm_list": (700, 80),
    "jagged_gemm": (700, 80),
    "batched_gemm": (600, 80),
    "routing": (800, 80),
    "layer": (1000, 130),
}
CASES_OF_A_PART = {"kernels": 60 if torch.cuda.is_available() else 10, "reference": 100}


def parts(mix: dict[str, tuple[int, int]], num_cases: int) -> list[tuple[str, str, int, int]]:
    """Return (what runs, kind, number of the part, cases in it), `num_cases` in total."""
    total = sum(map(sum, mix.values()))
    found, given_out, passed = [], 0, 0
    for kind, numbers in mix.items():
        for runs, number in zip(("kernels", "reference"), numbers, strict=True):
            passed += number
            # Rounded cumulatively, so that no case is lost.
            count = num_cases * passed // total - given_out
            given_out += count
            step = CASES_OF_A_PART[runs]
            found += [(runs, kind, p, min(step, count - p * step)) for p in range(-(-count // step))]
    return found


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        on_gpu, is_long = torch.cuda.is_available(), metafunc.config.getoption("--all")
        num_cases = metafunc.config.getoption("--fuzz-cases") or ((10_000 if on_gpu else 2_000) if is_long else 200)
        found = parts(ON_A_GPU if on_gpu else IN_THE_INTERPRETER, num_cases)
        marked = [pytest.param(part, marks=[slow] * is_long) for part in found]
        metafunc.parametrize("part", marked, ids=lambda part: "-".join(map(str, part[:3])))


def search(cases: st.SearchStrategy[Case], number: int, part: int, device: str) -> None:
    """Check the given number of cases.

    Raises:
        AssertionError: the smallest failing case has a wrong result; a note gives the command that checks it again.
    """

    @seed(part)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(case=cases)
    def check(case: Case) -> None:
        note(case.command)
        case.check(device)

    check()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # NumPy, in the interpreter
def test_random_cases(part, device):
    runs, kind, number_of_part, num_cases = part
    if runs == "kernels" and not HAS_TRITON:
        pytest.skip("there are no kernels to run")
    space = REFERENCE if runs == "reference" else GPU if device == "cuda" else INTERPRETER
    search(KINDS[kind](space), num_cases, number_of_part, device)
