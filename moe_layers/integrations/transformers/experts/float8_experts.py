"""Computes transformers' FP8 experts, for which transformers has a separate registry of implementations. The weights
are either float8 with a scale per block, or packed float4 with one power-of-two scale per 32 numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

from moe_kernels.quantization.formats import FP8, MXFP4, as_format
from moe_kernels.runtime.pytorch import called_while_traced
from moe_kernels.types import QuantizedWeight, Weight, WeightFormat

from .activation import recognise_gated, recognise_plain
from .experts_forward import NAME, ExpertsSpec, experts_forward, recognise_once


@dataclass(frozen=True)
class Float8Spec(ExpertsSpec):
    """Describes how to compute FP8 experts from their stored weights."""

    format: WeightFormat = FP8

    def held(self, experts: Any) -> Iterable[Weight]:
        return (*self.up_parameters(experts), self.w_down(experts))

    def up_parameters(self, experts: Any) -> tuple[Weight, ...]:
        return (self._stored(experts, self._up_name),)

    def stored_down(self, experts: Any) -> Weight:
        return self._stored(experts, "down_proj")

    def _stored(self, experts: Any, name: str) -> QuantizedWeight:
        if name in getattr(experts, "parametrizations", {}):  # PEFT's wrappers would ignore the scales
            raise ValueError(
                f"moe_layers: {name} of {type(experts).__name__} is stored as {self.format.name}, which no wrapper can "
                "change; plain LoRA is computed by enable(model), other adapters need dequantised experts"
            )
        values, scales = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        if torch.is_grad_enabled() and (values.requires_grad or scales.requires_grad):
            raise ValueError(
                f"moe_layers: {name} of {type(experts).__name__} is stored as {self.format.name} and must be frozen, "
                "got one that requires a gradient; call requires_grad_(False) on the experts, and train adapters"
            )
        values, scales, shape = values.detach(), scales.detach(), list(values.shape)
        if self.format.name == "mxfp4":
            values, shape[2] = values.view(torch.uint8), 2 * shape[2]
        return QuantizedWeight(values, scales, self.format, torch.Size(shape))


def float8_spec(experts: Any, implementation: str | None) -> Float8Spec:
    """Return the spec of an FP8 experts module. Raise ValueError, with the reason, for unsupported modules."""
    kind = type(experts).__name__
    if experts.down_proj.dtype == torch.int8:
        format = MXFP4
    elif experts.down_proj.dtype == torch.float8_e4m3fn and experts.block_size is not None:
        format = as_format("moe_layers", WeightFormat("fp8", tuple(experts.block_size)))
    else:
        raise ValueError(
            f"moe_layers: the weights of {kind} must be float8_e4m3fn in blocks, or packed float4, "
            f"got {experts.down_proj.dtype} with block_size={experts.block_size}"
        )
    if not experts.has_gate:
        return Float8Spec(recognise_plain(experts, experts.act_fn), implementation, format=format)
    d_ff, block_rows = experts.gate_up_proj.shape[1] // 2, format.block[0]
    if d_ff % block_rows:
        raise ValueError(
            f"moe_layers: gate and up of {kind} must be whole blocks of {block_rows} rows, because each has scales of "
            f"its own, got d_ff {d_ff}; load the model with FineGrainedFP8Config(dequantize=True)"
        )
    return Float8Spec(recognise_gated(experts, experts._apply_gate, interleaved=False), implementation, format=format)


@called_while_traced
def _recognise_once(experts: nn.Module) -> None:
    recognise_once(experts, float8_spec)


def float8_experts_forward(
    self: Any,
    hidden_states: Tensor,  # [T, D]
    top_k_index: Tensor,  # [T, K]
    top_k_weights: Tensor,  # [T, K]
) -> Tensor:  # [T, D]
    """Compute FP8 experts whose configuration selects "moe_layers". The first call sets the spec of the experts."""
    _recognise_once(self)
    return experts_forward(self, hidden_states, top_k_index, top_k_weights)


# Register the function in this file, because unpickling a model that has a `Float8Spec` may import only this file.
FP8ExpertsInterface.register(NAME, float8_experts_forward)
