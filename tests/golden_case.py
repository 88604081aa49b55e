"""Golden cases: small random models in the hub's layout, with the results of transformers' own modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parent / "golden"


class GoldenCase(NamedTuple):
    config: dict
    weights: dict[str, Tensor]  # the block's weights, by name inside it
    gradients: dict[str, Tensor]  # gradients of sum(y * dy), by the same names
    golden: dict[str, Tensor]  # x, y, dy, grad_x, topk_idx, topk_weight, router_logits, y_routed


def load_case(name: str, device: str) -> GoldenCase:
    directory = ROOT / name
    prefix = json.loads((directory / "meta.json").read_text())["disk_prefix"]

    def block(file: str) -> dict[str, Tensor]:
        tensors = load_file(directory / file, device=device)
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

    golden = load_file(directory / "golden.safetensors", device=device)
    config = json.loads((directory / "config.json").read_text())
    return GoldenCase(config, block("model.safetensors"), block("grads.safetensors"), golden)
