"""The best form of expert parallelism, from the results of `benchmarks.expert_parallel`."""

from __future__ import annotations

import itertools

from .implementations import BASELINE, STYLES

COLUMNS = ("shape", "ep", "pass", "best", "times_whole", "times_baseline")
AS_FAST = 1.02  # times the fastest


def best_form(times: dict[str, float]) -> str | None:
    """Return the simplest of our implementations whose time is within 2 % of the fastest of them."""
    ours = [name for name in STYLES if name in times]
    fastest = min((times[name] for name in ours), default=0.0)
    return next((name for name in ours if times[name] <= AS_FAST * fastest), None)


def best_forms(rows: list[dict]) -> list[dict]:
    """Return one row per shape, EP and pass: the best form by the sum over routings, and the best whole one. Forms not
    timed for every routing are ignored, because their sum would be too small."""

    def key(row: dict) -> tuple:
        return row["shape"], row["ep"], row["pass"]

    chosen = []
    timed = sorted((row for row in rows if "ms" in row and "pass" in row), key=key)
    for about, group in itertools.groupby(timed, key):
        by_routing: dict[str, dict[str, float]] = {}
        for row in group:
            by_routing.setdefault(row["routing"], {})[row["implementation"]] = row["ms"]
        in_all = set.intersection(*map(set, by_routing.values()))
        times = {name: sum(ms[name] for ms in by_routing.values()) for name in in_all}
        best = best_form(times)
        if best is None:
            continue
        whole = best_form({name: ms for name, ms in times.items() if "/" not in name})
        of_best = {
            "best": best,
            "times_whole": whole and times[whole] / times[best],
            "times_baseline": times[BASELINE] / times[best] if BASELINE in times else None,
        }
        chosen.append(dict(zip(("shape", "ep", "pass"), about, strict=True)) | of_best)
    return chosen
