"""The profile of a step contains all of its GEMMs and bytes, and explains the complete time."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import profile_step
from benchmarks.common.layers import VARIANTS, make_layer
from benchmarks.common.shapes import TINY
from benchmarks.profile_step import Gemm, explain, label, record_bytes, record_gemms
from moe_kernels.runtime.triton import HAS_TRITON

from ..tiers import default_tier

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    "variant",
    default_tier(["swiglu", "relu", "swiglu with biases", "swiglu, weight on input"], ["relu", "swiglu with biases"]),
)
def test_gemms_and_bytes_are_those_of_the_variant(variant, device):
    layer = make_layer(TINY, device, torch.float32, **VARIANTS[variant])
    tokens = torch.randn(TINY.num_tokens, TINY.d_model, device=device, requires_grad=True)

    def step():
        layer(tokens).sum().backward()

    gemms, moved = record_gemms(step), record_bytes(step)
    rows, d_model, d_ff, num_experts = TINY.num_rows, TINY.d_model, TINY.d_ff, TINY.num_experts
    width = (1 + layer.experts.activation.gated) * d_ff
    up, down = (rows, d_model, width), (rows, d_ff, d_model)
    backward = [(rows, d_model, d_ff), (rows, width, d_model), (rows, d_model, d_ff), (rows, width, d_model)]
    assert sorted(gemm[2:] for gemm in gemms) == sorted([up, down, *backward])

    has_bias = layer.experts.b_up is not None
    bias = num_experts * width + rows if has_bias else 0  # and the expert of each row
    # H, dA', dH and A_w; per slot its row, its weight and the gradient of the weight.
    middle = 4 * (2 * rows * width + 2 * rows * d_ff + 3 * rows + bias)
    assert moved["weighted_activation_backward_kernel"] == [middle]
    if "activation_kernel" in moved:  # if no GEMM applies the activation
        assert moved["activation_kernel"] == [4 * (rows * width + rows * d_ff + bias)]
    if has_bias:
        # Gradient by the rows' tokens and weights of dout, and of dH.
        bounds = num_experts + 2
        db_down = 4 * (TINY.num_tokens * d_model + 2 * rows + bounds + num_experts * d_model)
        db_up = 4 * (rows * width + bounds + num_experts * width)
        assert moved["_segment_sum_kernel"] == [db_down, db_up]
    functions = {gemm.function for gemm in gemms}
    others = [(name, size) for name, sizes in moved.items() if name not in functions for size in sizes]
    launches = [(name, 1.0) for name in (*(gemm.function for gemm in gemms), *(name for name, _ in others))]
    labels = label(launches, gemms, moved, 0)
    assert [(gemm, size) for _, gemm, size in labels] == [(g, None) for g in gemms] + [(None, n) for _, n in others]


def test_labels_follow_the_order_of_the_launches():
    gemms = [Gemm("gemm_kernel", "gemm K=4 N=2", 8, 4, 2)]
    added = "at::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>"
    names = ["_permute_kernel", "gemm_kernel", "_permute_kernel", "_combine_dweights_kernel", added, "nvjet"]
    names += ["activation_kernel", "at::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"]
    launches = [(name, 1.0) for name in names]
    moved = {"_permute_kernel": [100, 7], "gemm_kernel": [3]}
    moved |= {"_combine_dweights_kernel": [50], "activation_kernel": [9]}
    assert label(launches, gemms, moved, 60) == [
        ("tokens to rows", None, 100),
        (gemms[0].stage, gemms[0], None),
        ("tokens to rows", None, 7),
        ("gradient of the weights", None, 50),
        ("sum of gradients", None, 60),
        ("router GEMM, other", None, None),
        ("activation", None, 9),
        ("PyTorch elementwise", None, None),
    ]
    with pytest.raises(AssertionError, match="_permute_kernel"):
        label(launches[:2] + launches[3:], gemms, moved, 60)


def row(kernel: str, stage: str, ms: float, bound_ms: float | None = None, tflops_per_s: float | None = None) -> dict:
    said = {"kernel": kernel, "stage": stage, "ms": ms, "bound_ms": bound_ms, "tflops_per_s": tflops_per_s}
    return {"shape": "some", **said}


STEP = [
    row("gemm", "up", 5.0, 4.0, 600.0),
    row("gemm", "down", 1.0, 2.0, 600.0),
    row("gemm", "up", 1.0, 1.0, 600.0),
    row("permute", "copies", 1.5, 1.0),
    row("permute", "copies", 0.5, 0.75),  # faster than a copy
    row("sort", "others", 0.5, 0.25),
    row("nvjet", "others", 0.25),
    row("idle", "between kernels", 0.25),
    row("step", "forward+backward", 10.0),
]


def test_explanation_worked_by_hand():
    def line(stage, ms, dense_ms, points, bytes_points=None, lost_points=None):
        split = {"bytes_points": bytes_points, "lost_points": lost_points}
        return {"stage": stage, "ms": ms, "dense_ms": dense_ms, "points": points, **split}

    lines = [
        line("copies", 2.0, None, 20.0, 15.0, 5.0),
        line("up", 6.0, 5.0, 10.0),
        line("others", 0.75, None, 7.5),
        line("idle", 0.25, None, 2.5),
        line("down", 1.0, 2.0, -10.0),
    ]
    expected = {"step_ms": 10.0, "dense_bound_ms": 7.0, "share_of_dense_bound": 0.7, "stages": lines}
    relu = [{**row, "activation": "relu"} for row in STEP]
    assert explain(STEP + relu) == [
        {"shape": "some", "activation": activation, **expected} for activation in ("swiglu", "relu")
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("account_*.json")), ids=lambda path: path.stem)
def test_points_of_results_add_up(path):
    rows = json.loads(path.read_text())
    steps = explain(rows)
    profiled = dict.fromkeys((row["shape"], row.get("activation", "swiglu")) for row in rows)
    assert [(step["shape"], step["activation"]) for step in steps] == list(profiled)
    for step in steps:
        points = [line["points"] for line in step["stages"]]
        assert points == sorted(points, reverse=True)
        assert 100 * step["share_of_dense_bound"] + sum(points) == pytest.approx(100)
        assert all(line["lost_points"] is None or line["lost_points"] > -1e-9 for line in step["stages"])


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([{"shape": "some", "ms": 1.0}], "without kernel, stage, tflops_per_s, bound_ms"),
        (STEP[:-1], "some must have one row of kernel 'step', got 0"),
        (STEP[:-2] + STEP[-1:], "some must have one row of kernel 'idle', got 0"),
        (STEP[3:], "some must have GEMMs, each with its bound_ms, got 0 GEMMs"),
        ([{**STEP[0], "bound_ms": None}, *STEP[1:]], "some must have GEMMs, each with its bound_ms, got 3 GEMMs"),
    ],
)
def test_what_results_lack_is_said(rows, error):
    with pytest.raises(ValueError, match=error):
        explain(rows)


def test_command_explains_files(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(STEP))
    bad.write_text(json.dumps(STEP[:-1]))
    profile_step.main(["--explain", str(good)])
    printed = capsys.readouterr().out
    assert "some, swiglu: step 10.000 ms, dense bound 7.000 ms, share 70.0 %" in printed
    assert [line.split()[0] for line in printed.splitlines()[4:]] == ["copies", "up", "others", "idle", "down"]
    with pytest.raises(SystemExit, match=f"{bad}: explain: some must have one row of kernel 'step'"):
        profile_step.main(["--explain", str(bad)])
