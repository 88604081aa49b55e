"""Adds the adapters of experts to the weights of a checkpoint, shard by shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from moe_kernels import ExpertAdapters

from ..architectures import read_config
from ..checks import first_three
from .convert import ExpertReader, Output, copy_other_files, copy_output, only_layout
from .files import CONFIG, CheckpointFiles, read_json
from .layouts import Sizes, published_layouts
from .lora import AdapterReport, PeftAdapter, merged_weight, read_peft_adapter
from .quantization import float8_block
from .stored import describe, group_names
from .survey import BlockSurvey, survey
from .writer import DEFAULT_SHARD_BYTES, ShardWriter


def merge_adapter(
    source: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    orientation: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[list[Output]], Iterable[Output]] = iter,
) -> AdapterReport:
    """Write the model in `source` to `target` with PEFT's adapter added to the experts' weights.

    Each sum is computed in float32 and rounded once to the dtype of the weight. Names, layout and all other tensors
    stay as they are. Memory holds the adapter, one output shard and one expert's matrix of the source.

    Args:
        orientation: of the adapter, as in `read_peft_adapter`.
        progress: wraps the list of tensors to be written, as tqdm does.

    Raises:
        ValueError: the adapter also changes other modules, or does not fit the model's blocks; the model is quantised;
            or `target` already holds files.
        NotImplementedError: the experts' tensors also hold zero experts.
    """
    with CheckpointFiles(source) as files:
        values = read_json(files.directory / CONFIG)
        interleaved = published_layouts(read_config(values, 0).model_type)[0] == "interleaved"
        loaded = read_peft_adapter(adapter, orientation=orientation, interleaved=interleaved)
        outputs = _outputs(files, values, loaded)
        writer = ShardWriter(target, max_shard_bytes)
        for output in progress(outputs):
            writer.make_room(output.num_bytes)
            writer.add(output.name, output.make(files))
        writer.finish(values)
        copy_other_files(files.directory, writer.directory)
    return loaded.report


@dataclass(frozen=True)
class _MergedReader(ExpertReader):
    """Reads parts of experts with their adapters added."""

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
        return merged_weight(weight, a[expert], b, scale)


def _outputs(files: CheckpointFiles, values: dict, loaded: PeftAdapter) -> list[Output]:
    """Return all tensors of the merged checkpoint. All errors are found here, before anything is written."""
    if loaded.others:
        raise ValueError(f"lora: the adapter must be of experts alone, it also has {next(iter(loaded.others))}")
    blocks = {found.block.layer: found for found in survey(files)}
    if missing := sorted(loaded.layers.keys() - blocks.keys()):
        raise ValueError(
            f"lora: {files.directory} must have experts in layers [{first_three(missing)}], which the adapter changes"
        )
    changed: dict[str, Output] = {}
    for layer, adapters in loaded.layers.items():
        changed |= {output.name: output for output in _merged(blocks[layer], adapters)}
    float8 = float8_block(values, read_config(values, 0))
    outputs, problems = [], []
    for name, group in sorted(group_names(files.file_of).items()):
        stored = describe(files, name, group, float8, problems)
        if stored is not None and stored.encoding != "plain":
            raise ValueError(
                f"lora: the model must not be quantised, got {name} in {stored.encoding}; convert it first"
            )
        if stored is not None:
            outputs.append(changed.get(name) or copy_output(stored, stored.dtype))
    if problems:
        raise ValueError(f"checkpoint: {files.directory}:\n  " + "\n  ".join(problems))
    return outputs


def _merged(found: BlockSurvey, adapters: ExpertAdapters) -> Iterator[Output]:
    layout, sizes = only_layout(found)
    _check_sizes(found, sizes, adapters, layout.gated)
    reader = _MergedReader(found, layout, sizes, adapters)
    for key in layout.select(bias=False):
        for number in range(sizes.num_experts) if key.per_expert else (None,):
            short = key.name.replace("{e}", str(number))
            stored = found.experts[short]
            if stored.shape != key.shape(sizes):
                raise NotImplementedError(f"lora: {stored.name} holds zero experts, with which no adapter is merged")
            full_name = found.block.weights[short][0]
            yield Output(full_name, stored.shape, stored.dtype, reader.maker(key, number, stored.dtype))


def _check_sizes(found: BlockSurvey, sizes: Sizes, adapters: ExpertAdapters, gated: bool) -> None:
    d_up = sizes.d_ff * (2 if gated else 1)
    wanted = {"up": (sizes.num_experts, d_up, sizes.d_model), "down": (sizes.num_experts, sizes.d_model, sizes.d_ff)}
    pairs = {"up": (adapters.up_a, adapters.up_b), "down": (adapters.down_a, adapters.down_b)}
    for name, (a, b) in pairs.items():
        if a is not None and b is not None and (len(a), b.shape[1], a.shape[2]) != wanted[name]:
            raise ValueError(
                f"lora: the adapter of {found.block.prefix} must be of {name} weights {list(wanted[name])}, "
                f"got {[len(a), b.shape[1], a.shape[2]]}"
            )
