"""Mixture-of-Experts kernels for PyTorch: functions on tensors, no modules and no state."""

from ._dispatch import IMPLEMENTATIONS, runs_kernels
from .activation import gated_activation, plain_activation
from .activation_functions import ACTIVATIONS
from .activation_spec import Activation, as_activation
from .batch_invariance import invariant_linear
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
from .experts import RECOMPUTE, fused_experts
from .experts_in_parts import ExpertsInParts, ExpertWeights
from .gemm.array import GroupedGemmListArguments
from .gemm.jagged import JaggedGemmArguments
from .grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from .grouped_gemm_list import GroupedProblem, grouped_gemm_list
from .jagged_gemm import PackedGroups, jagged_gemm, pack_groups
from .permutation import combine, permute
from .reference import Permutation, Routing, TileTable
from .router_spec import RouterSpec
from .routing import linear_routing, topk_routing
from .scored_routing import routing_weights, scored_linear_routing, scored_routing, selection_keys
from .shares import sum_shares
from .sorting import sort_by_expert

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "RECOMPUTE",
    "Activation",
    "CompiledArtifact",
    "ExpertWeights",
    "ExpertsInParts",
    "GemmArguments",
    "GroupedGemmArguments",
    "GroupedGemmListArguments",
    "GroupedProblem",
    "JaggedGemmArguments",
    "PackedGroups",
    "Permutation",
    "PointerDesign",
    "RouterSpec",
    "Routing",
    "Status",
    "TileTable",
    "TmaDesign",
    "WarpSpecializedDesign",
    "WgradArguments",
    "as_activation",
    "batched_gemm",
    "combine",
    "fused_experts",
    "gated_activation",
    "get_kernels",
    "grouped_gemm",
    "grouped_gemm_list",
    "grouped_gemm_wgrad",
    "invariant_linear",
    "is_device_cc_supported",
    "jagged_gemm",
    "linear_routing",
    "pack_groups",
    "permute",
    "plain_activation",
    "routing_weights",
    "runs_kernels",
    "scored_linear_routing",
    "scored_routing",
    "selection_keys",
    "sort_by_expert",
    "sum_shares",
    "topk_routing",
]
