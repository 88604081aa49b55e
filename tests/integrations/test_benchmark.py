import json

import pytest
import torch

from benchmarks import huggingface
from benchmarks.huggingface import SHAPES, check_models, draw_tokens, make_model
from moe_layers.integrations.transformers import enable


def test_small_run_writes_a_results_file(tmp_path, capsys):
    path = tmp_path / "results.json"
    quick = ["--shape", "tiny", "--device", "cpu", "--rounds", "1", "--round-ms", "1", "--implementation", "reference"]
    huggingface.main([*quick, "--commit", "abc", "--output", str(path)])
    rows = json.loads(path.read_text())
    assert [row["pass"] for row in rows] == ["block forward+backward"] * 2 + ["training step"] * 2
    assert [row["implementation"] for row in rows][1::2] == ["moe_layers"] * 2
    assert all(row["commit"] == "abc" and row["ms"] > 0 and row["transformers"] for row in rows)
    printed = capsys.readouterr().out
    assert "the experts of 2 blocks" in printed and "training step" in printed


def test_wrong_experts_are_not_timed(device):
    shape = SHAPES["tiny"]
    default, ours = (make_model(shape, device, torch.float32) for _ in range(2))
    enable(ours)
    batch = draw_tokens(shape, device)
    check_models(default, ours, shape, batch)
    with torch.no_grad():
        ours.model.layers[0].mlp.experts.down_proj[3] *= 1.001
    with pytest.raises(AssertionError, match="exceeds"):
        check_models(default, ours, shape, batch)
    with torch.no_grad():
        ours.model.layers[0].mlp.experts.down_proj[3] /= 1.001
        ours.model.layers[1].mlp.experts.down_proj *= 1.01
    with pytest.raises(AssertionError, match="exceeds"):
        check_models(default, ours, shape, batch)
