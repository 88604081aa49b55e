"""The order in which benchmarks take turns."""

from collections import Counter
from itertools import pairwise

from benchmarks.common.timing import time_interleaved, turns


def test_every_round_has_an_order_of_its_own():
    names = [f"function {i}" for i in range(8)]
    order = list(turns(names, 3))
    rounds = [order[i : i + 8] for i in range(0, 24, 8)]
    assert [sorted(names) for names in rounds] == [names] * 3
    assert len({tuple(names) for names in rounds}) == 3
    assert order == list(turns(names, 3))
    followers = {pair for names in rounds for pair in pairwise(names)}
    assert len(followers) > 12  # 21, if no name ever followed the same one twice


def test_every_function_is_timed_in_every_round():
    calls = Counter()
    timings = time_interleaved(
        {name: lambda name=name: calls.update([name]) for name in ("a", "b", "c")}, "cpu", rounds=2, round_ms=0.1
    )
    assert set(timings) == {"a", "b", "c"} and all(0 < t.ms_p20 <= t.ms <= t.ms_p80 for t in timings.values())
    assert min(calls.values()) >= 3 + 3 + 2 * 3  # warm-up, estimate of the number of calls, and the rounds
