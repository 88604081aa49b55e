"""Run a layer's router, the sort by expert and the layer's experts as one op, if nothing else reads the routing.

The op is one autograd node with one list of launches. In backward, one launch sums each token's gradient over its
experts and adds the gradient through the routing weights. The op replaces separate parts only if the experts alone read
the router's output, and read it unchanged. Other readers make the parts run one by one: the caller, an auxiliary loss,
an observer, a hook on router or experts, or a dispatch mode. If a hook is added or removed between a checkpointed
forward and its recomputation, the forward and the recomputation save different tensors. PyTorch then raises an error.

The checks run in every call. Modules and the experts' weights are read from `_modules` and `_parameters`, because
reading an attribute costs a call of `nn.Module.__getattr__`. A weight that FSDP has replaced is read as an attribute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.runtime.dispatch import runs_kernels
from moe_kernels.runtime.pytorch import any_autocast_is_enabled, jit_tracing_state, num_dispatch_modes

from ..autocast import autocast, autocast_is_enabled
from ..routing.result import differences
from ..routing.router import TopKRouter
from .dispatcher import LocalDispatcher
from .grouped import GroupedExperts
from .lora.adapters import active_adapters, any_dropout

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple("_global" + name for name in _HOOKS)
_of_all_modules = vars(torch.nn.modules.module)


def runs_as_one_op(
    layer: Any,  # a MoEFeedForward
    tokens: Tensor,  # [T, D]
) -> bool:
    """Return whether the settings allow one op. With a subclass of router, experts or dispatcher, return False."""
    router, experts = layer._modules["router"], layer._modules["experts"]
    if type(router) is not TopKRouter or type(experts) is not GroupedExperts:
        return False
    if layer.balance_losses.any and (torch.is_grad_enabled() or layer.training):
        return False
    lora = experts._modules.get("lora")
    return (
        type(layer.dispatcher) is LocalDispatcher
        and router.is_linear_op
        and router.assignment is None
        and router.noise is None
        and experts.num_experts == router.num_experts
        and experts.implementation == router.implementation
        and experts.local_share is None
        and layer.capacity is None
        and layer.observer is None
        and layer._config.latent_dim is None
        and not (experts.reserved_sms or layer.separate_router_input)
        and not ("forward" in vars(router) or has_hooks(router))
        and not ("forward" in vars(experts) or has_hooks(experts))
        and (lora is None or not any_dropout(active_adapters(lora, None)))
        and runs_unseen(experts.implementation, tokens)
    )


def runs_unseen(implementation: str | None, tokens: Tensor) -> bool:
    """Return whether kernels run for these tokens, and neither a dispatch mode nor `torch.jit.trace` sees each op."""
    if not torch.compiler.is_dynamo_compiling() and (
        jit_tracing_state() is not None or (num_dispatch_modes() and type(tokens) is Tensor)
    ):
        return False
    device_type = tokens.device.type
    if any_autocast_is_enabled() and autocast_is_enabled(device_type):
        tokens = autocast(tokens[:0], device_type)  # an empty tensor in the dtype in which the kernels compute
    return runs_kernels(implementation, tokens)


def compute_whole(
    layer: Any,  # a MoEFeedForward
    tokens: Tensor,  # [T, D]
) -> Tensor:  # [T, D]
    """Return the sum of the experts' outputs for each token. In training, count the choices if the router has a
    selection bias. Call the router's forward hooks after the op. These hooks only read the choice."""
    router, experts = layer._modules["router"], layer._modules["experts"]
    assert isinstance(router, TopKRouter) and isinstance(experts, GroupedExperts)
    made = experts.route_and_compute(tokens, router)
    if layer.training and router._spec.selection_bias is not None:
        router.count(differences(made.offsets))
    for hook in router._forward_hooks.values():
        hook(router, (tokens,), made)
    return made.out


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks, except hooks marked by `watches_choice`. A marked hook only reads
    the router's choice."""
    own = vars(module)
    for name in _GLOBAL_HOOKS:
        if _of_all_modules[name]:
            return True
    for name in _HOOKS:
        for hook in own[name].values():
            if not hasattr(hook, "watches_choice"):
                return True
    return False


def check_tokens(
    layer: Any,  # a MoEFeedForward
    x: Tensor,  # [..., D]
) -> None:
    """Raise ValueError if x differs from the experts' parameters in device or, without autocast, in dtype. The message
    says how to convert x.

    Experts of a subclass or with hooks are not checked here, because hooks may convert parameters or tokens, as FSDP's
    hooks do. The ops then check their operands.
    """
    experts = layer._modules["experts"]
    weight = experts._parameters.get("w_up")
    weight = experts.w_up if weight is None else weight
    if x.dtype == weight.dtype and x.device == weight.device:
        return
    if type(experts) is not GroupedExperts or "forward" in vars(experts) or has_hooks(experts):
        return
    device_type = weight.device.type
    if x.device != weight.device:
        raise ValueError(
            f"MoEFeedForward: x must be on {weight.device} as the parameters, got {x.device}; "
            f"pass x.to({str(weight.device)!r})"
        )
    if not autocast_is_enabled(device_type):
        raise ValueError(
            f"MoEFeedForward: x must have the parameters' dtype {weight.dtype}, got {x.dtype}; "
            f"pass x.to({weight.dtype}), or call the layer under torch.autocast({device_type!r})"
        )
