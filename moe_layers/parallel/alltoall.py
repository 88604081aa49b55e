"""Expert parallelism in which every token travels to the processes of its experts, and the outputs travel back."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import Permutation, combine, permute, sort_by_expert

from ..experts.grouped import GroupedExperts
from ..routing.capacity import Slots
from .collectives import AsyncCollective, check_on_device, wait
from .rank_dispatcher import Chunk, RankDispatcher, row_bytes


class _Route(NamedTuple):
    """Which row of what is sent is which slot, and which expert each received row is for. S rows go, R rows come."""

    slot_to_row: Tensor  # [T, K] int32; -1 for a slot that is not sent
    row_to_slot: Tensor  # [S] int32
    sent: list[int]  # rows to each process
    received: list[int]  # rows from each
    experts: Tensor  # [R] int32: the expert among those here; beyond them for a row of no slot


class _Outgoing(NamedTuple):
    """Some tokens that are to be sent, in expert order."""

    tokens: Tensor  # [T, D]
    slots: Slots
    order: Permutation  # of the slots as [T * K, 1], whose rows thus know their slots
    counts: Tensor  # [P, E / P]: slots for each process and its experts
    capacity: int | None  # the rows that go to each process, of slots or none; None for as many as there are


class AllToAllDispatcher(RankDispatcher):
    """Send each slot's token and weight to the process of its expert, and sum what comes back.

    Processes may have any numbers of tokens. The weight is applied at the expert, so that nothing of what comes back
    is kept for backward.

    With `max_rows_factor`, every rank sends max_rows_factor * T * K / P rows to each, padded. All must
    have equally many tokens. Without, it sends as many rows as there are, for which the host waits once.
    """

    def dispatch(self, chunks: list[Chunk], experts: GroupedExperts) -> tuple[list[Callable[[], Tensor]], list[Tensor]]:
        implementation, num_local = experts.implementation, experts.num_experts // self.ranks.size
        leaving = [self._sort(*chunk, experts) for chunk in chunks]
        routes = self._routes(leaving, *self._exchange_counts(leaving))
        trips = [self._send(part, route, implementation) for part, route in zip(leaving, routes, strict=True)]
        returning = []
        for route, (weights, rows) in zip(routes, trips, strict=True):
            permutation = sort_by_expert(route.experts[:, None], num_local, implementation=implementation)
            rows = experts(rows.wait(), weights.wait(), permutation)  # [R, D]
            trip = self.ranks.exchanging(rows, route.sent, route.received)
            returning.append(partial(_collect, trip, route.slot_to_row, implementation))
        return returning, [part.order.offsets for part in leaving]

    def _sort(self, tokens: Tensor, slots: Slots, experts: GroupedExperts) -> _Outgoing:
        order = sort_by_expert(
            slots.topk_experts.reshape(-1, 1), experts.num_experts, implementation=experts.implementation
        )
        counts = torch.diff(order.offsets, prepend=order.offsets.new_zeros(1)).view(self.ranks.size, -1)
        capacity = None
        if self.max_rows_factor is not None:
            capacity = math.ceil(self.max_rows_factor * self.num_slots(slots) / self.ranks.size)
        return _Outgoing(tokens, slots, order, counts, capacity)

    def _exchange_counts(self, chunks: list[_Outgoing]) -> tuple[list[Tensor], Tensor]:  # [P, E / P] each, [P]
        """What comes from each process for each expert here, and how many bytes its tokens have.

        Raises ValueError if the counts fit into no capacity.
        """
        facts = [chunks[0].counts.new_full((self.ranks.size, 1), row_bytes(chunks[0].tokens))]
        for chunk in chunks:
            limit = chunk.counts.new_full((self.ranks.size, 1), chunk.capacity or 0)
            if chunk.capacity is not None:  # all processes learn of an error in one
                limit = torch.where((chunk.counts.sum(1) <= chunk.capacity).all(), limit, -1)
            facts += [chunk.counts, limit]
        ones = [1] * self.ranks.size
        facts = wait(self.ranks.all_to_all(torch.cat(facts, dim=1), ones, ones))
        num_bytes, facts = facts[:, 0], facts[:, 1:].chunk(len(chunks), dim=1)
        for chunk, fact in zip(chunks, facts, strict=True):
            if chunk.capacity is not None:
                check_on_device(
                    (fact[:, -1] == chunk.capacity).all(),
                    f"ExpertParallel: with max_rows_factor={self.max_rows_factor} every process must have as "
                    f"many tokens, and at most {chunk.capacity} slots for experts of one process, got more or others",
                )
        return [fact[:, :-1] for fact in facts], num_bytes

    def _routes(self, chunks: list[_Outgoing], arriving: list[Tensor], num_bytes: Tensor) -> list[_Route]:
        """Raises ValueError unless the tokens of all processes have as many bytes."""
        own_bytes = row_bytes(chunks[0].tokens)
        message = "ExpertParallel: the tokens of all processes must have as many bytes"
        if self.max_rows_factor is not None:
            check_on_device((num_bytes == own_bytes).all(), f"{message}, got others than {own_bytes}")
            return [_bounded_route(*pair) for pair in zip(chunks, arriving, strict=True)]
        sums = [tensor.sum(1) for chunk, come in zip(chunks, arriving, strict=True) for tensor in (chunk.counts, come)]
        num_bytes, *splits = torch.stack([num_bytes.long(), *sums]).tolist()  # waits for the GPU
        if set(num_bytes) != {own_bytes}:
            raise ValueError(f"{message}, got {num_bytes}")
        return [_exact_route(*facts) for facts in zip(chunks, arriving, splits[::2], splits[1::2], strict=True)]

    def _send(
        self, chunk: _Outgoing, route: _Route, implementation: str | None
    ) -> tuple[AsyncCollective, AsyncCollective]:
        """The weights [R, 1] and tokens [R, D] of the slots for experts here, under way."""
        top_k = max(route.slot_to_row.shape[1], 1)
        by_slot = chunk.order._replace(slot_to_row=route.slot_to_row.view(-1, 1), row_to_token=route.row_to_slot)
        by_token = chunk.order._replace(slot_to_row=route.slot_to_row, row_to_token=route.row_to_slot // top_k)
        weights = permute(chunk.slots.topk_weights.reshape(-1, 1), by_slot, implementation=implementation)
        rows = permute(chunk.tokens, by_token, implementation=implementation)
        return tuple(self.ranks.exchanging(tensor, route.received, route.sent) for tensor in (weights, rows))


def _collect(trip: AsyncCollective, slot_to_row: Tensor, implementation: str | None) -> Tensor:  # [T, D]
    return combine(trip.wait(), None, slot_to_row, implementation=implementation)


def _exact_route(chunk: _Outgoing, arriving: Tensor, sent: list[int], received: list[int]) -> _Route:
    row = torch.arange(sum(received), device=arriving.device)
    experts = torch.searchsorted(arriving.flatten().cumsum(0), row, right=True) % arriving.shape[1]
    slot_to_row = chunk.order.slot_to_row.view(chunk.slots.topk_experts.shape)
    return _Route(slot_to_row, chunk.order.row_to_token[: sum(sent)], sent, received, experts.int())


def _bounded_route(chunk: _Outgoing, arriving: Tensor) -> _Route:
    """Each process owns `capacity` rows of what is sent, and of what is received."""
    num_ranks, capacity, choices = len(arriving), chunk.capacity, chunk.slots.topk_experts
    ends = chunk.counts.sum(1).cumsum(0)  # [P] of the rows in expert order
    starts = ends - chunk.counts.sum(1)
    place = torch.arange(capacity, device=ends.device)
    row = (starts[:, None] + place).flatten().clamp(max=max(choices.numel() - 1, 0))
    row_to_slot = chunk.order.row_to_token[row]
    sorted_row = chunk.order.slot_to_row.view(choices.shape)
    rank = torch.searchsorted(ends, sorted_row.long(), right=True).clamp(max=num_ranks - 1)
    place_of_slot = sorted_row - starts[rank]
    is_sent = (sorted_row >= 0) & (place_of_slot < capacity)
    slot_to_row = torch.where(is_sent, rank * capacity + place_of_slot, -1).int()
    experts = torch.searchsorted(arriving.cumsum(1), place.expand(num_ranks, -1).contiguous(), right=True)
    splits = [capacity] * num_ranks
    return _Route(slot_to_row, row_to_slot, splits, splits, experts.flatten().int())
