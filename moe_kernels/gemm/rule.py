"""The rule of thumb for sizes without a measurement: the order of kernels, and whether copies and fusions are worth
their cost."""

from __future__ import annotations

from torch import Tensor

from ..runtime.row_layout import has_aligned_rows
from .arguments.activation_gradient import ActivationGradientArguments
from .arguments.base import Arguments, layout_of, rows_bucket
from .arguments.grouped import GroupedGemmArguments, WgradArguments
from .kernel import Design, Kernel, PointerDesign, StreamingDesign, WarpSpecializedDesign


def best_first(kernels: list[Kernel], args: Arguments, measured: str | None) -> list[Kernel]:
    """Sort kernels that support the arguments: the fastest measured one first, the others by the rule of thumb.

    The rule of thumb is each kernel's estimate of its work divided by the speed of its design.
    """

    half_speed, drifts = _half_speed(args), _drifts(args)

    def rank(kernel: Kernel) -> tuple[bool, float]:
        speed = _speed(kernel.metadata.design, half_speed, drifts)
        return kernel.metadata.kernel_name != measured, kernel.estimate(args) / speed

    return sorted(kernels, key=rank)


def is_worth_fusing(args: ActivationGradientArguments) -> bool:
    """Return whether a GEMM with the activation's gradient in its epilogue is faster than a GEMM and a pass.

    Tiles of the fused GEMM are half as wide, because they share memory with their part of H. Its additional reads grow
    with the length of the reduction, but the cost of the saved pass does not. With few rows other designs multiply
    faster.
    """
    num_groups, depth, _ = args.B.shape
    return rows_bucket(args.num_rows, num_groups) >= _ROWS_WORTH_FUSING and depth <= _LONGEST_FUSED


def is_worth_aligning(matrices: Tensor, num_rows: int, cc: int) -> bool:
    """Return whether the copy engine of a GPU of compute capability `cc` saves more time than a copy to aligned rows
    costs. The tensor is an operand or the result of a GEMM. The copy engine needs rows that are multiples of 16
    bytes."""
    many = num_rows >= _ROWS_WORTH_AN_ALIGNED_WEIGHT * matrices.shape[0]
    return many and cc >= 90 and matrices.element_size() == 2 and not has_aligned_rows(matrices)


_ROWS_WORTH_AN_ALIGNED_WEIGHT = 512  # per expert
_ROWS_WORTH_FUSING = 256  # per expert; a bound of `rows_bucket`
_LONGEST_FUSED = 3072  # columns of the reduction

# Multiplications per element read at which a kernel has half its full speed.
_HALF_SPEED = 20
_HALF_SPEED_OF_MANY_ROWS = 40
_HALF_SPEED_BETWEEN_LINES = 150
_MANY_ROWS = 2048  # per group; a bound of `rows_bucket`
_WIDEST_TILE = 256  # columns
_DRIFTING = 0.85  # speed of warp-specialised programs that drift apart


def _half_speed(args: Arguments) -> int:
    """Return how many multiplications per element read give half the full speed, from measurements on an H100.

    A piece of a row that does not start at a cache line is read as two cache lines. Reading then bounds the GEMM: tiles
    of 128x256 are 1.19 to 1.35 times as fast as tiles of 128x128. With many rows the wide tiles are 1.1 to 1.35 times
    as fast if none is cut to half its width.
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

    On an H100 such kernels took 0.95 to 1.23 times as long as other TMA kernels. This holds for gradients of many rows
    without a gather, whose last column tile is partly filled.
    """
    if isinstance(args, WgradArguments):
        gathers = args.a_row_to_token is not None or args.dout_row_to_token is not None
    elif isinstance(args, GroupedGemmArguments) and args.B.stride(-1) == 1:  # as for the gradient of the rows
        gathers = args.row_to_token is not None
    else:
        return False
    return not gathers and args.out.shape[-1] % _WIDEST_TILE != 0 and _has_many_rows(args)


def _speed(design: Design, half_speed: int, drifts: bool) -> float:
    """Return the relative speed of computing one tile. Larger tiles read less per multiplication, and some designs
    stall less."""
    if isinstance(design, StreamingDesign):
        return 1.0  # such a kernel's estimate already covers reading
    rows, columns, _ = design.tile_shape
    reuse = rows * columns / (rows + columns)  # multiplications per element read
    if isinstance(design, WarpSpecializedDesign):
        kind = _DRIFTING if drifts else 1.0
    else:
        kind = 0.7 if isinstance(design, PointerDesign) else 0.9
    return kind * reuse / (reuse + half_speed)
