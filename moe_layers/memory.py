"""Memory that a layer saves for backward, computed without running the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_kernels.runtime.dispatch import runs_kernels


def saved_bytes(layer: Any, num_tokens: int, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the distinct storages saved for backward, without parameters, buffers and the input.

    The layer runs on fake tensors, which have sizes but no memory. This counts all it would save, and launches and
    allocates nothing on its device. Numbers of dropped or masked tokens do not matter.

    Args:
        dtype: dtype of the input, which requires a gradient. Default: the dtype of the parameters.

    Raises:
        ValueError: `layer` is not a `MoEFeedForward`.
        NotImplementedError: the reference would run (for example without a GPU), or several ranks share the experts. In
            both cases memory depends on the routing.
    """
    if not hasattr(layer, "aux_loss_scale"):
        raise ValueError(
            f"saved_bytes: layer must be a MoEFeedForward, got {type(layer).__name__}; of a model, add those of its "
            "layers, [part for part in model.modules() if isinstance(part, MoEFeedForward)]"
        )
    if layer.experts.local_share is not None:
        raise NotImplementedError("saved_bytes: with experts sharded over ranks, memory depends on the routing")
    w_up = layer.experts.w_up  # a parameter, or quantised
    if not runs_kernels(layer.experts.implementation, torch.empty(0, dtype=w_up.dtype, device=w_up.device)):
        raise NotImplementedError("saved_bytes: the reference would run, and its memory depends on the routing")
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # observers and balancing hold real tensors
    tensors = *layer.named_parameters(), *layer.named_buffers()
    own: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors}
    loss_scale, last_loss = layer.aux_loss_scale, layer.aux_loss
    fake_scale = None if loss_scale is None else mode.from_tensor(loss_scale)
    kept: dict[int, Tensor] = {}  # by storage; holding the tensors keeps the storages alive

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with mode, torch.inference_mode(False), torch.enable_grad():
        sizes = num_tokens, layer.d_model
        x = torch.empty(sizes, dtype=dtype or w_up.dtype, device=w_up.device, requires_grad=True)
        inputs = {"router_input": torch.empty_like(x, requires_grad=True)} if layer.separate_router_input else {}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                layer.aux_loss_scale = fake_scale
                torch.func.functional_call(layer, own, x, inputs)
            finally:
                layer.aux_loss_scale, layer.aux_loss = loss_scale, last_loss
    for tensor in (x, *inputs.values(), *own.values(), *([] if fake_scale is None else [fake_scale])):
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
