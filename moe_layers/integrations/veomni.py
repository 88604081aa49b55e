"""Registers the MoE implementation "fused_moe_layers" in VeOmni. Import this module, and set the option in the YAML:

    import moe_layers.integrations.veomni  # before build_foundation_model

ops_implementation:
  moe_implementation: fused_moe_layers
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from veomni.distributed.parallel_state import get_parallel_state  # pyright: ignore[reportMissingImports]  # optional
from veomni.lora.ops import bind_lora_moe_kernels  # pyright: ignore[reportMissingImports]
from veomni.ops.kernel_registry import (  # pyright: ignore[reportMissingImports]
    KERNEL_REGISTRY,
    HardwareRequirement,
    KernelSpec,
)
from veomni.ops.kernels import moe  # pyright: ignore[reportMissingImports]

from moe_kernels import Activation, fused_experts, sort_by_expert

from .versions import ENABLE, check_version

__all__ = ["fused_moe_forward"]

check_version("veomni", "0.1", ENABLE)
NAME = "moe_layers"


def fused_moe_forward(
    num_experts: int,
    routing_weights: Tensor,  # [T, K]
    selected_experts: Tensor,  # [T, K]
    hidden_states: Tensor,  # [T, D]
    fc1_1_weight: Tensor | None,
    fc1_2_weight: Tensor | None,
    fc2_weight: Tensor,  # [E, D, F]
    fc1_1_2_weight: Tensor | None = None,  # [E, 2F, D]
    swiglu_limit: float | None = None,
) -> Tensor:  # [T, D]
    """Compute the experts. The signature is that of VeOmni's own kernels. Outputs are weighted and summed in float32.

    Raises:
        ValueError: gate and up are two parameters, or expert parallelism is enabled.
    """
    if fc1_1_2_weight is None or fc1_1_weight is not None or fc1_2_weight is not None:
        raise ValueError("fused_moe_layers: gate and up must be one parameter, fc1_1_2_weight, got two")
    if get_parallel_state().ep_enabled:
        raise ValueError("fused_moe_layers: ep_size must be 1, got expert parallelism; use fused_triton with it")
    activation = "swiglu" if swiglu_limit is None else Activation("clamped_swiglu", limit=swiglu_limit)
    operands = routing_weights.float(), sort_by_expert(selected_experts, num_experts), fc1_1_2_weight, fc2_weight
    return fused_experts(hidden_states, *operands, activation=activation)


def _experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the output of an experts module of VeOmni. The module calls this function instead of its own forward."""
    if (act := type(experts.act_fn).__name__) not in ("SiLU", "SiLUActivation"):
        raise ValueError(f"fused_moe_layers: the activation must be SiLU, got {act}; use eager")
    weights = None, None, experts.down_proj, experts.gate_up_proj
    limit = getattr(experts, "limit", None)
    return fused_moe_forward(experts.num_experts, top_k_weights, top_k_index, hidden_states, *weights, limit)


def _bind(fused_moe_kernel: str = "triton") -> None:
    if fused_moe_kernel != NAME:
        _bind_of_veomni(fused_moe_kernel)
        return
    moe._fused_moe_forward = fused_moe_forward
    bind_lora_moe_kernels(NAME)


_anywhere = HardwareRequirement(device_type="any")
# VeOmni's documentation tells other packages to add their kernels to this registry.
KERNEL_REGISTRY.register(KernelSpec(NAME, "moe_experts", "standard", lambda: _experts_forward, _anywhere))
_bind_of_veomni, moe.apply_veomni_fused_moe_patch = moe.apply_veomni_fused_moe_patch, _bind
