"""benchmarks/expert_parallel.py, on sizes small enough for seconds: it compares, times and reports."""

import argparse

from torch import distributed

from benchmarks import expert_parallel, parallel_timing

from .processes import run_cases


def small_run(device):
    rows = []
    options = {"shapes": ["tiny"], "routing": ["zipf"], "ep": [1, 2], "megabytes": [1], "rounds": 1, "round_ms": 1.0}
    expert_parallel.run(argparse.Namespace(**options, commit="abc", output=None), device, rows)
    bandwidths = [row for row in rows if "collective" in row]
    assert [row["collective"] for row in bandwidths[:2]] == ["all_gather", "reduce_scatter"]
    assert all(row["gb_per_s"] > 0 for row in bandwidths)
    layers = [row for row in rows if "shape" in row]
    assert len(layers) == 2 * 2 * (len(expert_parallel.STYLES) + 1)
    for row in layers:
        assert row["commit"] == "abc" and row["processes"] == distributed.get_world_size()
        assert row["share_of_model"] > 0
        assert row["implementation"] != expert_parallel.BASELINE or row["times_baseline"] == 1


def test_two_processes(tmp_path):
    failures = run_cases([small_run], 2, tmp_path)
    assert not failures["small_run"], failures["small_run"]


def test_zipf_splits():
    assert parallel_timing.zipf_splits(110, 3) == [60, 30, 20]
    assert parallel_timing.zipf_splits(0, 2) == [0, 0]
