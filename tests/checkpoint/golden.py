"""The golden cases: small random models in the layout of the hub, outputs and gradients beside them."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent.parent / "golden"
# Where the kernels themselves are not the question; the interpreter is slow.
FASTEST = None if torch.cuda.is_available() else "reference"
CASES = sorted(path.name for path in GOLDEN.iterdir())


class Golden:
    def __init__(self, name):
        self.directory = GOLDEN / name
        self.prefix = json.loads((self.directory / "meta.json").read_text())["disk_prefix"]
        self.layer = int(re.search(r"\.(\d+)\.", self.prefix)[1])
        self.config = json.loads((self.directory / "config.json").read_text())

    def tensors(self, name):
        """`name` is "model", "golden", "grads" or "dequant"."""
        path = self.directory / f"{name}.safetensors"
        return load_file(path) if path.is_file() else {}
