"""Sorts kernels by a rule of thumb, for sizes without a measurement."""

from __future__ import annotations

from .arguments.base import Arguments, layout_of, rows_bucket
from .arguments.grouped import GroupedGemmArguments, WgradArguments
from .kernel import Design, Kernel, PointerDesign, StreamingDesign, WarpSpecializedDesign


def best_first(kernels: list[Kernel], args: Arguments, measured: str | None) -> list[Kernel]:
    """Return `kernels` sorted, best first: the kernel named `measured`, then the others by the rule of thumb.

    The rule of thumb sorts by a kernel's estimated cost divided by the speed of the kernel's design. All kernels must
    support `args`.
    """
    half_speed, drifts = _half_speed(args), _drifts(args)

    def rank(kernel: Kernel) -> tuple[bool, float]:
        speed = _speed(kernel.metadata.design, half_speed, drifts)
        return kernel.metadata.kernel_name != measured, kernel.estimate(args) / speed

    return sorted(kernels, key=rank)


# `_half_speed` returns one of these three numbers of multiplications per element read.
_HALF_SPEED = 20
_HALF_SPEED_OF_MANY_ROWS = 40
_HALF_SPEED_BETWEEN_LINES = 150
_MANY_ROWS = 2048  # a GEMM has many rows if the rows per group, rounded up to a power of two, exceed this number
_WIDEST_TILE = 256  # number of columns of the widest tile
_DRIFTING = 0.85  # relative speed of a warp-specialised kernel if `_drifts` is true


def _half_speed(args: Arguments) -> int:
    """Return how many multiplications per element read give a kernel on an H100 half of its full speed.

    A larger result favours wide tiles. If a tile's piece of a row does not start at a cache line, the piece spans two
    lines, and loads limit the GEMM's speed. Tiles of 128x256 are then 1.19 to 1.35 times as fast as tiles of 128x128.
    With many rows, tiles of 128x256 are 1.1 to 1.35 times as fast as tiles of 128x128, except in kernels that compute
    the last column tile at half width.
    """
    if not isinstance(args, GroupedGemmArguments | WgradArguments):
        return _HALF_SPEED
    if not all(layout_of(operand)[-1] for name, operand in args.operands.items() if name != "out"):
        return _HALF_SPEED_BETWEEN_LINES
    return _HALF_SPEED_OF_MANY_ROWS if _has_many_rows(args) else _HALF_SPEED


def _has_many_rows(args: GroupedGemmArguments | WgradArguments) -> bool:
    groups = (args.B if isinstance(args, GroupedGemmArguments) else args.out).shape[0]
    return rows_bucket(args.num_rows, groups) > _MANY_ROWS


def _drifts(args: Arguments) -> bool:
    """Return whether warp-specialised programs that share data drift so far apart that the L2 cache drops the data.

    Programs drift apart in GEMMs that compute a gradient from many rows, gather no rows, and fill only a part of the
    last column tile. In these GEMMs, warp-specialised kernels took 0.95 to 1.23 times as long as other TMA kernels on
    an H100.
    """
    if isinstance(args, WgradArguments):
        gathers = args.a_row_to_token is not None or args.dout_row_to_token is not None
    elif isinstance(args, GroupedGemmArguments) and args.B.stride(-1) == 1:  # input gradients have a row-major B
        gathers = args.row_to_token is not None
    else:
        return False
    return not gathers and args.out.shape[-1] % _WIDEST_TILE != 0 and _has_many_rows(args)


def _speed(design: Design, half_speed: int, drifts: bool) -> float:
    """Return the relative speed of computing one tile. Larger tiles read less per multiplication, and some designs
    stall less."""
    if isinstance(design, StreamingDesign):
        return 1.0  # a streaming kernel's estimated cost already includes reading
    rows, columns, _ = design.tile_shape
    reuse = rows * columns / (rows + columns)  # multiplications per element read
    if isinstance(design, WarpSpecializedDesign):
        kind = _DRIFTING if drifts else 1.0
    else:
        kind = 0.7 if isinstance(design, PointerDesign) else 0.9
    return kind * reuse / (reuse + half_speed)
