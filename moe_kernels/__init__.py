"""Mixture-of-Experts kernels for PyTorch: functions on tensors, no modules and no state."""

from ._dispatch import IMPLEMENTATIONS
from .activation import ACTIVATIONS, gated_activation
from .batched_gemm import batched_gemm
from .catalog import (
    CompiledArtifact,
    GemmArguments,
    GroupedGemmArguments,
    PointerDesign,
    Status,
    TmaDesign,
    WarpSpecializedDesign,
    WgradArguments,
    get_kernels,
    is_device_cc_supported,
)
from .experts import fused_experts
from .grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from .permutation import combine, permute
from .reference import Permutation, Routing, TileTable
from .routing import linear_routing, topk_routing
from .sorting import sort_by_expert

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "CompiledArtifact",
    "GemmArguments",
    "GroupedGemmArguments",
    "Permutation",
    "PointerDesign",
    "Routing",
    "Status",
    "TileTable",
    "TmaDesign",
    "WarpSpecializedDesign",
    "WgradArguments",
    "batched_gemm",
    "combine",
    "fused_experts",
    "gated_activation",
    "get_kernels",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "is_device_cc_supported",
    "linear_routing",
    "permute",
    "sort_by_expert",
    "topk_routing",
]
