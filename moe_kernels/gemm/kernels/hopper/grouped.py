"""Kernel catalog entries of the warp-specialised grouped GEMM, and their checks of the arguments."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ....runtime.gluon import OBSTACLE, compiler_options, registers
from ....runtime.launch import Launch
from ....runtime.triton import cdiv
from ....specs import is_gated
from ...arguments.grouped import GroupedGemmArguments
from ...kernel import GemmOperands, KernelMetadata, Operand, Status, WarpSpecializedDesign
from ..families import GroupedGemmKernel, kernel_name, num_programs
from ..pointer import EXTRA
from .descriptors import descriptor, form, matrices_descriptor, plain_descriptor, ragged_descriptor, rows_descriptor

if OBSTACLE is None:
    from .activations import FORWARD
    from .grouped_device import grouped_gemm_kernel


_MOST_WALKED = 32  # maximum number of groups without a tile table; each of a warp's 32 lanes reads one group's offsets
_PRODUCT_PARTS = 2  # number of parts of a finished tile's product; each of the next tile's first steps writes one part


def _pieces(epilogue: str | None) -> int:
    """Return the number of pieces of a finished tile's activation. One reduction step computes one piece.

    A step lasts as long as four wgmma instructions of each warpgroup. A thread has time for about 16 values per step,
    or for 64 values without an exponential. A gated activation has half as many values as a plain activation.
    """
    if epilogue is None:
        return 0
    if is_gated(epilogue):
        return 4
    return 2 if epilogue in ("relu", "relu_squared") else 8


@functools.cache
def band_height(least: int, num_column_tiles: int, num_programs: int) -> int:
    """Return the height of a band, from `least` to 2 * `least` row tiles, that spreads half-width tiles most evenly.

    A band is a set of adjacent row tiles, computed column by column. The tiles of the last column have half the width,
    and those of one band are computed one after another. Every num_programs-th tile goes to the same program. With most
    heights, some programs get many half-width tiles and other programs none. The former run ahead of the latter, and
    the L2 cache drops data before the slower programs read the data.

    Let `step` be the gcd of num_programs and the number of tiles in a band. The first tiles of the bands go to the
    programs whose numbers are multiples of `step`, to each equally often. If `step` divides the height, all programs
    get equally many half-width tiles.
    """

    def unevenness(height: int) -> float:
        step = math.gcd(height * num_column_tiles, num_programs)
        return 0.0 if height % step == 0 else step / height

    return min(range(least, 2 * least + 1), key=unevenness)


class WarpSpecializedGroupedGemm(GroupedGemmKernel):
    """Computes `out[start:end] = epilogue(A[start:end] @ B[g] + bias[g])` with contiguous or gathered rows of A. With
    an epilogue, `preactivation` gets A @ B[g]."""

    obstacle = OBSTACLE

    def supports_design(self, args: GroupedGemmArguments) -> Status:
        if not (status := super().supports_design(args)):
            return status
        pieces, block_k = _pieces(self.metadata.epilogue), self.metadata.design.tile_shape[2]
        if pieces and cdiv(args.A.shape[1], block_k) < _PRODUCT_PARTS + pieces:
            # Each part needs a reduction step. Adding empty steps would take longer than a separate activation pass.
            least = (_PRODUCT_PARTS + pieces - 1) * block_k + 1
            rule = f"expected at least {least} columns with {self.metadata.epilogue}"
            return Status(f"Operand `A`: {rule}, got {args.A.shape[1]}")
        if args.bias is not None:
            gated = is_gated(self.metadata.epilogue)
            if args.bias.shape[-1] % (16 if gated else 8):
                return Status(f"Operand `bias`: expected rows of whole 16 bytes, got {args.bias.shape[-1]} columns")
            # A thread has too few registers for a float32 bias together with a gated activation.
            dtypes = (args.A.dtype,) if gated else (args.A.dtype, torch.float32)
            if args.bias.dtype not in dtypes:
                return Status(f"Operand `bias`: expected {' or '.join(map(str, dtypes))}, got {args.bias.dtype}")
            if args.bias.stride(-1) != 1:
                return Status(f"Operand `bias`: expected axis -1 contiguous, got strides {args.bias.stride()}")
        return status

    def _launch(self, args: GroupedGemmArguments) -> Launch:
        design = self.metadata.design
        block_m, block_n, block_k = design.tile_shape
        if self._walks(args):
            table, num_groups = (args.offsets, None, None), args.B.shape[0]
        else:
            made = self.tile_table(args)
            table, num_groups = (made.bounds, made.tiles, made.num_tiles), None
        _, depth, num_columns = args.B.shape
        half = (block_m // 2, block_n // 2)
        gated = is_gated(self.metadata.epilogue)
        pieces = _pieces(self.metadata.epilogue)
        extra_steps = 0 if args.extra_a is None else cdiv(args.extra_a.shape[1], block_k)
        out_desc, activated_desc = ragged_descriptor(args.out, half), None
        if pieces:
            out_desc, activated_desc = ragged_descriptor(args.preactivation, half, split=2 if gated else 1), out_desc
        num_column_tiles, programs = cdiv(num_columns, block_n), num_programs(args.A, args.reserved_sms)
        band = design.group_tiles
        if not gated and block_n == 256 and 0 < num_columns % 256 <= 128:  # the last column tile has half width
            band = band_height(band, num_column_tiles, programs)
        return Launch(
            grouped_gemm_kernel,
            (programs,),
            (
                *rows_descriptor(args.A, args.row_to_token, (block_m, block_k)),
                self._b_descriptor(args.B),
                *self._extra(args),
                args.bias,
                None if args.bias is None else args.bias.stride(0),
                out_desc,
                activated_desc,
                *table,
                args.out.shape[0],
                num_columns,
                num_column_tiles,
                # Each of a tile's first steps writes one part of the previous tile. A tile needs a step for each part.
                max(cdiv(depth, block_k) + extra_steps, _PRODUCT_PARTS + pieces),
            ),
            {
                "NUM_GROUPS": num_groups,
                "ZERO_TAIL": int(args.zero_tail),
                "EXTRA_STEPS": extra_steps,
                "B_COLUMN": self.metadata.operands.B.layout == "column",
                "FORWARD": FORWARD[self.metadata.epilogue] if pieces else None,
                "GATED": gated,
                "PIECES": pieces,
                **launch_options(design),
                "GROUP_TILES": band,
                **registers(design.gather, pieces),
            },
        )

    def _extra(self, args: GroupedGemmArguments) -> tuple[Any, ...]:
        """Return the five kernel arguments for `extra_a` and `extra_b`."""
        if args.extra_a is None:
            return (None,) * 5
        block_m, _, block_k = self.metadata.design.tile_shape
        b_desc = self._b_descriptor(args.extra_b)
        if self.metadata.design.gather:
            return None, args.extra_a, args.extra_a.stride(0), args.extra_a.shape[1], b_desc
        return plain_descriptor(args.extra_a, block_m, block_k), None, None, None, b_desc

    def _b_descriptor(self, b: Tensor) -> Any:
        _, block_n, block_k = self.metadata.design.tile_shape
        if is_gated(self.metadata.epilogue):
            (num_groups, depth, num_columns), (stride_g, _, stride_n) = b.shape, b.stride()
            d_ff = num_columns // 2
            shape, strides = [num_groups, 2, d_ff, depth], [stride_g, d_ff * stride_n, stride_n, 1]
            return descriptor(b, form(shape, strides, [1, 2, block_n // 2, block_k]))
        return matrices_descriptor(b, self.metadata.operands.B.layout == "column", block_n, block_k)

    def metadata_bytes(self, args: GroupedGemmArguments) -> int:
        return 0 if self._walks(args) else super().metadata_bytes(args)

    def with_metadata(self, args: GroupedGemmArguments, memory: Tensor | None) -> GroupedGemmArguments:
        return args if self._walks(args) else super().with_metadata(args, memory)

    def _walks(self, args: GroupedGemmArguments) -> bool:
        """Return whether the kernel finds tiles from the offsets, without a table. For few groups, finding tiles is
        faster than launching a kernel that makes a table."""
        if args.tile_table is not None or self.metadata.epilogue is not None or self.metadata.design.gather:
            return False
        return args.offsets is not None and len(args.offsets) <= _MOST_WALKED and args.offsets.is_contiguous()


def launch_options(design: WarpSpecializedDesign, axes: str = "MNK") -> dict[str, Any]:
    """Return launch options of all warp-specialised kernels. `axes` "MNK" adds BLOCK_M, BLOCK_N and BLOCK_K."""
    return {
        **design.blocks(axes),
        "NUM_BUFFERS": design.num_stages,
        "GROUP_TILES": design.group_tiles,
        **compiler_options(),
        "num_warps": 4,
    }


def _forward(dtype: torch.dtype, design: WarpSpecializedDesign, b_layout: str, epilogue: str | None):
    tma = Operand(dtype, "row", 16)
    operands = GemmOperands(tma, Operand(dtype, b_layout, 16), tma)
    name = kernel_name("grouped_gemm", "ws", dtype, design, f"b_{b_layout}", epilogue)
    # A gather together with an activation leaves too few registers for a bias.
    optional = EXTRA if design.gather and epilogue is not None else ("bias", *EXTRA)
    cls = WarpSpecializedGroupedGemm
    return cls(KernelMetadata(name, cls, 90, operands, design, epilogue, max_cc=90, optional_operands=optional))


def warp_specialized_design(tile: tuple[int, int, int], num_stages: int, group_tiles: int, gather: bool = False):
    return WarpSpecializedDesign(tile, 12, num_stages, gather, persistent=True, tma=True, group_tiles=group_tiles)


DTYPES = (torch.bfloat16, torch.float16)
_FORWARD = (
    warp_specialized_design((128, 256, 64), 4, 8),
    warp_specialized_design((128, 128, 64), 5, 8),
    warp_specialized_design((128, 256, 64), 4, 8, gather=True),
)

WARP_SPECIALIZED_KERNELS = (
    *(_forward(dtype, design, layout, None) for dtype in DTYPES for design in _FORWARD for layout in ("column", "row")),
    *(
        _forward(dtype, design, "column", epilogue)
        for dtype in DTYPES
        for design in _FORWARD
        for epilogue in (("swiglu",) if design.gather else ("swiglu", "relu"))
    ),
)
