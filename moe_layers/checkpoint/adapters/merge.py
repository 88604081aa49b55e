"""Adds a LoRA adapter to a checkpoint's weights of experts and linear layers, shard by shard."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import ExpertAdapters

from ...architectures import read_config
from ...checks import first_three
from ..files.directory import CONFIG, CheckpointFiles, read_json
from ..files.layouts import published_layouts
from ..files.recognition import block_of_module, stack_of
from ..files.stored_weights import Stored
from ..files.writer import DEFAULT_SHARD_BYTES, ShardWriter
from ..model.convert import ExpertReader, Output, all_weights, copy_output, only_layout, write_model
from ..model.survey import BlockSurvey, survey
from .adapter_files import ROOT, AdapterReport, PeftAdapter, read_peft_adapter
from .peft_config import check_mergeable, rank_and_scale, targets, targets_below

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


class _LinearAdapter(NamedTuple):
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float


def merge_adapter(
    source: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    orientation: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[list[Output]], Iterable[Output]] = iter,
) -> AdapterReport:
    """Add a PEFT adapter to the model in `source`, and write the merged model to `target`.

    The adapter may change experts and linear layers. Each changed weight is computed in float32 and rounded once to its
    dtype on disk. Names, layout and all other tensors do not change. Memory holds the adapter, one output shard and one
    matrix of the source.

    Args:
        orientation: order of the factors' axes: "0.19" or "0.18", named after a version of PEFT that writes this order.
            Default None: find the order from the adapter's shapes and version.
        progress: function that wraps the list of tensors to be written, such as tqdm. The default shows no progress.

    Raises:
        ValueError: the adapter changes other modules than experts and linear layers, or does not fit the model; the
            model is quantised; or `target` already holds files.
        NotImplementedError: the experts' tensors also hold zero experts, which use no weights.
    """
    with CheckpointFiles(source) as files:
        values = read_json(files.directory / CONFIG)
        interleaved = published_layouts(read_config(values, 0).model_type)[0] == "interleaved"
        loaded = read_peft_adapter(adapter, orientation=orientation, interleaved=interleaved)
        outputs = _outputs(files, values, loaded)
        write_model(files, outputs, values, ShardWriter(target, max_shard_bytes), progress)
    return loaded.report


@dataclass(frozen=True)
class _MergedReader(ExpertReader):
    """Reads one expert's matrix at a time, and adds the adapter to the matrix."""

    adapters: ExpertAdapters

    def part(self, files: CheckpointFiles, part: str, expert: int, *, bias: bool) -> Tensor:  # [rows, columns]
        weight = super().part(files, part, expert, bias=bias)
        up_a, up_b, down_a, down_b, scale = self.adapters
        a, b = (down_a, down_b) if part == "down" else (up_a, up_b)
        if bias or a is None or b is None:
            return weight
        b = b[expert]
        if part != "down" and self.layout.gated:
            b = b.chunk(2)[("gate", "up").index(part)]
        return _merged_weight(weight, a[expert], b, scale)


def _outputs(files: CheckpointFiles, values: dict, loaded: PeftAdapter) -> list[Output]:
    """Return all tensors of the merged checkpoint. Errors are raised here, before anything is written."""
    check_mergeable(loaded.config)
    experts, stacks = _expert_outputs(survey(files), loaded.layers)
    linear = _linear_adapters(loaded, stacks)
    if twice := sorted(linear.keys() & experts.keys()):
        raise ValueError(f"lora: a weight must be changed by one adapter, got several of {first_three(twice)}")
    outputs = []
    for stored in all_weights(files, values):
        name = stored.name
        is_changed = name in experts or name in linear
        if stored.encoding != "plain" or (is_changed and not stored.dtype.is_floating_point):
            kind = stored.dtype if stored.encoding == "plain" else stored.encoding
            raise ValueError(f"lora: the model must not be quantised, got {name} in {kind}; convert it first")
        if name in linear:
            outputs.append(_merged_linear(stored, linear.pop(name)))
        else:
            outputs.append(experts.get(name) or copy_output(stored, stored.dtype))
    if linear:
        raise ValueError(
            f"lora: {files.directory} must hold the weights that the adapter changes, got no {first_three(linear)}"
        )
    return outputs


def _expert_outputs(
    surveys: list[BlockSurvey], layers: dict[str, ExpertAdapters]
) -> tuple[dict[str, Output], dict[str, str]]:
    """Return the experts' changed weights by name. Also return a map of the names of stacks of layers, from PEFT's
    name, such as "model.layers", to the name on disk."""
    blocks = {found.block.prefix: found for found in surveys}
    outputs: dict[str, Output] = {}
    stacks: dict[str, str] = {}
    for key, adapters in layers.items():
        module = key.removeprefix(ROOT)
        prefix = block_of_module(list(blocks), module)
        stack, stored_stack = stack_of(module), stack_of(prefix)
        changed = {output.name: output for output in _merged(blocks[prefix], adapters)}
        if changed.keys() & outputs.keys() or stacks.setdefault(stack, stored_stack) != stored_stack:
            raise ValueError(
                "lora: a block must have the adapters of one module, and a stack of layers those of one stack; "
                f"got {key} for {prefix}, which has others"
            )
        outputs |= changed
    return outputs, stacks


def _linear_adapters(loaded: PeftAdapter, stacks: dict[str, str]) -> dict[str, _LinearAdapter]:
    """Return the adapters of linear layers, by the adapted weight's name on disk. Raise ValueError if a tensor is no
    factor of a linear layer, a rank differs from the configuration, or two adapters change the same weight."""
    modules: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in loaded.others.items():
        if match := _FACTOR.fullmatch(name):
            modules.setdefault(match["module"], {})[match["factor"]] = tensor
        else:
            others.append(name)
    others += [module for module, factors in modules.items() if len(factors) < 2]
    others += [m for m in modules if targets_below(m.removeprefix(ROOT), loaded.config) - {"weight"}]
    if others:
        raise ValueError(
            f"lora: only lora_A and lora_B of experts and linear layers merge, got {first_three(others)}; "
            "PEFT's merge_and_unload merges all"
        )
    found: dict[str, _LinearAdapter] = {}
    for module, factors in modules.items():
        name = f"{module.removeprefix(ROOT)}.weight"
        stack = stack_of(name)
        stored_name = stacks.get(stack, stack) + name.removeprefix(stack)
        if stored_name in found:
            raise ValueError(f"lora: {stored_name} must be changed by one adapter, got {module}.weight and another")
        found[stored_name] = _adapter(module, factors["A"], factors["B"], loaded.config)
    return found


def _adapter(module: str, a: Tensor, b: Tensor, config: dict) -> _LinearAdapter:
    name = module.removeprefix(ROOT)
    # PEFT matches rank_pattern and alpha_pattern with the weight's name if target_parameters lists it, else with the
    # module's name.
    rank, scale = rank_and_scale(config, f"{name}.weight" if targets(f"{name}.weight", config) else name)
    if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
        raise ValueError(
            f"lora: the factors of {module} must be [{rank}, in] and [out, {rank}], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    return _LinearAdapter(a, b, scale)


def _merged_linear(stored: Stored, adapter: _LinearAdapter) -> Output:
    a, b, scale = adapter
    if stored.shape != (len(b), a.shape[1]):
        raise ValueError(f"lora: the adapter of {stored.name} {list(stored.shape)} is of {[len(b), a.shape[1]]}")

    def make(files: CheckpointFiles) -> Tensor:
        return _merged_weight(stored.read(files, None, "cpu"), a, b, scale)

    return Output(stored.name, stored.shape, stored.dtype, make)


def _merged(found: BlockSurvey, adapters: ExpertAdapters) -> Iterator[Output]:
    layout, sizes = only_layout(found)
    d_up = sizes.d_ff * (2 if layout.gated else 1)
    wanted = {"up": (sizes.num_experts, d_up, sizes.d_model), "down": (sizes.num_experts, sizes.d_model, sizes.d_ff)}
    pairs = {"up": (adapters.up_a, adapters.up_b), "down": (adapters.down_a, adapters.down_b)}
    for name, (a, b) in pairs.items():
        if a is not None and b is not None and (len(a), b.shape[1], a.shape[2]) != wanted[name]:
            raise ValueError(
                f"lora: the adapter of {found.block.prefix} must be of {name} weights {list(wanted[name])}, "
                f"got {[len(a), b.shape[1], a.shape[2]]}"
            )
    reader = _MergedReader(found, layout, sizes, adapters)
    for key in layout.select(bias=False):
        for number, short in key.names(sizes.num_experts):
            stored = found.experts[short]
            if stored.shape != key.shape(sizes):
                raise NotImplementedError(f"lora: {stored.name} holds zero experts, with which no adapter is merged")
            yield reader.output(found.block.weights[short][0], key, number, stored.dtype)


def _merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:  # [out, in]
    """Return weight + scale * b @ a, computed in float32 (in float64 for a float64 weight) and rounded once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(dtype) + scale * (b.to(dtype) @ a.to(dtype))).to(weight.dtype)
