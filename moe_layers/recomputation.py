"""What activation checkpointing must not change: a forward is counted once, and chooses its experts once."""

from __future__ import annotations

import torch
from torch import Tensor


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward, as the recomputation of a checkpointed region does."""
    return torch._C._current_graph_task_id() != -1


# Registered ops, so that what they ask is asked whenever compiled code runs, and not while it is traced.
@torch.library.custom_op("moe_layers::add_once", mutates_args=("total",))
def add_once(total: Tensor, amount: Tensor) -> None:
    """`total += amount`, but not in a recomputation."""
    if not is_recomputing():
        total.add_(amount)


@add_once.register_fake
def _(total, amount):
    return None
