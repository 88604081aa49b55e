"""Records one forward of a transformers model: the padding, and the data that a recomputation in backward must reuse.

An MoE block of transformers gets no attention mask, and cannot tell which forward a checkpointed region recomputes.
Module hooks on the model provide the mask and the forward. A tensor hook on the model's outputs runs in backward before
any layer is recomputed, and tells the routers which forward will be recomputed. The tensor hook works with every kind
of checkpointing.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.runtime.pytorch import disable_dynamo

from ....routing.model_routers import ReplayedChoice

_HOOKS = "_moe_layers_forward_hooks"  # name of the attribute in which a hooked model keeps its hooks
_KEPT = ("cu_seq_lens_q", "position_ids", "output_router_logits")  # names of arguments that a recomputation reads
_active = threading.local()  # `forward`: the ModelForward that runs in this thread


class ModelForward:
    """The padding, arguments and replayed choices of one forward of a model.

    Args:
        owner: the outermost module that is a model of the library `transformers`.
        arguments: the arguments of the owner's forward, by name.
    """

    def __init__(self, owner: nn.Module, arguments: dict[str, Any]):
        self.owner = owner
        self.arguments = {name: arguments.get(name) for name in _KEPT}
        self.choices: dict[Any, ReplayedChoice] = {}  # HookedRouter -> replayed choice
        self.global_counts: dict[Any, Tensor] = {}  # HookedRouter -> counts of a global batch, [E] int64
        self.routers: list[Any] = []  # the HookedRouters that ran
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        mask = arguments.get("attention_mask")
        # Ignore masks that are not [B, S], because masks prepared for attention do not tell which tokens are padding.
        self._attention_mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._token_masks: dict[tuple[int, torch.device], Tensor] = {}  # (number of tokens, device) -> shared mask
        self._batch = len(tokens) if isinstance(tokens, Tensor) else None

    def token_mask(self, name: str, num_tokens: int, device: torch.device) -> Tensor | None:  # [T] bool
        """Return the mask of non-padding tokens on a layer's device, or None without an attention mask [B, S]. Raise
        ValueError if the number of tokens of the layer `name` does not fit the attention mask."""
        mask = self._attention_mask
        if mask is None:
            return None
        length = num_tokens // len(mask)
        if length * len(mask) != num_tokens or length > mask.shape[1]:
            raise ValueError(
                f"moe_layers: the tokens of {name} must be those of attention_mask {list(mask.shape)}, "
                f"got {num_tokens} tokens"
            )
        form = num_tokens, device
        if form not in self._token_masks:
            # Take the last columns, because with a KV cache the mask also covers past tokens.
            self._token_masks[form] = mask[:, mask.shape[1] - length :].reshape(-1).bool().to(device)
        return self._token_masks[form]

    def sequence_lengths(self, num_tokens: int, device: torch.device) -> Tensor | int | None:
        """Return the lengths [N] of packed sequences on a layer's device. Without packing, return the common length of
        all sequences, or None if the batch size is unknown."""
        boundaries = self.arguments.get("cu_seq_lens_q")
        if boundaries is not None:
            return torch.diff(boundaries).to(device)
        batch = self._batch if self._attention_mask is None else len(self._attention_mask)
        positions = self.arguments.get("position_ids")
        if batch == 1 and self._attention_mask is None and isinstance(positions, Tensor) and positions.dim() == 2:
            # Each packed sequence starts at position 0, but the first sequence may continue from another forward.
            is_start = positions[0] == 0
            is_start[:1] = True
            starts = is_start.nonzero().flatten()  # synchronises the host to count the sequences
            return torch.diff(starts, append=starts.new_full((1,), num_tokens)).to(device)
        return num_tokens // batch if batch else None

    def recompute(self, gradient: Tensor) -> None:
        """Tell the routers that backward recomputes this forward. A tensor hook of the outputs calls this method."""
        for router in self.routers:
            router.recomputed = self


def check_single_loss(model: Any, arguments: dict[str, Any]) -> None:
    """Raise ValueError if a forward with these arguments adds transformers' own balancing loss."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    wanted = arguments.get("output_router_logits")
    wanted = getattr(config, "output_router_logits", False) if wanted is None else wanted
    coefficient = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0.0))
    if wanted and coefficient:
        raise ValueError(
            "balance_routing: the model must have one balancing loss, got BalanceLosses and output_router_logits=True "
            f"with router_aux_loss_coef={coefficient}; set one of the two to zero"
        )


def current_forward() -> ModelForward | None:
    """Return the forward of the outermost hooked model that runs in this thread, or None if no such model runs."""
    return getattr(_active, "forward", None)


def hook_models(model: nn.Module) -> None:
    """Hook each transformers model in `model` once. The outermost hooked model makes a `ModelForward` per call."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _HOOKS not in vars(module):
            before = module.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)
            vars(module)[_HOOKS] = before, module.register_forward_hook(_end, always_call=True)


def unhook_models(model: nn.Module) -> None:
    """Remove the hooks that `hook_models` registered."""
    for module in model.modules():
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()


@disable_dynamo
def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if current_forward() is None:
        named = inspect.signature(type(module).forward).bind_partial(module, *args).arguments if args else {}
        _active.forward = ModelForward(module, {**named, **kwargs})


@disable_dynamo
def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """End the forward, even after an exception. Hook the outputs, so that `recompute` runs at the start of backward."""
    forward = current_forward()
    if forward is None or forward.owner is not module:
        return
    _active.forward = None
    if forward.routers and torch.is_grad_enabled():
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
        for value in values:
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(forward.recompute)
