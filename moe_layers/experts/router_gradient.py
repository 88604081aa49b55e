"""Decides whether the experts compute the part of the tokens' gradient that comes through the routing weights.

The gradient of a layer's input has two parts: through the experts' products, and through the routing weights. Where the
weights are a softmax over the logits of the chosen experts, the experts' op can add the second part where it sums the
rows of the first. That replaces a product with the gradient of all logits, and an addition. The router then gets
detached tokens. The result is right only if the experts alone read the router's output, unchanged. So autograd computes
the second part where an auxiliary loss, a hook on the router or the experts, or the caller reads the routing. A hook
that is added or removed between a checkpointed forward and its recomputation changes what is saved, which PyTorch
reports as an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels.runtime.dispatch import runs_kernels

from ..routing.router import TopKRouter
from .dispatcher import LocalDispatcher
from .grouped import GroupedExperts
from .lora import uses_dropout

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple("_global" + name for name in _HOOKS)


def can_fuse_router_gradient(layer: nn.Module, tokens: Tensor) -> bool:
    """Whether the layer's parts allow it and the tokens need a gradient. Subclasses of the parts never allow it."""
    router, experts = layer.router, layer.experts
    return (
        tokens.requires_grad
        and torch.is_grad_enabled()
        and type(router) is TopKRouter
        and router.is_softmax_of_chosen
        and type(experts) is GroupedExperts
        and type(layer.dispatcher) is LocalDispatcher
        and experts.num_experts == router.num_experts
        and experts.local_share is None
        and not experts.weight_on_input
        and not experts.batch_invariant
        and not uses_dropout(experts.lora)
        and router.weight.dtype == experts.w_up.dtype
        and layer.w_latent_in is None
        and layer.capacity is None
        and not layer.separate_router_input
        and is_called_as_written(router)
        and is_called_as_written(experts)
        and runs_kernels(experts.implementation, tokens)
    )


def is_called_as_written(module: nn.Module) -> bool:
    """No hook, nor another `forward` in this instance, as some libraries put there."""
    own = vars(module)
    if any(map(vars(torch.nn.modules.module).get, _GLOBAL_HOOKS)) or "forward" in own:
        return False
    return all([hasattr(hook, "watches_choice") for name in _HOOKS for hook in own[name].values()])
