"""Warp-specialised, persistent grouped GEMM with the gradient of a gated activation in its epilogue.

Multiplying the product dA' = A @ B[g] by the row weights gives the gradient of the activation. A finished tile's dA'
stays in registers, rounded to the dtype of the results. A separate kernel would read the same rounded values. Among
the next tile's first steps, every SPACING-th step also computes a piece of the finished tile's gradient. The steps in
between keep the tensor cores busy during the computation of a piece.

Each consumer has two buffers for pieces of H, the preactivation. The consumer overwrites a piece of H with the same
piece of dH, the gradient of H, and stores dH from the buffer. The step before the computation of piece p starts to load
piece p + 1. The first two pieces of a tile are loaded before the tile is finished.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ....runtime.gluon import aggregate, tma_load, tma_store
from .finished import piece_of
from .operand_blocks import accumulator, multiply, produce
from .ring import ROW_BOUND, buffers, gather_buffers, make_ring, packed, release_previous, unpacked
from .tiles import Tiles, tile_at


@aggregate
class Staged:
    """A consumer's buffers in shared memory for two pieces of a tile. A piece has PIECE_N columns."""

    gate: gl.shared_memory_descriptor  # gate columns of H, later of dH; [2, 1, 1, BLOCK_M / 2, 1, PIECE_N]
    up: gl.shared_memory_descriptor  # up columns of H, later of dH; same shape as `gate`
    weighted: gl.shared_memory_descriptor  # [2, 1, 1, BLOCK_M / 2, PIECE_N]
    arrived: gl.shared_memory_descriptor  # [2, 1] barriers that signal the arrival of a piece of H

    @gluon.constexpr_function
    def __init__(self, gate, up, weighted, arrived):
        self.gate = gate
        self.up = up
        self.weighted = weighted
        self.arrived = arrived


@gluon.jit
def _make_staged(h_desc, weighted_desc):
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=1)
    return Staged(buffers(h_desc, 2), buffers(h_desc, 2), buffers(weighted_desc, 2), arrived)


@gluon.jit
def _fetch(staged, h_desc, row, end, column_tile, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """Start to load a piece of H into shared memory. First wait until earlier stores have read the buffers."""
    N: gl.constexpr = h_desc.block_type.shape[4]
    column = (column_tile * PIECES + PIECE) * N
    arrived = staged.arrived.index(PIECE % 2)
    tma.store_wait(0)
    mbarrier.expect(arrived, 2 * h_desc.block_type.nbytes)
    tma_load(h_desc, [ROW_BOUND, end, row, 0, column], arrived, staged.gate.index(PIECE % 2))
    tma_load(h_desc, [ROW_BOUND, end, row, 1, column], arrived, staged.up.index(PIECE % 2))


@gluon.jit
def _differentiate(
    kept,
    weight,
    sums,
    staged,
    dh_desc,
    weighted_desc,
    row,
    end,
    column_tile,
    BACKWARD: gl.constexpr,
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,
):
    """Compute a piece of dH and of the weighted activation, and start to store both. Return `sums` plus the sum of
    dA' * activation over the piece's columns. For rows past the end of the group, H is zero and dA' is arbitrary. The
    results of these rows are not written."""
    dtype: gl.constexpr = weighted_desc.dtype
    grad = unpacked(piece_of(kept, PIECE, PIECES), dtype).to(gl.float32)
    M: gl.constexpr = grad.shape[0]
    N: gl.constexpr = grad.shape[1]
    grad = gl.convert_layout(grad, accumulator(N), assert_trivial=True)
    gate_buffer = staged.gate.index(PIECE % 2)
    up_buffer = staged.up.index(PIECE % 2)
    weighted_buffer = staged.weighted.index(PIECE % 2)
    # The barrier's phase is PIECE // 2, because each buffer serves two pieces of a tile. The wait also keeps the
    # compiler from moving the following code between the multiplications, which would delay the multiplications.
    mbarrier.wait(staged.arrived.index(PIECE % 2), PIECE // 2)
    gate = gate_buffer.reshape([M, N]).load(grad.type.layout).to(gl.float32)
    up = up_buffer.reshape([M, N]).load(grad.type.layout).to(gl.float32)
    activated, dgate, dup = BACKWARD(gate, up, grad * weight[:, None])
    gate_buffer.reshape([M, N]).store(dgate.to(dtype))
    up_buffer.reshape([M, N]).store(dup.to(dtype))
    weighted_buffer.reshape([M, N]).store((activated * weight[:, None]).to(dtype))
    column = (column_tile * PIECES + PIECE) * N
    fence_async_shared()
    tma_store(dh_desc, [ROW_BOUND, end, row, 0, column], gate_buffer)
    tma_store(dh_desc, [ROW_BOUND, end, row, 1, column], up_buffer)
    tma_store(weighted_desc, [ROW_BOUND, end, row, column], weighted_buffer)
    return sums + gl.sum(grad * activated, 1)


@gluon.jit
def _write_sums(sums, sums_ptr, row, end, column_tile, num_column_tiles):
    r = end - (ROW_BOUND - row) + gl.arange(0, sums.shape[0], layout=sums.type.layout)
    gl.store(sums_ptr + r.to(gl.int64) * num_column_tiles + column_tile, sums, mask=r < end)


@gluon.jit
def _consume(
    tiles,
    ring,
    h_desc,
    dh_desc,
    weighted_desc,
    weights_ptr,
    sums_ptr,
    staged,
    WARPGROUP: gl.constexpr,
    B_COLUMN: gl.constexpr,
    BACKWARD: gl.constexpr,
    PIECES: gl.constexpr,
    SPACING: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    HALF_M: gl.constexpr = tiles.block_m // 2
    dtype: gl.constexpr = weighted_desc.dtype
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_N // PIECES))
    r = gl.arange(0, HALF_M, layout=by_row)
    total = gl.zeros((HALF_M, BLOCK_N), gl.float32, accumulator(BLOCK_N))  # [HALF_M, BLOCK_N]
    kept = packed(total.to(dtype))  # dA' of the finished tile; `last_...` are the tile's position and weights
    # Each iteration writes the results of the previous tile. In the first iteration there is none, so its row is
    # ROW_BOUND, and TMA ignores writes to this row.
    last_row = gl.to_tensor(0x40000000)
    last_end = gl.to_tensor(0)
    last_column = gl.to_tensor(0)
    last_weight = gl.zeros((HALF_M,), gl.float32, by_row)
    for piece in gl.static_range(2):
        _fetch(staged, h_desc, last_row, last_end, last_column, piece, PIECES)
    step = 0
    for tile in range(gl.program_id(0), tiles.num_row_tiles * tiles.num_column_tiles, gl.num_programs(0)):
        _, first_row, end, column = tile_at(tiles, tile)
        first_row += WARPGROUP * HALF_M
        row = 0x40000000 - (end - first_row)
        sums = gl.zeros((HALF_M,), gl.float32, by_row)
        for part in gl.static_range(PIECES * SPACING):
            total = multiply(ring, step, total, part > 0, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
            if part % SPACING == 0:
                sums = _differentiate(
                    kept, last_weight, sums, staged, dh_desc, weighted_desc, last_row, last_end, last_column,
                    BACKWARD, part // SPACING, PIECES,
                )  # fmt: skip
            elif part % SPACING == SPACING - 1:
                if part // SPACING + 2 < PIECES:
                    _fetch(staged, h_desc, last_row, last_end, last_column, part // SPACING + 2, PIECES)
                else:
                    _fetch(staged, h_desc, row, end, column, part // SPACING + 2 - PIECES, PIECES)
            total = warpgroup_mma_wait(1, deps=(total,))
            release_previous(ring, step, pred=part > 0)
            step += 1
        _write_sums(sums, sums_ptr, last_row, last_end, last_column, tiles.num_column_tiles)
        last_weight = gl.load(weights_ptr + first_row + r, mask=first_row + r < end, other=0.0)
        last_row = row
        last_end = end
        last_column = column
        for _ in range(PIECES * SPACING, tiles.num_steps):
            total = multiply(ring, step, total, True, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
            total = warpgroup_mma_wait(1, deps=(total,))
            release_previous(ring, step)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        release_previous(ring, step)
        kept = packed(total.to(dtype))
    sums = gl.zeros((HALF_M,), gl.float32, by_row)
    for piece in gl.static_range(PIECES):
        sums = _differentiate(
            kept, last_weight, sums, staged, dh_desc, weighted_desc, last_row, last_end, last_column,
            BACKWARD, piece, PIECES,
        )  # fmt: skip
        if piece + 2 < PIECES:
            _fetch(staged, h_desc, last_row, last_end, last_column, piece + 2, PIECES)
    _write_sums(sums, sums_ptr, last_row, last_end, last_column, tiles.num_column_tiles)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_column_tiles", "num_steps"])
def activation_gradient_kernel(
    a_desc,  # [R, K], block [BLOCK_M, BLOCK_K]; None if the rows are gathered
    a_ptr,  # [T, K]; this argument and the next three are None unless the rows of A are gathered
    a_stride,
    row_to_token_ptr,  # [R]
    depth,  # K
    b_desc,  # [G, F, K] or [G, K, F]
    h_desc,  # ragged [R, 2, F], block [BLOCK_M / 2, BLOCK_N / PIECES] of the gate half or the up half
    dh_desc,  # ragged [R, 2, F], block [BLOCK_M / 2, BLOCK_N / PIECES] of the gate half or the up half
    weighted_desc,  # ragged [R, F], block [BLOCK_M / 2, BLOCK_N / PIECES]
    weights_ptr,  # [R]
    sums_ptr,  # [R, column tiles]
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    num_rows,  # R
    num_column_tiles,
    num_steps,  # number of steps of the reduction, at least PIECES * SPACING
    B_COLUMN: gl.constexpr,
    BACKWARD: gl.constexpr,
    PIECES: gl.constexpr,  # number of pieces of a finished tile: 4, two for each buffer
    SPACING: gl.constexpr,  # number of steps from one piece to the next, at least 2
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Each program writes every num_programs-th tile of dH, `weighted` and `row_sums`. Grid: (number of SMs,)."""
    num_row_tiles = gl.load(num_tiles_ptr)
    tiles = Tiles(
        tiles_ptr, bounds_ptr, num_rows, num_row_tiles, num_column_tiles, num_steps, BLOCK_M, GROUP_TILES, None
    )
    GATHER: gl.constexpr = a_desc is None
    a_buffers = gather_buffers(b_desc.dtype, NUM_BUFFERS, BLOCK_M, BLOCK_K) if GATHER else buffers(a_desc, NUM_BUFFERS)
    ring = make_ring(a_buffers, buffers(b_desc, NUM_BUFFERS), NUM_BUFFERS, GATHER)
    staged_0 = _make_staged(h_desc, weighted_desc)
    staged_1 = _make_staged(h_desc, weighted_desc)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tiles, ring, h_desc, dh_desc, weighted_desc, weights_ptr, sums_ptr, staged_0, 0,
                    B_COLUMN, BACKWARD, PIECES, SPACING, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                _consume,
                (
                    tiles, ring, h_desc, dh_desc, weighted_desc, weights_ptr, sums_ptr, staged_1, 1,
                    B_COLUMN, BACKWARD, PIECES, SPACING, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                produce,
                (
                    tiles, num_tiles_ptr, ring, a_desc, a_ptr, a_stride, row_to_token_ptr, depth, b_desc,
                    None, None, None, None, None, 0, B_COLUMN, False, BLOCK_N, BLOCK_K,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
