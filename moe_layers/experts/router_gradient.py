"""When the experts pass on to the tokens what the router's choice of weights owes them.

The gradient of a layer's input has two parts: through the experts' products, and through the routing weights. Where
weights are a softmax over the logits of the chosen experts, the op of the experts can add the second to the first for
next to nothing, instead of a product with the gradient of all logits and a pass that adds it. The router then gets the
tokens without their graph. That is right only if nobody but the experts reads what the router returns, and reads
it as the router returned it: so in training with auxiliary losses, with hooks on either of them, or where `forward`
returns the routing, autograd has to find its own way. A hook that comes or goes between a checkpointed forward and its
recomputation changes what is kept, and PyTorch reports that as an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels import runs_kernels

from ..routing.router import TopKRouter
from .dispatcher import LocalDispatcher
from .grouped import GroupedExperts

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def experts_can_pass_it_on(layer: nn.Module, tokens: Tensor) -> bool:
    """Whether the layer's parts are such, and there is a gradient to pass on.

    Subclasses of the parts, and what wraps them, may do anything.
    """
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
        and router.weight.dtype == experts.w_up.dtype
        and layer.w_latent_in is None
        and layer.capacity is None
        and _is_called_as_written(router)
        and _is_called_as_written(experts)
        and runs_kernels(experts.implementation, tokens)
    )


def _is_called_as_written(module: nn.Module) -> bool:
    """No hook, nor another `forward` in this instance, as some libraries put there."""
    everywhere = torch.nn.modules.module
    hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
    if any(getattr(everywhere, "_global" + name) for name in _HOOKS) or "forward" in vars(module):
        return False
    return all(hasattr(hook, "watches_choice") for hook in hooks)
