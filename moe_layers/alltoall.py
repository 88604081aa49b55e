"""Expert parallelism in which every token travels to the processes of its experts, and the outputs travel back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import Permutation, combine, permute, sort_by_expert

from .collectives import Ranks, check_on_device, wait
from .dispatcher import Dispatched, dispatch_dtype
from .dropping import Slots
from .experts import GroupedExperts


class _Route(NamedTuple):
    """Which row of what is sent is which slot, and which expert each received row is for. S rows go, R rows come."""

    slot_to_row: Tensor  # [T, K] int32; -1 for a slot that is not sent
    row_to_slot: Tensor  # [S] int32
    sent: list[int]  # rows to each process
    received: list[int]  # rows from each
    experts: Tensor  # [R] int32: the expert among those here; beyond them for a row of no slot


class AllToAllDispatcher:
    """Send each slot's token and weight to the process of its expert, and sum what comes back.

    Processes may have any numbers of tokens. The weight is applied at the expert, so that nothing of what comes back
    is kept for backward.

    Args:
        ranks: that share the experts, as many for each.
        row_bound: every process sends each one so many times T * K / P rows, filled up; all must have equally many
            tokens. None sends as many rows as there are, for which the host waits once.
    """

    def __init__(self, ranks: Ranks, row_bound: float | None = None):
        self.ranks = ranks
        self.row_bound = row_bound

    def __call__(
        self,
        tokens: Tensor,  # [T, D]
        slots: Slots,
        experts: GroupedExperts,
    ) -> Dispatched:
        ranks, implementation = self.ranks, experts.implementation
        top_k = slots.topk_experts.shape[1]
        # A sort of [T * K, 1] slots: its rows know their slots.
        by_expert = sort_by_expert(
            slots.topk_experts.reshape(-1, 1), experts.num_experts, implementation=implementation
        )
        counts = torch.diff(by_expert.offsets, prepend=by_expert.offsets.new_zeros(1)).view(ranks.size, -1)
        capacity = self._capacity(slots)
        # Beside the counts, what tells all processes of an error in one.
        limit = counts.new_full((ranks.size, 1), capacity or 0)
        if capacity is not None:
            limit = torch.where((counts.sum(1) <= capacity).all(), limit, -1)
        facts = torch.cat([counts, limit], dim=1)
        ones = [1] * ranks.size
        facts = wait(ranks.all_to_all(facts, ones, ones))
        arriving = facts[:, :-1]  # [P, E / P]: from each process, for each expert here
        if capacity is None:
            route = self._exact_route(slots, by_expert, counts, arriving)
        else:
            check_on_device(
                (facts[:, -1] == capacity).all(),
                f"ExpertParallel: with row_bound={self.row_bound} every process must have as many tokens, and at most "
                f"{capacity} slots for experts of one process, got more or others",
            )
            route = self._bounded_route(slots, by_expert, counts, arriving, capacity)
        by_slot = by_expert._replace(slot_to_row=route.slot_to_row.view(-1, 1), row_to_token=route.row_to_slot)
        by_token = by_expert._replace(slot_to_row=route.slot_to_row, row_to_token=route.row_to_slot // max(top_k, 1))
        tokens = tokens.to(dispatch_dtype(tokens))
        leaving = (
            permute(slots.topk_weights.reshape(-1, 1), by_slot, implementation=implementation),  # [S, 1]
            permute(tokens, by_token, implementation=implementation),  # [S, D]
        )
        under_way = [ranks.all_to_all(rows, route.received, route.sent) for rows in leaving]
        permutation = sort_by_expert(route.experts[:, None], arriving.shape[1], implementation=implementation)
        weights, rows = map(wait, under_way)  # [R, 1], [R, D]
        rows = experts(rows, weights, permutation)  # [R, D]
        rows = wait(ranks.all_to_all(rows, route.sent, route.received))  # [S, D]
        return Dispatched(combine(rows, None, route.slot_to_row, implementation=implementation), by_expert.offsets)

    def _capacity(self, slots: Slots) -> int | None:
        """The rows that go to each process, of slots or none. None for as many as there are slots."""
        if self.row_bound is None:
            return None
        num_slots = slots.topk_experts.numel() if slots.max_rows is None else slots.max_rows
        return math.ceil(self.row_bound * num_slots / self.ranks.size)

    def _exact_route(self, slots: Slots, by_expert: Permutation, counts: Tensor, arriving: Tensor) -> _Route:
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # waits for the GPU
        row = torch.arange(sum(received), device=arriving.device)
        experts = torch.searchsorted(arriving.flatten().cumsum(0), row, right=True) % arriving.shape[1]
        slot_to_row = by_expert.slot_to_row.view(slots.topk_experts.shape)
        return _Route(slot_to_row, by_expert.row_to_token[: sum(sent)], sent, received, experts.int())

    def _bounded_route(
        self, slots: Slots, by_expert: Permutation, counts: Tensor, arriving: Tensor, capacity: int
    ) -> _Route:
        """Each process owns `capacity` rows of what is sent, and of what is received."""
        num_ranks = len(arriving)
        ends = counts.sum(1).cumsum(0)  # [P] of the rows in expert order
        starts = ends - counts.sum(1)
        place = torch.arange(capacity, device=ends.device)
        row = (starts[:, None] + place).flatten().clamp(max=max(slots.topk_experts.numel() - 1, 0))
        row_to_slot = by_expert.row_to_token[row]
        sorted_row = by_expert.slot_to_row.view(slots.topk_experts.shape)
        rank = torch.searchsorted(ends, sorted_row.long(), right=True).clamp(max=num_ranks - 1)
        place_of_slot = sorted_row - starts[rank]
        is_sent = (sorted_row >= 0) & (place_of_slot < capacity)
        slot_to_row = torch.where(is_sent, rank * capacity + place_of_slot, -1).int()
        experts = torch.searchsorted(arriving.cumsum(1), place.expand(num_ranks, -1).contiguous(), right=True)
        splits = [capacity] * num_ranks
        return _Route(slot_to_row, row_to_slot, splits, splits, experts.flatten().int())
