"""Writing a layer as a checkpoint directory that `from_checkpoint` reads."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ..architectures import OWN_MODEL_TYPE, RECORD
from ..config import MoEConfig
from .blocks import OTHER_NAMES, check_names
from .layouts import Key, Layout, Sizes, find_layout
from .quantization import without_quantization
from .source import CheckpointSource
from .writer import DEFAULT_SHARD_BYTES, ShardWriter


def save_layer(
    module: Any,  # MoEFeedForward, which imports this package
    directory: str | os.PathLike[str],
    layout: str | None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a directory that `from_checkpoint` reads, with every value bit by bit.

    Names and configuration are those of the model that the layer was read from. Those of any other layer are our own,
    and its configuration is `config.to_dict()`. Noise and an assignment are not saved.

    Args:
        directory: must be empty or not exist.
        layout: of the experts: "per_expert", "fused", "transposed", "interleaved", ...; None for the source's.

    Raises:
        ValueError: the layout is unknown or has no place for these experts, experts are missing here, or the directory
            holds files.
    """
    config: MoEConfig = module.config
    source: CheckpointSource | None = module.checkpoint_source
    if layout is None:
        layout = "per_expert" if source is None or source.layout == "mxfp4" else source.layout
    target = find_layout(layout, gated=config.is_gated, bias=config.bias)
    _check_holds_all(module, config.num_experts)
    if module.experts.lora is not None:
        names = sorted(module.experts.lora)
        raise ValueError(f"save_checkpoint: merge_lora or remove_lora must come first, got adapters {names}")
    prefix = source.prefix if source is not None else "model.layers.0.mlp."
    check_names(prefix, target)
    state = module.state_dict()
    writer = ShardWriter(directory, max_shard_bytes)
    _add_others(writer, state, source, prefix)
    _add_shared_expert(writer, state, source, prefix, config)
    _add_experts(writer, state, target, prefix, config)
    own = {"model_type": OWN_MODEL_TYPE, **config.to_dict()}
    writer.finish({**(own if source is None else without_quantization(source.config)), RECORD: layout})


def _check_holds_all(module: Any, num_experts: int) -> None:
    experts = module.experts
    if experts.num_experts != num_experts:
        raise ValueError(f"save_checkpoint: the layer must hold all {num_experts} experts, got {experts.num_experts}")
    if experts.local_share is not None:
        raise ValueError(
            "save_checkpoint: the layer must hold all experts, got experts sharded over ranks; load their full state "
            "dict (torch.distributed.checkpoint.state_dict) into a layer on one rank"
        )


def _add_others(writer: ShardWriter, state: dict[str, Tensor], source: CheckpointSource | None, prefix: str) -> None:
    """Add all tensors except the matrices of the experts and of the shared expert."""
    for parameter in OTHER_NAMES:
        if parameter in state:
            tensor = state[parameter].cpu().contiguous()
            if source is None:
                writer.add(prefix + OTHER_NAMES[parameter][0], tensor)
            else:
                writer.add(source.names[parameter], tensor.reshape(source.shapes[parameter]))


def _add_shared_expert(
    writer: ShardWriter, state: dict[str, Tensor], source: CheckpointSource | None, prefix: str, config: MoEConfig
) -> None:
    if config.shared_d_ff is None:
        return
    gated, sizes = config.shared_is_gated, Sizes(1, config.shared_d_ff, config.d_model)
    for key in source.shared if source is not None else _own_shared_keys(prefix, gated):
        writer.add(key.name, _shared_tensor(key, state[f"shared_expert.{key.parameter}"], sizes, gated))


def _add_experts(writer: ShardWriter, state: dict[str, Tensor], target: Layout, prefix: str, config: MoEConfig) -> None:
    sizes = Sizes(config.num_experts, config.d_ff, config.latent_dim or config.d_model)
    for key in target.select(bias=config.bias):
        parameter = state[f"experts.{key.parameter}"]
        for number in range(config.num_experts) if key.per_expert else (None,):
            tensor = _expert_tensor(key, parameter, number, sizes, target.gated)
            writer.add(prefix + key.name.replace("{e}", str(number)), tensor)


def _own_shared_keys(prefix: str, gated: bool) -> list[Key]:
    parts = ("gate", "up", "down") if gated else ("up", "down")
    return [Key(f"{prefix}shared_expert.{part}_proj.weight", (part,)) for part in parts]


@torch.no_grad()
def _shared_tensor(key: Key, parameter: Tensor, sizes: Sizes, gated: bool) -> Tensor:
    tensor = torch.empty(key.matrix_shape(sizes), dtype=parameter.dtype, device="cpu")
    key.disk_parts(tensor).copy_(key.parameter_parts(parameter, gated))
    return tensor


@torch.no_grad()
def _expert_tensor(key: Key, parameter: Tensor, number: int | None, sizes: Sizes, gated: bool) -> Tensor:
    """Return the tensor of one expert, or of all experts if `number` is None."""
    tensor = torch.empty(key.shape(sizes), dtype=parameter.dtype, device="cpu")
    for expert in range(sizes.num_experts) if number is None else (number,):
        rows = key.rows_of_expert(expert, sizes)
        matrix = tensor if rows is None else tensor[rows] if key.flat else tensor[rows][0]
        key.disk_parts(matrix).copy_(key.parameter_parts(parameter[expert], gated))
    return tensor
