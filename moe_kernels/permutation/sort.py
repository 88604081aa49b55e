"""A stable sort of the slots by expert, deterministic because it uses no atomics.

More than 1024 slots are sorted by counting, in three launches for any T, K and E. The first launch counts each expert's
slots in each block of slots. For each block, the second launch sums each expert's counts over all earlier blocks. The
third launch sorts each block of slots and writes the slots' rows. Up to 1024 slots take one launch, which compares all
pairs of slots.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..gemm.tile_table import (
    empty_tile_table,
    make_tile_table,
    num_table_programs,
    table_blocks,
    tile_capacity,
    write_tile_table,
)
from ..runtime.checks import check_dtype, check_shapes
from ..runtime.dispatch import choose, once_per_form
from ..runtime.launch import launch_kernel
from ..runtime.registered_ops import registered_op
from ..runtime.triton import cdiv, next_power_of_2, slots_compared_at_once, sort, tl, triton
from ..types import Permutation, TileTable

MAX_EXPERTS = 1024
BLOCK_ROWS = 128  # default number of rows per tile in the tile table

_FEW_SLOTS = 1024  # maximum number of slots to sort in one launch; for more slots, three launches are faster
_RANKED = 32  # number of slots per program in the launch that compares all pairs of slots
_COMPARED = slots_compared_at_once
_ALIGNED_INTEGERS = 4  # number of int32 values in 16 bytes, the alignment for which Triton specialises kernels


def sort_by_expert(
    topk_experts: Tensor,  # [T, K] int32 or int64
    num_experts: int,
    *,
    block_rows: int = BLOCK_ROWS,
    max_rows: int | None = None,
    implementation: str | None = None,
) -> Permutation:
    """Sort the slots by expert, stably: an expert's rows stay in token order.

    A slot whose expert id is outside [0, num_experts) is dropped: its `slot_to_row` is -1. Each dropped slot leaves a
    padding row after the last expert's rows. Padding rows never affect results. Not differentiable. Deterministic.

    Shapes: topk_experts [T, K] int32 or int64.

    Args:
        block_rows: the number of rows per tile in the permutation's tile table. Default: 128.
        max_rows: upper bound of the number of rows R, for inputs with mostly dropped slots. R becomes
            min(max_rows, T * K), and slots whose row index would be R or more are dropped, too. Default: None, which
            means R = T * K.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: wrong shape or dtype, or `num_experts` or `max_rows` is not positive.
        NotImplementedError: more than 1024 experts with "triton".
    """
    _check(topk_experts, num_experts, max_rows)
    if choose("sort_by_expert", implementation, topk_experts) == "reference":
        return reference.sort_by_expert(topk_experts, num_experts, block_rows=block_rows, max_rows=max_rows)
    check_num_experts(num_experts)
    results = _sort_op(topk_experts.contiguous(), num_experts, block_rows)
    # Compiled code must fit any number of tokens, so compiled code applies the bound even if no row exceeds it.
    if max_rows is not None and (torch.compiler.is_compiling() or max_rows < topk_experts.numel()):
        results = _bound_op(*results[:3], max_rows, block_rows)
    offsets, slot_to_row, row_to_token, *table = results
    return Permutation(offsets, slot_to_row, row_to_token, TileTable(*table, block_rows=block_rows))


def check_num_experts(num_experts: int) -> None:
    """Raise NotImplementedError if there are more experts than the kernels support."""
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(f"sort_by_expert: at most {MAX_EXPERTS} experts, got {num_experts}")


@once_per_form
def _check(topk_experts: Tensor, num_experts: int, max_rows: int | None) -> None:
    check_shapes("sort_by_expert", topk_experts=(topk_experts, "T K"))
    check_dtype("sort_by_expert", "topk_experts", topk_experts, torch.int32, torch.int64)
    if num_experts < 1:
        raise ValueError(f"sort_by_expert: num_experts must be positive, got {num_experts}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"sort_by_expert: max_rows must be positive, got {max_rows}")


# This op hides the slice of rows from Inductor, which would compile the slice again for small numbers of tokens.
@registered_op("bound_rows")
def _bound_op(
    offsets: Tensor, slot_to_row: Tensor, row_to_token: Tensor, max_rows: int, block_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows = min(max_rows, len(row_to_token))
    offsets = offsets.clamp(max=num_rows)
    table = make_tile_table(offsets, num_rows, block_rows)
    return offsets, torch.where(slot_to_row < num_rows, slot_to_row, -1), row_to_token[:num_rows].clone(), *table[:4]


@_bound_op.register_fake
def _(offsets, slot_to_row, row_to_token, max_rows, block_rows):
    num_rows: Any = torch.sym_min(max_rows, row_to_token.shape[0])
    table = empty_tile_table(offsets, num_rows, offsets.shape[0], block_rows)
    rows = row_to_token.new_empty(num_rows)
    return torch.empty_like(offsets), torch.empty_like(slot_to_row), rows, *table[:4]


@registered_op("sort_by_expert")
def _sort_op(
    topk_experts: Tensor, num_experts: int, block_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = _empty_sort(topk_experts, num_experts, block_rows)
    _launch_sort(topk_experts, num_experts, block_rows, results)
    return results


class SortedSlots(NamedTuple):
    """A permutation in one tensor, `buffer`, for sorts without `max_rows`. With `has_choice`, `empty` reserves space at
    the end of the buffer for the routing weights [T, K] float32 and the experts [T, K] int32 to sort. Each part is a
    view of `buffer` that starts at a multiple of 16 bytes."""

    buffer: Tensor  # [N, 4] int32; the first E of its 4 * N elements are the offsets
    slots_per_token: int
    num_sorted_experts: int

    @classmethod
    def empty(cls, tokens: Tensor, top_k: int, num_experts: int, *, has_choice: bool) -> SortedSlots:
        num_tokens = tokens.shape[0]
        shapes = _part_shapes(num_tokens, top_k, num_experts, BLOCK_ROWS) + [(num_tokens, top_k)] * 2 * has_choice
        total = sum(map(_padded_size, shapes))
        buffer = tokens.new_empty(total // _ALIGNED_INTEGERS, _ALIGNED_INTEGERS, dtype=torch.int32)
        return cls(buffer, top_k, num_experts)

    def sort(self, topk_experts: Tensor) -> Permutation:
        """Write to `buffer` the permutation that sorts `topk_experts`. Return the permutation as views of `buffer`."""
        permutation = self.permutation(len(topk_experts))
        results = *permutation[:3], *permutation.tile_table[:4]
        _launch_sort(topk_experts, self.num_sorted_experts, BLOCK_ROWS, results)
        return permutation

    def permutation(self, num_tokens: int) -> Permutation:
        shapes = _part_shapes(num_tokens, self.slots_per_token, self.num_sorted_experts, BLOCK_ROWS)
        start, views = self.buffer.storage_offset(), []
        for shape in shapes:
            views.append(self.buffer.as_strided(shape, (*shape[1:], 1), start))
            start += _padded_size(shape)
        offsets, slot_to_row, row_to_token, *table = views
        return Permutation(offsets, slot_to_row, row_to_token, TileTable(*table, block_rows=BLOCK_ROWS))

    def choice(self, num_tokens: int) -> tuple[Tensor, Tensor]:  # weights [T, K], experts [T, K]
        """Return the weights and experts as views of a `buffer` that `empty` made with `has_choice`."""
        shape = num_tokens, self.slots_per_token
        size, end = _padded_size(shape), self.buffer.storage_offset() + self.buffer.numel()
        weights, experts = self.buffer.view(torch.float32), self.buffer
        strides = self.slots_per_token, 1
        return weights.as_strided(shape, strides, end - 2 * size), experts.as_strided(shape, strides, end - size)


def _part_shapes(num_tokens: int, top_k: int, num_experts: int, block_rows: int) -> list[tuple[int, ...]]:
    num_slots = num_tokens * top_k
    capacity = tile_capacity(num_slots, num_experts, block_rows)
    return [(num_experts,), (num_tokens, top_k), (num_slots,), (num_experts + 2,), (capacity, 2), (4,), (num_experts,)]


def _padded_size(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // _ALIGNED_INTEGERS) * _ALIGNED_INTEGERS


def _launch_sort(topk_experts: Tensor, num_experts: int, block_rows: int, results: tuple[Tensor, ...]) -> None:
    """Write a permutation to `results`: offsets, slot_to_row, row_to_token and the tensors of the tile table."""
    num_slots, top_k = topk_experts.numel(), topk_experts.shape[1]
    capacity = results[4].shape[0]
    table_programs = num_table_programs(capacity, num_experts)
    sizes = num_slots, capacity, num_experts, top_k
    constants = {"E_P2": next_power_of_2(num_experts), "BLOCK_ROWS": block_rows, **table_blocks(num_experts)}
    if num_slots <= _FEW_SLOTS:
        grid = (table_programs + cdiv(num_slots, _RANKED),)
        launch_kernel(_rank_kernel, grid, topk_experts, *results, *sizes, RANKED=_RANKED, BLOCK=_COMPARED, **constants)
        return
    # One warp sorts and scans 256 slots without shared memory or barriers. Each program writes E counts. With many
    # experts, programs of 512 slots are therefore faster, because half as many programs write counts.
    block_slots, num_place_warps = (256, 1) if num_experts <= 128 else (512, 4)
    num_blocks = cdiv(num_slots, block_slots)
    # `counts` first holds each expert's number of slots in each block. The scan replaces each number by the sum over
    # earlier blocks.
    counts = topk_experts.new_empty(num_blocks, num_experts, dtype=torch.int32)
    totals = topk_experts.new_empty(num_experts, dtype=torch.int32)
    count = {"E_P2": constants["E_P2"], "BLOCK": block_slots}
    launch_kernel(_count_kernel, (num_blocks,), topk_experts, counts, num_slots, num_experts, **count)
    scan = {"BLOCK_B": 2048, "num_warps": 8} if num_blocks > 256 else {"BLOCK_B": 256, "num_warps": 4}
    launch_kernel(_scan_kernel, (cdiv(num_experts, 4),), counts, totals, num_blocks, num_experts, BLOCK_E=4, **scan)
    grid, options = (table_programs + num_blocks,), {"BLOCK": block_slots, "num_warps": num_place_warps, **constants}
    launch_kernel(_place_kernel, grid, topk_experts, counts, totals, *results, *sizes, **options)


@_sort_op.register_fake
def _empty_sort(topk_experts, num_experts, block_rows):
    num_tokens, top_k = topk_experts.shape
    shapes = _part_shapes(num_tokens, top_k, num_experts, block_rows)
    return tuple(topk_experts.new_empty(shape, dtype=torch.int32) for shape in shapes)


@triton.jit
def _load_experts(experts_ptr, slot, num_slots, E):
    """Return the experts of slots as int32. Dropped slots and lanes beyond the last slot get E."""
    expert = tl.load(experts_ptr + slot, mask=slot < num_slots, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _rank_kernel(
    experts_ptr,  # [num_slots]
    offsets_ptr,  # [E]
    slot_to_row_ptr,  # [num_slots]
    row_to_token_ptr,  # [num_slots]
    bounds_ptr,
    tiles_ptr,
    num_tiles_ptr,
    order_ptr,
    num_slots,
    capacity,
    E,
    TOP_K,
    RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
    E_P2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    PROGRAM_ENTRIES: tl.constexpr,
):
    """The first programs write the offsets and the tile table. Each other program finds the rows of RANKED slots.
    Grid: (cdiv(max(capacity, E), PROGRAM_ENTRIES) + cdiv(num_slots, RANKED),)."""
    table_programs = tl.cdiv(tl.maximum(capacity, E), PROGRAM_ENTRIES)
    lane = tl.arange(0, BLOCK)
    if tl.program_id(0) < table_programs:
        index = tl.arange(0, E_P2)
        totals = tl.zeros((E_P2,), tl.int32)
        for first in range(0, num_slots, BLOCK):
            expert = _load_experts(experts_ptr, first + lane, num_slots, E)
            kept = expert < E
            totals += tl.histogram(tl.where(kept, expert, 0), E_P2, mask=kept)
        ends = tl.cumsum(totals, 0)
        if tl.program_id(0) == 0:
            tl.store(offsets_ptr + index, ends, mask=index < E)
        write_tile_table(
            tl.program_id(0),
            ends - totals,
            ends,
            bounds_ptr,
            tiles_ptr,
            num_tiles_ptr,
            order_ptr,
            num_slots,
            capacity,
            E,
            E_P2,
            BLOCK_ROWS,
            ENTRY_BLOCK,
            PROGRAM_ENTRIES,
        )
    else:
        slot = (tl.program_id(0) - table_programs) * RANKED + tl.arange(0, RANKED)
        expert = _load_experts(experts_ptr, slot, num_slots, E)
        row = tl.zeros((RANKED,), tl.int32)
        for first in range(0, num_slots, BLOCK):
            other = first + lane
            value = _load_experts(experts_ptr, other, num_slots, E)
            value = tl.where(other < num_slots, value, E + 1)[None, :]  # lanes past the last slot rank after all slots
            is_tie = value == expert[:, None]  # [RANKED, BLOCK]
            is_before = (value < expert[:, None]) | (is_tie & (other[None, :] < slot[:, None]))
            row += tl.sum(is_before.to(tl.int32), 1)
        tl.store(slot_to_row_ptr + slot, tl.where(expert < E, row, -1), mask=slot < num_slots)
        tl.store(row_to_token_ptr + row, (slot // TOP_K).to(tl.int32), mask=slot < num_slots)


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(
    experts_ptr,  # [num_slots]
    counts_ptr,  # [num_blocks, E]
    num_slots,
    E,
    E_P2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes counts[block, :], the number of each expert's slots in the block. Grid: (num_blocks,)."""
    block = tl.program_id(0).to(tl.int64)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_experts(experts_ptr, slot, num_slots, E)
    kept = expert < E
    counts = tl.histogram(tl.where(kept, expert, 0), E_P2, mask=kept)  # [E_P2]
    index = tl.arange(0, E_P2)
    tl.store(counts_ptr + block * E + index, counts, mask=index < E)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(
    counts_ptr,  # [num_blocks, E]; becomes the exclusive sum over blocks
    totals_ptr,  # [E]
    num_blocks,
    E,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program replaces the counts of BLOCK_E experts by sums over earlier blocks. Grid: (cdiv(E, BLOCK_E),)."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    carry = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        mask = (block < num_blocks)[:, None] & (expert < E)[None, :]
        pointer = counts_ptr + block.to(tl.int64)[:, None] * E + expert[None, :]
        counts = tl.load(pointer, mask=mask, other=0)  # [BLOCK_B, BLOCK_E]
        tl.store(pointer, carry[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        carry += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, carry, mask=expert < E)


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _place_kernel(
    experts_ptr,  # [num_slots]
    earlier_ptr,  # [num_blocks, E]: number of the expert's slots in earlier blocks
    totals_ptr,  # [E]
    offsets_ptr,  # [E]
    slot_to_row_ptr,  # [num_slots]
    row_to_token_ptr,  # [num_slots]
    bounds_ptr,
    tiles_ptr,
    num_tiles_ptr,
    order_ptr,
    num_slots,
    capacity,
    E,
    TOP_K,
    E_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    PROGRAM_ENTRIES: tl.constexpr,
):
    """The first programs write the offsets and the tile table. Each other program finds the rows of a block of slots.
    Grid: (cdiv(max(capacity, E), PROGRAM_ENTRIES) + num_blocks,)."""
    index = tl.arange(0, E_P2)
    totals = tl.load(totals_ptr + index, mask=index < E, other=0)
    ends = tl.cumsum(totals, 0)
    starts = ends - totals
    table_programs = tl.cdiv(tl.maximum(capacity, E), PROGRAM_ENTRIES)
    if tl.program_id(0) < table_programs:
        if tl.program_id(0) == 0:
            tl.store(offsets_ptr + index, ends, mask=index < E)
        write_tile_table(
            tl.program_id(0),
            starts,
            ends,
            bounds_ptr,
            tiles_ptr,
            num_tiles_ptr,
            order_ptr,
            num_slots,
            capacity,
            E,
            E_P2,
            BLOCK_ROWS,
            ENTRY_BLOCK,
            PROGRAM_ENTRIES,
        )
    else:
        block = tl.program_id(0) - table_programs
        is_last = tl.program_id(0) == tl.num_programs(0) - 1
        exists = index < E
        earlier = tl.load(earlier_ptr + block.to(tl.int64) * E + index, mask=exists, other=0)
        up_to_here = tl.load(earlier_ptr + (block + 1).to(tl.int64) * E + index, mask=exists & (not is_last), other=0)
        counts = tl.where(is_last, totals, up_to_here) - earlier
        first_lane = tl.cumsum(counts, 0) - counts  # position of each expert's first slot in the sorted block
        lane = tl.arange(0, BLOCK)
        slot = block.to(tl.int64) * BLOCK + lane
        # The keys are distinct, so any sort of the keys is a stable sort of the slots.
        keys = sort(_load_experts(experts_ptr, slot, num_slots, E) * BLOCK + lane)
        expert = keys // BLOCK
        slot = block.to(tl.int64) * BLOCK + keys % BLOCK
        kept = expert < E
        base = tl.gather(starts + earlier - first_lane, tl.where(kept, expert, 0), 0)
        dropped_base = tl.max(ends, 0) + block * BLOCK - tl.sum(earlier, 0) - tl.sum(counts, 0)
        row = lane + tl.where(kept, base, dropped_base)
        tl.store(slot_to_row_ptr + slot, tl.where(kept, row, -1), mask=slot < num_slots)
        tl.store(row_to_token_ptr + row, (slot // TOP_K).to(tl.int32), mask=slot < num_slots)
