"""A finished tile of the grouped GEMM: its bias, its activation, and how it is written, one part at a time.

The tile waits in registers, as a left and a right half in the dtype of the result. What the activation is computed from
are these rounded values, the ones that backward reads.

An activation is computed in several pieces, each beside a step of its own, so that the tensor cores do not wait for it.
There the halves wait as pairs of columns: otherwise the compiler takes them apart, or computes the activation, before
the next tile's first step, and runs out of registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from .ring import ROW_BOUND, halves, joined, packed, pinned, send, stage, unpacked, write


@aggregate
class Finished:
    """Where the tile lies that waits to be written."""

    row: gl.tensor  # counted so that ROW_BOUND is the end of the group
    end: gl.tensor
    column: gl.tensor

    @gluon.constexpr_function
    def __init__(self, row, end, column):
        self.row = row
        self.end = end
        self.column = column


@gluon.constexpr_function
def num_parts(pieces):
    """Two of the product, then those of the activation."""
    return 2 + pieces


@gluon.jit
def waiting(rounded, PIECES: gl.constexpr):
    """The halves of a tile that has just been rounded, as they wait."""
    if PIECES:
        left, right = halves(rounded)
        return packed(left), packed(right)
    else:
        return halves(pinned(rounded))


@gluon.jit
def column_bias(bias_ptr, column_tile, num_columns, total, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """The bias of the columns of a tile, as the accumulator lays them out; zeros past the last column."""
    column = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    if GATED:
        # The tile holds the same columns of both halves. F is a multiple of 8, which the compiler learns here.
        HALF_N: gl.constexpr = BLOCK_N // 2
        d_ff = num_columns // 16 * 8
        place = column_tile * HALF_N + column % HALF_N
        return gl.load(bias_ptr + (place + column // HALF_N * d_ff), mask=place < d_ff, other=0.0)
    else:
        place = column_tile * BLOCK_N + column
        return gl.load(bias_ptr + place, mask=place < num_columns // 8 * 8, other=0.0)


@gluon.jit
def _activated_pairs(pairs, up_pairs, FORWARD: gl.constexpr, GATED: gl.constexpr, DTYPE: gl.constexpr):
    """Sixteen pairs of columns at a time."""
    if pairs.shape[1] > 16:
        left, right = halves(pairs)
        up_left, up_right = halves(up_pairs)
        left = _activated_pairs(left, up_left, FORWARD, GATED, DTYPE)
        return joined(left, _activated_pairs(right, up_right, FORWARD, GATED, DTYPE))
    else:
        gate = unpacked(pairs, DTYPE).to(gl.float32)
        up = unpacked(up_pairs, DTYPE).to(gl.float32) if GATED else gate
        return packed(FORWARD(gate, up).to(DTYPE))


@gluon.jit
def _piece(value, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """The columns of one of so many equal pieces."""
    if PIECES == 1:
        return value
    else:
        left, right = halves(value)
        if PIECE < PIECES // 2:
            return _piece(left, PIECE, PIECES // 2)
        else:
            return _piece(right, PIECE - PIECES // 2, PIECES // 2)


@gluon.jit
def _write_activated(
    pairs,
    up_pairs,
    desc,
    corner,
    buffer,
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
):
    """One piece goes to the staging buffer, which holds the compiler to computing it here; the last one sends all."""
    activated = unpacked(
        _activated_pairs(_piece(pairs, PIECE, PIECES), _piece(up_pairs, PIECE, PIECES), FORWARD, GATED, desc.dtype),
        desc.dtype,
    )
    stage(activated, buffer, PIECE, PIECES)
    if PIECE == PIECES - 1:
        send(desc, corner, buffer)


@gluon.jit
def write_part(
    PART: gl.constexpr,
    left,
    right,
    at,  # Finished
    out_desc,
    activated_desc,
    buffer,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    PIECES: gl.constexpr,
):
    """Part 0 of a finished tile is its left half, 1 its right half, the others are the pieces of the activation. Those
    of a plain activation are of the left half, then of the right one."""
    if PART < 2:
        _write_half(PART, left if PART == 0 else right, at, out_desc, buffer, GATED, PIECES)
    elif GATED:
        corner = [ROW_BOUND, at.end, at.row, at.column * (2 * left.shape[1])]
        _write_activated(left, right, activated_desc, corner, buffer, PART - 2, PIECES, FORWARD, GATED)
    else:
        OF_HALF: gl.constexpr = PIECES // 2
        HALF: gl.constexpr = (PART - 2) // OF_HALF
        pairs = left if HALF == 0 else right
        corner = [ROW_BOUND, at.end, at.row, (2 * at.column + HALF) * (2 * left.shape[1])]
        _write_activated(pairs, pairs, activated_desc, corner, buffer, (PART - 2) % OF_HALF, OF_HALF, FORWARD, GATED)


@gluon.jit
def _write_half(half, value, at, desc, buffer, SPLIT: gl.constexpr, PIECES: gl.constexpr):
    """Half 0 is the left one. SPLIT: the descriptor has an axis for the halves."""
    if PIECES:
        value = unpacked(value, desc.dtype)
    HALF_N: gl.constexpr = value.shape[1]
    if SPLIT:
        corner = [ROW_BOUND, at.end, at.row, half, at.column * HALF_N]
        write(value, desc, corner, buffer.reshape(desc.block_type.shape))
    else:
        corner = [ROW_BOUND, at.end, at.row, (2 * at.column + half) * HALF_N]
        write(value, desc, corner, buffer)


@gluon.jit
def write_last(
    left,
    right,
    at,  # Finished
    out_desc,
    activated_desc,
    buffer,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    PIECES: gl.constexpr,
):
    """All parts of the last tile."""
    if PIECES and not GATED:
        # A loop that the compiler does not unroll: it would compute both halves at once, and run out of registers.
        for half in range(0, gl.where(at.end > 0, 2, 0)):
            _write_half(half, left, at, out_desc, buffer, False, PIECES)
            corner = [ROW_BOUND, at.end, at.row, (2 * at.column + half) * (2 * left.shape[1])]
            for piece in gl.static_range(PIECES // 2):
                _write_activated(left, left, activated_desc, corner, buffer, piece, PIECES // 2, FORWARD, GATED)
            left = right
    else:
        for part in gl.static_range(num_parts(PIECES)):
            write_part(part, left, right, at, out_desc, activated_desc, buffer, FORWARD, GATED, PIECES)


@gluon.jit
def unchanged(gate, up):
    """The activation of zeros."""
    return gate
