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


def off_by(error, exact_draws=()):
    """2 x, off by so much in float32, but for some of the draws."""

    def op(x):
        exact = x.dtype == torch.float64 or any(torch.equal(x.detach(), draw(seed)[0]) for seed in exact_draws)
        return x * 2 if exact else x * 2 + error

    return op


def test_a_larger_error_fails():
    with pytest.raises(AssertionError, match=r"out: the median of 8 samples: error 3\.000e-03 exceeds 2 x 1\.000e-03"):
        check_accuracy(off_by(3e-3), off_by(1e-3), draw, ("out", "dx"))


def test_one_wrong_result_fails_among_right_ones():
    seeds = [seed for seed in range(8) if seed != 5]
    lucky = off_by(1e-3, exact_draws=[0])  # so that the first sample asks for more
    with pytest.raises(AssertionError, match="out: far off: error"):
        check_accuracy(
            lambda x: off_by(1e-3)(x) + off_by(0.1, exact_draws=seeds)(x) - 2 * x, lucky, draw, ("out", "dx")
        )


def test_luck_of_a_sample_is_judged_among_others():
    """The first one's baseline happens to be nearly exact; in the others both are as far off."""
    lucky = lambda x: off_by(3e-4)(x) if torch.equal(x.detach(), draw(0)[0]) else off_by(1e-3)(x)  # noqa: E731
    check_accuracy(off_by(1e-3), lucky, draw, ("out", "dx"))
