"""Products A_list[g] @ B_list[g] through pointers, for any size, layout and leading dimension, on any supported GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ...activation.functions import PLAIN_EPILOGUES
from ...runtime.dispatch import FLOAT8, FLOAT8_CC
from ...runtime.launch import Launch
from ...runtime.triton import tl, triton
from ..arguments.list import NUM_FIELDS, GroupedGemmListArguments
from ..kernel import GemmOperands, KernelMetadata, Operand, PointerDesign, Status
from .families import kernel_name
from .float32_products import dot_precision
from .pointer import activate, multiply_tile, out_operand, plain_forward
from .problem_table import GroupedGemmListKernel, tile_origin, triton_dtype


@triton.jit
def _strides(leading, by_columns, LAYOUT: tl.constexpr):
    """Return the row and the column stride. If all problems share a layout, the compiler knows which stride is 1."""
    if LAYOUT == "row":
        return leading, 1
    elif LAYOUT == "column":
        return 1, leading
    else:
        return tl.where(by_columns != 0, 1, leading), tl.where(by_columns != 0, leading, 1)


@triton.jit(do_not_specialize=["num_tiles"])
def _pointer_array_kernel(
    problems_ptr,  # [G, FIELDS] int64
    tile_to_problem_ptr,  # [num_tiles] int32
    num_tiles,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    A_LAYOUT: tl.constexpr,
    B_LAYOUT: tl.constexpr,
    PIECE: tl.constexpr,  # divisor of the addresses, leading dimensions and contiguous lengths of A and B, in elements
    OUT_PIECE: tl.constexpr,  # divisor of the addresses, leading dimensions and row lengths of out, in elements
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    FORWARD: tl.constexpr,  # device function of the activation, or None
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each program writes every num_programs-th [BLOCK_M, BLOCK_N] tile of all products. Grid: (programs,)."""
    ALIGNMENT: tl.constexpr = PIECE * DTYPE.primitive_bitwidth // 8
    OUT_ALIGNMENT: tl.constexpr = OUT_PIECE * OUT_DTYPE.primitive_bitwidth // 8
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        problem_ptr = problems_ptr + tl.load(tile_to_problem_ptr + tile).to(tl.int64) * FIELDS
        a_ptr = tl.multiple_of(tl.load(problem_ptr).to(tl.pointer_type(DTYPE)), ALIGNMENT)
        b_ptr = tl.multiple_of(tl.load(problem_ptr + 1).to(tl.pointer_type(DTYPE)), ALIGNMENT)
        out_ptr = tl.multiple_of(tl.load(problem_ptr + 2).to(tl.pointer_type(OUT_DTYPE)), OUT_ALIGNMENT)
        # Dividing and multiplying by PIECE changes no value, but tells the compiler the alignment.
        M = tl.load(problem_ptr + 3).to(tl.int32)
        N = tl.load(problem_ptr + 4).to(tl.int32) // OUT_PIECE * OUT_PIECE
        K = tl.load(problem_ptr + 5).to(tl.int32)
        if A_LAYOUT == "column":
            M = M // PIECE * PIECE
        if B_LAYOUT == "row":
            N = N // PIECE * PIECE
        if A_LAYOUT == "row" or B_LAYOUT == "column":
            K = K // PIECE * PIECE
        a_leading = tl.load(problem_ptr + 6) // PIECE * PIECE
        b_leading = tl.load(problem_ptr + 7) // PIECE * PIECE
        out_leading = tl.load(problem_ptr + 8) // OUT_PIECE * OUT_PIECE
        by_columns = tl.load(problem_ptr + 9)
        a_stride_m, a_stride_k = _strides(a_leading, by_columns & 1, A_LAYOUT)
        b_stride_k, b_stride_n = _strides(b_leading, by_columns & 2, B_LAYOUT)
        local = tile - tl.load(problem_ptr + 10).to(tl.int32)
        first_row, first_column = tile_origin(local, M, N, GROUP_TILES, BLOCK_M, BLOCK_N)
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        row_mask, column_mask = row < M, column < N
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        total = multiply_tile(
            a_ptr + row.to(tl.int64)[:, None] * a_stride_m + k[None, :] * a_stride_k,
            a_stride_k,
            row_mask,
            b_ptr + k[:, None] * b_stride_k + column.to(tl.int64)[None, :] * b_stride_n,
            b_stride_k,
            column_mask,
            K,
            EVEN_K,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * out_leading + column[None, :]
        total = activate(total, FORWARD)
        tl.store(out_ptrs, total.to(OUT_DTYPE), mask=row_mask[:, None] & column_mask[None, :])


class PointerArrayGemm(GroupedGemmListKernel):
    """Computes `out_list[g] = epilogue(A_list[g] @ B_list[g])` for all g in one launch."""

    epilogues = tuple(PLAIN_EPILOGUES)

    def supports_aligned(self, args: GroupedGemmListArguments) -> Status:
        return Status(None if args.survey.whole else "expected contiguous axes of whole 16 bytes for all problems")

    def _launch(self, args: GroupedGemmListArguments) -> Launch:
        design = self.metadata.design
        _, _, block_k = design.tile_shape
        table = self.table(args)
        layouts = args.survey.layouts
        wide = args.survey.aligned and args.survey.whole and "mixed" not in layouts
        a, out = args.A, args.out_list[0]
        return Launch(
            _pointer_array_kernel,
            (self.num_programs(args),),
            (table.problems, table.tile_to_problem, len(table.tile_to_problem)),
            {
                "DTYPE": triton_dtype(a.dtype),
                "OUT_DTYPE": triton_dtype(out.dtype),
                "FIELDS": NUM_FIELDS,
                "A_LAYOUT": layouts[0],
                "B_LAYOUT": layouts[1],
                "PIECE": 16 // a.element_size() if wide else 1,
                "OUT_PIECE": 16 // out.element_size() if wide else 1,
                "EVEN_K": all(depth % block_k == 0 for depth in args.survey.depths),
                "PRECISION": dot_precision(a),
                "FORWARD": plain_forward(self.metadata),
                **design.tile_options(),
            },
        )


# Designs of each dtype: (tile, warps, stages, numbers of programs per SM, alignment in bytes). Each number of programs
# per SM makes one kernel. Among kernels of equal cost, `rule.py` takes the first kernel. Every tile fits into the
# smallest shared memory of a supported GPU. Kernels for operands of any alignment (1 byte) load single elements. These
# kernels keep an address per element in registers, so their tiles must be small.
_DESIGNS = {
    dtype: [((128, 128, 64), 8, 3, (1, 4), 16), ((64, 64, 64), 4, 3, (4, 2, 16), 16), ((64, 64, 32), 8, 3, (2,), 1)]
    for dtype in (torch.bfloat16, torch.float16)
} | {
    torch.float32: [((64, 64, 16), 8, 2, (2,), 1)],
    FLOAT8: [((128, 128, 128), 8, 3, (1,), 16), ((64, 64, 64), 8, 3, (1,), 1)],
}


def _kernels(
    dtype: torch.dtype,
    tile: tuple[int, int, int],
    warps: int,
    stages: int,
    choices: tuple[int, ...],
    alignment: int,
    epilogue: str | None = None,
) -> Iterator[PointerArrayGemm]:
    either_layout = Operand(dtype, None, alignment)
    out = dataclasses.replace(out_operand(dtype), layout="row", alignment_bytes=alignment)
    operands = GemmOperands(either_layout, either_layout, out)
    min_cc, first = FLOAT8_CC if dtype == FLOAT8 else 80, None
    for per_sm in choices:
        design = PointerDesign(tile, warps, stages, persistent=True, programs_per_sm=per_sm)
        name = kernel_name("grouped_gemm_list", "pointer", dtype, design, f"p{per_sm}", epilogue)
        kernel = PointerArrayGemm(KernelMetadata(name, PointerArrayGemm, min_cc, operands, design, epilogue), first)
        first = first or kernel
        yield kernel


POINTER_ARRAY_KERNELS = (
    *(kernel for dtype, designs in _DESIGNS.items() for design in designs for kernel in _kernels(dtype, *design)),
    # Only the designs that need no alignment apply an activation.
    *(
        kernel
        for dtype, designs in _DESIGNS.items()
        if dtype != FLOAT8
        for kernel in _kernels(dtype, *designs[-1], "relu")
    ),
)
