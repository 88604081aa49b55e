"""examples/load_checkpoint_layer.py on its own small checkpoint, and on a golden case."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
example = import_module("load_checkpoint_layer")
GOLDEN = Path(__file__).parents[1] / "golden"


def test_makes_a_sharded_checkpoint_itself(capsys):
    example.main(["--device", "cuda" if torch.cuda.is_available() else "cpu"])
    out = capsys.readouterr().out
    assert int(out.split("wrote ")[1].split()[0]) > 2
    assert "used once each" in out and "tokens per expert" in out


def test_loads_what_it_is_given(capsys):
    example.main([str(GOLDEN / "deepseek_v3"), "--layer", "1", "--experts", "4", "8"])
    out = capsys.readouterr().out
    assert "16 experts [4, 8) loaded" in out and "36 of other experts left unread" in out


def test_says_what_is_wrong():
    with pytest.raises(ValueError, match="no MoE block in layer 0"):
        example.main([str(GOLDEN / "deepseek_v3")])
