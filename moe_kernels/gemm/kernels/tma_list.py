"""Products A_list[g] @ B_list[g] through TMA. Programs make descriptors of each product's operands on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ...runtime.dispatch import FLOAT8
from ...runtime.launch import DESCRIPTOR_BYTES, Launch
from ...runtime.triton import tl, triton
from ..arguments.list import NUM_FIELDS, GroupedGemmListArguments
from ..kernel import GemmOperands, KernelMetadata, Operand, Status, TmaDesign
from .families import kernel_name
from .pointer import out_operand
from .problem_table import GroupedGemmListKernel, tile_origin, triton_dtype


@triton.jit
def _descriptor(address, leading, rows, columns, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a TMA descriptor of a matrix that is stored as `rows` rows of `columns` contiguous elements."""
    return tl.make_tensor_descriptor(
        address.to(tl.pointer_type(DTYPE)), [rows, columns], [leading, 1], [BLOCK_R, BLOCK_C]
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _tma_array_kernel(
    problems_ptr,  # [G, FIELDS] int64
    tile_to_problem_ptr,  # [num_tiles] int32
    num_tiles,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    A_COLUMN: tl.constexpr,
    B_COLUMN: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each program writes every num_programs-th [BLOCK_M, BLOCK_N] tile of all products. Grid: (programs,)."""
    HALF_N: tl.constexpr = BLOCK_N // 2
    # Tensor cores sum float8 products with about 14 bits. IMPRECISE makes `tl.dot` add each step's sum in float32.
    IMPRECISE: tl.constexpr = BLOCK_K if DTYPE.is_fp8() else None
    step = tl.num_programs(0)
    tile = tl.program_id(0)
    while tile < num_tiles:
        problem_ptr = problems_ptr + tl.load(tile_to_problem_ptr + tile).to(tl.int64) * FIELDS
        M = tl.load(problem_ptr + 3).to(tl.int32)
        N = tl.load(problem_ptr + 4).to(tl.int32)
        K = tl.load(problem_ptr + 5).to(tl.int32)
        a_leading, b_leading = tl.load(problem_ptr + 6), tl.load(problem_ptr + 7)
        first_tile = tl.load(problem_ptr + 10).to(tl.int32)
        end_tile = tl.load(problem_ptr + 11).to(tl.int32)
        if A_COLUMN:
            a_desc = _descriptor(tl.load(problem_ptr), a_leading, K, M, DTYPE, BLOCK_K, BLOCK_M)
        else:
            a_desc = _descriptor(tl.load(problem_ptr), a_leading, M, K, DTYPE, BLOCK_M, BLOCK_K)
        if B_COLUMN:
            b_desc = _descriptor(tl.load(problem_ptr + 1), b_leading, N, K, DTYPE, BLOCK_N, BLOCK_K)
        else:
            b_desc = _descriptor(tl.load(problem_ptr + 1), b_leading, K, N, DTYPE, BLOCK_K, BLOCK_N)
        out_desc = _descriptor(tl.load(problem_ptr + 2), tl.load(problem_ptr + 8), M, N, OUT_DTYPE, BLOCK_M, HALF_N)
        num_here = tl.cdiv(end_tile - tile, step)  # number of this problem's tiles that this program computes
        for i in range(0, num_here):
            local = tile + i * step - first_tile
            row, column = tile_origin(local, M, N, GROUP_TILES, BLOCK_M, BLOCK_N)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
            for k in range(0, K, BLOCK_K):
                if A_COLUMN:
                    a = a_desc.load([k, row]).T
                else:
                    a = a_desc.load([row, k])
                if B_COLUMN:
                    b = b_desc.load([column, k]).T
                else:
                    b = b_desc.load([k, column])
                total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
            left, right = total.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1).split()
            out_desc.store([row, column], left.to(OUT_DTYPE))
            out_desc.store([row, column + HALF_N], right.to(OUT_DTYPE))
        tile += num_here * step


class TmaArrayGemm(GroupedGemmListKernel):
    """Computes `out_list[g] = A_list[g] @ B_list[g]` for all g in one launch."""

    def supports_aligned(self, args: GroupedGemmListArguments) -> Status:
        if not args.survey.separate:
            return Status("expected leading dimensions of at least a row")
        return Status("takes no empty reduction" if 0 in args.survey.depths else None)

    def scratch_bytes(self, args: GroupedGemmListArguments) -> int:
        return DESCRIPTOR_BYTES * 3 * self.num_programs(args)

    def _launch(self, args: GroupedGemmListArguments) -> Launch:
        table = self.table(args)
        return Launch(
            _tma_array_kernel,
            (self.num_programs(args),),
            (table.problems, table.tile_to_problem, len(table.tile_to_problem)),
            {
                "DTYPE": triton_dtype(args.A.dtype),
                "OUT_DTYPE": triton_dtype(args.out_list[0].dtype),
                "FIELDS": NUM_FIELDS,
                "A_COLUMN": args.survey.layouts[0] == "column",
                "B_COLUMN": args.survey.layouts[1] == "column",
                **self.metadata.design.tile_options(),
            },
        )


# Designs of each dtype: (tile, warps, stages, numbers of programs per SM). Each number of programs per SM makes one
# kernel. Among kernels of equal cost, `rule.py` takes the first kernel. Float8 has no tile wider than 128 columns,
# because a sum of float8 products takes twice the registers of a sum of 16-bit products.
_DESIGNS = {
    dtype: [((128, 256, 64), 8, 4, (1,)), ((128, 128, 64), 8, 4, (1,)), ((64, 64, 64), 4, 4, (3, 1))]
    for dtype in (torch.bfloat16, torch.float16)
} | {FLOAT8: [((128, 128, 128), 8, 4, (1,))]}


def _kernels(
    dtype: torch.dtype, tile: tuple[int, int, int], warps: int, stages: int, choices: tuple[int, ...]
) -> Iterator[TmaArrayGemm]:
    if dtype == FLOAT8:
        # Tensor cores read float8 operands only if the axis of the reduction is contiguous.
        a, b = Operand(dtype, "row", 16), Operand(dtype, "column", 16)
        out = dataclasses.replace(out_operand(dtype), layout="row", alignment_bytes=16)
    else:
        a, b, out = Operand(dtype, None, 16), Operand(dtype, None, 16), Operand(dtype, "row", 16)
    operands = GemmOperands(a, b, out)
    first = None
    for per_sm in choices:
        design = TmaDesign(tile, warps, stages, persistent=True, tma=True, programs_per_sm=per_sm)
        name = kernel_name("grouped_gemm_list", "tma", dtype, design, f"p{per_sm}")
        # The smallest tile is excluded on Blackwell, because Triton 3.6 and 3.7 spill registers there.
        max_cc = 90 if tile == (64, 64, 64) else 103
        kernel = TmaArrayGemm(KernelMetadata(name, TmaArrayGemm, 90, operands, design, max_cc=max_cc), first)
        first = first or kernel
        yield kernel


TMA_ARRAY_KERNELS = tuple(
    kernel for dtype, designs in _DESIGNS.items() for design in designs for kernel in _kernels(dtype, *design)
)
