"""Put expert choices of inference engines, an array [S, layers, K] per sequence, in the order of a training batch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def choices_of_rollouts(
    model: nn.Module,
    routers: Mapping[str, Any],
    rollouts: Iterable[Any],
    attention_mask: Tensor | None,  # [B, S]
    lengths: Sequence[int] | None,
) -> dict[str, Tensor]:  # [T, K] int32
    """Return the choices of one forward, by router name. See `RoutingReplay.from_rollouts`."""
    arrays = [_as_choices(index, array) for index, array in enumerate(rollouts)]
    if not arrays:
        raise ValueError("RoutingReplay.from_rollouts: rollouts must hold a sequence, got none")
    layers = _layers_of(model, list(routers), arrays[0].shape[1])
    for index, array in enumerate(arrays):
        if array.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(
                f"RoutingReplay.from_rollouts: every rollout must have {list(arrays[0].shape[1:])} layers and experts, "
                f"got {list(array.shape[1:])} in rollout {index}"
            )
    positions, total = _positions(arrays, attention_mask, lengths)
    batch = torch.full((total, *arrays[0].shape[1:]), -1, dtype=torch.int32)  # [T, L, K]
    for array, rows in zip(arrays, positions, strict=True):
        batch[rows] = array
    choices = {name: batch[:, layer] for name, layer in zip(routers, layers, strict=True)}
    for name, choice in choices.items():
        _check_distinct(name, choice)
    return choices


def _as_choices(index: int, array: Any) -> Tensor:  # [S, L, K] int32
    choices = torch.as_tensor(array)
    if choices.dim() != 3 or choices.is_floating_point() or choices.is_complex() or choices.dtype == torch.bool:
        raise ValueError(
            "RoutingReplay.from_rollouts: a rollout must be integers [sequence, layer, top-k], "
            f"got {list(choices.shape)} {choices.dtype} in rollout {index}"
        )
    return choices.to("cpu", torch.int32)


def _layers_of(model: nn.Module, names: list[str], num_layers: int) -> list[int]:
    """Return each router's layer index in the arrays: its number among the routers, or among all layers."""
    if num_layers == len(names):
        return list(range(num_layers))
    numbers = [int(found[1]) for name in names if (found := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))]
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    texts = [config.get_text_config() if hasattr(config, "get_text_config") else config for config in configs]
    all_layers = next((getattr(config, "num_hidden_layers", None) for config in texts), None)
    if num_layers != all_layers or len(set(numbers)) != len(names) or max(numbers) >= num_layers:
        allowed = f"{len(names)} layers with experts" + (f" or {all_layers} layers" if all_layers else "")
        raise ValueError(f"RoutingReplay.from_rollouts: a rollout must have the model's {allowed}, got {num_layers}")
    return numbers


def _positions(
    arrays: list[Tensor], attention_mask: Tensor | None, lengths: Sequence[int] | None
) -> tuple[list[Tensor], int]:
    """Return the index in the batch of each token of each array, and the number of tokens of the batch."""
    if attention_mask is not None and lengths is not None:
        raise ValueError("RoutingReplay.from_rollouts: one of attention_mask and lengths must be None, got both")
    if attention_mask is not None:
        tokens, total = _of_padded(attention_mask, len(arrays)), attention_mask.numel()
    else:
        wanted = [len(array) for array in arrays] if lengths is None else [int(length) for length in lengths]
        if len(wanted) != len(arrays):
            raise ValueError(f"RoutingReplay.from_rollouts: lengths must be {len(arrays)} numbers, got {len(wanted)}")
        total = sum(wanted)
        tokens = list(torch.arange(total).split(wanted))
    for index, (array, rows) in enumerate(zip(arrays, tokens, strict=True)):
        if len(array) > len(rows):
            raise ValueError(
                f"RoutingReplay.from_rollouts: rollout {index} must have at most the {len(rows)} tokens of its "
                f"sequence, got {len(array)}"
            )
    return [rows[: len(array)] for array, rows in zip(arrays, tokens, strict=True)], total


def _of_padded(attention_mask: Tensor, num_sequences: int) -> list[Tensor]:
    """Return the token indices of each sequence in the flattened batch, without padding."""
    if attention_mask.dim() != 2 or len(attention_mask) != num_sequences:
        raise ValueError(
            f"RoutingReplay.from_rollouts: attention_mask must be [B={num_sequences}, S], "
            f"got {list(attention_mask.shape)}"
        )
    mask = attention_mask.to("cpu").bool()
    return [row.nonzero().flatten() + index * mask.shape[1] for index, row in enumerate(mask)]


def _check_distinct(name: str, choice: Tensor) -> None:
    ordered = choice.sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, :1] >= 0)
    if repeated.any():
        token = int(repeated.any(1).nonzero()[0])
        raise ValueError(
            f"RoutingReplay.from_rollouts: the experts of a token must differ, got {choice[token].tolist()} in {name}"
        )
