"""Computes another library's experts with `moe_kernels`, on the parameters as the model stores them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from moe_kernels import Activation, ExpertAdapters, fused_experts, sort_by_expert

from ...precision import call_with_autocast_rules
from .rebuilding import rebuilt_in_backward

NAME = "moe_layers"  # in the experts interface
ATTRIBUTE = "_moe_layers_experts"  # of an experts module: its ExpertsSpec while it is enabled
CHANGES = "_moe_layers_changes"  # of an experts module: LowRank by parameter name, while wrappers call it


class LowRank(NamedTuple):
    """A change left[e] @ right[e] of the matrices of a parameter."""

    left: Tensor  # [E, rows, r]
    right: Tensor  # [E, r, columns]


@dataclass(frozen=True)
class ExpertsSpec:
    """How to compute an experts module from `gate_up_proj` (or `up_proj`), `down_proj` and their biases.

    Attributes:
        transposed: matrices are [in, out].
        implementation: "triton", "reference", or None to choose by device.
    """

    copies: ClassVar[bool] = False  # `w_up` is a copy of the parameters instead of a view
    activation: Activation
    implementation: str | None
    transposed: bool = False
    bias: bool = False
    weight_on_input: bool = False

    @property
    def _up_name(self) -> str:
        return "gate_up_proj" if self.activation.gated else "up_proj"

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Names of the parameters whose low-rank changes `adapters` converts."""
        return self._up_name, "down_proj"

    def up_parameters(self, experts: Any) -> tuple[Tensor, ...]:
        return (getattr(experts, self._up_name),)

    def w_up(self, *parameters: Tensor) -> Tensor:  # [E, 2F, D] in the activation's order of rows; [E, F, D]
        (stored,) = parameters
        return stored.transpose(1, 2) if self.transposed else stored

    def w_down(self, experts: Any) -> Tensor:  # [E, D, F]
        return experts.down_proj.transpose(1, 2) if self.transposed else experts.down_proj

    def biases(self, experts: Any) -> tuple[Tensor, ...]:  # b_up [E, 2F] or [E, F], b_down [E, D]; or none
        if not self.bias:
            return ()
        return getattr(experts, f"{self._up_name}_bias"), experts.down_proj_bias

    def adapters(self, changes: Mapping[str, LowRank]) -> ExpertAdapters:
        """Convert changes of the stored parameters, by name, to changes of `w_up` and `w_down`."""
        return ExpertAdapters(*self._factors(changes.get(self._up_name)), *self._factors(changes.get("down_proj")))

    def _factors(self, change: LowRank | None) -> tuple[Tensor | None, Tensor | None]:  # a [E, r, in], b [E, out, r]
        if change is None:
            return None, None
        if self.transposed:
            return change.left.transpose(1, 2), change.right.transpose(1, 2)
        return change.right, change.left


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,  # [T, D]
    top_k_index: Tensor,  # [T, K]; ids outside [0, E) add nothing
    top_k_weights: Tensor,  # [T, K]
) -> Tensor:  # [T, D]
    """Replace the forward of an experts module.

    Raises:
        ValueError: the module was never passed to `enable`.
    """
    spec = getattr(self, ATTRIBUTE, None)
    if spec is None:
        raise ValueError(
            f"moe_layers: {type(self).__name__} must be in a model given to `enable` of moe_layers.integrations, "
            f"got one that was not; does it share its configuration with one that was, or hold a copy of it? "
            f"A model with a copy can be enabled, or given another experts implementation"
        )
    parameters, w_down = spec.up_parameters(self), spec.w_down(self)
    changes = getattr(self, CHANGES, None)
    adapters = spec.adapters(changes) if changes else None
    permutation = sort_by_expert(top_k_index.int(), len(w_down), implementation=spec.implementation)
    top_k_weights = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))

    def experts(tokens: Tensor, w_up: Tensor, w_down: Tensor, *biases: Tensor) -> Tensor:
        with rebuilt_in_backward(w_up, parameters, spec.w_up) if spec.copies else nullcontext():
            return fused_experts(
                tokens,
                top_k_weights,
                permutation,
                w_up,
                w_down,
                **dict(zip(("b_up", "b_down"), biases, strict=False)),
                adapters=adapters,
                activation=spec.activation,
                weight_on_input=spec.weight_on_input,
                implementation=spec.implementation,
            )

    weights = (spec.w_up(*parameters), w_down, *spec.biases(self))
    return call_with_autocast_rules(experts, hidden_states, *weights).to(hidden_states.dtype)


# Registered here, because unpickling an enabled model imports this file and may call nothing else of the package.
ExpertsInterface.register(NAME, experts_forward)
