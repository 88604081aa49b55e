"""Writes a layer as a checkpoint directory that `from_checkpoint` reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...architectures import OWN_MODEL_TYPE, RECORD
from ...checks import first_three, is_dtensor, whole_state
from ...config import MoEConfig
from ...experts.stored import QuantizedExperts, stored
from ..files.blocks import OTHER_NAMES, check_names, shared_keys
from ..files.layouts import Key, Layout, Sizes, find_layout
from ..files.quantization_config import with_quantization, without_quantization
from ..files.writer import DEFAULT_SHARD_BYTES, ShardWriter
from .kept import check_writable, stored_matrices
from .plan import CheckpointSource


def save_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the module's state dict to one file. Raise ValueError if a tensor is sharded or on the meta device."""
    state = whole_state("save_safetensors", module)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def save_layer(
    module: Any,  # Any instead of MoEFeedForward, to avoid a circular import
    directory: str | os.PathLike[str],
    layout: str | None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a directory that `from_checkpoint` reads. Values keep every bit.

    A layer that was read from a checkpoint keeps the checkpoint's names and configuration. Other layers get this
    package's names, and `config.to_dict()` as their configuration. The layer's `noise` and `assignment` are not saved.
    Experts in FP8 with block scales or in MXFP4 keep their stored bytes, for `from_checkpoint(keep_quantized=True)`.

    Args:
        directory: must be empty or not exist.
        layout: layout of the experts, by its name in `LAYOUTS`, such as "per_expert" or "fused". "mxfp4", the layout of
            gpt-oss, is only for experts in MXFP4. None (default) keeps the layout that was read, if any.
            Otherwise, and for experts read as "mxfp4" that are no longer in MXFP4, None means "per_expert".

    Raises:
        ValueError: the layout is unknown or cannot hold these experts; the layer lacks experts or has adapters; no
            published checkpoint has the experts' format; or the directory holds files.
    """
    config: MoEConfig = module.config
    source: CheckpointSource | None = module.checkpoint_source
    kept = module.experts.w_up if isinstance(module.experts.w_up, QuantizedExperts) else None
    target = layout_to_write(module, layout, kept)
    _check_holds_all(module, config.num_experts)
    if module.experts.lora is not None:
        names = first_three(map(repr, sorted(module.experts.lora)))
        raise ValueError(f"save_checkpoint: merge_lora or remove_lora must come first, got adapters [{names}]")
    prefix = "model.layers.0.mlp." if source is None else source.prefix
    check_names(prefix, target)
    writer = ShardWriter(directory, max_shard_bytes)
    state: dict[str, Tensor | QuantizedExperts] = dict(module.state_dict())
    if kept is not None:
        state |= {"experts.w_up": kept, "experts.w_down": module.experts.w_down}
    for name, tensor in layer_tensors(module, state, target, prefix):
        writer.add(name, tensor.cpu())
    values = {"model_type": OWN_MODEL_TYPE, **config.to_dict()} if source is None else source.config
    values = without_quantization(values) if kept is None else with_quantization(values, kept.format, kept.dtype)
    writer.finish({**values, RECORD: target.name})


def layout_to_write(module: Any, layout: str | None, kept: QuantizedExperts | None) -> Layout:
    """Return the layout with this name; `save_layer` says what None means. Raise ValueError if the layout is unknown or
    cannot hold these experts. `kept` is a quantised weight of the experts, or None if the experts are not quantised."""
    config: MoEConfig = module.config
    source: CheckpointSource | None = module.checkpoint_source
    encoding = "" if kept is None else kept.format.name
    if layout is None:
        layout = source.layout if source is not None else "per_expert"
        if layout == "mxfp4" and encoding != "mxfp4":
            layout = "per_expert"
    target = find_layout(layout, gated=config.is_gated, bias=config.bias, encoding=encoding)
    if kept is not None:
        check_writable(target, kept.format, Sizes.of(config))
    return target


def layer_tensors(module: Any, state: Mapping[str, Any], target: Layout, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the checkpoint, contiguous tensor) for all tensors of a layer, one at a time.

    Args:
        state: the layer's state dict. Tensors must not be sharded; experts' weights may be `QuantizedExperts`.
        target: the layout to write.
    """
    config: MoEConfig = module.config
    source: CheckpointSource | None = module.checkpoint_source
    for parameter in OTHER_NAMES:
        if parameter in state:
            tensor = state[parameter].contiguous()
            if source is None:
                yield prefix + OTHER_NAMES[parameter][0], tensor
            else:
                yield source.names[parameter], tensor.reshape(source.shapes[parameter])
    if config.shared_d_ff is not None:
        gated = config.shared_is_gated
        own = (replace(key, name=prefix + key.name) for key in shared_keys(gated=gated)[0])
        for key in own if source is None else source.shared:
            stack_of_one = state[f"shared_expert.{key.parameter}"].unsqueeze(0)
            yield key.name, _expert_tensor(key, stack_of_one, None, gated)[0]
    for key in target.select(bias=config.bias):
        weight = state[f"experts.{key.parameter}"]
        dotted = key.per_expert and source is not None and source.dotted_scales
        for number, short in key.names(config.num_experts):
            name = prefix + short
            if not isinstance(weight, QuantizedExperts):
                yield name, _expert_tensor(key, weight, number, target.gated)
                continue
            for suffix, dtype, matrices in stored_matrices(target, weight):
                tensor = _expert_tensor(key, matrices, number, target.gated)
                tensor = tensor.unflatten(-1, (-1, 16)) if suffix == "_blocks" else tensor.view(dtype)
                is_dotted = dotted and suffix == "_scale_inv"
                yield name.removesuffix(".weight") + ".scale" if is_dotted else name + suffix, tensor
        del weight  # free this weight before the next weight is read


def _check_holds_all(module: Any, num_experts: int) -> None:
    experts = module.experts
    if experts.num_experts != num_experts:
        raise ValueError(f"save_checkpoint: the layer must hold all {num_experts} experts, got {experts.num_experts}")
    if experts.local_share is not None or is_dtensor(stored(experts.w_up)):
        raise ValueError(
            "save_checkpoint: the layer must hold all experts, got experts sharded over ranks; load their full state "
            "dict (torch.distributed.checkpoint.state_dict) into a layer on one rank"
        )


@torch.no_grad()
def _expert_tensor(key: Key, parameter: Tensor, number: int | None, gated: bool) -> Tensor:
    """Return the tensor that a checkpoint stores for one expert, or for all experts if `number` is None.

    Args:
        parameter: weights or quantised codes [E, rows, columns], their scales, or biases [E, rows].
    """
    num_experts, rows, columns = len(parameter), parameter.shape[1], parameter.shape[-1]
    is_down = key.parts == ("down",)
    sizes = Sizes(num_experts, *((columns, rows) if is_down else (rows // (2 if gated else 1), columns)))
    tensor = torch.empty(key.shape(sizes), dtype=parameter.dtype, device=parameter.device)
    for expert in range(num_experts) if number is None else (number,):
        key.disk_parts(key.matrix_of(tensor, expert, sizes)).copy_(key.parameter_parts(parameter[expert], gated))
    return tensor
