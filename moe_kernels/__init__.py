"""Mixture-of-Experts kernels for PyTorch: functions on tensors, no modules and no state."""

from .activation.ops import apply_activation
from .experts.fused import fused_experts
from .gemm.arguments.dense import GemmArguments
from .gemm.arguments.grouped import GroupedGemmArguments, WgradArguments
from .gemm.arguments.jagged import JaggedGemmArguments
from .gemm.arguments.list import GroupedGemmListArguments
from .gemm.kernel import PointerDesign, WarpSpecializedDesign
from .gemm.ops.batched_gemm import batched_gemm
from .gemm.ops.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from .gemm.ops.grouped_gemm_list import GroupedProblem, grouped_gemm_list
from .gemm.ops.jagged_gemm import jagged_gemm, pack_groups
from .gemm.selection import get_kernels
from .permutation.permute import combine, permute
from .permutation.sort import sort_by_expert
from .routing.routers import linear_routing, routing_weights, topk_routing
from .specs import Activation, RouterSpec
from .types import ExpertAdapters, Permutation, Routing

__version__ = "0.1.0"  # version of both packages; pyproject.toml reads it

__all__ = [
    "Activation",
    "ExpertAdapters",
    "GemmArguments",
    "GroupedGemmArguments",
    "GroupedGemmListArguments",
    "GroupedProblem",
    "JaggedGemmArguments",
    "Permutation",
    "PointerDesign",
    "RouterSpec",
    "Routing",
    "WarpSpecializedDesign",
    "WgradArguments",
    "apply_activation",
    "batched_gemm",
    "combine",
    "fused_experts",
    "get_kernels",
    "grouped_gemm",
    "grouped_gemm_list",
    "grouped_gemm_wgrad",
    "jagged_gemm",
    "linear_routing",
    "pack_groups",
    "permute",
    "routing_weights",
    "sort_by_expert",
    "topk_routing",
]
