"""Warp-specialised, persistent grouped GEMM with the gradient of a gated activation in its epilogue.

The product dA' of a tile stays in registers, rounded to the dtype of the results, as a separate kernel would read it.
Each of the next tile's first steps computes one piece of its columns. H arrives in shared memory during the tile's own
steps. A consumer overwrites it there with dH, and sends dH and the weighted activation when all pieces are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ....runtime.gluon import aggregate, tma_load, tma_store
from .finished import piece_of
from .operands import accumulator, multiply, produce
from .ring import ROW_BOUND, buffers, gather_buffers, make_ring, packed, release_previous, unpacked
from .tiles import Tiles, tile_at

DRAIN_STEPS = gl.constexpr(4)  # between the last piece of a tile and the copy of H into the same memory


@aggregate
class Staged:
    """A consumer's part of a tile in shared memory."""

    gate: gl.shared_memory_descriptor  # of H, then of dH; [1, 1, BLOCK_M / 2, 1, BLOCK_N], as `up`
    up: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor  # [1, 1, BLOCK_M / 2, BLOCK_N]
    arrived: gl.shared_memory_descriptor  # barrier: H is there

    @gluon.constexpr_function
    def __init__(self, gate, up, weighted, arrived):
        self.gate = gate
        self.up = up
        self.weighted = weighted
        self.arrived = arrived


@gluon.jit
def _make_staged(h_desc, weighted_desc):
    gate = gl.allocate_shared_memory(h_desc.dtype, h_desc.block_type.shape, h_desc.layout)
    up = gl.allocate_shared_memory(h_desc.dtype, h_desc.block_type.shape, h_desc.layout)
    weighted = gl.allocate_shared_memory(h_desc.dtype, weighted_desc.block_type.shape, weighted_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    return Staged(gate, up, weighted, arrived)


@gluon.jit
def _fetch(staged, h_desc, row, end, column):
    """Start the copies of H, once what these buffers held before is sent."""
    tma.store_wait(0)
    mbarrier.expect(staged.arrived, 2 * h_desc.block_type.nbytes)
    tma_load(h_desc, [ROW_BOUND, end, row, 0, column], staged.arrived, staged.gate)
    tma_load(h_desc, [ROW_BOUND, end, row, 1, column], staged.arrived, staged.up)


@gluon.jit
def _differentiate(kept, weight, sums, staged, BACKWARD: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """Compute one piece of dH and of the weighted activation in place. Return the rows' sums with those of the piece.

    For rows past the group's end H is zero and the product arbitrary; nothing of these rows is written.
    """
    dtype: gl.constexpr = staged.gate.dtype
    grad = unpacked(piece_of(kept, PIECE, PIECES), dtype).to(gl.float32)
    M: gl.constexpr = grad.shape[0]
    N: gl.constexpr = grad.shape[1]
    grad = gl.convert_layout(grad, accumulator(N), assert_trivial=True)
    gate_view = staged.gate.reshape([M, PIECES * N]).slice(PIECE * N, N, 1)
    up_view = staged.up.reshape([M, PIECES * N]).slice(PIECE * N, N, 1)
    gate = gate_view.load(grad.type.layout).to(gl.float32)
    up = up_view.load(grad.type.layout).to(gl.float32)
    activated, dgate, dup = BACKWARD(gate, up, grad * weight[:, None])
    gate_view.store(dgate.to(dtype))
    up_view.store(dup.to(dtype))
    weighted = staged.weighted.reshape([M, PIECES * N]).slice(PIECE * N, N, 1)
    weighted.store((activated * weight[:, None]).to(dtype))
    return sums + gl.sum(grad * activated, 1)


@gluon.jit
def _send(staged, sums, dh_desc, weighted_desc, sums_ptr, row, end, column_tile, num_column_tiles):
    """Start the copies of a finished tile to global memory, and write the sums of its rows."""
    column = column_tile * weighted_desc.block_type.shape[3]
    fence_async_shared()
    tma_store(dh_desc, [ROW_BOUND, end, row, 0, column], staged.gate)
    tma_store(dh_desc, [ROW_BOUND, end, row, 1, column], staged.up)
    tma_store(weighted_desc, [ROW_BOUND, end, row, column], staged.weighted)
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
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    HALF_M: gl.constexpr = tiles.block_m // 2
    dtype: gl.constexpr = weighted_desc.dtype
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_N // PIECES))
    r = gl.arange(0, HALF_M, layout=by_row)
    total = gl.zeros((HALF_M, BLOCK_N), gl.float32, accumulator(BLOCK_N))  # [HALF_M, BLOCK_N]
    kept = packed(total.to(dtype))  # of the finished tile, as all with `last`
    # No tile is finished yet. At the bound of the rows the hardware clips everything.
    last_row = gl.to_tensor(0x40000000)
    last_end = gl.to_tensor(0)
    last_column = gl.to_tensor(0)
    last_weight = gl.zeros((HALF_M,), gl.float32, by_row)
    _fetch(staged, h_desc, last_row, last_end, last_column)
    step = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles.num_row_tiles * tiles.num_column_tiles, gl.num_programs(0)):
        _, row, end, column = tile_at(tiles, tile)
        sums = gl.zeros((HALF_M,), gl.float32, by_row)
        for part in gl.static_range(PIECES + DRAIN_STEPS):
            total = multiply(ring, step, total, part > 0, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
            if part == 0:
                mbarrier.wait(staged.arrived, phase)
            if part < PIECES:
                sums = _differentiate(kept, last_weight, sums, staged, BACKWARD, part, PIECES)
            if part == PIECES - 1:
                _send(
                    staged, sums, dh_desc, weighted_desc, sums_ptr, last_row, last_end, last_column,
                    tiles.num_column_tiles,
                )  # fmt: skip
            total = warpgroup_mma_wait(1, deps=(total,))
            release_previous(ring, step, pred=part > 0)
            step += 1
        row += WARPGROUP * HALF_M
        last_weight = gl.load(weights_ptr + row + r, mask=row + r < end, other=0.0)
        last_row = 0x40000000 - (end - row)
        last_end = end
        last_column = column
        _fetch(staged, h_desc, last_row, last_end, last_column * BLOCK_N)
        phase ^= 1
        for _ in range(PIECES + DRAIN_STEPS, tiles.num_steps):
            total = multiply(ring, step, total, True, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
            total = warpgroup_mma_wait(1, deps=(total,))
            release_previous(ring, step)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        release_previous(ring, step)
        kept = packed(total.to(dtype))
    sums = gl.zeros((HALF_M,), gl.float32, by_row)
    mbarrier.wait(staged.arrived, phase)
    for piece in gl.static_range(PIECES):
        sums = _differentiate(kept, last_weight, sums, staged, BACKWARD, piece, PIECES)
    _send(staged, sums, dh_desc, weighted_desc, sums_ptr, last_row, last_end, last_column, tiles.num_column_tiles)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_column_tiles", "num_steps"])
def activation_gradient_kernel(
    a_desc,  # [R, K], block [BLOCK_M, BLOCK_K]; None if the rows are gathered
    a_ptr,  # [T, K]; like the next three, only if the rows are gathered
    a_stride,
    row_to_token_ptr,  # [R]
    depth,  # K
    b_desc,  # [G, F, K] or [G, K, F]
    h_desc,  # ragged [R, 2, F], block [BLOCK_M / 2, BLOCK_N] of a half
    dh_desc,  # like h_desc
    weighted_desc,  # ragged [R, F], block [BLOCK_M / 2, BLOCK_N]
    weights_ptr,  # [R]
    sums_ptr,  # [R, column tiles]
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [2]
    num_rows,  # R
    num_column_tiles,
    num_steps,  # steps of the reduction, at least PIECES + DRAIN_STEPS
    B_COLUMN: gl.constexpr,
    BACKWARD: gl.constexpr,
    PIECES: gl.constexpr,  # pieces of a finished tile, each computed during one step
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Each program computes every num_programs-th tile of the product. Grid: (number of SMs,)."""
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
                    B_COLUMN, BACKWARD, PIECES, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                _consume,
                (
                    tiles, ring, h_desc, dh_desc, weighted_desc, weights_ptr, sums_ptr, staged_1, 1,
                    B_COLUMN, BACKWARD, PIECES, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                produce,
                (
                    tiles, ring, a_desc, a_ptr, a_stride, row_to_token_ptr, depth, b_desc, None, None, None, None,
                    None, 0, B_COLUMN, False, BLOCK_N, BLOCK_K,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
