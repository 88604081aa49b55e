"""Golden cases: small random models in the hub's layout, with outputs and gradients."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent.parent / "golden"
# Used where the kernels themselves are not tested, because the interpreter is slow.
FASTEST = None if torch.cuda.is_available() else "reference"
CASES = sorted(path.name for path in GOLDEN.iterdir())


def replace_by_grads(module):
    """Put gradients, or zeros where there are none, in place of the parameters."""
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Golden:
    def __init__(self, name):
        self.directory = GOLDEN / name
        self.prefix = json.loads((self.directory / "meta.json").read_text())["disk_prefix"]
        self.layer = int(re.search(r"\.(\d+)\.", self.prefix)[1])
        self.config = json.loads((self.directory / "config.json").read_text())

    def tensors(self, name):
        """Return the tensors of "model", "golden", "grads" or "dequant"."""
        path = self.directory / f"{name}.safetensors"
        return load_file(path) if path.is_file() else {}
