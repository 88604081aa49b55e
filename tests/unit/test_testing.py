"""The error budget itself."""

import pytest
import torch

from moe_kernels.testing import assert_accurate, check_accuracy


def draw(seed, size=100):
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)),)


def test_twice_the_baseline_and_one_ulp():
    exact = torch.tensor([1.0, -3.0], dtype=torch.float64)
    baseline = (exact + torch.tensor([0.25, 0.0])).float()
    ulp = torch.finfo(torch.float32).eps * 2  # of 3.0
    assert_accurate((exact + 0.5 + ulp).float(), baseline, exact)
    with pytest.raises(AssertionError, match=r"dx: error 5.000e-01 exceeds 2 x 2.500e-01"):
        assert_accurate((exact + 0.5 + 2 * ulp).float(), baseline, exact, "dx")


def test_nan_never_passes():
    exact = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="NaN at other places"):
        assert_accurate(torch.tensor([1.0, torch.nan]), exact.float(), exact)


def test_small_results_are_drawn_until_there_are_enough():
    seeds = []

    def count(seed):
        seeds.append(seed)
        return draw(seed, size=10)

    check_accuracy(lambda x: 2 * x, lambda x: 2 * x, count, ("out", "dx"))
    assert seeds == list(range(7))


def test_an_error_beyond_the_budget_fails():
    def off_by(error):
        return lambda x: x * 2 if x.dtype == torch.float64 else x * 2 + error

    check_accuracy(off_by(1.9e-3), off_by(1e-3), draw, ("out", "dx"))
    with pytest.raises(AssertionError, match=r"out: error 3\.000e-03 exceeds 2 x 1\.000e-03"):
        check_accuracy(off_by(3e-3), off_by(1e-3), draw, ("out", "dx"))
