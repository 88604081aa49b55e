"""Grouped GEMM for few rows per group: the kernel of `hopper/streaming.py` as catalog objects.

With few rows per group, reading the weights takes most of the time. These kernels keep more bytes in flight than those
with larger tiles, and decode quantised weights in the registers that multiply them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation.functions import EPILOGUES
from ...runtime.gluon import OBSTACLE
from ...runtime.launch import Launch
from ...runtime.triton import cdiv
from ...specs import is_gated
from ...types import TileTable
from ..arguments import GroupedGemmArguments
from ..kernel import SUPPORTED, Design, GroupedGemmOperands, Kernel, KernelMetadata, Operand, Status, StreamingDesign
from .base import GroupedGemmKernel, kernel_name
from .decoding import DecodingGemmArguments, DecodingGemmOperands
from .descriptors import descriptor, form

if OBSTACLE is None:
    from .hopper.activations import FORWARD
    from .hopper.streaming import streaming_kernel, values_per_64_bytes

_TABLE_ROWS = 128  # of a table that the kernel makes itself; it reads tables of any height
_MOST_ROWS = 16  # per group; each 8 rows read the weight once more
_REGISTERS = 128  # per thread, so that an SM runs 16 warps; without spills for 8 rows
_READING = 100  # multiplications of a row that take as long as reading and decoding one value of a weight


class _Weight(NamedTuple):
    """How the weights [G, out, in] are stored. Strides and the length of a row count stored elements."""

    form: str
    num_groups: int
    size_out: int
    size_in: int
    row: int
    stride_g: int
    stride_out: int
    element_bytes: int


def _estimate(design: Design, rows_per_group: int, num_columns: int) -> float:
    """Return the cost of one group and one step of the reduction.

    A group is read once for each tile of its rows. Most groups have fewer rows than twice the deviation above average.
    If groups have one row, there are few of them, and narrow tiles occupy more SMs.
    """
    rows, columns, _ = design.tile_shape
    passes = cdiv(math.ceil(rows_per_group + 2 * math.sqrt(rows_per_group)), rows)
    narrow = columns < 128
    return max(passes, 1) * (_READING + 2 * rows + (5 if narrow != (rows_per_group <= 1) else 0)) * num_columns


class StreamingGroupedGemm(GroupedGemmKernel):
    """Rows of A contiguous or gathered, B stored as [G, N, K]. The epilogue is none or a gated activation."""

    obstacle = OBSTACLE

    @property
    def epilogues(self) -> tuple[str, ...]:
        return () if self.metadata.epilogue is None else tuple(EPILOGUES)

    def _index_error(self, args: GroupedGemmArguments) -> str | None:
        return None

    def supports_design(self, args: GroupedGemmArguments) -> Status:
        if not (status := super().supports_design(args)):
            return status
        if args.bias is not None and args.bias.stride(-1) != 1:
            return Status(f"Operand `bias`: expected axis -1 contiguous, got strides {args.bias.stride()}")
        if (rows := cdiv(args.num_rows, args.B.shape[0])) > _MOST_ROWS:
            return Status(f"expected at most {_MOST_ROWS} rows per group on average, got {rows}")
        return SUPPORTED

    def estimate(self, args: GroupedGemmArguments) -> float:
        num_groups, _, num_columns = args.B.shape
        return _estimate(self.metadata.design, cdiv(args.num_rows, num_groups), num_columns)

    @property
    def _table_rows(self) -> int:
        return _TABLE_ROWS

    def _has_table(self, args: GroupedGemmArguments) -> bool:
        return args.tile_table is not None

    def launch(self, args: GroupedGemmArguments) -> Launch | None:
        if not args.out.numel():
            return None
        num_groups, depth, num_columns = args.B.shape
        stride_g, _, stride_n = args.B.stride()
        weight = _Weight("plain", num_groups, num_columns, depth, depth, stride_g, stride_n, args.B.element_size())
        return _launch(self, args, weight, args.B, None, self.tile_table(args), zero_tail=args.zero_tail)


class StreamingDecodingGemm(Kernel):
    """`DecodingGemmArguments` with B[g] the transpose of a quantised matrix, without adapters."""

    arguments_class = DecodingGemmArguments
    obstacle = OBSTACLE
    form: str
    values_per_byte = 1
    cost = 1.0  # measured beside the estimate of `DecodingGemm`

    def supports_design(self, args: DecodingGemmArguments) -> Status:
        if args.format.name != self.form:
            return Status(f"decodes {self.form}, got {args.format.name}")
        if not args.transposed:
            return Status("reads weights [G, out, in] along `in`, got a reduction along `out`")
        if args.extra_a is not None:
            return Status("Operand `extra_a`: this kernel takes none")
        if args.bias is not None and args.bias.stride(-1) != 1:
            return Status(f"Operand `bias`: expected axis -1 contiguous, got strides {args.bias.stride()}")
        row_bytes = args.shape[2] // self.values_per_byte
        if args.values.data_ptr() % 16 or row_bytes % 16 or not args.values.numel() or not args.A.numel():
            return Status(f"expected weights in rows of whole 16 bytes, aligned to 16, got {row_bytes} bytes")
        return self.supports_scales(args)

    def supports_scales(self, args: DecodingGemmArguments) -> Status:
        return SUPPORTED

    def estimate(self, args: DecodingGemmArguments) -> float:
        return self.cost * _estimate(self.metadata.design, args.rows_per_group, args.B.shape[2])

    def launch(self, args: DecodingGemmArguments) -> Launch | None:
        if not args.out.numel():
            return None
        assert args.tile_table is not None
        num_groups, size_out, size_in = args.shape
        row = size_in // self.values_per_byte
        weight = _Weight(self.form, num_groups, size_out, size_in, row, size_out * row, row, 1)
        # Triton has no e8m0.
        scales = args.scales.view(torch.uint8) if args.scales.dtype == torch.float8_e8m0fnu else args.scales
        return _launch(self, args, weight, args.values, scales, args.tile_table)


class StreamingFp8Gemm(StreamingDecodingGemm):
    form = "fp8"

    def supports_scales(self, args: DecodingGemmArguments) -> Status:
        if args.format.block != (128, 128) or args.scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return Status(f"takes floating-point scales of 128x128 blocks, got {args.scales.dtype} of {args.format}")
        return SUPPORTED


class StreamingMxfp4Gemm(StreamingDecodingGemm):
    form = "mxfp4"
    values_per_byte = 2
    cost = 0.65


def _launch(
    kernel: Kernel,
    args: GroupedGemmArguments | DecodingGemmArguments,
    weight: _Weight,
    stored: Tensor,
    scales: Tensor | None,
    table: TileTable,
    zero_tail: bool = False,
) -> Launch:
    design, epilogue = kernel.metadata.design, kernel.metadata.epilogue
    rows, block_out, _ = design.tile_shape
    product = None if epilogue is None else args.preactivation
    num_columns = weight.size_out // (1 + is_gated(epilogue))
    block = block_out // (1 + is_gated(epilogue))
    return Launch(
        streaming_kernel,
        (table.tiles.shape[0] * cdiv(num_columns, block),),
        (
            args.A,
            args.A.stride(0),
            args.row_to_token,
            descriptor(stored, _weight_form(weight, block_out, _chunks(design, weight.form), is_gated(epilogue))),
            scales,
            args.bias,
            0 if args.bias is None else args.bias.stride(0),
            args.out,
            args.out.stride(0),
            product,
            0 if product is None else product.stride(0),
            table.bounds,
            table.tiles,
            table.num_tiles,
            weight.num_groups,
        ),
        {
            "OUT": weight.size_out,
            "IN": weight.size_in,
            "FORM": weight.form,
            "NAN_255": weight.form == "mxfp4" and args.scales.dtype == torch.float8_e8m0fnu,
            "FORWARD": None if epilogue is None else FORWARD[epilogue],
            "GATED": is_gated(epilogue),
            "ZERO_TAIL": int(zero_tail),
            "TILE_ROWS": table.block_rows,
            "BLOCK_OUT": block_out,
            "ROWS": rows,
            "CHUNKS": _chunks(design, weight.form),
            "STAGES": design.num_stages,
            "num_warps": design.num_warps,
            **({"maxnreg": _REGISTERS} if rows == 8 else {}),
        },
    )


def _chunks(design: Design, form: str) -> int:
    """Return the chunks of 64 bytes of a step."""
    return design.tile_shape[2] // values_per_64_bytes(form)


@functools.lru_cache(maxsize=4096)
def _weight_form(weight: _Weight, block_out: int, chunks: int, gated: bool) -> dict[str, Any]:
    """Return all fields of the weight's descriptor except its tensor. Two halves of a gated one never overlap."""
    columns = 64 * chunks // weight.element_bytes
    shape, strides, block = [weight.size_out, weight.row], [weight.stride_out, 1], [block_out, columns]
    if gated:
        half = weight.size_out // 2
        shape, strides = [2, half, weight.row], [half * weight.stride_out, *strides]
        block = [2, block_out // 2, columns]
    bits, swizzle = 8 * weight.element_bytes, 64 * chunks
    return form([weight.num_groups, *shape], [weight.stride_g, *strides], [1, *block], bits, swizzle)


def _grouped(dtype: torch.dtype, design: StreamingDesign, epilogue: str | None) -> StreamingGroupedGemm:
    result = Operand(dtype, "row", other_dtypes=() if epilogue else (torch.float32,))
    operands = GroupedGemmOperands(Operand(dtype, "row", 16), Operand(dtype, "column", 16), result)
    name = kernel_name("grouped_gemm", "streaming", dtype, design, epilogue)
    cls = StreamingGroupedGemm
    return cls(KernelMetadata(name, cls, 90, operands, design, epilogue, max_cc=90, optional_operands=("bias",)))


def _decoding(cls: type[StreamingDecodingGemm], design: StreamingDesign) -> StreamingDecodingGemm:
    operands = DecodingGemmOperands(Operand(torch.bfloat16, "row", 16), Operand(torch.bfloat16, "row"))
    name = kernel_name("decoding_gemm", "streaming", torch.bfloat16, design, cls.form)
    return cls(KernelMetadata(name, cls, 90, operands, design, max_cc=90, optional_operands=("bias",)))


def _designs(values: int, *tiles: tuple[int, int, int, int]) -> list[StreamingDesign]:
    """Return designs of (rows, columns, stages, warps) with this many values of the reduction per step."""
    return [StreamingDesign((rows, columns, values), warps, stages, tma=True) for rows, columns, stages, warps in tiles]


# With more rows per group a warp-specialised kernel is faster than 16 rows here.
_PLAIN = _designs(64, (8, 64, 4, 2), (8, 128, 3, 4))
_FP8 = _designs(128, (8, 64, 4, 2), (8, 128, 3, 4), (16, 128, 4, 4))
_MXFP4 = _designs(128, (8, 64, 4, 2), (16, 64, 4, 2))

STREAMING_KERNELS = (
    *(
        _grouped(dtype, design, epilogue)
        for dtype in (torch.bfloat16, torch.float16)
        for design in _PLAIN
        for epilogue in (None, "swiglu")
    ),
    *(_decoding(StreamingFp8Gemm, design) for design in _FP8),
    *(_decoding(StreamingMxfp4Gemm, design) for design in _MXFP4),
)
