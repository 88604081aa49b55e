"""Adapters (LoRA) of linear layers, in files that also hold adapters of experts."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import first_three
from .adapter_files import ROOT, PeftAdapter
from .peft_config import rank_and_scale, targets, targets_below

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


class LinearAdapter(NamedTuple):
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float


def linear_adapters(loaded: PeftAdapter) -> dict[str, LinearAdapter]:
    """Return the adapters of modules other than experts, by the name of the adapted weight [out, in] in PEFT's keys.

    Raises:
        ValueError: a tensor is not a factor of a linear layer, or its rank differs from the configuration's.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in loaded.others.items():
        if match := _FACTOR.fullmatch(name):
            modules.setdefault(match["module"], {})[match["factor"]] = tensor
        else:
            others.append(name)
    others += [module for module, factors in modules.items() if len(factors) < 2]
    others += [m for m in modules if targets_below(m.removeprefix(ROOT), loaded.config) - {"weight"}]
    if others:
        raise ValueError(
            f"lora: only lora_A and lora_B of experts and linear layers merge, got {first_three(others)}; "
            "PEFT's merge_and_unload merges all"
        )
    return {
        f"{module}.weight": _adapter(module, factors["A"], factors["B"], loaded.config)
        for module, factors in modules.items()
    }


def _adapter(module: str, a: Tensor, b: Tensor, config: dict) -> LinearAdapter:
    name = module.removeprefix(ROOT)
    # PEFT's patterns match the own name of a parameter, but the module's name of a linear layer.
    rank, scale = rank_and_scale(config, f"{name}.weight" if targets(f"{name}.weight", config) else name)
    if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
        raise ValueError(
            f"lora: the factors of {module} must be [{rank}, in] and [out, {rank}], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    return LinearAdapter(a, b, scale)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:  # [out, in]
    """Return weight + scale * b @ a, computed in float32 (float64 stays) and rounded once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(dtype) + scale * (b.to(dtype) @ a.to(dtype))).to(weight.dtype)
