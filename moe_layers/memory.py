"""Computes how much memory layers save for backward, by running the layers on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_kernels.runtime.dispatch import runs_kernels

from .routing.model_routers import attached_routers


def saved_bytes(layer: Any, num_tokens: int, dtype: torch.dtype | None = None) -> int:
    """Return the number of bytes that a forward saves for backward, without parameters, buffers and the input.

    Each storage counts once. The layer runs on fake tensors, which have sizes but no memory. The function therefore
    launches and allocates nothing on the layer's device. Dropped or masked tokens do not change the result.

    For a transformers model that was given to `enable`, the result is the sum over its MoE blocks: routers, routed
    experts and shared experts. Attention is not included.

    Args:
        layer: a `MoEFeedForward`, or a model with MoE blocks of transformers.
        dtype: dtype of the input, which requires a gradient. Default: the dtype of the parameters.

    Raises:
        ValueError: `layer` is neither a `MoEFeedForward` nor an enabled model.
        NotImplementedError: the memory depends on the routing, because the reference implementation would run (for
            example on a CPU) or the experts of the `MoEFeedForward` are sharded over ranks. In a transformers model,
            also: a norm follows the experts, or the module that holds router and experts also holds attention.
    """
    if hasattr(layer, "aux_loss_scale"):
        if layer.experts.local_share is not None:
            raise NotImplementedError("saved_bytes: with experts sharded over ranks, memory depends on the routing")
        settings = layer.experts.implementation, layer.experts.w_up
        return _saved_by(layer, layer, (num_tokens, layer.d_model), dtype, *settings)
    routers = attached_routers(layer).values() if isinstance(layer, nn.Module) else ()
    if not routers:
        raise ValueError(
            f"saved_bytes: layer must be a MoEFeedForward, got {type(layer).__name__}; of a model, add those of its "
            "layers, [part for part in model.modules() if isinstance(part, MoEFeedForward)]"
        )
    total = 0
    for router in routers:
        sizes = 1, num_tokens, router.weight.shape[-1]
        total += _saved_by(router.block, router, sizes, dtype, *router.expert_settings("saved_bytes"))
    return total


def _saved_by(
    module: nn.Module,
    losses: Any,  # the object that holds the module's `aux_loss_scale` and `aux_loss`
    sizes: tuple[int, ...],
    dtype: torch.dtype | None,
    implementation: str | None,
    w_up: Any,  # a tensor or quantised experts
) -> int:
    """Return how many bytes a forward of `module` on one input saves for backward."""
    # An empty tensor represents w_up, because a quantised w_up is not a tensor.
    if not runs_kernels(implementation, torch.empty(0, dtype=w_up.dtype, device=w_up.device)):
        raise NotImplementedError("saved_bytes: the reference would run, and its memory depends on the routing")
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # allow the real tensors that observers and balancing hold
    tensors = *module.named_parameters(), *module.named_buffers()
    own: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors}
    loss_scale, last_loss = losses.aux_loss_scale, losses.aux_loss
    fake_scale = None if loss_scale is None else mode.from_tensor(loss_scale)
    kept: dict[int, Tensor] = {}  # address of a storage -> a tensor that keeps the storage alive

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with mode, torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(sizes, dtype=dtype or w_up.dtype, device=w_up.device, requires_grad=True)
        separate = getattr(module, "separate_router_input", False)
        inputs = {"router_input": torch.empty_like(x, requires_grad=True)} if separate else {}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                losses.aux_loss_scale = fake_scale
                torch.func.functional_call(module, own, x, inputs)
            finally:
                losses.aux_loss_scale, losses.aux_loss = loss_scale, last_loss
    for tensor in (x, *inputs.values(), *own.values(), *([] if fake_scale is None else [fake_scale])):
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
