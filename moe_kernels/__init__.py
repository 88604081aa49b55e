"""Mixture-of-Experts kernels for PyTorch: functions on tensors, no modules and no state."""

from ._dispatch import IMPLEMENTATIONS
from .activation import ACTIVATIONS, gated_activation
from .catalog import GroupedGemmArguments, Status, WgradArguments, get_kernels
from .experts import fused_experts
from .gemm.array import GroupedGemmListArguments
from .gemm.jagged import JaggedGemmArguments
from .grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from .grouped_gemm_list import GroupedProblem, grouped_gemm_list
from .jagged_gemm import PackedGroups, jagged_gemm, pack_groups
from .permutation import combine, permute
from .reference import Permutation, Routing, TileTable
from .routing import linear_routing, topk_routing
from .sorting import sort_by_expert

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "GroupedGemmArguments",
    "GroupedGemmListArguments",
    "GroupedProblem",
    "JaggedGemmArguments",
    "PackedGroups",
    "Permutation",
    "Routing",
    "Status",
    "TileTable",
    "WgradArguments",
    "combine",
    "fused_experts",
    "gated_activation",
    "get_kernels",
    "grouped_gemm",
    "grouped_gemm_list",
    "grouped_gemm_wgrad",
    "jagged_gemm",
    "linear_routing",
    "pack_groups",
    "permute",
    "sort_by_expert",
    "topk_routing",
]
