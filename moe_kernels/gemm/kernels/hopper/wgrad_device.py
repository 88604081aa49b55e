"""Warp-specialised, persistent kernel for the weight gradient. One operand may be gathered."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ....runtime.gluon import aggregate
from .operand_blocks import accumulator
from .pace import NOT_READ, end_pace, keep_pace, start_pace
from .ring import (
    ROW_BOUND,
    buffers,
    free_slot,
    gather_block,
    gather_buffers,
    gather_layout,
    halves,
    load_block,
    load_step,
    make_ring,
    opaque,
    pinned,
    release_previous,
    wait_step,
    write,
)
from .tiles import LONG_REDUCTION, LONG_WORK


@aggregate
class Tiles:
    """The tiles of all groups' gradients, group by group. Groups are sorted by descending number of rows."""

    bounds_ptr: gl.tensor  # [G + 2]
    order_ptr: gl.tensor  # [G]
    num_tiles: gl.tensor  # number of tiles of all groups together
    num_k_tiles: gl.tensor
    num_n_tiles: gl.tensor
    block_r: gl.constexpr
    group_tiles: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, bounds_ptr, order_ptr, num_tiles, num_k_tiles, num_n_tiles, block_r, group_tiles):
        self.bounds_ptr = bounds_ptr
        self.order_ptr = order_ptr
        self.num_tiles = num_tiles
        self.num_k_tiles = num_k_tiles
        self.num_n_tiles = num_n_tiles
        self.block_r = gl.constexpr(block_r)
        self.group_tiles = gl.constexpr(group_tiles)


@gluon.jit
def turns(tiles):
    """Return the number of tiles that this program computes."""
    whole = tiles.num_tiles // gl.num_programs(0)
    place = gl.program_id(0) if whole % 2 == 0 else gl.num_programs(0) - 1 - gl.program_id(0)
    return whole + (place < tiles.num_tiles % gl.num_programs(0)).to(gl.int32)


@gluon.jit
def tile_at(tiles, turn):
    """Return (group, tile along K, tile along N, number of rows in the group, end row of the group) of this program's
    tile number `turn`. Past the program's last tile, return the values of the last tile of all."""
    # In odd turns, programs take tiles in reverse order, so that no program gets the longest tile of every turn.
    place = gl.program_id(0) if turn % 2 == 0 else gl.num_programs(0) - 1 - gl.program_id(0)
    tile = min(turn * gl.num_programs(0) + place, tiles.num_tiles - 1)
    group = gl.load(tiles.order_ptr + tile // (tiles.num_k_tiles * tiles.num_n_tiles))
    local = tile % (tiles.num_k_tiles * tiles.num_n_tiles)
    band = tiles.group_tiles * tiles.num_n_tiles
    first = local // band * tiles.group_tiles
    height = min(tiles.num_k_tiles - first, tiles.group_tiles)
    end = gl.load(tiles.bounds_ptr + group + 1)
    num_rows = end - gl.load(tiles.bounds_ptr + group)
    return group, first + local % band % height, local % band // height, num_rows, end


@gluon.jit
def average_steps(tiles):
    """Return the groups' average number of reduction steps, rounded down."""
    num_groups = tiles.num_tiles // (tiles.num_k_tiles * tiles.num_n_tiles)
    return gl.load(tiles.bounds_ptr + num_groups) // (num_groups * tiles.block_r)


@gluon.jit
def steps_for(tiles, num_rows):
    """Return the number of reduction steps of a group: at least two, because the first two steps each write half of the
    previous tile. Steps past the end of the group read zeros."""
    # Triton 3.6.0 treats a value carried from tile to tile as dead if only the bound of an inner loop uses the value.
    # All tiles then get the first tile's value. Passing the value through assembly counts as a use.
    return max((opaque(num_rows) + tiles.block_r - 1) // tiles.block_r, 2)


@gluon.jit
def _produce_contiguous(tiles, num_tiles_ptr, ring, a_desc, dout_desc, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr):
    step = 0
    is_paced = average_steps(tiles) >= LONG_REDUCTION
    start_pace(num_tiles_ptr)
    _, k_tile, n_tile, num_rows, end = tile_at(tiles, 0)
    for turn in range(turns(tiles)):
        _, next_k, next_n, next_rows, next_end = tile_at(tiles, turn + 1)
        keep_pace(num_tiles_ptr, turn, is_paced, gl.to_tensor(False), NOT_READ)
        num_steps = steps_for(tiles, num_rows)
        for i in range(num_steps):
            row = min(0x40000000 - num_rows + i * tiles.block_r, 0x40000000)
            a_at = [ROW_BOUND, end, row, k_tile * BLOCK_K]
            load_step(ring, step, a_desc, a_at, dout_desc, [ROW_BOUND, end, row, n_tile * BLOCK_N])
            step += 1
        k_tile = next_k
        n_tile = next_n
        num_rows = next_rows
        end = next_end
    end_pace(num_tiles_ptr, is_paced.to(gl.int32) * turns(tiles))


@gluon.jit
def _produce_gathered(
    tiles,
    num_tiles_ptr,
    ring,
    gathered_ptr,
    gathered_stride,
    row_to_token_ptr,
    num_gathered_columns,
    desc,  # descriptor of the operand that is not gathered
    GATHER_A: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    COLUMNS: gl.constexpr = BLOCK_K if GATHER_A else BLOCK_N
    OTHER_COLUMNS: gl.constexpr = BLOCK_N if GATHER_A else BLOCK_K
    layout: gl.constexpr = gather_layout(COLUMNS)
    r = gl.arange(0, tiles.block_r, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # Rounding changes nothing, but tells the compiler that 8 divides row length and stride, as 16-byte copies require.
    num_gathered_columns = num_gathered_columns // 8 * 8
    gathered_stride = gathered_stride.to(gl.int64) // 8 * 8
    step = 0
    is_paced = average_steps(tiles) >= LONG_REDUCTION
    start_pace(num_tiles_ptr)
    _, k_tile, n_tile, num_rows, end = tile_at(tiles, 0)
    for turn in range(turns(tiles)):
        _, next_k, next_n, next_rows, next_end = tile_at(tiles, turn + 1)
        keep_pace(num_tiles_ptr, turn, is_paced, gl.to_tensor(False), NOT_READ)
        column = (k_tile if GATHER_A else n_tile) * COLUMNS + c
        other_column = (n_tile if GATHER_A else k_tile) * OTHER_COLUMNS
        row = end - num_rows + r
        token = gl.load(row_to_token_ptr + row, mask=row < end, other=0)
        num_steps = steps_for(tiles, num_rows)
        for i in range(num_steps):
            next_token = gl.load(row_to_token_ptr + row + tiles.block_r, mask=row + tiles.block_r < end, other=0)
            slot = free_slot(ring, step)
            ready = ring.full.index(slot)
            at = [ROW_BOUND, end, min(0x40000000 - num_rows + i * tiles.block_r, 0x40000000), other_column]
            load_block(ready, desc, at, ring.b.index(slot) if GATHER_A else ring.a.index(slot))
            pointers = gathered_ptr + (token * gathered_stride)[:, None] + column[None, :]
            mask = (row < end)[:, None] & (column < num_gathered_columns)[None, :]
            gather_block(ready, pointers, mask, ring.a.index(slot) if GATHER_A else ring.b.index(slot))
            row += tiles.block_r
            token = next_token
            step += 1
        k_tile = next_k
        n_tile = next_n
        num_rows = next_rows
        end = next_end
    end_pace(num_tiles_ptr, is_paced.to(gl.int32) * turns(tiles))


@gluon.jit
def _produce(
    tiles,
    num_tiles_ptr,
    ring,
    a_desc,  # None if the rows of A are gathered
    dout_desc,  # None if the rows of dout are gathered
    gathered_ptr,
    gathered_stride,
    row_to_token_ptr,
    num_gathered_columns,
    BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    if a_desc is None:
        _produce_gathered(
            tiles, num_tiles_ptr, ring, gathered_ptr, gathered_stride, row_to_token_ptr, num_gathered_columns,
            dout_desc, True, BLOCK_K, BLOCK_N,
        )  # fmt: skip
    elif dout_desc is None:
        _produce_gathered(
            tiles, num_tiles_ptr, ring, gathered_ptr, gathered_stride, row_to_token_ptr, num_gathered_columns,
            a_desc, False, BLOCK_K, BLOCK_N,
        )  # fmt: skip
    else:
        _produce_contiguous(tiles, num_tiles_ptr, ring, a_desc, dout_desc, BLOCK_K, BLOCK_N)


@gluon.jit
def _multiply(
    ring,
    step,
    total,
    use_total,
    WARPGROUP: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Start to multiply this warpgroup's rows of a.T by the first `total.shape[1]` columns of dout, over the BLOCK_R
    rows of one step. If `use_total`, add the product to `total`. Otherwise, the product replaces `total`."""
    slot = wait_step(ring, step)
    a = ring.a.index(slot).reshape([BLOCK_R, 2 * total.shape[0]])
    a = a.slice(WARPGROUP * total.shape[0], total.shape[0], 1).permute((1, 0))
    dout = ring.b.index(slot).reshape([BLOCK_R, BLOCK_N]).slice(0, total.shape[1], 1)
    return warpgroup_mma(a, dout, total, use_acc=use_total, is_async=True)


@aggregate
class Finished:
    """Position of the finished tile that is still to be written: its first row and column in out[group]."""

    group: gl.tensor
    row: gl.tensor
    column: gl.tensor

    @gluon.constexpr_function
    def __init__(self, group, row, column):
        self.group = group
        self.row = row
        self.column = column


@gluon.jit
def _reduce_tile(
    total,
    ring,
    step,
    num_steps,
    left,
    right,
    at,  # `Finished`: position of the previous tile, whose values `left` and `right` hold
    out_desc,
    buffer,
    WARPGROUP: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Return (sum over a tile's steps, next step's number). The first two steps also write the previous tile."""
    for part in gl.static_range(2):
        total = _multiply(ring, step, total, part > 0, WARPGROUP, BLOCK_R, BLOCK_N)
        write(left if part == 0 else right, out_desc, [at.group, at.row, at.column + part * left.shape[1]], buffer)
        total = warpgroup_mma_wait(1, deps=(total,))
        release_previous(ring, step, pred=part > 0)
        step += 1
    for _ in range(2, num_steps):
        total = _multiply(ring, step, total, True, WARPGROUP, BLOCK_R, BLOCK_N)
        total = warpgroup_mma_wait(1, deps=(total,))
        release_previous(ring, step)
        step += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    release_previous(ring, step)
    return total, step


@gluon.jit
def _consume(
    tiles,
    num_columns,
    ring,
    out_desc,
    buffer,
    WARPGROUP: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    HALF_K: gl.constexpr = BLOCK_K // 2
    HALF_N: gl.constexpr = BLOCK_N // 2
    total = gl.zeros((HALF_K, BLOCK_N), gl.float32, accumulator(BLOCK_N))  # [HALF_K, BLOCK_N]
    left, right = halves(total.to(out_desc.dtype))
    # No tile is finished yet. `at` is past the last group, where the hardware clips, so the first writes do nothing.
    at = Finished(tiles.num_tiles, gl.to_tensor(0), gl.to_tensor(0))
    halves_tiles = tiles.num_tiles // gl.num_programs(0) * average_steps(tiles) < LONG_WORK
    step = 0
    next_group, next_k, next_n, next_rows, _ = tile_at(tiles, 0)
    for turn in range(turns(tiles)):
        next_at = Finished(next_group, next_k * BLOCK_K + WARPGROUP * HALF_K, next_n * BLOCK_N)
        num_steps = steps_for(tiles, next_rows)
        next_group, next_k, next_n, next_rows, _ = tile_at(tiles, turn + 1)
        # A last column tile that is at most half full needs only half the multiplications.
        if BLOCK_N == 256 and halves_tiles and num_columns - next_at.column <= HALF_N:
            narrow = gl.zeros((HALF_K, HALF_N), gl.float32, accumulator(HALF_N))  # [HALF_K, HALF_N]
            narrow, step = _reduce_tile(
                narrow, ring, step, num_steps, left, right, at, out_desc, buffer, WARPGROUP, tiles.block_r, BLOCK_N
            )
            left = gl.convert_layout(pinned(narrow.to(out_desc.dtype)), left.type.layout)
        else:
            total, step = _reduce_tile(
                total, ring, step, num_steps, left, right, at, out_desc, buffer, WARPGROUP, tiles.block_r, BLOCK_N
            )
            left, right = halves(pinned(total.to(out_desc.dtype)))
        at = next_at
    write(left, out_desc, [at.group, at.row, at.column], buffer)
    write(right, out_desc, [at.group, at.row, at.column + HALF_N], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "num_columns", "num_k_tiles", "num_n_tiles"])
def wgrad_kernel(
    a_desc,  # ragged [R, K], block [BLOCK_R, BLOCK_K]; None if the rows of A are gathered
    dout_desc,  # ragged [R, N], block [BLOCK_R, BLOCK_N]; None if the rows of dout are gathered
    gathered_ptr,  # [T, K] or [T, N]; this argument and the next three are None unless an operand is gathered
    gathered_stride,
    row_to_token_ptr,  # [R]
    num_gathered_columns,
    out_desc,  # [G, K, N], block [BLOCK_K / 2, BLOCK_N / 2]
    bounds_ptr,  # [G + 2]
    num_tiles_ptr,  # [4]; the kernel uses only the last two elements, the counters of `pace.py`
    order_ptr,  # [G]
    num_groups,
    num_columns,  # N
    num_k_tiles,
    num_n_tiles,
    BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    """Each program writes every num_programs-th tile of A[start:end].T @ dout[start:end]. Grid: (number of SMs,)."""
    num_tiles = num_groups * num_k_tiles * num_n_tiles
    tiles = Tiles(bounds_ptr, order_ptr, num_tiles, num_k_tiles, num_n_tiles, BLOCK_R, GROUP_TILES)
    GATHER: gl.constexpr = gathered_ptr is not None
    dtype: gl.constexpr = out_desc.dtype
    if a_desc is None:
        a_buffers = gather_buffers(dtype, NUM_BUFFERS, BLOCK_R, BLOCK_K)
    else:
        a_buffers = buffers(a_desc, NUM_BUFFERS)
    if dout_desc is None:
        dout_buffers = gather_buffers(dtype, NUM_BUFFERS, BLOCK_R, BLOCK_N)
    else:
        dout_buffers = buffers(dout_desc, NUM_BUFFERS)
    ring = make_ring(a_buffers, dout_buffers, NUM_BUFFERS, GATHER)
    buffer_0 = gl.allocate_shared_memory(dtype, out_desc.block_type.shape, out_desc.layout)
    buffer_1 = gl.allocate_shared_memory(dtype, out_desc.block_type.shape, out_desc.layout)
    gl.warp_specialize(
        [
            (_consume, (tiles, num_columns, ring, out_desc, buffer_0, 0, BLOCK_K, BLOCK_N)),
            (_consume, (tiles, num_columns, ring, out_desc, buffer_1, 1, BLOCK_K, BLOCK_N)),
            (
                _produce,
                (
                    tiles, num_tiles_ptr, ring, a_desc, dout_desc, gathered_ptr, gathered_stride, row_to_token_ptr,
                    num_gathered_columns, BLOCK_K, BLOCK_N,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
