"""The error budget itself."""

import pytest
import torch

from moe_kernels.testing import Errors, assert_accurate, check_accuracy, hold_to_budget


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


@pytest.mark.parametrize(
    ("first", "again", "message"),
    [
        (1.0, None, None),
        (1.5, 0.9, None),  # by chance
        (1.5, 1.1, "c: error"),
        (2.5, 0.9, "b: error"),  # too far for chance
        (float("nan"), 0.9, "b: error"),
    ],
)
def test_an_error_beyond_its_budget_must_not_come_again(first, again, message):
    inside = Errors(0.0, 0.5, 0.0)
    errors = [{"a": inside, "b": Errors(first, 0.5, 0.0)}, {"a": inside, "c": Errors(again or 0.0, 0.5, 0.0)}]
    seen = []

    def measure(**options):
        seen.append(options)
        return errors[len(seen) - 1]

    if message is None:
        hold_to_budget(measure)
    else:
        with pytest.raises(AssertionError, match=message):
            hold_to_budget(measure)
    assert len(seen) == (2 if again is not None and first < 2 else 1)
    assert all(not set(range(32)) & set(options["seeds"]) for options in seen[1:]), "the same inputs again"
