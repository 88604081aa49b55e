"""The two tiers of tests: `python -m pytest` runs the default tier, `python -m pytest --all` also the slow tests."""

from collections.abc import Callable, Collection, Iterable

import pytest

from moe_kernels.testing import CASES

slow = pytest.mark.slow


def default_tier(cases: Iterable, keep: Collection | Callable[[object], bool]) -> list:
    """Return the parameters of a test. Those that `keep` does not hold, or does not accept, are marked as slow."""
    is_kept = keep if callable(keep) else keep.__contains__
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [case if is_kept(case) else pytest.param(*arguments, marks=slow) for case, arguments in values]


# The named cases of the ops. A case of few numbers is drawn many times to judge its error, which takes seconds.
OP_CASES = default_tier(CASES, {"odd_sizes", "zero_tokens", "every_expert"})
