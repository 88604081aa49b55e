"""Converts whole models between layouts of the experts, shard by shard."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...architectures import ARCHITECTURES, RECORD, read_config
from ...checks import first_three
from ..files.blocks import check_names
from ..files.directory import CONFIG, CheckpointFiles, read_json
from ..files.layouts import Key, Layout, Sizes, find_layout
from ..files.quantization_config import float8_block, without_quantization
from ..files.recognition import is_main
from ..files.stored_weights import Stored, describe_all, group_names
from ..files.writer import DEFAULT_SHARD_BYTES, ShardWriter
from ..layer.plan import ambiguous_scales
from .survey import BlockSurvey, survey


@dataclass(frozen=True)
class Output:
    """A tensor to be written. The size is known before `make` computes the tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[CheckpointFiles], Tensor]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    layout: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[list[Output]], Iterable[Output]] = iter,
) -> None:
    """Write the model in `source` to `target`, with the experts in another layout.

    Tensors that are not quantised keep every bit. All quantised weights are dequantised. Zero experts return their
    token unchanged; if the source holds weights for zero experts, these weights are left out. Memory holds at most one
    output shard, plus one tensor or one expert's matrix of the source. Small files, such as the tokenizer, are copied.

    Args:
        dtype: dtype of weights that were quantised; all other weights keep their dtype. Default: bfloat16.
        progress: function that wraps the list of tensors to be written, such as tqdm. The default shows no progress.

    Raises:
        ValueError: the layout does not exist, cannot hold these experts, or has names that would not be recognised as
            experts of the block; the source is damaged, incomplete or in an unknown layout; the tensors, the router and
            config.json disagree about the experts' number or size; the experts have several dtypes, or tensors outside
            the source's layout; float8 scales are ambiguous; or `target` already holds files.
    """
    with CheckpointFiles(source) as files:
        values = read_json(files.directory / CONFIG)
        outputs = _outputs(files, values, layout, dtype)
        values = {**without_quantization(values), RECORD: layout}
        write_model(files, outputs, values, ShardWriter(target, max_shard_bytes), progress)


def _outputs(files: CheckpointFiles, values: dict, layout: str, dtype: torch.dtype) -> list[Output]:
    """Return all tensors of the new checkpoint. Errors are raised here, before anything is written."""
    surveys = survey(files)
    if not surveys:
        raise ValueError(f"checkpoint: {files.directory} has no MoE blocks to convert")
    experts = {found.block.weights[name][0] for found in surveys for name in found.experts}
    outputs = []
    for found in surveys:
        outputs += _expert_outputs(found, layout, dtype)
    return outputs + [copy_output(stored, dtype) for stored in all_weights(files, values) if stored.name not in experts]


def all_weights(files: CheckpointFiles, values: dict) -> Iterable[Stored]:
    """Return all weights of a checkpoint, sorted by name. Raise ValueError if a weight cannot be read."""
    weights = {name: (name, group) for name, group in sorted(group_names(files.file_of).items())}
    return describe_all(files, weights, float8_block(values, read_config(values, 0)), str(files.directory)).values()


def only_layout(found: BlockSurvey) -> tuple[Layout, Sizes]:
    where = f"checkpoint: the layout of the experts below {found.block.prefix}"
    if not found.layouts:
        raise ValueError(f"{where} is not known, or tensors do not fit it:\n  " + first_three(found.wrong, "\n  "))
    if len(found.layouts) > 1:
        raise ValueError(f"{where} is ambiguous, it may be {' or '.join(layout.name for layout in found.layouts)}")
    for of_biases in (False, True):
        held = [stored for name, stored in found.experts.items() if ("bias" in name) == of_biases]
        kinds = sorted({f"{stored.encoding} {stored.dtype}" for stored in held})
        if len(kinds) > 1:
            raise ValueError(
                f"checkpoint: the experts below {found.block.prefix} must have one dtype, got {first_three(kinds)}"
            )
    layout, sizes = next(zip(found.layouts, found.sizes, strict=True))
    _check_complete(found, layout, sizes)
    return layout, sizes


def _check_complete(found: BlockSurvey, layout: Layout, sizes: Sizes) -> None:
    """Raise ValueError if tensors, router and configuration disagree about the number or size of the experts, or if
    float8 scales can be read in two ways: see `ambiguous_scales`."""
    prefix, architecture = found.block.prefix, ARCHITECTURES.get(found.config.model_type)
    if found.num_routed != sizes.num_experts:
        raise ValueError(
            f"checkpoint: the router of {prefix} must have a row for each expert, got {found.num_routed} rows and "
            f"tensors of {sizes.num_experts} experts; join the files of all ranks first"
        )
    if architecture is not None and is_main(found.block):
        expected = architecture.expert_sizes(found.config)
        if expected != (sizes.num_experts, sizes.d_ff):
            raise ValueError(
                f"checkpoint: config.json gives block {prefix} {expected[0]} experts with d_ff {expected[1]}, "
                f"but its tensors are of {sizes.num_experts} with d_ff {sizes.d_ff}"
            )
    for key in layout.select(bias=False):
        stored = found.experts[key.name_of(0)]
        if problem := ambiguous_scales(stored, key):
            raise ValueError(f"checkpoint: {problem}")


def copy_output(stored: Stored, dtype: torch.dtype) -> Output:
    dtype = stored.dtype if stored.encoding == "plain" else dtype

    def make(files: CheckpointFiles) -> Tensor:
        return stored.read(files, None, "cpu").to(dtype, copy=True)

    return Output(stored.name, stored.shape, dtype, make)


def _expert_outputs(found: BlockSurvey, layout: str, dtype: torch.dtype) -> Iterator[Output]:
    source, sizes = only_layout(found)
    _check_renamed(found)
    target = find_layout(layout, gated=source.gated, bias=found.bias)
    check_names(found.block.prefix, target)
    reader = ExpertReader(found, source, sizes)
    for key in target.select(bias=found.bias):
        for number, name in key.names(sizes.num_experts):
            yield reader.output(found.block.prefix + name, key, number, dtype)


def _check_renamed(found: BlockSurvey) -> None:
    """Raise ValueError if an expert's tensor is not in the source's layout, or neither quantised nor floating point."""
    integers = [s.name for s in found.experts.values() if s.encoding == "plain" and not s.dtype.is_floating_point]
    if integers:
        raise ValueError(f"checkpoint: experts must be floating point or known to be quantised, got {integers[0]}")
    others = found.block.expert_tensors() - found.experts.keys()
    if others:
        names = [found.block.weights[name][0] for name in sorted(others)]
        raise ValueError(
            f"checkpoint: each tensor of experts must have a place in the layout, got {first_three(names)}"
        )


@dataclass(frozen=True)
class ExpertReader:
    """Reads an expert's matrices and biases (gate, up and down) one by one, from a block in any layout."""

    found: BlockSurvey
    layout: Layout
    sizes: Sizes

    def output(self, name: str, key: Key, number: int | None, dequantized: torch.dtype) -> Output:
        """Return the tensor to be written for expert `number`, or for all experts if `number` is None.

        Args:
            key: describes how the new layout stores the tensor.
            dequantized: dtype of the tensor if the source's weight is quantised.
        """
        stored, shape = self._stored(self._key(key.parts[0], key.bias), 0), key.shape(self.sizes)
        dtype = stored.dtype if stored.encoding == "plain" else dequantized

        def make(files: CheckpointFiles) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            for expert in range(self.sizes.num_experts) if number is None else (number,):
                places = key.disk_parts(key.matrix_of(tensor, expert, self.sizes))
                for part, place in zip(key.parts, places, strict=True):
                    place.copy_(self.part(files, part, expert, bias=key.bias))
            return tensor

        return Output(name, shape, dtype, make)

    def part(self, files: CheckpointFiles, part: str, expert: int, *, bias: bool) -> Tensor:  # [rows, columns]
        key = self._key(part, bias)
        rows = self._stored(key, expert).read(files, key.rows_of_expert(expert, self.sizes), "cpu")
        return key.disk_parts(key.without_experts(rows))[key.parts.index(part)]

    def _key(self, part: str, bias: bool) -> Key:
        return next(key for key in self.layout.keys if part in key.parts and key.bias == bias)

    def _stored(self, key: Key, expert: int) -> Stored:
        return self.found.experts[key.name_of(expert)]


def write_model(
    files: CheckpointFiles,
    outputs: list[Output],
    config: dict,
    writer: ShardWriter,
    progress: Callable[[list[Output]], Iterable[Output]],
) -> None:
    """Write the outputs and the configuration, and copy the source's other small files, such as the tokenizer."""
    for output in progress(outputs):
        writer.make_room(torch.Size(output.shape).numel() * output.dtype.itemsize)
        writer.add(output.name, output.make(files))
    writer.finish(config)
    for path in sorted(files.directory.iterdir()):
        keep = path.suffix in {".json", ".txt", ".model", ".jinja", ".py", ".md"} and "index.json" not in path.name
        if path.is_file() and keep and path.name != CONFIG:
            shutil.copy2(path, writer.directory / path.name)
