"""Mixture-of-Experts kernels for PyTorch: functions on tensors, no modules and no state."""

from ._dispatch import IMPLEMENTATIONS
from .activation import gated_activation, plain_activation
from .activation_functions import ACTIVATIONS
from .activation_spec import Activation, as_activation
from .catalog import GroupedGemmArguments, Status, WgradArguments, get_kernels
from .experts import fused_experts
from .grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from .permutation import combine, permute
from .reference import Permutation, Routing, TileTable
from .router_spec import RouterSpec
from .routing import linear_routing, topk_routing
from .scored_routing import scored_linear_routing, scored_routing
from .sorting import sort_by_expert

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "Activation",
    "GroupedGemmArguments",
    "Permutation",
    "RouterSpec",
    "Routing",
    "Status",
    "TileTable",
    "WgradArguments",
    "as_activation",
    "combine",
    "fused_experts",
    "gated_activation",
    "get_kernels",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "linear_routing",
    "permute",
    "plain_activation",
    "scored_linear_routing",
    "scored_routing",
    "sort_by_expert",
    "topk_routing",
]
