"""Each example, on sizes small enough for seconds. Those that train a language model have files of their own."""

import dataclasses
import json
import re
from functools import partial
from importlib import import_module

import pytest
import torch

from moe_kernels import RouterSpec
from moe_kernels.testing import check_accuracy

from ..processes import ROOT, run_python
from .examples import SIZES, implementation_of, make_tiny, small_text

GOLDEN = ROOT / "tests" / "golden"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_example_has_a_test(path):
    assert any(re.search(rf"\b{path.stem}\b", test.read_text()) for test in (ROOT / "tests" / "docs").glob("*.py"))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("grouped_gemm", "an expert:"),
        ("kernel_catalog", "the result agrees with torch.nn.functional.grouped_mm"),
        ("grouped_gemm_list --sizes 40 24 8", "3 products are right"),
        ("jagged_gemm --rows 5 0 70 9 --depth 40 --columns 24", "4 groups"),
    ],
)
def test_short_examples_run_as_a_user_runs_them(command, says):
    name, *arguments = command.split()
    assert says in run_python([ROOT / "examples" / f"{name}.py", *arguments]).stdout


def test_load_checkpoint_layer(capsys):
    """Run the example on its own small checkpoint, on a golden case, and on a layer without experts."""
    example = import_module("load_checkpoint_layer")
    example.main(["--device", "cuda" if torch.cuda.is_available() else "cpu"])
    out = capsys.readouterr().out
    assert int(out.split("wrote ")[1].split()[0]) > 2
    assert "used once each" in out and "tokens per expert" in out
    example.main([str(GOLDEN / "deepseek_v3"), "--layer", "1", "--experts", "4", "8"])
    out = capsys.readouterr().out
    assert "16 experts [4, 8) loaded" in out and "36 of other experts left unread" in out
    with pytest.raises(ValueError, match="no MoE block in layer 0"):
        example.main([str(GOLDEN / "deepseek_v3")])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_fine_tune_hugging_face(model_type, device, monkeypatch, capsys):
    """Both models train alike, and their loss falls."""
    pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")
    example = import_module("fine_tune_hugging_face")
    assert set(example.MODEL_TYPES) == {"qwen3_moe", "mixtral"}
    make_tiny(example, monkeypatch, d_ff=16, num_experts=4, steps=6, held_out_windows=6)
    example.main(["--preset", "cpu", "--model-type", model_type, "--implementation", implementation_of(device)])
    out = capsys.readouterr().out
    assert "moe_layers computes the experts of 2 blocks" in out
    turns = re.findall(r"step (\d+): eager loss ([\d.]+), [\d,]+ tokens/s; moe_layers loss ([\d.]+), [\d,]+ tok", out)
    assert [int(step) for step, *_ in turns] == [2, 4, 6]
    for _, eager, ours in turns:
        assert float(ours) == pytest.approx(float(eager), rel=2e-2 if device == "cuda" else 1e-3)
    assert float(turns[-1][2]) < float(turns[0][2])
    held_out = re.findall(r"(\w+): held out ([\d.]+) nats per byte, [\d,]+ tokens/s", out)
    assert [name for name, _ in held_out] == ["eager", "moe_layers"]
    assert all(0 < float(loss) < 8 for _, loss in held_out)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_upcycled_feed_forward_is_the_same_function(top_k, device):
    """The gradient with respect to the input is the same, too, because the routers' part of it is zero."""
    example = import_module("upcycle_dense")
    torch.manual_seed(0)
    dense = example.SwiGLU(32, 24).to(device)
    moe = example.upcycle(dense, num_experts=4, top_k=top_k)
    exact = example.SwiGLU(32, 24).to(device, torch.float64)
    exact.load_state_dict(dense.state_dict())

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(20, 32, generator=generator).to(device),)

    check_accuracy(moe, lambda x: (exact if x.dtype == torch.float64 else dense)(x), draw, ("out", "dx"))


def test_upcycle_dense_trains_on_from_the_same_loss(device, monkeypatch, capsys):
    example = import_module("upcycle_dense")
    tiny = make_tiny(example, monkeypatch, d_ff=24, steps=10, held_out_windows=6)
    example.main(["--preset", "cpu", "--implementation", implementation_of(device)])
    out = capsys.readouterr().out
    dense_before, upcycled_before, dense_after, upcycled_after = map(float, re.findall(r"held out ([\d.]+)", out))
    assert upcycled_before == pytest.approx(dense_before, rel=1e-2 if device == "cuda" else 1e-4)
    assert dense_after < dense_before and upcycled_after < upcycled_before
    assert float(re.search(r"differ by ([\d.e+-]+)", out)[1]) < 1e-12
    assert "upcycled, step 20" in out
    # The example's own check sees a changed function.
    not_normalized = partial(example.MoEFeedForward, router=RouterSpec.softmax(normalize=False))
    monkeypatch.setattr(example, "MoEFeedForward", not_normalized)
    dense, windows = example.LanguageModel(tiny).to(device), torch.randint(256, (2, 32), device=device)
    with pytest.raises(AssertionError, match="upcycling changed the logits"):
        example.check_same_function(dense, tiny, windows)


def test_plot_expert_load(device, tmp_path, monkeypatch, capsys):
    """Each model balances by its setting alone, and the report and the maps are written."""
    example = import_module("plot_expert_load")
    tiny = dataclasses.replace(example.SETTINGS, **SIZES, d_ff=16, num_experts=4)
    models = [example.make_model(tiny, balancing, implementation_of(device)) for balancing in example.BALANCINGS]
    layers = [model.blocks[1].feed_forward for model in models]
    assert [layer.balance_losses.any for layer in layers] == [False, True, False]
    assert [layer.router.selection_bias is not None for layer in layers] == [False, False, True]
    monkeypatch.setattr(example, "SETTINGS", tiny)
    monkeypatch.setattr(example, "load_text", lambda root, device: small_text(device))
    options = ["--implementation", implementation_of(device)]
    assert example.main(["--steps", "4", "--output", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "expert_load.json").read_text())
    assert list(report) == [balancing.name for balancing in example.BALANCINGS]
    assert f"loss {report['Switch loss']['training_loss']:.3f}" in printed
    assert all(f"wrote {tmp_path / name}" in printed for name in ("expert_load.json", "expert_load.png"))
    pixels = pytest.importorskip("matplotlib.image").imread(tmp_path / "expert_load.png")
    assert pixels.shape == (1080, 1080, 4)
    for first in (280, 540, 800):  # each map has colours
        assert len({tuple(pixel) for pixel in pixels[first : first + 200, 300].tolist()}) > 4
