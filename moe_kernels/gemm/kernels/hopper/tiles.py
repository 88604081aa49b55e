"""Finds rows and columns of a grouped GEMM's tiles from a tile table or, for few groups, from the groups' offsets."""

# This file omits `from __future__ import annotations`, because `aggregate` needs the types of fields, not strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....runtime.gluon import aggregate

MOST_WALKED = gl.constexpr(32)  # maximum number of groups without a table: one group per lane

# A reduction with at least this number of steps is long. In long reductions, programs keep pace (`pace.py`), and
# warpgroups without rows in a tile multiply, too (`grouped_device.py`). In shorter reductions, these measures cost more
# than they save.
LONG_REDUCTION = gl.constexpr(16)

# If a program's tiles take at least this number of steps in total, half-width tiles are computed at full width.
# Half-width tiles recur periodically in the order of tiles, so some programs get more of them and run ever further
# ahead. The L2 cache may then drop data before slower programs read the data. Reading the data from memory again costs
# more than half-width tiles save. The number was measured without the waits of `pace.py`.
LONG_WORK = gl.constexpr(4400)


@aggregate
class Tiles:
    """The tiles of the product, one for each pair of a row tile and a column tile. A tile table defines the row tiles.
    Without a table, the groups' offsets define the row tiles."""

    # Without a table, `with_walk` puts the groups' cumulative tile counts in `entries` and their end rows in `bounds`.
    entries: gl.tensor  # pointer to the table's entries [capacity, 2]; without a table, unused before `with_walk`
    bounds: gl.tensor  # pointer to the table's bounds [G + 2]; without a table, to the offsets [G]
    num_rows: gl.tensor
    num_row_tiles: gl.tensor
    num_column_tiles: gl.tensor
    num_steps: gl.tensor  # number of reduction steps per tile
    block_m: gl.constexpr
    group_tiles: gl.constexpr  # number of successive row tiles with the same column tile; keeps B in L2
    num_groups: gl.constexpr  # number of groups; None if there is a table

    @gluon.constexpr_function
    def __init__(
        self,
        entries,
        bounds,
        num_rows,
        num_row_tiles,
        num_column_tiles,
        num_steps,
        block_m,
        group_tiles,
        num_groups,
    ):
        self.entries = entries
        self.bounds = bounds
        self.num_rows = num_rows
        self.num_row_tiles = num_row_tiles
        self.num_column_tiles = num_column_tiles
        self.num_steps = num_steps
        self.block_m = gl.constexpr(block_m)
        self.group_tiles = gl.constexpr(group_tiles)
        self.num_groups = gl.constexpr(num_groups)


@gluon.jit
def _larger(x, y):
    return max(x, y)


@gluon.jit
def _plus(x, y):
    return x + y


@gluon.jit
def walk(offsets_ptr, num_rows, BLOCK_M: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Return (cumulative tile counts, end rows) of the groups, each [MOST_WALKED]. Offsets that decrease or
    leave [0, num_rows] are clamped. Lanes past the last group repeat the last group's values."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    group = gl.arange(0, MOST_WALKED, layout=layout)
    raw_ends = gl.load(offsets_ptr + group, mask=group < NUM_GROUPS, other=0)
    raw_starts = gl.load(offsets_ptr + (group - 1), mask=(group > 0) & (group <= NUM_GROUPS), other=0)
    ends = gl.associative_scan(gl.minimum(gl.maximum(raw_ends, 0), num_rows), 0, _larger)
    starts = gl.associative_scan(gl.minimum(gl.maximum(raw_starts, 0), num_rows), 0, _larger)
    counts = gl.where(group < NUM_GROUPS, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    return gl.associative_scan(counts, 0, _plus), ends


@gluon.jit
def with_walk(tiles):
    """Return `tiles` with the groups' tile counts and end rows (`walk`) in the registers of the calling warps. If there
    is a table, return `tiles` unchanged."""
    if tiles.num_groups is None:
        return tiles
    else:
        tile_ends, ends = walk(tiles.bounds, tiles.num_rows, tiles.block_m, tiles.num_groups)
        return Tiles(
            tile_ends, ends, tiles.num_rows, tiles.num_row_tiles, tiles.num_column_tiles, tiles.num_steps,
            tiles.block_m, tiles.group_tiles, tiles.num_groups,
        )  # fmt: skip


@gluon.jit
def row_tile_at(tiles, row_tile):
    """Return (group, first row, end row of the group). Row tiles past the last group have group G."""
    if tiles.num_groups is None:
        group = gl.load(tiles.entries + 2 * row_tile)
        block = gl.load(tiles.entries + 2 * row_tile + 1)
        return group, gl.load(tiles.bounds + group) + block * tiles.block_m, gl.load(tiles.bounds + group + 1)
    else:
        is_before = tiles.entries <= row_tile  # [MOST_WALKED]
        group = min(gl.sum(is_before.to(gl.int32), 0), tiles.num_groups)
        block = row_tile - gl.max(gl.where(is_before, tiles.entries, 0), 0)
        start = gl.max(gl.where(is_before, tiles.bounds, 0), 0)
        end = gl.min(gl.where(is_before, tiles.num_rows, tiles.bounds), 0)
        return group, start + block * tiles.block_m, end


@gluon.jit
def tile_at(tiles, tile):
    """Return (group, first row, end row of group, column tile) of a tile, or of the last tile if `tile` is larger."""
    tile = max(min(tile, tiles.num_row_tiles * tiles.num_column_tiles - 1), 0)
    band = tiles.group_tiles * tiles.num_column_tiles
    first = tile // band * tiles.group_tiles
    height = max(min(tiles.num_row_tiles - first, tiles.group_tiles), 1)
    group, row, end = row_tile_at(tiles, first + tile % band % height)
    return group, row, end, tile % band // height
