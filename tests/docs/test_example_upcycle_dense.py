"""examples/upcycle_dense.py, on a model and a text small enough for seconds."""

import argparse
import dataclasses
import re
import sys
import textwrap
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from moe_kernels import RouterSpec
from moe_kernels.testing import check_accuracy

# As in a script run: the example imports modules from its own folder.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
language_model = import_module("_language_model")
example = import_module("upcycle_dense")

TINY = dataclasses.replace(
    example.PRESETS["cpu"],
    width=32,
    num_heads=2,
    d_ff=24,
    context=32,
    batch=4,
    steps=10,
    warmup_steps=2,
    log_every=5,
    held_out_windows=6,
)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_upcycled_feed_forward_is_the_same_function(top_k, device):
    """The gradient with respect to the input is the same, too, because the routers' part of it is zero."""
    torch.manual_seed(0)
    dense = example.SwiGLU(32, 24).to(device)
    moe = example.upcycle(dense, num_experts=4, top_k=top_k)
    exact = example.SwiGLU(32, 24).to(device, torch.float64)
    exact.load_state_dict(dense.state_dict())

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(20, 32, generator=generator).to(device),)

    check_accuracy(moe, lambda x: (exact if x.dtype == torch.float64 else dense)(x), draw, ("out", "dx"))


def test_trains_on_from_the_same_loss(device, monkeypatch, capsys):
    parts = (Path(module.__file__).read_bytes() for module in (argparse, textwrap))
    text = language_model.Text(*(torch.frombuffer(bytearray(p), dtype=torch.uint8).to(device) for p in parts))
    monkeypatch.setattr(example, "load_text", lambda root, device: text)
    monkeypatch.setitem(example.PRESETS, "cpu", TINY)
    implementation = "triton" if device == "cuda" else "reference"
    example.main(["--preset", "cpu", "--implementation", implementation])

    out = capsys.readouterr().out
    held_out = [float(loss) for loss in re.findall(r"held out ([\d.]+)", out)]
    dense_before, upcycled_before, dense_after, upcycled_after = held_out
    assert upcycled_before == pytest.approx(dense_before, rel=1e-2 if device == "cuda" else 1e-4)
    assert dense_after < dense_before and upcycled_after < upcycled_before
    assert float(re.search(r"differ by ([\d.e+-]+)", out)[1]) < 1e-12
    assert "upcycled, step 20" in out


def test_a_changed_function_is_seen(device, monkeypatch):
    torch.manual_seed(0)
    dense = example.LanguageModel(TINY).to(device)
    windows = torch.randint(256, (2, 32), device=device)
    example.check_same_function(dense, TINY, windows)
    not_normalized = partial(example.MoEFeedForward, router=RouterSpec.softmax(normalize=False))
    monkeypatch.setattr(example, "MoEFeedForward", not_normalized)
    with pytest.raises(AssertionError, match="upcycling changed the logits"):
        example.check_same_function(dense, TINY, windows)
