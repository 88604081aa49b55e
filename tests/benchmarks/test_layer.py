"""benchmarks/layer.py, small_batches.py, and what they share: shapes, the baseline and the results file."""

import argparse
import json
from functools import partial

import pytest
import torch

from benchmarks import small_batches
from benchmarks.common import layers, results_file
from benchmarks.common.baselines import TorchGroupedMM, dense_gemms, grouped_mm_takes
from benchmarks.common.results_file import ResultsFile
from benchmarks.common.shapes import OFF_GRID, PUBLISHED, SHAPES, TINY, TOKENS, UNSEEN, Shape, shapes_named
from benchmarks.layer import compare, markdown_table
from moe_layers import MoEConfig, MoEFeedForward

from .commands import measure

PRESETS = {
    "deepseek-v3-ep8": (MoEConfig.deepseek_v3(), 8),
    "kimi-k2-ep16": (MoEConfig.kimi_k2(), 16),
    "dbrx": (MoEConfig.dbrx(), 1),
    "llama4-scout": (MoEConfig.llama4_scout(), 1),
    "phi-3.5-moe": (MoEConfig.phi3_5_moe(), 1),
}


def test_shapes_are_those_of_published_models():
    for name, (config, num_ranks) in PRESETS.items():
        shape = PUBLISHED[name]
        assert (shape.d_model, shape.d_ff, shape.top_k) == (config.d_model, config.d_ff, config.top_k), name
        assert shape.num_experts * num_ranks == config.num_experts, name
    assert len(UNSEEN) == len(TOKENS) * len(PUBLISHED | SHAPES)
    assert {shape.num_tokens for shape in UNSEEN.values()} == {4096, 16384, 65536}
    assert UNSEEN["dbrx-t4096"] == Shape("dbrx-t4096", 4096, 6144, 10752, 16, 4)
    assert (PUBLISHED["nemotron-3-nano"].up_columns, PUBLISHED["dbrx"].up_columns) == (1856, 2 * 10752)


def test_off_grid_shapes_are_off_the_grid():
    for name, shape in OFF_GRID.items():
        widths = shape.d_model, shape.d_ff
        assert grouped_mm_takes(shape, torch.bfloat16) is not name.startswith("no-tma"), name
        assert (name == "granite-like") == all(width % 64 == 0 for width in widths), name


def test_groups_and_names_of_shapes():
    assert shapes_named(["tiny", "off-grid"]) == [TINY, *OFF_GRID.values()]
    assert shapes_named(["tuned"]) == list(SHAPES.values())
    with pytest.raises(SystemExit, match=r"must be among tiny, .*, got tinier"):
        shapes_named(["tinier"])


def test_check_of_large_layers_takes_fewer_experts():
    assert [layers.num_checked(shape) for shape in SHAPES.values()] == [shape.num_experts for shape in SHAPES.values()]
    arctic, kimi = UNSEEN["arctic-t16384"], UNSEEN["kimi-k2-ep16-t65536"]
    of_weights = layers.num_checked(arctic) / arctic.num_experts * 40 * arctic.num_weights
    of_rows = layers.num_checked(kimi) / kimi.num_experts * (16 * kimi.num_weights + 32 * 65536 * 8 * (7168 + 2048))
    assert all(0.9 < needed / layers.CHECKED_BYTES <= 1 for needed in (of_weights, of_rows))


@pytest.mark.parametrize("num_experts", [3, None])
def test_check_of_some_experts_finds_errors(monkeypatch, num_experts):
    layer = MoEFeedForward(64, 32, 8, 2, activation="relu_squared", implementation="reference")
    tokens, exact = torch.randn(40, 64), layers.reference.fused_experts
    counts = []

    def op(tokens, topk_weights, permutation, *operands, **options):
        counts.append((len(tokens), len(permutation.row_to_token), len(permutation.offsets), len(operands[0])))
        return exact(tokens, topk_weights, permutation, *operands, **options)

    monkeypatch.setattr(layers, "fused_experts", op)
    layers.check_layer(layer, tokens, num_experts)
    assert counts == [(15, 30, 3, 3) if num_experts else (40, 80, 8, 8)]
    monkeypatch.setattr(layers, "fused_experts", lambda *args, **options: 1.1 * exact(*args, **options))
    with pytest.raises(AssertionError, match="out: error"):
        layers.check_layer(layer, tokens, num_experts)


@pytest.mark.parametrize("activation", ["swiglu", "relu_squared"])
def test_baseline_computes_the_layer(activation):
    torch.manual_seed(0)
    layer = MoEFeedForward(64, 32, 8, 2, activation=activation, implementation="reference")
    tokens = torch.randn(24, 64)
    torch.testing.assert_close(TorchGroupedMM(layer)(tokens), layer(tokens))
    shape = Shape("plain", 24, 64, 32, 8, 2, activation)
    gemms = {name: gemm() for name, gemm in dense_gemms(shape, "cpu", torch.float32).items()}
    assert gemms["up"].shape == (shape.num_rows, layer.experts.w_up.shape[1])
    assert gemms["up_wgrad"].shape == layer.experts.w_up.shape[1:]


def options(path, **changed):
    return argparse.Namespace(**{"output": path, "commit": "abc", "resume": True, "time_limit_s": None, **changed})


def tasks(names, ran):
    def measure(name):
        ran.append(name)
        return [{"name": name, "value": 1.0}]

    return [({"name": name}, lambda name=name: measure(name)) for name in names]


def test_results_are_written_one_by_one_and_resumed(tmp_path):
    path, ran = tmp_path / "new" / "results.json", []
    measured = ResultsFile(options(path), lambda: {"commit": "abc"}).measure(tasks("abc", ran))
    assert next(measured) == [{"name": "a", "value": 1.0}]
    assert json.loads(path.read_text()) == [{"name": "a", "value": 1.0, "commit": "abc"}]
    assert len(list(ResultsFile(options(path), lambda: {"commit": "abc"}).measure(tasks("abc", ran)))) == 2
    assert ran == ["a", "b", "c"] == [row["name"] for row in json.loads(path.read_text())]
    with pytest.raises(SystemExit, match=r"must be of def, got \['abc'\]"):
        ResultsFile(options(path, commit="def"), dict)
    assert ResultsFile(options(path, commit="def", resume=False), dict).rows == []


def test_time_limit_counts_the_longest_measurement(monkeypatch, capsys):
    times = iter([0, 0, 30, 30, 35, 65, 99])  # start; begin and end of "a" and "b"; begin of "c" and of "d"
    monkeypatch.setattr(results_file.time, "monotonic", lambda: next(times))
    file, ran = ResultsFile(options(None, time_limit_s=90), dict), []
    assert len(list(file.measure(tasks("abcd", ran)))) == 2 and ran == ["a", "b"]
    assert "stopped after 65 s" in capsys.readouterr().out


def test_host_times_are_taken_next_to_a_dense_mlp(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "MoEFeedForward", partial(MoEFeedForward, implementation="reference"))
    monkeypatch.setattr(small_batches, "TorchGroupedMM", lambda layer: torch.nn.Linear(1, 1))  # fails
    small = ["--host", "--shapes", "tiny", "--device", "cpu"]
    rows = measure(small_batches.main, tmp_path / "host.json", *small)
    names = ["dense_mlp", "moe_layers", "dense_mlp_compiled", "moe_layers_compiled", "grouped_mm_compiled"]
    assert [(r["implementation"], r["pass"]) for r in rows] == [
        (name, which) for name in names for which in ("inference", *layers.PASSES)
    ]
    *timed, _, _, failed = rows
    assert failed["host_us"] is failed["over_dense"] is None and "mat1 and mat2" in failed["error"]
    assert all(r["over_dense"] > 0 and r["error"] is None and r["T"] == 40 for r in timed[:9])
    assert [r["over_dense"] for r in rows[:3]] == [1, 1, 1] and rows[0]["commit"] == "abc"


def test_shapes_without_baseline_are_in_the_tables():
    row = {"shape": "x", "routing": "even", "implementation": "triton", "ms": 2.0, "share_of_dense_bound": 0.5}
    row |= {letter: 1 for letter in "TDFEK"} | {"saved_mib": 3.0, "peak_mib": 4.0}
    rows = [{**row, "pass": name} for name in layers.PASSES]
    assert "| 2.00 / 2.00 | 0.50 / 0.50 | - / - | - / - | 3 (-) | 4 (-) |" in markdown_table(rows)
    (line,) = compare(rows)
    assert line["share forward"] == 0.5 and "speedup forward" not in line
