"""Router, sort and experts of a layer as one op, where nothing reads the routing between them.

One op is one autograd node with one list of launches. In backward it adds the gradient through the routing weights
where it sums the rows of the gradient through the experts. The result is the layer's only if the experts alone read the
router's output, unchanged. So the parts run one by one where an auxiliary loss, an observer, a hook on the router or
the experts, a mode, or the caller reads the routing. A hook that is added or removed between a checkpointed forward and
its recomputation changes what is saved, which PyTorch reports as an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels.routing.routers import is_one_op
from moe_kernels.runtime.dispatch import runs_kernels

from ..routing.router import TopKRouter
from .dispatcher import LocalDispatcher
from .grouped import GroupedExperts
from .lora import uses_dropout

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple("_global" + name for name in _HOOKS)


def runs_as_one_op(layer: nn.Module, tokens: Tensor) -> bool:
    """Return whether the layer's parts allow it. Subclasses of the parts never do.

    Compiled code runs the parts one by one, because `save_routing` keeps the results of the router's op.
    """
    router, experts = layer.router, layer.experts
    return (
        type(router) is TopKRouter
        and type(experts) is GroupedExperts
        and type(layer.dispatcher) is LocalDispatcher
        and router.is_linear
        and is_one_op(router.spec)
        and experts.num_experts == router.num_experts
        and experts.local_share is None
        and experts.reserved_sms == 0
        and layer.w_latent_in is None
        and layer.capacity is None
        and not layer.separate_router_input
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and is_called_as_written(router)
        and is_called_as_written(experts)
        and not uses_dropout(experts.lora)
        and runs_kernels(experts.implementation, tokens)
        and runs_kernels(router.implementation, tokens)
    )


def compute_whole(layer: nn.Module, tokens: Tensor) -> Tensor:  # [T, D]
    """Compute the sum of the experts' outputs. Hooks that only watch the router's choice get it afterwards."""
    made = layer.experts.route_and_compute(tokens, layer.router)
    for hook in layer.router._forward_hooks.values():
        hook(layer.router, (tokens,), made)
    return made.out


def is_called_as_written(module: nn.Module) -> bool:
    """Return whether the module has no hook, nor another `forward` in this instance, as some libraries put there."""
    own = vars(module)
    if any(map(vars(torch.nn.modules.module).get, _GLOBAL_HOOKS)) or "forward" in own:
        return False
    return all([hasattr(hook, "watches_choice") for name in _HOOKS for hook in own[name].values()])
