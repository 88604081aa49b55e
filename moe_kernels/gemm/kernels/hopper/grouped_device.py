"""Warp-specialised, persistent grouped GEMM: rows contiguous or gathered, with or without an activation."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .finished import Bias, Finished, load_bias, num_parts, plus_bias, unchanged, waiting, write_last, write_part
from .operand_blocks import accumulator, multiply, produce
from .ring import buffers, gather_buffers, halves, make_ring, packed, pinned, release_previous, wait_step
from .tiles import LONG_REDUCTION, LONG_WORK, Tiles, row_tile_at, tile_at, walk, with_walk


@gluon.jit
def _reduce_tile(
    total,
    ring,
    step,
    tiles,
    tile,
    group,
    column_tile,
    bias,
    left,
    right,
    at,  # `Finished`: position of the previous tile, whose values `left` and `right` hold
    out_desc,
    activated_desc,
    buffer,
    WARPGROUP: gl.constexpr,
    B_COLUMN: gl.constexpr,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Return the sum over a tile's steps, the number of the next step, and the position of this program's next tile.
    The position consists of the group, first row, end row and column tile. The sum includes the bias unless an
    activation follows. The first steps also write the previous tile."""
    PARTS: gl.constexpr = num_parts(PIECES)
    for part in gl.static_range(PARTS):
        total = multiply(ring, step, total, part > 0, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
        write_part(part, left, right, at, bias, out_desc, activated_desc, buffer, FORWARD, GATED, PIECES)
        total = warpgroup_mma_wait(1, deps=(total,))
        release_previous(ring, step, pred=part > 0)
        step += 1
    if bias is not None and PIECES == 0:
        # The bias is loaded during the remaining multiplications, into the registers that held the previous tile.
        # Rounding does not change `num_columns`, but tells the compiler that 8 divides the number.
        loaded = load_bias(bias, group, column_tile * BLOCK_N, bias.num_columns // 8 * 8, total)
    for _ in range(PARTS, tiles.num_steps):
        total = multiply(ring, step, total, True, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
        total = warpgroup_mma_wait(1, deps=(total,))
        release_previous(ring, step)
        step += 1
    # The last multiplications hide the time for finding the next tile's position.
    next_group, next_row, next_end, next_column = tile_at(tiles, tile + gl.num_programs(0))
    total = warpgroup_mma_wait(0, deps=(total,))
    release_previous(ring, step)
    if bias is not None and PIECES == 0:
        total = plus_bias(total, loaded)
    return total, step, next_group, next_row, next_end, next_column


@gluon.jit
def _consume(
    tiles,
    num_all_row_tiles,
    num_columns,
    ring,
    bias_ptr,
    bias_stride,
    out_desc,
    activated_desc,
    buffer,
    WARPGROUP: gl.constexpr,
    B_COLUMN: gl.constexpr,
    FORWARD: gl.constexpr,
    GATED: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    tiles = with_walk(tiles)
    bias = None if bias_ptr is None else Bias(bias_ptr, bias_stride, num_columns)
    PARTS: gl.constexpr = num_parts(PIECES)
    HALF_M: gl.constexpr = tiles.block_m // 2
    HALF_N: gl.constexpr = BLOCK_N // 2
    total = gl.zeros((HALF_M, BLOCK_N), gl.float32, accumulator(BLOCK_N))  # [HALF_M, BLOCK_N]
    left, right = halves(total.to(out_desc.dtype))
    half_layout: gl.constexpr = left.type.layout
    if PIECES:
        left, right = packed(left), packed(right)
    # No tile is finished yet. The hardware ignores the first writes, because their row coordinate is ROW_BOUND.
    at = Finished(gl.to_tensor(0), gl.to_tensor(0x40000000), gl.to_tensor(0), gl.to_tensor(0))
    # In a long reduction, a warpgroup without rows in a tile multiplies, too. If the warpgroup skipped the tile, the
    # program would run ahead, and the L2 cache could drop data before slower programs read the data. Reading the data
    # again costs more than skipping saves. The costs were measured with kernels that keep no pace (`pace.py`).
    keeps_step = tiles.num_steps >= LONG_REDUCTION
    step = 0
    num_tiles = tiles.num_row_tiles * tiles.num_column_tiles
    halves_tiles = num_tiles // gl.num_programs(0) * tiles.num_steps < LONG_WORK
    group, tile_row, tile_end, tile_column = tile_at(tiles, gl.program_id(0))
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        if tile_row + WARPGROUP * HALF_M < tile_end or keeps_step:
            # A last column tile that is at most half full needs only half the multiplications.
            if not GATED and BLOCK_N == 256 and halves_tiles and num_columns - tile_column * BLOCK_N <= HALF_N:
                narrow = gl.zeros((HALF_M, HALF_N), gl.float32, accumulator(HALF_N))  # [HALF_M, HALF_N]
                narrow, step, next_group, next_row, next_end, next_column = _reduce_tile(
                    narrow, ring, step, tiles, tile, group, tile_column, bias,
                    left, right, at, out_desc, activated_desc, buffer,
                    WARPGROUP, B_COLUMN, FORWARD, GATED, PIECES, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                if PIECES:
                    left = packed(gl.convert_layout(narrow.to(out_desc.dtype), half_layout))
                else:
                    left = gl.convert_layout(pinned(narrow.to(out_desc.dtype)), half_layout)
            else:
                total, step, next_group, next_row, next_end, next_column = _reduce_tile(
                    total, ring, step, tiles, tile, group, tile_column, bias,
                    left, right, at, out_desc, activated_desc, buffer,
                    WARPGROUP, B_COLUMN, FORWARD, GATED, PIECES, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                left, right = waiting(total.to(out_desc.dtype), PIECES)
            at = Finished(group, 0x40000000 - (tile_end - tile_row) + WARPGROUP * HALF_M, tile_end, tile_column)
        else:
            # The tile has no rows for this warpgroup. The other warpgroup gets the full rate of the tensor cores.
            for _ in range(tiles.num_steps):
                slot = wait_step(ring, step)
                mbarrier.arrive(ring.empty.index(slot), count=1)
                step += 1
            next_group, next_row, next_end, next_column = tile_at(tiles, tile + gl.num_programs(0))
        group = next_group
        tile_row = next_row
        tile_end = next_end
        tile_column = next_column
    write_last(left, right, at, bias, out_desc, activated_desc, buffer, FORWARD, GATED, PIECES)
    left, right = halves(gl.zeros((HALF_M, BLOCK_N), gl.float32, accumulator(BLOCK_N)).to(out_desc.dtype))
    if PIECES:
        left, right = packed(left), packed(right)
    ZEROS: gl.constexpr = None if FORWARD is None else unchanged
    for tile in range(num_tiles + gl.program_id(0), num_all_row_tiles * tiles.num_column_tiles, gl.num_programs(0)):
        group, tile_row, end = row_tile_at(tiles, tile // tiles.num_column_tiles)
        row = 0x40000000 - (end - tile_row) + WARPGROUP * HALF_M
        for part in gl.static_range(PARTS):
            at = Finished(group, row, end, tile % tiles.num_column_tiles)
            write_part(part, left, right, at, None, out_desc, activated_desc, buffer, ZEROS, GATED, PIECES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_column_tiles", "num_steps"])
def grouped_gemm_kernel(
    a_desc,  # [R, K], block [BLOCK_M, BLOCK_K]; None if the rows are gathered
    a_ptr,  # [T, K]; this argument and the next three are None unless the rows of A are gathered
    a_stride,
    row_to_token_ptr,  # [R]
    depth,  # K
    b_desc,  # [G, N, K] or [G, K, N]; [G, 2, F, K] if GATED
    # If EXTRA_STEPS > 0, extra_a @ extra_b[g] is added to A @ B[g]. Otherwise the next five arguments are None.
    extra_a_desc,  # [R, r]; None if the rows of A are gathered
    extra_a_ptr,  # [R, r]; replaces extra_a_desc if the rows of A are gathered
    extra_a_stride,
    extra_depth,  # r
    extra_b_desc,  # shape of b_desc, with r instead of K
    bias_ptr,  # [G, N], or None; added before the activation, if any
    bias_stride,
    out_desc,  # ragged [R, N], block [BLOCK_M / 2, BLOCK_N / 2]; ragged [R, 2, F] if GATED
    activated_desc,  # ragged [R, F] with an activation, else None
    bounds_ptr,  # bounds [G + 2] of the tile table; without a table, offsets [G]
    tiles_ptr,  # entries [capacity, 2] of the tile table; None without a table
    num_tiles_ptr,  # [4]; None without a table
    num_rows,  # R
    num_columns,  # N
    num_column_tiles,
    num_steps,  # number of reduction steps per tile, at least `num_parts(PIECES)`
    NUM_GROUPS: gl.constexpr,  # G; None if a table is given
    ZERO_TAIL: gl.constexpr,  # whether to write zeros to the rows past the last group
    EXTRA_STEPS: gl.constexpr,  # number of steps at a reduction's end that read extra_a and extra_b
    B_COLUMN: gl.constexpr,
    FORWARD: gl.constexpr,  # activation, or None
    GATED: gl.constexpr,
    PIECES: gl.constexpr,  # number of pieces of a tile's activation, one per step of the next tile; 0: no activation
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Each program writes every num_programs-th tile of FORWARD(A @ B[g] + bias[g]). Grid: (number of SMs,)."""
    if NUM_GROUPS is None:
        entries = tiles_ptr
        num_row_tiles = gl.load(num_tiles_ptr)
        num_all_row_tiles = gl.load(num_tiles_ptr + ZERO_TAIL)
    else:
        entries = bounds_ptr
        tile_ends, ends = walk(bounds_ptr, num_rows, BLOCK_M, NUM_GROUPS)
        num_row_tiles = gl.max(tile_ends, 0)
        num_all_row_tiles = num_row_tiles
        if ZERO_TAIL:
            num_all_row_tiles += (num_rows - gl.max(ends, 0) + BLOCK_M - 1) // BLOCK_M
    tiles = Tiles(
        entries, bounds_ptr, num_rows, num_row_tiles, num_column_tiles, num_steps, BLOCK_M, GROUP_TILES, NUM_GROUPS
    )
    GATHER: gl.constexpr = a_desc is None
    a_buffers = gather_buffers(b_desc.dtype, NUM_BUFFERS, BLOCK_M, BLOCK_K) if GATHER else buffers(a_desc, NUM_BUFFERS)
    ring = make_ring(a_buffers, buffers(b_desc, NUM_BUFFERS), NUM_BUFFERS, GATHER)
    staged = out_desc if activated_desc is None else activated_desc  # blocks of `staged` never have a gate/up axis
    buffer_0 = gl.allocate_shared_memory(out_desc.dtype, staged.block_type.shape, staged.layout)
    buffer_1 = gl.allocate_shared_memory(out_desc.dtype, staged.block_type.shape, staged.layout)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tiles, num_all_row_tiles, num_columns, ring, bias_ptr, bias_stride, out_desc,
                    activated_desc, buffer_0, 0, B_COLUMN, FORWARD, GATED, PIECES, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                _consume,
                (
                    tiles, num_all_row_tiles, num_columns, ring, bias_ptr, bias_stride, out_desc,
                    activated_desc, buffer_1, 1, B_COLUMN, FORWARD, GATED, PIECES, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                produce,
                (
                    tiles, num_tiles_ptr, ring, a_desc, a_ptr, a_stride, row_to_token_ptr, depth, b_desc, extra_a_desc,
                    extra_a_ptr, extra_a_stride, extra_depth, extra_b_desc, EXTRA_STEPS,
                    B_COLUMN, GATED, BLOCK_N, BLOCK_K,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
