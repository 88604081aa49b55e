"""benchmarks/whole_model_parallel.py: a small run of two processes, and the predictions."""

import json

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="transformers 5.23 or later is not installed")
pytest.importorskip("peft", reason="needs peft")

from benchmarks import whole_model_parallel
from benchmarks.parallel import plan

from ..processes import run_torchrun
from ..tiers import slow
from .commands import QUICK

ROW = {"model": "qwen3-30b-a3b", "layers": 6, "batch": 4, "length": 4096, "processes": 2, "ms": 200.0, "comm_ms": 40.0}


@slow  # each process imports transformers
def test_every_way_agrees_with_one_process(tmp_path):
    path = tmp_path / "results.json"
    small = ["--device", "cpu", "--models", "tiny", "--layers", "2", "--tokens", "2x16", "--warm-up", "1"]
    small += ["--routing", "balanced", "--checkpointing", "--compiled"]
    quick = [*QUICK.split(), "--output", str(path)]
    run_torchrun(["-m", "benchmarks.whole_model_parallel", *small, *quick], 2, tmp_path)
    rows = json.loads(path.read_text())
    assert [row["way"] for row in rows] == [*whole_model_parallel.WAYS, "one_gpu"]
    for row in rows:
        assert row["error"] is None and row["tokens_per_s_per_gpu"] > 0 and row["commit"] == "abc"
        assert (row["comm_ms"] > 0) == (row["way"] != "one_gpu")
        assert row["routing"] == "balanced" and row["checkpointing"] and row["compiled"]


def test_plan(capsys):
    whole_model_parallel.main(["--plan"])
    printed = capsys.readouterr().out
    assert "400 TFLOP/s per GPU (assumed)" in printed and printed.count("deepseek-v3") == 2


def test_predictions_follow_the_measured_parts():
    rows = [{**ROW, "way": "one_gpu"}, {**ROW, "way": "shard_experts/alltoall"}]
    # 6 layers of 58 M active parameters and the head, 6 FLOPs each and those of attention.
    assert plan.measured_rate(rows) == pytest.approx(2.48e14, rel=0.05)
    # 4 exchanges of 6 layers of half of 131,072 rows of 4 KiB.
    assert plan.measured_bandwidth(rows) == pytest.approx(4 * 6 * 65536 * 4096 / 0.04)
    assert "measured" in plan.basis(rows) and "assumed" not in plan.basis(rows)
    faster = plan.predictions([{**ROW, "way": "one_gpu", "ms": 100.0}])
    slower = plan.predictions([{**ROW, "way": "one_gpu", "ms": 300.0}])
    assert all(a["tokens_per_s_per_gpu"] > b["tokens_per_s_per_gpu"] for a, b in zip(faster, slower, strict=True))


def test_published_sizes():
    """Billions of parameters, and of those that a token multiplies, as the models' cards state them."""
    found = {row["model"]: (row["parameters_b"], row["active_b"]) for row in plan.predictions([])}
    for name, total, active in (
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("deepseek-v3", 671.0, 37.0),
    ):
        assert found[name] == (pytest.approx(total, rel=0.01), pytest.approx(active, rel=0.12)), name
