"""Reads and replaces the choice of a transformers router inside the calls of `torch.topk` by its own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....routing.model_routers import ReplayedChoice


class Selection(TorchFunctionMode):
    """While active, reads the top-k of scores [T, E] of all experts, and may replace the choice.

    The router's own code weighs the experts that the replaced call returns. A replayed choice therefore gets the
    router's scores and normalisation. A top-k of groups, [T, groups] or [T, groups, members], is not replaced.

    Args:
        choose: takes T and K and returns the choice. None replaces nothing.
    """

    def __init__(self, num_experts: int, choose: Callable[[int, int], ReplayedChoice] | None = None):
        super().__init__()
        self.num_experts = num_experts
        self.choose = choose
        self.num_calls = 0
        self.keys: Tensor | None = None  # [T, E]: scores plus selection bias, without excluded groups
        self.chosen: Tensor | None = None  # [T, K] int64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or scores.shape[1] != self.num_experts:
            return result
        self.num_calls += 1
        self.keys, self.chosen = scores.detach(), result.indices
        if self.choose is None:
            return result
        experts, is_own = self.choose(*result.indices.shape)
        self.chosen = experts if is_own is None else torch.where(is_own, result.indices, experts)
        # The gradient equals that of top-k, because a token's experts are distinct.
        return torch.return_types.topk((scores.gather(1, self.chosen), self.chosen))
