"""Reads and writes experts that keep the bytes of a quantised checkpoint: `from_checkpoint(keep_quantized=True)`.

A quantised matrix consists of a matrix of numbers and a smaller one of scales. One `Key` describes the layout of both
on disk. An FP8 scale belongs to a block of rows and columns. Transposing the matrix also transposes its blocks, so
blocks must be square if matrices on disk are transposed. Gate and up must each consist of whole blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_kernels.quantization.formats import MXFP4, as_format, scales_shape
from moe_kernels.types import QuantizedWeight, WeightFormat

from ...checks import first_three
from ...experts.stored import QuantizedExperts, as_bits, replace_weight
from ..files.directory import CheckpointFiles
from ..files.layouts import Key, Layout, Sizes, copy_expert
from .plan import Fill, Plan

WEIGHTS = ("experts.w_up", "experts.w_down")


def keep_stored_weights(module: Any, plan: Plan, files: CheckpointFiles) -> str:
    """Replace the expert weights of a layer on the meta device by quantised weights. Return the format's name.

    Raises:
        ValueError: the experts on disk are not quantised, or not in one supported format. The scales have several
            dtypes, or do not fit the layer's order of rows.
    """
    formats = set()
    for name in WEIGHTS:
        fills = [fill for fill in plan.fills if fill.parameter == name]
        format, scale_dtype = _format_of(fills, plan.sizes, files)
        weight = module.get_parameter(name)
        formats.add(format)
        shape = weight.shape
        packed = (*shape[:2], shape[2] // 2) if format.name == "mxfp4" else shape
        kind = torch.uint8 if format.name == "mxfp4" else torch.float8_e4m3fn
        values = torch.empty(packed, dtype=kind, device="meta")
        scales = torch.empty(scales_shape(format, shape), dtype=scale_dtype, device="meta")
        kept = QuantizedExperts(QuantizedWeight(values, scales, format, shape), weight.dtype)
        replace_weight(module.experts, name.rpartition(".")[2], kept)
    if len(formats) > 1:
        found = first_three(sorted(map(str, formats)))
        raise ValueError(f"from_checkpoint: keep_quantized needs experts in one format, got {found}")
    return str(formats.pop())


def _format_of(fills: list[Fill], sizes: Sizes, files: CheckpointFiles) -> tuple[WeightFormat, torch.dtype]:
    encodings = {fill.stored.encoding for fill in fills}
    scale_dtypes = {files.info(fill.stored.names[-1]).dtype for fill in fills}
    first = fills[0].stored
    if encodings <= {"mxfp4", "float4"}:
        format = MXFP4
    elif encodings == {"float8"} and all(fill.stored.dtype == torch.float8_e4m3fn for fill in fills):
        format = as_format("from_checkpoint", WeightFormat("fp8", first.block))
    else:
        described = sorted({f"{fill.stored.encoding} {fill.stored.dtype}" for fill in fills})
        raise ValueError(
            "from_checkpoint: keep_quantized needs experts in float8_e4m3fn by blocks or in MXFP4, "
            f"got {first_three(described)}, first {first.name}"
        )
    for key in {fill.key for fill in fills if fill.key is not None}:
        if _is_misplaced(key, format, sizes):
            raise ValueError(
                f"from_checkpoint: keep_quantized cannot place the scales of {key.name} as {format}, because its parts "
                f"are no whole blocks (d_ff {sizes.d_ff}); load without keep_quantized, then call quantize_experts_"
            )
    if len(scale_dtypes) > 1:
        raise ValueError(
            f"from_checkpoint: scales must have one dtype to be kept, got {first_three(sorted(map(str, scale_dtypes)))}"
        )
    return format, scale_dtypes.pop()


def _is_misplaced(key: Key, format: WeightFormat, sizes: Sizes) -> bool:
    """Return whether `key` describes the order of the quantised numbers on disk, but not the order of their scales."""
    rows, columns = format.block
    if format.name == "mxfp4":
        return key.transposed or key.flat
    cut = key.parts != ("down",) and sizes.d_ff % rows != 0
    return key.interleaved or key.flat or cut or (key.transposed and rows != columns)


def fill_stored(
    fill: Fill, files: CheckpointFiles, sizes: Sizes, kept: QuantizedExperts, *, expert: int, place: int, gated: bool
) -> None:
    """Read one expert's quantised numbers and scales from `files` into `kept`, at index `place` of the first axis.
    Raise ValueError if a scale is not finite."""
    assert fill.key is not None
    rows = fill.key.rows_of_expert(expert, sizes)
    numbers, scales = (fill.key.without_experts(files.read(name, rows)) for name in fill.stored.names)
    is_finite = as_bits(scales) != 255 if scales.element_size() == 1 else scales.isfinite()
    if not is_finite.all():
        raise ValueError(f"checkpoint: the scales of {fill.stored.name} must be finite")
    if fill.stored.encoding == "mxfp4":
        numbers = numbers.flatten(1)  # [rows, K / 32, 16] -> [rows, K / 2]
    for name, matrix in (("values", numbers), ("scales", scales)):
        parameter, bits = kept.get_parameter(name), as_bits(matrix)
        copy_expert(fill.key, bits.to(parameter.device), parameter[place].view(bits.dtype), gated=gated)


def check_writable(layout: Layout, format: WeightFormat, sizes: Sizes) -> None:
    """Raise ValueError unless checkpoints of this layout can hold experts in this format."""
    cure = "call dequantize_experts_ first"
    if format.name not in ("fp8", "mxfp4"):
        raise ValueError(f"save_checkpoint: no published checkpoint has experts in {format}; {cure}")
    for key in layout.select(bias=False):
        if _is_misplaced(key, format, sizes):
            raise ValueError(
                f"save_checkpoint: layout {layout.name!r} cannot place the scales of {key.name} as {format} "
                f"(d_ff {sizes.d_ff}); choose another layout, or {cure}"
            )


def stored_matrices(layout: Layout, kept: QuantizedExperts) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """Yield (suffix of the name on disk, dtype on disk, bits [E, rows, columns]) of the numbers, then of the scales."""
    weight = kept.weight()
    values, scales = as_bits(weight.values).flatten(2), as_bits(weight.scales)
    if layout.encoding == "mxfp4":
        yield "_blocks", torch.uint8, values
        yield "_scales", torch.uint8, scales
    else:
        yield "", torch.int8 if weight.format.name == "mxfp4" else weight.values.dtype, values
        yield "_scale_inv", weight.scales.dtype, scales
