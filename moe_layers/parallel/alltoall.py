"""Expert parallelism by all-to-all: each token is sent to the ranks of its experts, and the outputs are sent back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import Permutation, combine, permute, sort_by_expert

from ..experts.dispatcher import Pending
from ..experts.grouped import ExpertRows
from ..routing.result import Slots, differences
from .collectives import AsyncCollective, check_on_device, wait
from .rank_dispatcher import GRADIENTS, Chunk, ExpertsOfRank, RankDispatcher, gradients_needed, packing_of, row_bytes


class _Route(NamedTuple):
    """Layout of one chunk's buffers: a send buffer of S rows, and a receive buffer of R rows."""

    slot_to_row: Tensor  # [T, K] int32: a slot's row in the send buffer; -1 for a slot that is not sent
    row_to_slot: Tensor  # [S] int32: the slot of each row in the send buffer
    sent: list[int]  # number of rows sent to each rank
    received: list[int]  # number of rows received from each rank
    experts: Tensor  # [R] int32: local expert index; E / P for a padding row
    implementation: str | None


class _Outgoing(NamedTuple):
    """The tokens of one chunk, and the order in which their slots are sent."""

    tokens: Tensor  # [T, D]
    slots: Slots
    order: Permutation  # sorts slots as if each were a token with K = 1; `row_to_token` holds slot indices
    counts: Tensor  # [P, E / P]: number of slots for each expert, by the expert's rank
    capacity: int | None  # number of rows sent to each rank, with padding; None sends exactly the slots


class AllToAllDispatcher(RankDispatcher):
    """Sends each slot's token and weight to the rank of its expert, and sums the outputs that are sent back.

    Ranks may have different numbers of tokens. An expert's rank applies the routing weight and computes the gradient of
    this weight. Backward therefore needs no outputs on the token's rank.

    With `max_rows_factor`, every rank sends max_rows_factor * T * K / P rows to each rank, padding included. All ranks
    must then have equally many tokens. By default a rank sends exactly its slots, with one host synchronisation.
    """

    def dispatch(self, chunks: Sequence[Chunk], experts: ExpertsOfRank) -> Iterator[ExpertRows]:
        implementation, num_local = experts.implementation, experts.num_experts // self.ranks.size
        leaving = [self._sort(*chunk, experts) for chunk in chunks]
        agreed = row_bytes(chunks[0][0]), gradients_needed(*chunks[0], experts)
        routes = self._routes(leaving, *self._exchange_counts(leaving, agreed), agreed, implementation)
        sent = [self._send(part, route, experts) for part, route in zip(leaving, routes, strict=True)]
        for part, route, (weights, rows) in zip(leaving, routes, sent, strict=True):
            permutation = sort_by_expert(route.experts[:, None], num_local, implementation=implementation)
            yield ExpertRows(rows.wait(), weights.wait(), permutation, part.order.offsets, route=route)

    def combine(self, out: Tensor, rows: ExpertRows) -> Pending:  # out [R, D]
        assert rows.offsets is not None
        route, options = rows.route, {"implementation": rows.route.implementation}
        returning = self.ranks.exchanging(out, route.sent, route.received)
        return Pending(rows.offsets, lambda: combine(returning.wait(), None, route.slot_to_row, **options))

    def _sort(self, tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> _Outgoing:
        order = sort_by_expert(
            slots.topk_experts.reshape(-1, 1), experts.num_experts, implementation=experts.implementation
        )
        counts = differences(order.offsets).view(self.ranks.size, -1)
        capacity = None
        if self.max_rows_factor is not None:
            capacity = math.ceil(self.max_rows_factor * self.num_slots(slots) / self.ranks.size)
        return _Outgoing(tokens, slots, order, counts, capacity)

    def _exchange_counts(
        self, chunks: list[_Outgoing], agreed: tuple[int, ...]
    ) -> tuple[list[Tensor], Tensor]:  # [P, E / P] each, [2, P]
        """Return, for each chunk, the number of slots that each rank sends to each local expert. Also return all ranks'
        values of `agreed`, which must be equal: bytes per token, and a bit mask of needed gradients.

        Fail by `check_on_device` if a rank's counts exceed its capacity, or if ranks have different capacities.
        """
        own = [chunks[0].counts.new_full((self.ranks.size, 1), number) for number in agreed]
        for chunk in chunks:
            limit = chunk.counts.new_full((self.ranks.size, 1), chunk.capacity or 0)
            if chunk.capacity is not None:  # a rank beyond its capacity sends -1, so that all ranks fail
                limit = torch.where((chunk.counts.sum(1) <= chunk.capacity).all(), limit, -1)
            own += [chunk.counts, limit]
        ones = [1] * self.ranks.size
        received = wait(self.ranks.all_to_all(torch.cat(own, dim=1), ones, ones))
        to_agree, by_chunk = received[:, : len(agreed)].t(), received[:, len(agreed) :].chunk(len(chunks), dim=1)
        for chunk, numbers in zip(chunks, by_chunk, strict=True):
            if chunk.capacity is not None:
                check_on_device(
                    (numbers[:, -1] == chunk.capacity).all(),
                    f"{self.name}: with max_rows_factor={self.max_rows_factor} every rank must have "
                    f"equally many tokens, sequences and pairs, and at most {chunk.capacity} slots for any rank's "
                    "experts, got unequal numbers or more slots",
                )
        return [numbers[:, :-1] for numbers in by_chunk], to_agree

    def _routes(
        self,
        chunks: list[_Outgoing],
        arriving: list[Tensor],
        to_agree: Tensor,  # [2, P]: each rank's bytes per token and mask of needed gradients
        agreed: tuple[int, ...],
        implementation: str | None,
    ) -> list[_Route]:
        """Return each chunk's route. Raise ValueError if any rank's values in `to_agree` differ from this rank's values
        in `agreed`. With `max_rows_factor`, a device-side assertion fails on GPUs instead."""
        message = f"{self.name}: the tokens of all ranks must have equally many bytes, and need the same gradients"
        if self.max_rows_factor is not None:
            agree = torch.stack([numbers == own for numbers, own in zip(to_agree, agreed, strict=True)])
            message += f", got others than [bytes, gradients] of {agreed}"
            check_on_device(agree.all(), f"{message}; {GRADIENTS}" if agree.device.type == "cpu" else message)
            return [_bounded_route(*pair, implementation) for pair in zip(chunks, arriving, strict=True)]
        departing = [chunk.counts for chunk in chunks]
        sums = [counts.sum(1) for pair in zip(departing, arriving, strict=True) for counts in pair]
        num_bytes, gradients, *splits = torch.stack([*to_agree.long(), *sums]).tolist()  # synchronises the host
        if set(zip(num_bytes, gradients, strict=True)) != {agreed}:
            raise ValueError(f"{message}, got bytes {num_bytes} and gradients {gradients} by rank; {GRADIENTS}")
        return [
            _exact_route(*counts, implementation)
            for counts in zip(chunks, arriving, splits[::2], splits[1::2], strict=True)
        ]

    def _send(self, chunk: _Outgoing, route: _Route, experts: ExpertsOfRank) -> tuple[AsyncCollective, AsyncCollective]:
        """Start to send the slots to the ranks of their experts. Return the transfers of the weights [R, 1] and tokens
        [R, D] that this rank receives."""
        top_k = max(route.slot_to_row.shape[1], 1)
        by_slot = chunk.order._replace(slot_to_row=route.slot_to_row.view(-1, 1), row_to_token=route.row_to_slot)
        by_token = chunk.order._replace(slot_to_row=route.slot_to_row, row_to_token=route.row_to_slot // top_k)
        weights = permute(chunk.slots.topk_weights.reshape(-1, 1), by_slot, implementation=route.implementation)
        rows = permute(chunk.tokens, by_token, implementation=route.implementation)
        sent, received, packing = route.sent, route.received, packing_of(chunk.tokens, experts)
        return self.ranks.exchanging(weights, received, sent), self.ranks.exchanging(rows, received, sent, packing)


def _exact_route(
    chunk: _Outgoing, arriving: Tensor, sent: list[int], received: list[int], implementation: str | None
) -> _Route:
    row = torch.arange(sum(received), device=arriving.device)
    experts = torch.searchsorted(arriving.flatten().cumsum(0), row, right=True) % arriving.shape[1]
    slot_to_row = chunk.order.slot_to_row.view(chunk.slots.topk_experts.shape)
    return _Route(slot_to_row, chunk.order.row_to_token[: sum(sent)], sent, received, experts.int(), implementation)


def _bounded_route(chunk: _Outgoing, arriving: Tensor, implementation: str | None) -> _Route:
    """Return a route whose send buffer and receive buffer have `capacity` rows for each rank."""
    num_ranks, capacity, choices = len(arriving), chunk.capacity, chunk.slots.topk_experts
    assert capacity is not None
    ends = chunk.counts.sum(1).cumsum(0)  # [P]: end of the slots for each rank, among the slots sorted by expert
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
    return _Route(slot_to_row, row_to_slot, splits, splits, experts.flatten().int(), implementation)
