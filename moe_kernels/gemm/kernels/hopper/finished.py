"""Writes a finished tile of the grouped GEMM, one part at a time, and applies the tile's bias and activation.

The tile stays in registers as a left and a right half, rounded to the dtype of the result. The activation is computed
from these rounded values plus the bias, because the backward pass reads the same rounded values. Without an activation,
the bias is added before the values are rounded.

An activation is computed in several pieces, each during one reduction step of the next tile. The tensor cores therefore
do not wait for the activation. The halves stay packed, with two columns in each 32-bit value. Otherwise the compiler
would unpack the halves, or compute the activation, before the next tile's first step, and run out of registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....runtime.gluon import aggregate
from .ring import ROW_BOUND, halves, joined, packed, pinned, send, stage, unpacked, write


@aggregate
class Finished:
    """Position of the finished tile that is still to be written."""

    group: gl.tensor
    row: gl.tensor  # row coordinate in a ragged descriptor: ROW_BOUND minus the number of rows to the group's end
    end: gl.tensor
    column: gl.tensor  # index of the column tile

    @gluon.constexpr_function
    def __init__(self, group, row, end, column):
        self.group = group
        self.row = row
        self.end = end
        self.column = column


@gluon.constexpr_function
def num_parts(pieces):
    """Return the number of parts in which a tile is written: the product's two halves, then the activation's pieces."""
    return 2 + pieces


@gluon.jit
def waiting(rounded, PIECES: gl.constexpr):
    """Return the two halves of a rounded tile. If an activation follows (PIECES > 0), the halves are packed."""
    if PIECES:
        left, right = halves(rounded)
        return packed(left), packed(right)
    else:
        return halves(pinned(rounded))


@aggregate
class Bias:
    """A bias [G, N] whose rows are multiples of 16 bytes long. Without a bias, functions take None instead."""

    pointer: gl.tensor
    stride: gl.tensor
    num_columns: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, stride, num_columns):
        self.pointer = pointer
        self.stride = stride
        self.num_columns = num_columns


@gluon.constexpr_function
def _columns_of_threads(columns):
    """Return the columns' layout in a wgmma result. A thread holds pairs of adjacent columns. One load reads a pair."""
    registers = [[1], *([8 << i] for i in range((columns // 8).bit_length() - 1))]
    return gl.DistributedLinearLayout(registers, [[2], [4], [0], [0], [0]], [[0], [0]], [], [columns])


@gluon.jit
def load_bias(bias, group, first, end, like):
    """Load the group's bias for the columns of `like`, starting at column `first`. Columns from `end` on get zeros."""
    column = first + gl.arange(0, like.shape[1], layout=_columns_of_threads(like.shape[1]))
    loaded = gl.load(bias.pointer + group.to(gl.int64) * bias.stride + column, mask=column < end, other=0.0)
    return gl.convert_layout(loaded, gl.SliceLayout(0, like.type.layout))


@gluon.jit
def plus_bias(value, loaded):
    if loaded.dtype != gl.float32:
        # Without `pinned`, the compiler would unpack the 16-bit bias at once, and threads would wait for the load.
        loaded = pinned(loaded)
    return value + loaded.to(gl.float32)[None, :]


@gluon.jit
def _activated_pairs(
    pairs,
    up_pairs,
    bias,
    group,
    first,  # column of the activation where the pairs start
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Return the activation, two columns per 32-bit value. To save registers, compute 16 pairs at a time, or 8 with a
    bias."""
    PAIRS: gl.constexpr = pairs.shape[1]
    AT_ONCE: gl.constexpr = 16 if bias is None else 8
    if PAIRS > AT_ONCE:
        left, right = halves(pairs)
        up_left, up_right = halves(up_pairs)
        left = _activated_pairs(left, up_left, bias, group, first, FORWARD, GATED, DTYPE)
        right = _activated_pairs(right, up_right, bias, group, first + PAIRS, FORWARD, GATED, DTYPE)
        return joined(left, right)
    else:
        gate = unpacked(pairs, DTYPE).to(gl.float32)
        up = unpacked(up_pairs, DTYPE).to(gl.float32) if GATED else gate
        if bias is not None:
            # Rounding down to multiples of 8 does not change `width`, but tells the compiler that rows are aligned.
            width = bias.num_columns // 16 * 8 if GATED else bias.num_columns // 8 * 8
            gate = plus_bias(gate, load_bias(bias, group, first, width, gate))
            up = plus_bias(up, load_bias(bias, group, width + first, 2 * width, up)) if GATED else gate
        return packed(FORWARD(gate, up).to(DTYPE))


@gluon.jit
def piece_of(value, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """Return the columns of piece PIECE, one of PIECES equal pieces of `value`."""
    if PIECES == 1:
        return value
    else:
        left, right = halves(value)
        if PIECE < PIECES // 2:
            return piece_of(left, PIECE, PIECES // 2)
        else:
            return piece_of(right, PIECE - PIECES // 2, PIECES // 2)


@gluon.jit
def _write_activated(
    pairs,
    up_pairs,
    at,  # position of the finished tile, a `Finished`
    first,  # column of the activation where piece 0 starts
    bias,
    desc,
    buffer,
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
):
    """Write one piece of the activation to the staging buffer. Because of the write, the compiler computes the piece
    at this point of the code. After the last piece, copy the whole buffer to global memory."""
    gate = piece_of(pairs, PIECE, PIECES)
    up = piece_of(up_pairs, PIECE, PIECES)
    column = first + PIECE * (2 * gate.shape[1])
    activated = _activated_pairs(gate, up, bias, at.group, column, FORWARD, GATED, desc.dtype)
    stage(unpacked(activated, desc.dtype), buffer, PIECE, PIECES)
    if PIECE == PIECES - 1:
        send(desc, [ROW_BOUND, at.end, at.row, first], buffer)


@gluon.jit
def write_part(
    PART: gl.constexpr,
    left,
    right,
    at,  # position of the finished tile, a `Finished`
    bias,  # Bias or None; added before the activation
    out_desc,
    activated_desc,
    buffer,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    PIECES: gl.constexpr,
):
    """Write one part of a finished tile. Part 0 is the left half of the product, and part 1 is the right half. Later
    parts are pieces of the activation. Pieces of a plain activation cover the left half first, then the right half."""
    if PART < 2:
        _write_half(PART, left if PART == 0 else right, at, out_desc, buffer, GATED, PIECES)
    elif GATED:
        first = at.column * (2 * left.shape[1])
        _write_activated(left, right, at, first, bias, activated_desc, buffer, PART - 2, PIECES, FORWARD, GATED)
    else:
        OF_HALF: gl.constexpr = PIECES // 2
        HALF: gl.constexpr = (PART - 2) // OF_HALF
        PIECE: gl.constexpr = (PART - 2) % OF_HALF
        pairs = left if HALF == 0 else right
        first = (2 * at.column + HALF) * (2 * left.shape[1])
        _write_activated(pairs, pairs, at, first, bias, activated_desc, buffer, PIECE, OF_HALF, FORWARD, GATED)


@gluon.jit
def _write_half(half, value, at, desc, buffer, SPLIT: gl.constexpr, PIECES: gl.constexpr):
    """Write the left (0) or right (1) half of the product. With SPLIT, the descriptor has an axis for the halves."""
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
    at,  # position of the finished tile, a `Finished`
    bias,  # Bias or None; added before the activation
    out_desc,
    activated_desc,
    buffer,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    PIECES: gl.constexpr,
):
    """Write all parts of the last tile."""
    if PIECES and not GATED:
        # The compiler does not unroll this loop, because the bound is a run-time value. Unrolled code would compute
        # both halves at once and run out of registers.
        for half in range(0, gl.where(at.end > 0, 2, 0)):
            _write_half(half, left, at, out_desc, buffer, False, PIECES)
            first = (2 * at.column + half) * (2 * left.shape[1])
            OF_HALF: gl.constexpr = PIECES // 2
            for piece in gl.static_range(OF_HALF):
                _write_activated(left, left, at, first, bias, activated_desc, buffer, piece, OF_HALF, FORWARD, GATED)
            left = right
    else:
        for part in gl.static_range(num_parts(PIECES)):
            write_part(part, left, right, at, bias, out_desc, activated_desc, buffer, FORWARD, GATED, PIECES)


@gluon.jit
def unchanged(gate, up):
    """Return the gate unchanged. Tiles past the last group use this activation, so that zeros stay zeros."""
    return gate
