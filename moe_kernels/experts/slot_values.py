"""Copies routing weights from slots to rows. Sums the partial gradients of a slot's routing weight that are stored in
the slot's row."""

from __future__ import annotations

from torch import Tensor

from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, next_power_of_2, tl, triton

_BLOCK = 1024


def launch_row_weights(topk_weights: Tensor, slot_to_row: Tensor, row_weights: Tensor) -> None:
    """Write each slot's weight [T, K] to its row in [R]. Rows without a slot are not written."""
    num_slots = topk_weights.numel()
    if num_slots:
        grid = (cdiv(num_slots, _BLOCK),)
        launch_kernel(_row_weights_kernel, grid, topk_weights, slot_to_row, row_weights, num_slots, BLOCK=_BLOCK)


def launch_slot_sums(row_sums: Tensor, slot_to_row: Tensor) -> Tensor:  # [R, C] contiguous -> [T, K]
    """Return the sum over the columns of each slot's row, added in a fixed order. A dropped slot gets 0."""
    sums, num_slots, num_columns = row_sums.new_empty(slot_to_row.shape), slot_to_row.numel(), row_sums.shape[1]
    if num_slots:
        block_c = min(next_power_of_2(num_columns), _BLOCK)
        block_s = _BLOCK // block_c
        grid = (cdiv(num_slots, block_s),)
        options = {"BLOCK_S": block_s, "BLOCK_C": block_c}
        launch_kernel(_slot_sums_kernel, grid, row_sums, slot_to_row, sums, num_slots, num_columns, **options)
    return sums


@triton.jit(do_not_specialize=["num_slots"])
def _row_weights_kernel(
    weights_ptr,  # [T * K]
    slot_to_row_ptr,  # [T * K]
    row_weights_ptr,  # [R]
    num_slots,
    BLOCK: tl.constexpr,
):
    """One program copies the weights of BLOCK slots to their rows. Grid: (cdiv(T * K, BLOCK),)."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(slot_to_row_ptr + slot, mask=slot < num_slots, other=-1)
    weight = tl.load(weights_ptr + slot, mask=slot < num_slots, other=0.0)
    tl.store(row_weights_ptr + row, weight, mask=row >= 0)


@triton.jit(do_not_specialize=["num_slots"])
def _slot_sums_kernel(
    row_sums_ptr,  # [R, C]
    slot_to_row_ptr,  # [T * K]
    sums_ptr,  # [T * K]
    num_slots,
    C,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program adds the C values of each slot's row, for BLOCK_S slots. Grid: (cdiv(T * K, BLOCK_S),)."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.load(slot_to_row_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)  # [BLOCK_S, BLOCK_C]
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)[None, :]
        total += tl.load(row_sums_ptr + row * C + c, mask=(row >= 0) & (c < C), other=0.0)
    tl.store(sums_ptr + slot, tl.sum(total, 1), mask=slot < num_slots)
