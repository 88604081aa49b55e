"""The examples as modules, and sizes and a text small enough for seconds."""

import argparse
import sys
import textwrap
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from ..processes import ROOT

# The examples import modules from their own folder, which is on the path of a script.
sys.path.insert(0, str(ROOT / "examples"))
language_model = import_module("_language_model")
SIZES = {"width": 32, "num_heads": 2, "context": 32, "batch": 4, "warmup_steps": 2, "log_every": 2}


def small_text(device):
    """Return two modules of the standard library as training and held-out text."""
    parts = (Path(module.__file__).read_bytes() for module in (argparse, textwrap))
    return language_model.Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts))


def make_tiny(example, monkeypatch, **changes):
    """Replace the example's preset "cpu" and its text by small ones. Return the preset."""
    tiny = replace(example.PRESETS["cpu"], **SIZES, **changes)
    monkeypatch.setitem(example.PRESETS, "cpu", tiny)
    monkeypatch.setattr(example, "load_text", lambda root, device="cpu": small_text(device))
    return tiny


def implementation_of(device):
    return "triton" if torch.device(device).type == "cuda" else "reference"
