"""Warp-specialised, persistent grouped GEMM of e4m3 operands with block scales: rows contiguous or gathered.

Each of the two consumers multiplies 64 rows of a tile by 128 columns at a time. After 128 products per element, the
tensor cores' sum is scaled and added to a float32 total. While one consumer adds, the tensor cores multiply for the
other consumer. A tile of 256 columns has two halves. Each half has one scale of B per step, a scalar.

Each step loads its scales at its start, so that the scales arrive while the tensor cores multiply. Consumers load a
tile's position one tile ahead, because a tile's first step needs the position to load the scales.
"""

# This file omits `from __future__ import annotations`, because `aggregate` needs the types of fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ....runtime.gluon import aggregate
from .ring import (
    ROW_BOUND,
    buffers,
    free_slot,
    gather_block,
    gather_buffers,
    gather_layout,
    load_block,
    load_step,
    make_ring,
    pinned,
    wait_step,
    write,
)
from .tiles import Tiles, row_tile_at, tile_at

_STEP = gl.constexpr(128)  # values of K per step, and columns per product; B has one scale per 128 x 128 block
_ROWS = gl.constexpr(64)  # number of rows of a tile that one consumer computes


@aggregate
class Scales:
    """Scales of both operands."""

    a: gl.tensor  # pointer to [K / 128, rows of A]
    a_stride: gl.tensor  # number of elements between the scales of successive steps
    b: gl.tensor  # pointer to [G, N / 128, K / 128]
    num_steps: gl.tensor  # K / 128, rounded up
    num_column_blocks: gl.tensor  # N / 128, rounded up

    @gluon.constexpr_function
    def __init__(self, a, a_stride, b, num_steps, num_column_blocks):
        self.a = a
        self.a_stride = a_stride
        self.b = b
        self.num_steps = num_steps
        self.num_column_blocks = num_column_blocks


@gluon.jit
def _rows_of_a(row_to_token_ptr, row, end, r):
    """Return the indices in A of a tile's rows. Rows past the end of the group repeat the group's last row, and their
    results are not written."""
    rows = gl.minimum(row + r, max(end - 1, 0))
    if row_to_token_ptr is None:
        return rows
    else:
        return gl.load(row_to_token_ptr + rows)


@gluon.jit
def _produce(
    tiles,
    ring,
    a_desc,  # None if the rows of A are gathered
    a_ptr,  # this argument and the next three are None unless the rows of A are gathered
    a_stride,
    row_to_token_ptr,
    depth,
    b_desc,
    BLOCK_N: gl.constexpr,
):
    layout: gl.constexpr = gather_layout(_STEP, 8)
    r = gl.arange(0, tiles.block_m, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, _STEP, layout=gl.SliceLayout(0, layout))
    step = 0
    group, row, end, column = tile_at(tiles, gl.program_id(0))
    if a_desc is None:
        # Rounding changes nothing, but tells the compiler that 16 divides depth and stride, as 16-byte copies require.
        depth = depth // 16 * 16
        a_stride = a_stride.to(gl.int64) // 16 * 16
        token = _rows_of_a(row_to_token_ptr, row, end, r)
    for tile in range(gl.program_id(0), tiles.num_row_tiles * tiles.num_column_tiles, gl.num_programs(0)):
        next_group, next_row, next_end, next_column = tile_at(tiles, tile + gl.num_programs(0))
        if a_desc is None:
            next_token = _rows_of_a(row_to_token_ptr, next_row, next_end, r)
            pointers = a_ptr + (token * a_stride)[:, None] + c[None, :]
        for k in range(0, tiles.num_steps * _STEP, _STEP):
            b_at = [group, column * BLOCK_N, k]
            if a_desc is None:
                slot = free_slot(ring, step)
                ready = ring.full.index(slot)
                load_block(ready, b_desc, b_at, ring.b.index(slot))
                gather_block(ready, pointers + k, (k + c < depth)[None, :], ring.a.index(slot))
            else:
                load_step(ring, step, a_desc, [row, k], b_desc, b_at)
            step += 1
        group = next_group
        row = next_row
        column = next_column
        if a_desc is None:
            token = next_token


@gluon.jit
def _multiply(ring, slot, partial, WARPGROUP: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start to multiply this warpgroup's rows of A by 128 columns of B. The product sums over 128 values of K, and
    replaces `partial`."""
    a = ring.a.index(slot).slice(WARPGROUP * _ROWS, _ROWS, 0)
    b = ring.b.index(slot).reshape([BLOCK_N, _STEP]).slice(HALF * _STEP, _STEP, 0).permute((1, 0))
    return warpgroup_mma(a, b, partial, use_acc=False, is_async=True)


@gluon.jit
def _b_scales_at(scales, group, block):
    """Return the offset from `scales.b` of the first scale of column block `block`. Past the last column block, return
    the offset of the last block's first scale."""
    block = min(block, scales.num_column_blocks - 1)
    return (group * scales.num_column_blocks + block) * scales.num_steps


@gluon.jit
def _consume(
    tiles,
    num_tiles_ptr,
    ring,
    scales,
    row_to_token_ptr,
    out_desc,
    buffer,
    WARPGROUP: gl.constexpr,
    ZERO_TAIL: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    TWO: gl.constexpr = BLOCK_N == 2 * _STEP
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _STEP, 32])
    r = WARPGROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    partial = gl.zeros((_ROWS, _STEP), gl.float32, layout)  # [64, 128]
    left = pinned(partial.to(out_desc.dtype))
    right = left
    # No tile is finished yet. The hardware ignores the first writes, because their row coordinate is ROW_BOUND.
    at_end = gl.to_tensor(0)
    at_row = gl.to_tensor(0x40000000)
    at_column = gl.to_tensor(0)
    step = 0
    group, row, end, column = tile_at(tiles, gl.program_id(0))
    rows = _rows_of_a(row_to_token_ptr, row, end, r)
    num_tiles = tiles.num_row_tiles * tiles.num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        a_at = rows
        b_at_0 = _b_scales_at(scales, group, column * (BLOCK_N // _STEP))
        scale_a = gl.load(scales.a + a_at)
        scale_0 = gl.load(scales.b + b_at_0)
        if TWO:
            b_at_1 = _b_scales_at(scales, group, column * (BLOCK_N // _STEP) + 1)
            scale_1 = gl.load(scales.b + b_at_1)
        # The first step also writes the previous tile.
        slot = wait_step(ring, step)
        partial = _multiply(ring, slot, partial, WARPGROUP, 0, BLOCK_N)
        write(left, out_desc, [ROW_BOUND, at_end, at_row, at_column], buffer)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        total_0 = partial * (scale_a * scale_0)[:, None]  # [64, 128]
        if TWO:
            partial = _multiply(ring, slot, partial, WARPGROUP, 1, BLOCK_N)
            write(right, out_desc, [ROW_BOUND, at_end, at_row, at_column + _STEP], buffer)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            total_1 = partial * (scale_a * scale_1)[:, None]  # [64, 128]
        mbarrier.arrive(ring.empty.index(slot), count=1)
        step += 1
        next_group, next_row, next_end, next_column = tile_at(tiles, tile + gl.num_programs(0))
        next_rows = _rows_of_a(row_to_token_ptr, next_row, next_end, r)
        at_end = end
        at_row = 0x40000000 - (end - row) + WARPGROUP * _ROWS
        at_column = column * BLOCK_N
        for _ in range(1, tiles.num_steps):
            a_at += scales.a_stride
            b_at_0 += 1
            scale_a = gl.load(scales.a + a_at)
            scale_0 = gl.load(scales.b + b_at_0)
            if TWO:
                b_at_1 += 1
                scale_1 = gl.load(scales.b + b_at_1)
            slot = wait_step(ring, step)
            partial = _multiply(ring, slot, partial, WARPGROUP, 0, BLOCK_N)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            if not TWO:
                mbarrier.arrive(ring.empty.index(slot), count=1)
            total_0 = total_0 + partial * (scale_a * scale_0)[:, None]
            if TWO:
                partial = _multiply(ring, slot, partial, WARPGROUP, 1, BLOCK_N)
                partial = warpgroup_mma_wait(0, deps=(partial,))
                mbarrier.arrive(ring.empty.index(slot), count=1)
                total_1 = total_1 + partial * (scale_a * scale_1)[:, None]
            step += 1
        left = pinned(total_0.to(out_desc.dtype))
        if TWO:
            right = pinned(total_1.to(out_desc.dtype))
        group = next_group
        row = next_row
        end = next_end
        column = next_column
        rows = next_rows
    write(left, out_desc, [ROW_BOUND, at_end, at_row, at_column], buffer)
    if TWO:
        write(right, out_desc, [ROW_BOUND, at_end, at_row, at_column + _STEP], buffer)
    if ZERO_TAIL:
        zeros = gl.zeros((_ROWS, _STEP), out_desc.dtype, layout)
        # The number of tiles is loaded again, because no register was free to keep the number during the loop above.
        num_all_tiles = gl.load(num_tiles_ptr + 1) * tiles.num_column_tiles
        first_tile = gl.load(num_tiles_ptr) * tiles.num_column_tiles + gl.program_id(0)
        for tile in range(first_tile, num_all_tiles, gl.num_programs(0)):
            _, row, end = row_tile_at(tiles, tile // tiles.num_column_tiles)
            at_row = 0x40000000 - (end - row) + WARPGROUP * _ROWS
            for half in gl.static_range(BLOCK_N // _STEP):
                at_column = tile % tiles.num_column_tiles * BLOCK_N + half * _STEP
                write(zeros, out_desc, [ROW_BOUND, end, at_row, at_column], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale_a_stride", "num_rows", "num_column_blocks", "num_column_tiles", "num_steps"])
def block_scaled_gemm_kernel(
    a_desc,  # [R, K], block [BLOCK_M, 128]; None if the rows are gathered
    a_ptr,  # [T, K]; this argument and the next three are None unless the rows of A are gathered
    a_stride,
    row_to_token_ptr,  # [R]
    depth,  # K
    b_desc,  # [G, N, K], block [1, BLOCK_N, 128]
    scale_a_ptr,  # [num_steps, rows of A]
    scale_a_stride,
    scale_b_ptr,  # [G, num_column_blocks, num_steps] contiguous
    out_desc,  # ragged [R, N], block [64, 128]
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    num_rows,  # R
    num_column_blocks,  # cdiv(N, 128)
    num_column_tiles,  # cdiv(N, BLOCK_N)
    num_steps,  # cdiv(K, 128), at least 1
    ZERO_TAIL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Each program writes every num_programs-th tile of (A * scale_a) @ (B * scale_b)[g]. Grid: (number of SMs,)."""
    num_row_tiles = gl.load(num_tiles_ptr)
    tiles = Tiles(
        tiles_ptr, bounds_ptr, num_rows, num_row_tiles, num_column_tiles, num_steps, BLOCK_M, GROUP_TILES, None
    )
    scales = Scales(scale_a_ptr, scale_a_stride, scale_b_ptr, num_steps, num_column_blocks)
    GATHER: gl.constexpr = a_desc is None
    a_buffers = gather_buffers(b_desc.dtype, NUM_BUFFERS, BLOCK_M, _STEP) if GATHER else buffers(a_desc, NUM_BUFFERS)
    ring = make_ring(a_buffers, buffers(b_desc, NUM_BUFFERS), NUM_BUFFERS, GATHER)
    buffer_0 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    buffer_1 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    gl.warp_specialize(
        [
            (
                _consume,
                (tiles, num_tiles_ptr, ring, scales, row_to_token_ptr, out_desc, buffer_0, 0, ZERO_TAIL, BLOCK_N),
            ),
            (
                _consume,
                (tiles, num_tiles_ptr, ring, scales, row_to_token_ptr, out_desc, buffer_1, 1, ZERO_TAIL, BLOCK_N),
            ),
            (_produce, (tiles, ring, a_desc, a_ptr, a_stride, row_to_token_ptr, depth, b_desc, BLOCK_N)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
