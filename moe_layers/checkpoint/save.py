"""Writing a layer as a checkpoint directory that `from_checkpoint` reads."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch import Tensor, nn

from .architectures import OWN_MODEL_TYPE, BlockSpec
from .blocks import OTHER_NAMES, check_names
from .config import RECORD, without_quantization
from .layouts import Key, Sizes, find_layout
from .source import CheckpointSource
from .writer import DEFAULT_SHARD_BYTES, ShardWriter


def save_layer(
    module: nn.Module,
    directory: str | os.PathLike[str],
    layout: str | None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Names and configuration are those of the model that the layer was read from, else our own."""
    spec = spec_of(module)
    source: CheckpointSource | None = module.checkpoint_source
    if layout is None:
        layout = "per_expert" if source is None or source.layout == "mxfp4" else source.layout
    target = find_layout(layout, gated=spec.activation.gated, bias=spec.bias)
    if module.experts.num_experts != spec.num_experts:
        raise ValueError(
            f"save_checkpoint: the layer must hold all {spec.num_experts} experts, got {module.experts.num_experts}"
        )
    if module.experts.local_share is not None:
        raise ValueError(
            "save_checkpoint: the layer must hold all experts, got experts that processes share; load their full state "
            "dict (torch.distributed.checkpoint.state_dict) into a layer of one process"
        )
    prefix = source.prefix if source is not None else "model.layers.0.mlp."
    check_names(prefix, target)
    state = module.state_dict()
    writer = ShardWriter(directory, max_shard_bytes)
    for parameter in OTHER_NAMES:
        if parameter in state:
            tensor = state[parameter].cpu().contiguous()
            if source is None:
                writer.add(prefix + OTHER_NAMES[parameter][0], tensor)
            else:
                writer.add(source.names[parameter], tensor.reshape(source.shapes[parameter]))
    if spec.shared_d_ff is not None:
        gated = spec.shared_is_gated
        sizes = Sizes(1, spec.shared_d_ff, spec.d_model)
        for key in source.shared if source is not None else _own_shared_keys(prefix, gated):
            writer.add(key.name, _shared_tensor(key, state[f"shared_expert.{key.parameter}"], sizes, gated))
    sizes = Sizes(spec.num_experts, spec.d_ff, spec.latent_dim or spec.d_model)
    for key in target.select(bias=spec.bias):
        parameter = state[f"experts.{key.parameter}"]
        for number in range(spec.num_experts) if key.per_expert else (None,):
            tensor = _expert_tensor(key, parameter, number, sizes, target.gated)
            writer.add(prefix + key.name.replace("{e}", str(number)), tensor)
    writer.finish({**_config(source, spec), RECORD: layout})


def spec_of(module: nn.Module) -> BlockSpec:
    """The facts of a layer."""
    shared = module.shared_expert
    return BlockSpec(
        d_model=module.d_model,
        d_ff=module.experts.w_down.shape[2],
        num_experts=module.num_experts,
        top_k=module.router.top_k,
        activation=module.experts.activation,
        router=module.router.spec,
        bias=module.experts.b_up is not None,
        shared_d_ff=None if shared is None else shared.w_down.shape[1],
        shared_gate=shared is not None and shared.w_gate is not None,
        shared_activation=None if shared is None else shared.activation,
        num_zero_experts=module.num_zero_experts,
        latent_dim=module.latent_dim,
        capacity=module.capacity if isinstance(module.capacity, int) else None,
    )


def _config(source: CheckpointSource | None, spec: BlockSpec) -> dict:
    if source is not None:
        return without_quantization(source.config)
    described = ("activation", "shared_activation", "router")
    block = {name: value for name, value in vars(spec).items() if name not in described}
    router = {
        field.name: value
        for field in dataclasses.fields(spec.router)
        if (value := getattr(spec.router, field.name)) != field.default
    }
    config = {"model_type": OWN_MODEL_TYPE, "block": block, "activation": vars(spec.activation), "router": router}
    return config if spec.shared_activation is None else {**config, "shared_activation": vars(spec.shared_activation)}


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
    """The tensor of one expert, or with number None of all."""
    tensor = torch.empty(key.shape(sizes), dtype=parameter.dtype, device="cpu")
    for expert in range(sizes.num_experts) if number is None else (number,):
        rows = key.rows_of_expert(expert, sizes)
        matrix = tensor if rows is None else tensor[rows] if key.flat else tensor[rows][0]
        key.disk_parts(matrix).copy_(key.parameter_parts(parameter[expert], gated))
    return tensor
