"""Operand blocks of a grouped GEMM. The producer copies blocks to shared memory, and consumers multiply the blocks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .pace import end_pace, keep_pace, start_pace
from .ring import free_slot, gather_block, gather_layout, load_block, load_step, moved, opaque, wait_step
from .tiles import LONG_REDUCTION, tile_at, with_walk

MARK_STEPS = gl.constexpr(8)  # number of steps from one mark to the next (`pace.py`)


@gluon.jit
def _is_paced(tiles):
    # Without `opaque`, Triton 3.8 computes this value for all warps, and consumers spill.
    return opaque(tiles.num_steps) >= LONG_REDUCTION


@gluon.jit
def _pace(num_tiles_ptr, is_paced, step, passed):
    """If `is_paced`, pass a mark of `pace.py` every MARK_STEPS steps. `keep_pace` explains `passed` and the result."""
    passes = is_paced & (step % MARK_STEPS == 0)
    is_next = is_paced & (step % MARK_STEPS == MARK_STEPS - 1)
    return keep_pace(num_tiles_ptr, step // MARK_STEPS, passes, is_next, passed)


@gluon.jit
def _num_marks(is_paced, num_steps):
    """Return the number of marks that `_pace` passes in `num_steps` steps."""
    return is_paced.to(gl.int32) * ((num_steps + MARK_STEPS - 1) // MARK_STEPS)


@gluon.jit
def _b_at(group, column, k, B_COLUMN: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the coordinates of a block of B in its descriptor."""
    if GATED:
        return [group, 0, column * (BLOCK_N // 2), k]
    elif B_COLUMN:
        return [group, column * BLOCK_N, k]
    else:
        return [group, k, column * BLOCK_N]


@gluon.jit
def _produce_contiguous(
    tiles,
    num_tiles_ptr,
    ring,
    a_desc,
    b_desc,
    extra_a_desc,
    extra_b_desc,
    EXTRA_STEPS: gl.constexpr,
    B_COLUMN: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    tiles = with_walk(tiles)
    step = 0
    passed = 0
    is_paced = _is_paced(tiles)
    start_pace(num_tiles_ptr)
    # A tile's position is loaded one tile ahead, so that no copy waits for the position.
    group, row, _, column = tile_at(tiles, gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.num_row_tiles * tiles.num_column_tiles, gl.num_programs(0)):
        next_group, next_row, _, next_column = tile_at(tiles, tile + gl.num_programs(0))
        for k in range(0, (tiles.num_steps - EXTRA_STEPS) * BLOCK_K, BLOCK_K):
            passed = _pace(num_tiles_ptr, is_paced, step, passed)
            load_step(ring, step, a_desc, [row, k], b_desc, _b_at(group, column, k, B_COLUMN, GATED, BLOCK_N))
            step += 1
        for extra in gl.static_range(EXTRA_STEPS):
            passed = _pace(num_tiles_ptr, is_paced, step, passed)
            b_at = _b_at(group, column, extra * BLOCK_K, B_COLUMN, GATED, BLOCK_N)
            load_step(ring, step, extra_a_desc, [row, extra * BLOCK_K], extra_b_desc, b_at)
            step += 1
        group = next_group
        row = next_row
        column = next_column
    end_pace(num_tiles_ptr, _num_marks(is_paced, step))


@gluon.jit
def _produce_gathered(
    tiles,
    num_tiles_ptr,
    ring,
    a_ptr,
    a_stride,
    row_to_token_ptr,
    depth,
    b_desc,
    extra_a_ptr,
    extra_a_stride,
    extra_depth,
    extra_b_desc,
    EXTRA_STEPS: gl.constexpr,
    B_COLUMN: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    layout: gl.constexpr = gather_layout(BLOCK_K)
    r = gl.arange(0, tiles.block_m, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    # Rounding changes nothing, but tells the compiler that 8 divides depth and a_stride, as 16-byte copies require.
    depth = depth // 8 * 8
    a_stride = a_stride.to(gl.int64) // 8 * 8
    step = 0
    passed = 0
    is_paced = _is_paced(tiles)
    start_pace(num_tiles_ptr)
    group, row, end, column = tile_at(tiles, gl.program_id(0))
    # Rows past the end of the group repeat the group's last row, and their results are not written.
    token = gl.load(row_to_token_ptr + gl.minimum(row + r, max(end - 1, 0)))
    for tile in range(gl.program_id(0), tiles.num_row_tiles * tiles.num_column_tiles, gl.num_programs(0)):
        next_group, next_row, next_end, next_column = tile_at(tiles, tile + gl.num_programs(0))
        next_token = gl.load(row_to_token_ptr + gl.minimum(next_row + r, max(next_end - 1, 0)))
        pointers = a_ptr + (token * a_stride)[:, None] + c[None, :]
        for k in range(0, (tiles.num_steps - EXTRA_STEPS) * BLOCK_K, BLOCK_K):
            passed = _pace(num_tiles_ptr, is_paced, step, passed)
            slot = free_slot(ring, step)
            ready = ring.full.index(slot)
            load_block(ready, b_desc, _b_at(group, column, k, B_COLUMN, GATED, BLOCK_N), ring.b.index(slot))
            gather_block(ready, moved(pointers, k), (c < depth - k)[None, :], ring.a.index(slot))
            step += 1
        for extra in gl.static_range(EXTRA_STEPS):
            passed = _pace(num_tiles_ptr, is_paced, step, passed)
            slot = free_slot(ring, step)
            ready = ring.full.index(slot)
            b_at = _b_at(group, column, extra * BLOCK_K, B_COLUMN, GATED, BLOCK_N)
            load_block(ready, extra_b_desc, b_at, ring.b.index(slot))
            k = extra * BLOCK_K + c
            extra_stride = extra_a_stride // 8 * 8
            first = extra_a_ptr + row.to(gl.int64) * extra_stride  # extra_a [R, r] is not gathered
            within = gl.minimum(r, max(end - 1 - row, 0)) * extra_stride
            extra_pointers = first + (within[:, None] + k[None, :])
            gather_block(ready, extra_pointers, (k < extra_depth // 8 * 8)[None, :], ring.a.index(slot))
            step += 1
        group = next_group
        row = next_row
        end = next_end
        token = next_token
        column = next_column
    end_pace(num_tiles_ptr, _num_marks(is_paced, step))


@gluon.jit
def produce(
    tiles,
    num_tiles_ptr,
    ring,
    a_desc,  # None if the rows of A are gathered
    a_ptr,
    a_stride,
    row_to_token_ptr,
    depth,
    b_desc,
    extra_a_desc,  # None without EXTRA_STEPS, or if the rows of A are gathered
    extra_a_ptr,  # None without EXTRA_STEPS, or if the rows of A are contiguous
    extra_a_stride,
    extra_depth,
    extra_b_desc,
    EXTRA_STEPS: gl.constexpr,
    B_COLUMN: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    if a_desc is None:
        _produce_gathered(
            tiles, num_tiles_ptr, ring, a_ptr, a_stride, row_to_token_ptr, depth, b_desc,
            extra_a_ptr, extra_a_stride, extra_depth, extra_b_desc, EXTRA_STEPS, B_COLUMN, GATED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _produce_contiguous(
            tiles, num_tiles_ptr, ring, a_desc, b_desc, extra_a_desc, extra_b_desc, EXTRA_STEPS, B_COLUMN, GATED,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip


@gluon.jit
def multiply(
    ring,
    step,
    total,
    use_total,
    WARPGROUP: gl.constexpr,
    B_COLUMN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Start to multiply this warpgroup's rows of A by the first `total.shape[1]` columns of B, over one step. If
    `use_total`, add the product to `total`. Otherwise, the product replaces `total`."""
    slot = wait_step(ring, step)
    a = ring.a.index(slot).slice(WARPGROUP * total.shape[0], total.shape[0], 0)
    if B_COLUMN:
        b = ring.b.index(slot).reshape([BLOCK_N, BLOCK_K]).slice(0, total.shape[1], 0).permute((1, 0))
    else:
        b = ring.b.index(slot).reshape([BLOCK_K, BLOCK_N]).slice(0, total.shape[1], 1)
    return warpgroup_mma(a, b, total, use_acc=use_total, is_async=True)


@gluon.constexpr_function
def accumulator(columns):
    """Return the layout of a consumer's sums [64, columns]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
