"""The tile table of a grouped GEMM, made on the device from group offsets.

`types.TileTable` documents the table's fields. Offsets that decrease or leave [0, num_rows] are clamped here, so that
kernels that read a table access no memory out of bounds.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel
from ..runtime.triton import next_power_of_2, tl, triton
from ..types import TileTable

MAX_GROUPS = 8192


@functools.cache
def table_blocks(num_groups: int) -> dict[str, int]:
    """Return the numbers of table entries that a program writes at once (ENTRY_BLOCK) and in total (PROGRAM_ENTRIES).
    A program compares ENTRY_BLOCK entries with all groups at once. A small ENTRY_BLOCK needs few registers, so that an
    SM can run many programs. PROGRAM_ENTRIES is large enough that a program's scan of all groups costs little per
    entry, but small enough that no program takes long."""
    entries = min(max(1024 // next_power_of_2(num_groups), 1), 64)
    return {"ENTRY_BLOCK": entries, "PROGRAM_ENTRIES": max(entries, next_power_of_2(num_groups) // 128)}


def tile_capacity(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Return the largest possible number of tiles. The last tile of each group, and of the rows past the last group,
    may be partly filled."""
    most: Any = torch.sym_min(num_groups + 1, num_rows)
    return (num_rows - most) // block_rows + most


def num_table_programs(capacity: int, num_groups: int) -> int:
    """Return the number of programs that write a table's `tiles` [capacity, 2] and `order` [num_groups]."""
    return -(-max(capacity, num_groups) // table_blocks(num_groups)["PROGRAM_ENTRIES"])


def empty_tile_table(like: Tensor, num_rows: int, num_groups: int, block_rows: int) -> TileTable:
    """Return a table with uninitialised tensors, on the device of `like`."""
    return TileTable(
        like.new_empty(num_groups + 2, dtype=torch.int32),
        like.new_empty(tile_capacity(num_rows, num_groups, block_rows), 2, dtype=torch.int32),
        like.new_empty(4, dtype=torch.int32),
        like.new_empty(num_groups, dtype=torch.int32),
        block_rows,
    )


class _Parts(NamedTuple):
    """Layout of a table's tensors in one block of memory."""

    sizes: tuple[int, ...]  # number of int32 elements of each tensor and each gap; gaps align tensors to 16 bytes
    places: tuple[int, ...]  # indices in `sizes` of the tensors order, bounds, tiles and num_tiles
    total: int


@functools.lru_cache(maxsize=4096)
def _parts(num_rows: int, num_groups: int, block_rows: int) -> _Parts:
    sizes: list[int] = []
    places = []
    for size in (num_groups, num_groups + 2, 2 * tile_capacity(num_rows, num_groups, block_rows), 4):
        if gap := -sum(sizes) % 4:
            sizes.append(gap)
        places.append(len(sizes))
        sizes.append(size)
    return _Parts(tuple(sizes), tuple(places), sum(sizes))


def tile_table_bytes(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Return the number of bytes of all tensors of a table, gaps included."""
    return 4 * _parts(num_rows, num_groups, block_rows).total


def tile_table_in(
    memory: Tensor | None,  # uint8, at least `tile_table_bytes` long; None: allocate new memory
    like: Tensor,
    num_rows: int,
    num_groups: int,
    block_rows: int,
) -> TileTable:
    """Return an uninitialised table in one block of memory, which is faster to allocate than several tensors. An op
    must not return this table, because results of ops must not share memory."""
    sizes, (order, bounds, tiles, num_tiles), total = _parts(num_rows, num_groups, block_rows)
    if memory is None:
        numbers = like.new_empty(total, dtype=torch.int32)
    else:
        numbers = memory[: 4 * total].view(torch.int32)
    parts = numbers.unsafe_split_with_sizes(sizes)  # faster than `split`, because autograd tracks no views
    return TileTable(parts[bounds], parts[tiles].view(-1, 2), parts[num_tiles], parts[order], block_rows)


def make_tile_table(
    offsets: Tensor,  # [G] int32, on the device
    num_rows: int,
    block_rows: int,
) -> TileTable:
    """Return the tile table of these groups, with `block_rows` rows per tile, without host synchronisation."""
    table = empty_tile_table(offsets, num_rows, offsets.shape[0], block_rows)
    write_table(table, offsets, num_rows)
    return table


def write_table(table: TileTable, offsets: Tensor, num_rows: int) -> None:
    """Write the tile table of the groups with these offsets, in one launch."""
    num_groups, block_rows, capacity = offsets.shape[0], table.block_rows, table.tiles.shape[0]
    if num_groups > MAX_GROUPS:
        raise NotImplementedError(f"tile table: at most {MAX_GROUPS} groups, got {num_groups}")
    launch_kernel(
        _tile_table_kernel,
        (num_table_programs(capacity, num_groups),),
        offsets,
        offsets.stride(0),
        table.bounds,
        table.tiles,
        table.num_tiles,
        table.order,
        num_rows,
        capacity,
        num_groups,
        G_P2=next_power_of_2(num_groups),
        BLOCK_ROWS=block_rows,
        **table_blocks(num_groups),
    )


@triton.jit
def write_tile_table(
    block,  # index of the program
    starts,  # [G_P2] int32, non-decreasing, at most num_rows
    ends,  # [G_P2] int32; lanes past G repeat the last end
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    order_ptr,  # [G]
    num_rows,
    capacity,
    G,
    G_P2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    PROGRAM_ENTRIES: tl.constexpr,
):
    # A program writes PROGRAM_ENTRIES entries of `tiles` and inserts PROGRAM_ENTRIES groups in `order`. Program 0 also
    # writes `bounds` and `num_tiles`.
    group = tl.arange(0, G_P2)
    counts = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS  # [G_P2], 0 past G
    tile_ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    tail_start = tl.max(ends, 0)
    if block == 0:
        tl.store(bounds_ptr + group, starts, mask=group < G)
        tl.store(bounds_ptr + G, tail_start)
        tl.store(bounds_ptr + G + 1, num_rows)
        tl.store(num_tiles_ptr, total)
        tl.store(num_tiles_ptr + 1, total + (num_rows - tail_start + BLOCK_ROWS - 1) // BLOCK_ROWS)
        tl.store(num_tiles_ptr + 2, 0)  # elements 2 and 3 are counters of `kernels/hopper/pace.py`
        tl.store(num_tiles_ptr + 3, 0)
    for first_entry in range(0, PROGRAM_ENTRIES, ENTRY_BLOCK):
        entry = block * PROGRAM_ENTRIES + first_entry + tl.arange(0, ENTRY_BLOCK)
        before = tile_ends[None, :] <= entry[:, None]  # [ENTRY_BLOCK, G_P2]
        owner = tl.minimum(tl.sum(before.to(tl.int32), 1), G)
        first = tl.max(tl.where(before, tile_ends[None, :], 0), 1)
        tl.store(tiles_ptr + entry * 2, owner, mask=entry < capacity)
        tl.store(tiles_ptr + entry * 2 + 1, entry - first, mask=entry < capacity)
        # `entry` is also the index of a group to insert in `order`. All programs together have at least G entries.
        size = tl.sum(tl.where(group[None, :] == entry[:, None], (ends - starts)[None, :], 0), 1)  # [ENTRY_BLOCK]
        larger = (ends - starts)[None, :] > size[:, None]
        before = larger | (((ends - starts)[None, :] == size[:, None]) & (group[None, :] < entry[:, None]))
        tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), entry, mask=entry < G)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _tile_table_kernel(
    offsets_ptr,  # [G]
    offsets_stride,
    bounds_ptr,
    tiles_ptr,
    num_tiles_ptr,
    order_ptr,
    num_rows,
    capacity,
    G,
    G_P2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    PROGRAM_ENTRIES: tl.constexpr,
):
    """One program writes PROGRAM_ENTRIES table entries. Grid: (cdiv(max(capacity, G), PROGRAM_ENTRIES),)."""
    group = tl.arange(0, G_P2)
    raw_ends = tl.load(offsets_ptr + group * offsets_stride, mask=group < G, other=0)
    raw_starts = tl.load(offsets_ptr + (group - 1) * offsets_stride, mask=(group > 0) & (group <= G), other=0)
    ends = tl.associative_scan(tl.minimum(tl.maximum(raw_ends, 0), num_rows), 0, larger)
    starts = tl.associative_scan(tl.minimum(tl.maximum(raw_starts, 0), num_rows), 0, larger)
    starts = tl.where(group < G, starts, ends)
    write_tile_table(
        tl.program_id(0),
        starts,
        ends,
        bounds_ptr,
        tiles_ptr,
        num_tiles_ptr,
        order_ptr,
        num_rows,
        capacity,
        G,
        G_P2,
        BLOCK_ROWS,
        ENTRY_BLOCK,
        PROGRAM_ENTRIES,
    )
