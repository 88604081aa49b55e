"""Lists the GEMMs that the op of an expert layer runs in a forward and backward, and their kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..gemm.arguments.base import Arguments
from ..gemm.kernel import Kernel
from ..gemm.selection import Copies, Target, planning
from ..specs import as_activation
from ..types import ExpertWeights, QuantizedWeight
from .fused import make_operands
from .fused_op import compute_gradients, fused_experts_op, read_by_backward

TRAINED = ("up", "down", "down_dgrad", "down_wgrad", "up_dgrad", "up_wgrad")
FROZEN = ("up", "down", "down_dgrad", "up_dgrad")


class Step(NamedTuple):
    """A GEMM of the layer."""

    name: str  # one of `TRAINED`, such as "up"
    args: Arguments
    kernel: Kernel | None  # None: no kernel supports the arguments

    @property
    def gathers(self) -> bool:
        """Return whether the GEMM gathers rows of tokens."""
        return any("row_to_token" in name and getattr(self.args, name) is not None for name in self.args.tensors)


def plan_experts(
    tokens: Tensor,  # [T, D]
    topk_experts: Tensor,  # [T, K] int32
    topk_weights: Tensor,  # [T, K] float32
    weights: ExpertWeights,
    *,
    activation: str = "swiglu",
    precision: str | None = None,
    target: Target | None = None,
    copies: Copies | None = None,
    fuses: bool = True,
) -> list[Step]:
    """Run a forward and backward of `fused_experts` and return its GEMMs. Quantised weights are frozen.

    If no kernel computes the activation in its epilogue, there are two steps "up", and the first has no kernel.

    Args:
        target, copies, fuses: as in `selection.planning`. With a target all tensors may be meta tensors.
    """
    # Gradients are enabled so that forward keeps the pre-activations. Backward then does not recompute them.
    with planning(target, copies=copies, fuses=fuses) as choices, torch.enable_grad():
        kind = as_activation("plan_experts", activation)
        operands = make_operands(tokens, weights, activation=kind, precision=precision)
        operands = operands._replace(topk_experts=topk_experts, topk_weights=topk_weights)
        made = fused_experts_op(operands)
        is_frozen = isinstance(weights.w_up, QuantizedWeight)
        needed = {"tokens", "topk_weights"} if is_frozen else {"tokens", "topk_weights", "w_up", "w_down"}
        compute_gradients(torch.randn_like(tokens), [read_by_backward(operands, *made[1:])], needed, {})
    names, steps = list(FROZEN if is_frozen else TRAINED), []
    for args, kernel in choices:
        is_tried = kernel is None and args.epilogue is not None
        steps.append(Step(names[0] if is_tried else names.pop(0), args, kernel))
    return steps
