"""The guide's table of memory and examples/fine_tune_quantized.py."""

import re
from importlib import import_module

import pytest
import torch

from moe_kernels.quantization.quantize import quantize
from moe_layers import MoEConfig

from ..processes import ROOT
from ..tiers import slow
from .examples import small_text

GUIDE = (ROOT / "docs" / "guides" / "quantized_experts.md").read_text()
MODELS = {
    "Qwen3-30B-A3B": (MoEConfig.qwen3_30b_a3b(), 48),
    "gpt-oss-20b": (MoEConfig.gpt_oss_20b(), 24),
    "gpt-oss-120b": (MoEConfig.gpt_oss_120b(), 36),
    "DeepSeek-V3, one layer": (MoEConfig.deepseek_v3(), 1),
}


def test_memory_of_models_is_that_of_the_formats():
    table = GUIDE.split("## Memory")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    (_, *formats, _), _, *rows = rows
    assert [row[0] for row in rows] == list(MODELS) and formats == ["bfloat16", "fp8", "int8", "nf4", "mxfp4"]
    for name, *cells in rows:
        config, num_layers = MODELS[name]
        up = config.num_experts, (1 + config.is_gated) * config.d_ff, config.d_model
        shapes = [torch.Size(up), torch.Size((config.num_experts, config.d_model, config.d_ff))]
        dense = [2 * shape.numel() for shape in shapes]
        expected = [sum(dense)]
        for format in formats[1:]:
            expected.append(sum(quantize(torch.empty(shape, device="meta"), format).num_bytes for shape in shapes))
        printed = [f"{num_layers * size / 1e9:.1f}" for size in expected]
        assert cells == [*printed, f"{max(dense) / 1e9:.2f}"], name


@slow
def test_adapters_lower_the_loss_over_each_format(monkeypatch, capsys):
    example = import_module("fine_tune_quantized")
    monkeypatch.setattr(example, "load_text", lambda root, device: small_text(device))
    example.main(["--steps", "24", "--formats", "fp8", "mxfp4"])
    out = capsys.readouterr().out
    losses = {name.strip(): float(loss) for name, loss in re.findall(r"^ *([\w +]+): ([\d.]+) nats", out, re.MULTILINE)}
    assert list(losses) == ["float32", "fp8", "fp8 + LoRA", "mxfp4", "mxfp4 + LoRA"]
    for format in ("fp8", "mxfp4"):
        assert losses[format] == pytest.approx(losses["float32"], abs=0.05)
        assert losses[f"{format} + LoRA"] < losses[format]
