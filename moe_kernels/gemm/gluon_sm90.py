"""Warp-specialised persistent GEMM kernels for Hopper, in the Gluon of Triton 3.6 (later versions renamed its parts).

One warpgroup produces: it keeps several steps of both operands on their way to shared memory through TMA. Two
warpgroups consume: each owns half of the rows of a tile and multiplies it with wgmma. A consumer writes a finished tile
to global memory while the tensor cores already work on the next one: the tile waits in registers, as two rounded
halves, and each of the first steps of the next tile takes one part of the writing with it.

Ragged rows are read and written through descriptors whose row coordinate reaches its bound at the end of the group, so
the hardware clips there; `ragged.py` has the maths.
"""

# No `from __future__ import annotations`: the fields of an aggregate are types, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

ROW_BOUND = gl.constexpr(0x40000000)


@aggregate
class Ring:
    """The buffers between the producer and the consumers. Steps take its slots in turn."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # barriers: both operands of the slot have arrived
    empty: gl.shared_memory_descriptor  # barriers: both consumers are done with the slot
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, slots):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty
        self.slots = gl.constexpr(slots)


@gluon.jit
def make_ring(a_desc, b_desc, SLOTS: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, [SLOTS] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(b_desc.dtype, [SLOTS] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return Ring(a, b, full, empty, SLOTS)


@gluon.jit
def load_step(ring, step, a_desc, a_at, b_desc, b_at):
    """Producer: start both copies of a step, once the consumers have left its slot."""
    slot = step % ring.slots
    mbarrier.wait(ring.empty.index(slot), (step // ring.slots & 1) ^ 1)
    ready = ring.full.index(slot)
    mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, a_at, ready, ring.a.index(slot))
    tma.async_copy_global_to_shared(b_desc, b_at, ready, ring.b.index(slot))


@gluon.jit
def wait_step(ring, step):
    """Consumer: the slot of a step, once its operands are there."""
    slot = step % ring.slots
    mbarrier.wait(ring.full.index(slot), step // ring.slots & 1)
    return slot


@gluon.jit
def release_previous(ring, step, pred=True):
    """Consumer: give back the slot of the step before this one."""
    mbarrier.arrive(ring.empty.index((step + ring.slots - 1) % ring.slots), count=1, pred=pred)


@gluon.jit
def rounded_halves(total, desc, PIN: gl.constexpr):
    """The left and right half of the columns, in the dtype of the descriptor."""
    rounded = total.to(desc.dtype)
    if PIN:
        # Ties the rounding to this place: drifting into the next tile's wgmma region, it would make the compiler
        # wait after every single wgmma.
        rounded = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [rounded], dtype=desc.dtype, is_pure=False, pack=2
        )
    return rounded.reshape(rounded.shape[0], 2, rounded.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def write(value, desc, at, buffer):
    """Copy a [rows, columns] value to global memory through this warpgroup's staging buffer."""
    tma.store_wait(0)
    buffer.reshape([value.shape[0], value.shape[1]]).store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, at, buffer)


@aggregate
class Rows:
    """The tiles of a grouped GEMM: row tiles from the table, times column tiles."""

    tiles_ptr: gl.tensor  # [capacity, 2]
    bounds_ptr: gl.tensor  # [G + 2]
    num_row_tiles: gl.tensor
    num_column_tiles: gl.tensor
    num_steps: gl.tensor  # of the reduction
    block_m: gl.constexpr
    group_tiles: gl.constexpr  # row tiles that share their columns of B in the L2 cache

    @gluon.constexpr_function
    def __init__(self, tiles_ptr, bounds_ptr, num_row_tiles, num_column_tiles, num_steps, block_m, group_tiles):
        self.tiles_ptr = tiles_ptr
        self.bounds_ptr = bounds_ptr
        self.num_row_tiles = num_row_tiles
        self.num_column_tiles = num_column_tiles
        self.num_steps = num_steps
        self.block_m = gl.constexpr(block_m)
        self.group_tiles = gl.constexpr(group_tiles)


@gluon.jit
def row_tile_at(rows, row_tile):
    """(group, first row, end row of the group)."""
    group = gl.load(rows.tiles_ptr + 2 * row_tile)
    block = gl.load(rows.tiles_ptr + 2 * row_tile + 1)
    return group, gl.load(rows.bounds_ptr + group) + block * rows.block_m, gl.load(rows.bounds_ptr + group + 1)


@gluon.jit
def tile_at(rows, tile):
    """(group, first row, end row of the group, column tile)."""
    band = rows.group_tiles * rows.num_column_tiles
    first = tile // band * rows.group_tiles
    height = min(rows.num_row_tiles - first, rows.group_tiles)
    group, row, end = row_tile_at(rows, first + tile % band % height)
    return group, row, end, tile % band // height


@gluon.jit
def _produce(
    rows,
    ring,
    a_desc,
    b_desc,
    B_COLUMN: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    step = 0
    num_tiles = rows.num_row_tiles * rows.num_column_tiles
    # Where a tile lies is loaded one tile ahead, so that no load stands in the way of a copy.
    group, row, _, column = tile_at(rows, min(gl.program_id(0), num_tiles - 1))
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_tile = min(tile + gl.num_programs(0), num_tiles - 1)
        next_group, next_row, _, next_column = tile_at(rows, next_tile)
        for k in range(0, rows.num_steps * BLOCK_K, BLOCK_K):
            if GATED:
                load_step(ring, step, a_desc, [row, k], b_desc, [group, 0, column * (BLOCK_N // 2), k])
            elif B_COLUMN:
                load_step(ring, step, a_desc, [row, k], b_desc, [group, column * BLOCK_N, k])
            else:
                load_step(ring, step, a_desc, [row, k], b_desc, [group, k, column * BLOCK_N])
            step += 1
        group = next_group
        row = next_row
        column = next_column


@gluon.jit
def _multiply(
    ring,
    step,
    total,
    use_total,
    WARPGROUP: gl.constexpr,
    B_COLUMN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Start total (+)= a[this warpgroup's rows] @ b for a step."""
    slot = wait_step(ring, step)
    a = ring.a.index(slot).slice(WARPGROUP * total.shape[0], total.shape[0], 0)
    if B_COLUMN:
        b = ring.b.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
    else:
        b = ring.b.index(slot).reshape([BLOCK_K, BLOCK_N])
    return warpgroup_mma(a, b, total, use_acc=use_total, is_async=True)


@gluon.jit
def _write_part(
    PART: gl.constexpr,
    left,
    right,
    row,  # counted so that ROW_BOUND is the end of the group
    end,
    column,
    out_desc,
    activated_desc,
    buffer,
    FORWARD: gl.constexpr,
):
    """Part 0 of a finished tile is its left half, 1 its right half, 2 the activation of the two."""
    HALF_N: gl.constexpr = left.shape[1]
    if FORWARD is None:
        write(left if PART == 0 else right, out_desc, [ROW_BOUND, end, row, (2 * column + PART) * HALF_N], buffer)
    elif PART < 2:
        at = [ROW_BOUND, end, row, PART, column * HALF_N]
        write(left if PART == 0 else right, out_desc, at, buffer.reshape(out_desc.block_type.shape))
    else:
        activated = FORWARD(left.to(gl.float32), right.to(gl.float32)).to(left.dtype)
        write(activated, activated_desc, [ROW_BOUND, end, row, column * HALF_N], buffer)


@gluon.jit
def _consume(
    rows,
    num_all_row_tiles,
    ring,
    out_desc,
    activated_desc,
    buffer,
    WARPGROUP: gl.constexpr,
    B_COLUMN: gl.constexpr,
    FORWARD: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    GATED: gl.constexpr = FORWARD is not None
    PARTS: gl.constexpr = 3 if GATED else 2
    HALF_M: gl.constexpr = rows.block_m // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    total = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout)  # [HALF_M, BLOCK_N]
    left, right = rounded_halves(total, out_desc, not GATED)
    # No tile is finished yet: at the bound of the rows the hardware clips everything.
    row = 0x40000000
    end = 0
    column = 0
    step = 0
    num_tiles = rows.num_row_tiles * rows.num_column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, tile_row, tile_end, tile_column = tile_at(rows, tile)
        if tile_row + WARPGROUP * HALF_M < tile_end:
            for part in gl.static_range(PARTS):
                total = _multiply(ring, step, total, part > 0, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
                _write_part(part, left, right, row, end, column, out_desc, activated_desc, buffer, FORWARD)
                total = warpgroup_mma_wait(1, deps=(total,))
                release_previous(ring, step, pred=part > 0)
                step += 1
            for _ in range(PARTS, rows.num_steps):
                total = _multiply(ring, step, total, True, WARPGROUP, B_COLUMN, BLOCK_N, BLOCK_K)
                total = warpgroup_mma_wait(1, deps=(total,))
                release_previous(ring, step)
                step += 1
            total = warpgroup_mma_wait(0, deps=(total,))
            release_previous(ring, step)
            left, right = rounded_halves(total, out_desc, not GATED)
            row = 0x40000000 - (tile_end - tile_row) + WARPGROUP * HALF_M
            end = tile_end
            column = tile_column
        else:
            # The tile has no rows for this warpgroup, so the other one gets the tensor cores to itself.
            for _ in range(rows.num_steps):
                slot = wait_step(ring, step)
                mbarrier.arrive(ring.empty.index(slot), count=1)
                step += 1
    for part in gl.static_range(PARTS):
        _write_part(part, left, right, row, end, column, out_desc, activated_desc, buffer, FORWARD)
    left, right = rounded_halves(gl.zeros((HALF_M, BLOCK_N), gl.float32, layout), out_desc, not GATED)
    for tile in range(num_tiles + gl.program_id(0), num_all_row_tiles * rows.num_column_tiles, gl.num_programs(0)):
        _, tile_row, end = row_tile_at(rows, tile // rows.num_column_tiles)
        row = 0x40000000 - (end - tile_row) + WARPGROUP * HALF_M
        column = tile % rows.num_column_tiles
        for part in gl.static_range(PARTS):
            _write_part(part, left, right, row, end, column, out_desc, activated_desc, buffer, FORWARD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_column_tiles", "num_steps"])
def grouped_gemm_kernel(
    a_desc,  # [R, K], block [BLOCK_M, BLOCK_K]
    b_desc,  # [G, N, K] or [G, K, N]; [G, 2, F, K] with an activation
    out_desc,  # ragged [R, N], block [BLOCK_M / 2, BLOCK_N / 2]; ragged [R, 2, F] with an activation
    activated_desc,  # ragged [R, F] with an activation, else not used
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [2]
    num_column_tiles,
    num_steps,  # of the reduction, at least 3
    ZERO_TAIL: gl.constexpr,
    B_COLUMN: gl.constexpr,
    FORWARD: gl.constexpr,  # activation, or None
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
):
    """Each program writes every num_programs-th tile of out. Grid: (number of SMs,)."""
    num_row_tiles = gl.load(num_tiles_ptr)
    num_all_row_tiles = gl.load(num_tiles_ptr + ZERO_TAIL)
    rows = Rows(tiles_ptr, bounds_ptr, num_row_tiles, num_column_tiles, num_steps, BLOCK_M, GROUP_TILES)
    ring = make_ring(a_desc, b_desc, NUM_BUFFERS)
    GATED: gl.constexpr = FORWARD is not None
    buffer_0 = gl.allocate_shared_memory(out_desc.dtype, activated_desc.block_type.shape, activated_desc.layout)
    buffer_1 = gl.allocate_shared_memory(out_desc.dtype, activated_desc.block_type.shape, activated_desc.layout)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    rows,
                    num_all_row_tiles,
                    ring,
                    out_desc,
                    activated_desc,
                    buffer_0,
                    0,
                    B_COLUMN,
                    FORWARD,
                    BLOCK_N,
                    BLOCK_K,
                ),
            ),
            (
                _consume,
                (
                    rows,
                    num_all_row_tiles,
                    ring,
                    out_desc,
                    activated_desc,
                    buffer_1,
                    1,
                    B_COLUMN,
                    FORWARD,
                    BLOCK_N,
                    BLOCK_K,
                ),
            ),
            (_produce, (rows, ring, a_desc, b_desc, B_COLUMN, GATED, BLOCK_N, BLOCK_K)),
        ],
        [4, 4],
        [240, 32],
    )


@aggregate
class Groups:
    """The tiles of a weight gradient: those of a group are neighbours."""

    bounds_ptr: gl.tensor  # [G + 2]
    num_tiles: gl.tensor
    num_k_tiles: gl.tensor
    num_n_tiles: gl.tensor
    block_r: gl.constexpr
    group_tiles: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, bounds_ptr, num_tiles, num_k_tiles, num_n_tiles, block_r, group_tiles):
        self.bounds_ptr = bounds_ptr
        self.num_tiles = num_tiles
        self.num_k_tiles = num_k_tiles
        self.num_n_tiles = num_n_tiles
        self.block_r = gl.constexpr(block_r)
        self.group_tiles = gl.constexpr(group_tiles)


@gluon.jit
def wgrad_tile_at(groups, tile):
    """(group, tile along K, tile along N, rows in the group, end row)."""
    tile = min(tile, groups.num_tiles - 1)
    group = tile // (groups.num_k_tiles * groups.num_n_tiles)
    local = tile % (groups.num_k_tiles * groups.num_n_tiles)
    band = groups.group_tiles * groups.num_n_tiles
    first = local // band * groups.group_tiles
    height = min(groups.num_k_tiles - first, groups.group_tiles)
    end = gl.load(groups.bounds_ptr + group + 1)
    num_rows = end - gl.load(groups.bounds_ptr + group)
    return group, first + local % band % height, local % band // height, num_rows, end


@gluon.jit
def wgrad_steps(groups, num_rows):
    """At least two steps, to write the last tile's two parts along; steps past the end of a group read zeros."""
    # Triton 3.6.0 takes a value that goes from tile to tile and is used for nothing but the bound of an inner loop for
    # dead, and keeps the first tile's. Passing through assembly is a use that it respects.
    num_rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [num_rows], dtype=gl.int32, is_pure=False, pack=1)
    return max((num_rows + groups.block_r - 1) // groups.block_r, 2)


@gluon.jit
def _wgrad_produce(groups, ring, a_desc, dout_desc, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr):
    step = 0
    _, k_tile, n_tile, num_rows, end = wgrad_tile_at(groups, gl.program_id(0))
    for tile in range(gl.program_id(0), groups.num_tiles, gl.num_programs(0)):
        _, next_k, next_n, next_rows, next_end = wgrad_tile_at(groups, tile + gl.num_programs(0))
        for i in range(wgrad_steps(groups, num_rows)):
            row = min(0x40000000 - num_rows + i * groups.block_r, 0x40000000)
            a_at = [ROW_BOUND, end, row, k_tile * BLOCK_K]
            load_step(ring, step, a_desc, a_at, dout_desc, [ROW_BOUND, end, row, n_tile * BLOCK_N])
            step += 1
        k_tile = next_k
        n_tile = next_n
        num_rows = next_rows
        end = next_end


@gluon.jit
def _wgrad_multiply(ring, step, total, use_total, WARPGROUP: gl.constexpr, BLOCK_R: gl.constexpr):
    """Start total (+)= a.T[this warpgroup's rows] @ dout for a step."""
    slot = wait_step(ring, step)
    a = ring.a.index(slot).reshape([BLOCK_R, 2 * total.shape[0]])
    a = a.slice(WARPGROUP * total.shape[0], total.shape[0], 1).permute((1, 0))
    dout = ring.b.index(slot).reshape([BLOCK_R, total.shape[1]])
    return warpgroup_mma(a, dout, total, use_acc=use_total, is_async=True)


@gluon.jit
def _wgrad_consume(
    groups, ring, out_desc, buffer, WARPGROUP: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr
):
    HALF_K: gl.constexpr = BLOCK_K // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    total = gl.zeros((HALF_K, BLOCK_N), gl.float32, layout)  # [HALF_K, BLOCK_N]
    left, right = rounded_halves(total, out_desc, True)
    # No tile is finished yet: past the last group the hardware clips everything.
    group = groups.num_tiles
    row = 0
    column = 0
    step = 0
    next_group, next_k, next_n, next_rows, _ = wgrad_tile_at(groups, gl.program_id(0))
    for tile in range(gl.program_id(0), groups.num_tiles, gl.num_programs(0)):
        tile_group = next_group
        tile_row = next_k * BLOCK_K + WARPGROUP * HALF_K
        tile_column = next_n * BLOCK_N
        num_steps = wgrad_steps(groups, next_rows)
        next_group, next_k, next_n, next_rows, _ = wgrad_tile_at(groups, tile + gl.num_programs(0))
        for part in gl.static_range(2):
            total = _wgrad_multiply(ring, step, total, part > 0, WARPGROUP, groups.block_r)
            write(left if part == 0 else right, out_desc, [group, row, column + part * (BLOCK_N // 2)], buffer)
            total = warpgroup_mma_wait(1, deps=(total,))
            release_previous(ring, step, pred=part > 0)
            step += 1
        for _ in range(2, num_steps):
            total = _wgrad_multiply(ring, step, total, True, WARPGROUP, groups.block_r)
            total = warpgroup_mma_wait(1, deps=(total,))
            release_previous(ring, step)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        release_previous(ring, step)
        left, right = rounded_halves(total, out_desc, True)
        group = tile_group
        row = tile_row
        column = tile_column
    write(left, out_desc, [group, row, column], buffer)
    write(right, out_desc, [group, row, column + BLOCK_N // 2], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "num_k_tiles", "num_n_tiles"])
def wgrad_kernel(
    a_desc,  # ragged [R, K], block [BLOCK_R, BLOCK_K]
    dout_desc,  # ragged [R, N], block [BLOCK_R, BLOCK_N]
    out_desc,  # [G, K, N], block [BLOCK_K / 2, BLOCK_N / 2]
    bounds_ptr,  # [G + 2]
    num_groups,
    num_k_tiles,
    num_n_tiles,
    BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
):
    """Each program writes every num_programs-th tile of out. Grid: (number of SMs,)."""
    num_tiles = num_groups * num_k_tiles * num_n_tiles
    groups = Groups(bounds_ptr, num_tiles, num_k_tiles, num_n_tiles, BLOCK_R, GROUP_TILES)
    ring = make_ring(a_desc, dout_desc, NUM_BUFFERS)
    buffer_0 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    buffer_1 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    gl.warp_specialize(
        [
            (_wgrad_consume, (groups, ring, out_desc, buffer_0, 0, BLOCK_K, BLOCK_N)),
            (_wgrad_consume, (groups, ring, out_desc, buffer_1, 1, BLOCK_K, BLOCK_N)),
            (_wgrad_produce, (groups, ring, a_desc, dout_desc, BLOCK_K, BLOCK_N)),
        ],
        [4, 4],
        [240, 32],
    )
