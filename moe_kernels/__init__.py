"""Mixture-of-Experts kernels for PyTorch: functions on tensors, no modules and no state."""

from .activation.functions import ACTIVATIONS
from .activation.ops import gated_activation, plain_activation
from .activation_spec import Activation, as_activation
from .experts.chunked import ExpertsInParts
from .experts.fused import RECOMPUTE, fused_experts
from .gemm.arguments import GemmArguments, GroupedGemmArguments, WgradArguments
from .gemm.artifact_file import load_artifact, save_artifact
from .gemm.batch_invariance import invariant_linear
from .gemm.kernel import PointerDesign, Status, TmaDesign, WarpSpecializedDesign, is_device_cc_supported
from .gemm.kernels.jagged import JaggedGemmArguments
from .gemm.kernels.list import GroupedGemmListArguments
from .gemm.ops.batched import batched_gemm
from .gemm.ops.grouped import grouped_gemm, grouped_gemm_wgrad
from .gemm.ops.jagged import PackedGroups, jagged_gemm, pack_groups
from .gemm.ops.list import GroupedProblem, grouped_gemm_list
from .gemm.selection import get_kernels
from .permutation.partial_sums import sum_shares
from .permutation.permute import combine, permute
from .permutation.sort import sort_by_expert
from .router_spec import RouterSpec
from .routing.scored import routing_weights, scored_linear_routing, scored_routing, selection_keys
from .routing.softmax import linear_routing, topk_routing
from .runtime.dispatch import IMPLEMENTATIONS, runs_kernels
from .runtime.launch import CompiledArtifact
from .types import ExpertWeights, Permutation, Routing, TileTable

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
    "load_artifact",
    "pack_groups",
    "permute",
    "plain_activation",
    "routing_weights",
    "runs_kernels",
    "save_artifact",
    "scored_linear_routing",
    "scored_routing",
    "selection_keys",
    "sort_by_expert",
    "sum_shares",
    "topk_routing",
]
