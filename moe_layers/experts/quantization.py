"""Quantises the experts of whole models in place, or dequantises quantised experts.

    quantize_experts_(model, "mxfp4")
    for layer in model.modules():
        if isinstance(layer, MoEFeedForward):
            layer.add_lora(LoRA(16, 16))

Quantised weights are frozen. Adapters (`add_lora`) can be trained.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_kernels.quantization.formats import as_format
from moe_kernels.quantization.quantize import quantize
from moe_kernels.types import WeightFormat

from ..checks import is_dtensor
from .grouped import GroupedExperts
from .stored import QuantizedExperts, replace_weight, stored

WEIGHTS = ("w_up", "w_down")


def quantize_experts_(module: nn.Module, format: str | WeightFormat) -> None:
    """Quantise the experts' weights of a layer, or of all layers of a model, and freeze them.

    Router, biases, shared experts and adapters do not change. The experts' op computes in the dtype of the tokens.
    Forward and backward are bitwise equal to those of a layer with the dequantised weights. To train the layer, add
    adapters by `add_lora`. If an error is raised, nothing changes.

    Args:
        format: "fp8" (e4m3, a scale per 128 x 128 block), "mxfp4" (a power-of-two scale per 32 numbers of a row),
            "nf4" (a scale per 64 numbers), "nf4_nested" ("nf4" with quantised scales), "int8" (a scale per row), or a
            `WeightFormat`.

    Raises:
        NotImplementedError: the format is not supported, such as AWQ, GPTQ or NVFP4.
        ValueError: the module holds no experts, experts are quantised or sharded, or sizes do not fit the format.
    """
    op, found = "quantize_experts_", _experts_of("quantize_experts_", module)
    format = as_format(op, format)
    for experts in found:
        for name in WEIGHTS:
            weight = getattr(experts, name)
            if isinstance(weight, QuantizedExperts):
                raise ValueError(f"{op}: experts must not be quantised yet, got {name} as {weight.format}")
            if is_dtensor(weight):
                raise ValueError(f"{op}: must be called before ExpertParallel and fully_shard, got {name} as a DTensor")
            like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            QuantizedExperts(quantize(like, format), weight.dtype)  # raises if the format does not support the sizes
    for experts in found:
        for name in WEIGHTS:
            weight = getattr(experts, name)
            replace_weight(experts, name, QuantizedExperts(quantize(weight.detach(), format), weight.dtype))


@torch.no_grad()
def dequantize_experts_(module: nn.Module) -> None:
    """Turn quantised experts into plain parameters, in the dtype that their layer computes in. The parameters stay
    frozen: `requires_grad_()` lets them train.

    Raises:
        ValueError: the module holds no quantised experts, or quantised experts are sharded.
    """
    op = "dequantize_experts_"
    found = [experts for experts in _experts_of(op, module) if isinstance(experts.w_up, QuantizedExperts)]
    if not found:
        raise ValueError(f"{op}: the module must hold quantised experts, got none")
    for experts in found:
        if is_dtensor(stored(experts.w_up)):
            raise ValueError(f"{op}: must be called before ExpertParallel and fully_shard, got DTensors")
    for experts in found:
        for name in WEIGHTS:
            replace_weight(experts, name, nn.Parameter(getattr(experts, name).dequantize(), requires_grad=False))


def _experts_of(op: str, module: nn.Module) -> list[GroupedExperts]:
    found = [part for part in module.modules() if isinstance(part, GroupedExperts)]
    if not found:
        raise ValueError(
            f"{op}: the module must hold GroupedExperts, got {type(module).__name__} without; quantise a transformers "
            "model in transformers or bitsandbytes and then call `enable`, which reads the stored weights"
        )
    return found
