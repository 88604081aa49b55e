"""Routing statistics of one forward pass. Two launches add the statistics to totals on the device. The host does not
wait for the GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel
from ..runtime.registered_ops import on_device_of
from ..runtime.triton import cdiv, next_power_of_2, tl, triton

TILE_ROWS = 128  # number of rows per tile in a permutation's tile table
_MOST_PROGRAMS = 256
_BLOCK = 1024  # number of tokens times number of experts that a step covers; larger steps spill registers


class RoutedForward(NamedTuple):
    """The tensors from which the routing statistics of one forward pass are computed."""

    logits: Tensor  # [T, E]
    keys: Tensor  # [T, E], the values by which the router ranks experts
    choices: Tensor  # [T, K] integers; negative means no expert
    kept: Tensor | None  # [T, K] integers: `choices`, with -1 for choices beyond a capacity; None without capacities
    token_mask: Tensor | None  # [T] bool: False for padding, left out of all statistics except the number of all tokens
    aux_loss: Tensor | None  # scalar


def add_routing_statistics(
    counts: Tensor,  # [2E + 4] int64
    sums: Tensor,  # [6] float64
    forward: RoutedForward,
    num_experts: int,
) -> None:
    """Add the statistics of one forward pass to the totals `counts` and `sums`.

    `counts` holds, in order, the numbers of: kept choices [E], all choices [E], forward passes, tokens other than
    padding, all tokens, and padding rows. Padding rows complete the last tile of an expert. Only the first
    `num_experts` experts, which have parameters, have padding rows.

    `sums` holds, in order: the sums of the softmax's entropies, of margins, of excesses and of auxiliary losses, then
    the number of losses and the smallest margin. The excess of a forward pass is the largest number of choices per
    expert, divided by the mean number, minus 1. A token's margin is the lowest key of its chosen experts minus the
    highest key of its other experts. If both keys are equal, the margin is zero.

    Computes in float32 and sums in float64. Deterministic. Runs only with Triton. Not differentiable. Operands are not
    checked.
    """
    on_device_of(forward.logits, _launch, counts, sums, forward, num_experts)


def _launch(counts: Tensor, sums: Tensor, forward: RoutedForward, num_experts: int) -> None:
    logits, keys = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (forward.logits, forward.keys))
    choices, kept = forward.choices.contiguous(), None if forward.kept is None else forward.kept.contiguous()
    token_mask = None if forward.token_mask is None else forward.token_mask.contiguous().view(torch.uint8)
    (num_tokens, num_choices), top_k = logits.shape, choices.shape[1]
    block_e = max(next_power_of_2(num_choices), 16)
    block_t = max(_BLOCK // block_e, 1)
    num_programs = max(min(cdiv(num_tokens, block_t), _MOST_PROGRAMS), 1)
    # Without capacities, one array of counts is enough, because all choices are kept.
    part_counts = counts.new_empty(num_programs, 1 if kept is None else 2, num_choices, dtype=torch.int32)
    part_sums = sums.new_empty(num_programs, 4)
    launch_kernel(
        _partial_statistics_kernel,
        (num_programs,),
        logits,
        logits.stride(0),
        keys,
        keys.stride(0),
        choices,
        kept,
        token_mask,
        part_counts,
        part_sums,
        num_tokens,
        E=num_choices,
        TOP_K=top_k,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )
    launch_kernel(
        _add_statistics_kernel,
        (1,),
        part_counts,
        part_sums,
        forward.aux_loss,
        counts,
        sums,
        num_programs,
        num_tokens,
        E=num_choices,
        NUM_EXPERTS=num_experts,
        NUM_COUNTS=part_counts.shape[1],
        TILE_ROWS=TILE_ROWS,
        BLOCK_P=max(4 * _BLOCK // block_e, 1),
        BLOCK_E=block_e,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _partial_statistics_kernel(
    logits_ptr,
    logits_stride,  # [T, E], each row contiguous
    keys_ptr,
    keys_stride,  # [T, E], each row contiguous
    choices_ptr,  # [T, K] contiguous
    kept_ptr,  # [T, K] contiguous, or None
    token_mask_ptr,  # [T] bytes, or None
    counts_ptr,  # [P, 1, E] int32: all choices; [P, 2, E]: all choices, then kept choices
    sums_ptr,  # [P, 4] float64: sums of entropies and of margins, smallest margin, number of tokens
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Program p writes counts[p] and sums[p] over the blocks p, p + P, p + 2P, ... of BLOCK_T tokens. Grid: (P,)."""
    p = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    chosen = tl.zeros((BLOCK_E,), tl.int32)  # [BLOCK_E]
    kept = tl.zeros((BLOCK_E,), tl.int32)  # [BLOCK_E]
    entropies = tl.zeros((BLOCK_T,), tl.float64)  # [BLOCK_T]
    margins = tl.zeros((BLOCK_T,), tl.float64)  # [BLOCK_T]
    smallest = tl.full((BLOCK_T,), float("inf"), tl.float32)  # [BLOCK_T]
    tokens = tl.zeros((BLOCK_T,), tl.int32)  # [BLOCK_T]
    for first in range(p * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        is_token = t < num_tokens
        if token_mask_ptr is not None:
            is_token = is_token & (tl.load(token_mask_ptr + t, mask=is_token, other=0) != 0)
        slots = _slots_per_expert(choices_ptr, t, is_token, e, TOP_K, BLOCK_T, BLOCK_E)
        chosen += tl.sum(slots, 0)
        if kept_ptr is not None:
            kept += tl.sum(_slots_per_expert(kept_ptr, t, is_token, e, TOP_K, BLOCK_T, BLOCK_E), 0)
        is_read = is_token[:, None] & (e < E)[None, :]
        row = logits_ptr + t[:, None] * logits_stride
        logits = tl.load(row + e[None, :], mask=is_read, other=float("-inf")).to(tl.float32)
        entropies += tl.where(is_token, _entropy(logits), 0.0).to(tl.float64)
        row = keys_ptr + t[:, None] * keys_stride
        keys = tl.load(row + e[None, :], mask=is_read, other=float("-inf")).to(tl.float32)
        last = tl.min(tl.where(slots > 0, keys, float("inf")), 1)
        best = tl.max(tl.where(slots > 0, float("-inf"), keys), 1)
        margin = tl.where(last == best, 0.0, last - best)  # if both are -inf, last - best is NaN
        margins += tl.where(is_token, margin, 0.0).to(tl.float64)
        smallest = tl.minimum(smallest, tl.where(is_token, margin, float("inf")))
        tokens += is_token.to(tl.int32)
    counts_ptr += p * (E * (1 if kept_ptr is None else 2))
    tl.store(counts_ptr + e, chosen, mask=e < E)
    if kept_ptr is not None:
        tl.store(counts_ptr + E + e, kept, mask=e < E)
    tl.store(sums_ptr + p * 4, tl.sum(entropies, 0))
    tl.store(sums_ptr + p * 4 + 1, tl.sum(margins, 0))
    tl.store(sums_ptr + p * 4 + 2, tl.min(smallest, 0).to(tl.float64))
    tl.store(sums_ptr + p * 4 + 3, tl.sum(tokens, 0).to(tl.float64))


@triton.jit
def _slots_per_expert(
    choices_ptr,  # [T, K]
    t,  # [BLOCK_T]
    is_token,  # [BLOCK_T]
    e,  # [BLOCK_E]
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return how often each token chose each expert, [BLOCK_T, BLOCK_E] int32."""
    slots = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)  # [BLOCK_T, BLOCK_E]
    for k in tl.range(TOP_K, loop_unroll_factor=8):  # unrolled, so that the loads of several slots overlap
        choice = tl.load(choices_ptr + t * TOP_K + k, mask=is_token, other=-1)
        slots += (choice[:, None] == e[None, :]).to(tl.int32)
    return slots


@triton.jit
def _entropy(
    logits,  # [BLOCK_T, BLOCK_E], -inf in columns beyond the experts
):
    """Return the entropy of each token's softmax, in nats. Both summands are at least 0, so no digits cancel."""
    shifted = logits - tl.max(logits, 1)[:, None]
    powers = tl.exp(shifted)
    total = tl.sum(powers, 1)
    return tl.log(total) - tl.sum(tl.where(powers > 0.0, powers * shifted, 0.0), 1) / total


@triton.jit(do_not_specialize=["num_partials", "num_tokens"])
def _add_statistics_kernel(
    part_counts_ptr,  # [P, NUM_COUNTS, E] int32: all choices, then kept choices if NUM_COUNTS is 2
    part_sums_ptr,  # [P, 4] float64
    aux_loss_ptr,  # scalar, or None
    counts_ptr,  # [2E + 4] int64
    sums_ptr,  # [6] float64
    num_partials,
    num_tokens,
    E: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program adds the partial statistics of all P programs to counts and sums. Grid: (1,)."""
    e = tl.arange(0, BLOCK_E)
    chosen = tl.zeros((BLOCK_E,), tl.int32)  # [BLOCK_E]
    kept = tl.zeros((BLOCK_E,), tl.int32)  # [BLOCK_E]
    entropies = tl.zeros((BLOCK_P,), tl.float64)  # [BLOCK_P]
    margins = tl.zeros((BLOCK_P,), tl.float64)  # [BLOCK_P]
    smallest = tl.full((BLOCK_P,), float("inf"), tl.float64)  # [BLOCK_P]
    tokens = tl.zeros((BLOCK_P,), tl.float64)  # [BLOCK_P]
    for first in range(0, num_partials, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        is_part = p < num_partials
        is_read = is_part[:, None] & (e < E)[None, :]
        row = part_counts_ptr + p[:, None] * (NUM_COUNTS * E)
        chosen += tl.sum(tl.load(row + e[None, :], mask=is_read, other=0), 0)
        kept += tl.sum(tl.load(row + (NUM_COUNTS - 1) * E + e[None, :], mask=is_read, other=0), 0)
        entropies += tl.load(part_sums_ptr + p * 4, mask=is_part, other=0.0)
        margins += tl.load(part_sums_ptr + p * 4 + 1, mask=is_part, other=0.0)
        smallest = tl.minimum(smallest, tl.load(part_sums_ptr + p * 4 + 2, mask=is_part, other=float("inf")))
        tokens += tl.load(part_sums_ptr + p * 4 + 3, mask=is_part, other=0.0)
    _add(counts_ptr + e, kept.to(tl.int64), e < E)
    _add(counts_ptr + E + e, chosen.to(tl.int64), e < E)
    padding = tl.where(e < NUM_EXPERTS, (TILE_ROWS - kept % TILE_ROWS) % TILE_ROWS, 0)
    scalars = counts_ptr + 2 * E
    _add(scalars, 1, None)
    _add(scalars + 1, tl.sum(tokens, 0).to(tl.int64), None)
    _add(scalars + 2, num_tokens, None)
    _add(scalars + 3, tl.sum(padding, 0), None)
    total, most = tl.sum(chosen, 0).to(tl.int64), tl.max(chosen, 0).to(tl.int64)
    excess = (most * E - total).to(tl.float64)
    _add(sums_ptr, tl.sum(entropies, 0), None)
    _add(sums_ptr + 1, tl.sum(margins, 0), None)
    _add(sums_ptr + 2, excess / tl.maximum(total, 1).to(tl.float64), None)
    if aux_loss_ptr is not None:
        _add(sums_ptr + 3, tl.load(aux_loss_ptr).to(tl.float64), None)
        _add(sums_ptr + 4, 1.0, None)
    tl.store(sums_ptr + 5, tl.minimum(tl.load(sums_ptr + 5), tl.min(smallest, 0)))


@triton.jit
def _add(pointer, value, mask):
    tl.store(pointer, tl.load(pointer, mask=mask) + value, mask=mask)
