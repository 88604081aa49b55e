"""Expert parallelism in which every process sees every token, and computes the share of its own experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_kernels import Permutation, sort_by_expert

from ..experts.grouped import GroupedExperts
from ..routing.capacity import Slots
from .collectives import AsyncCollective, check_on_device, wait
from .rank_dispatcher import Chunk, RankDispatcher, row_bytes


class AllGatherDispatcher(RankDispatcher):
    """Gather the tokens of all processes, compute the slots of the experts that are here, and reduce-scatter the sums.

    All shapes follow from T, however the tokens are routed. It moves P - 1 times the tokens, which is no more than an
    all-to-all moves while P is at most top_k. All processes must have equally many tokens.

    `max_rows_factor` bounds the rows computed here: that many times the slots of this rank, which are T * K or,
    with a capacity or a list of pairs, fewer. Without it the rows are counted, and the host waits for the count while
    the tokens are in flight.
    """

    def dispatch(self, chunks: list[Chunk], experts: GroupedExperts) -> tuple[list[Callable[[], Tensor]], list[Tensor]]:
        ranks, implementation = self.ranks, experts.implementation
        num_local = experts.num_experts // ranks.size
        bounds, offsets = self._count_rows(chunks, experts)
        choices = [ranks.all_gather(slots.topk_experts) for _, slots in chunks]
        gathered = [(ranks.gathering(slots.topk_weights), ranks.gathering(tokens)) for tokens, slots in chunks]
        choices = [wait(choice) - ranks.rank * num_local for choice in choices]  # [P * T, K]
        permutations = local_permutations(choices, bounds, num_local, implementation)
        returning = []
        for permutation, (topk_weights, tokens) in zip(permutations, gathered, strict=True):
            shares = experts(tokens.wait(), topk_weights.wait(), permutation)  # [P * T, D]
            trip = ranks.scattering(shares)
            returning.append(trip.wait if len(chunks) > 1 else partial(_copy_of, trip))
        return returning, offsets

    def _count_rows(self, chunks: list[Chunk], experts: GroupedExperts) -> tuple[list[int] | None, list[Tensor]]:
        """(Row bound of each chunk or None, offsets [E] of each chunk's sorted slots).

        Raises ValueError unless all have tensors of one size, and no more rows than these."""
        offsets = [
            sort_by_expert(slots.topk_experts, experts.num_experts, implementation=experts.implementation).offsets
            for _, slots in chunks
        ]
        num_tokens, top_k = sum(len(tokens) for tokens, _ in chunks), chunks[0][1].topk_experts.shape[1]
        own = [offsets[0].new_full((1,), size) for size in (num_tokens, top_k, row_bytes(chunks[0][0]))]
        num_sizes, bounds = len(own), None
        if self.max_rows_factor is not None:
            bounds = [self._bound(slots) for _, slots in chunks]
            own += [offsets[0].new_full((1,), bound) for bound in bounds]
            zeros = offsets[0].new_zeros(len(offsets), 1)
            own.append(torch.diff(torch.stack(offsets), prepend=zeros).flatten())  # slots of [chunks, E]
        facts = wait(self.ranks.all_gather(torch.cat(own))).view(self.ranks.size, -1)
        sizes = facts[:, :num_sizes]
        message = "ExpertParallel: where the tokens of all are gathered, all processes must have as many tokens and "
        message += "slots, and as many bytes in a token"
        if sizes.device.type == "cpu":
            message += f", got [T, K, bytes] of {sizes.tolist()}; the alltoall dispatcher takes any T"
        check_on_device((sizes == sizes[0]).all(), message)
        if bounds is not None:
            self._check_bounds(facts[:, num_sizes:], bounds)
        return bounds, offsets

    def _bound(self, slots: Slots) -> int:
        """Rows computed at most: no more than there can be at all, so that every bound is an int32."""
        return min(
            math.ceil(self.max_rows_factor * self.num_slots(slots)), self.ranks.size * slots.topk_experts.numel()
        )

    def _check_bounds(
        self,
        facts: Tensor,  # [P, chunks + chunks * E]: each process's bounds, and slots for each expert
        own: list[int],
    ) -> None:
        """Raises ValueError, the same in all processes, if one of them has more rows than its bound."""
        num_chunks, num_ranks = len(own), self.ranks.size
        bounds, counts = facts[:, :num_chunks], facts[:, num_chunks:]
        num_rows = counts.reshape(num_ranks, num_chunks, num_ranks, -1).sum((0, 3))  # [chunks, P]
        for chunk, bound in enumerate(own):
            check_on_device(
                (num_rows[chunk] <= bounds[:, chunk]).all(),
                f"ExpertParallel: with max_rows_factor={self.max_rows_factor} every process must get at most "
                f"so many times its own slots, here {bound}, got more",
            )


def _copy_of(trip: AsyncCollective) -> Tensor:
    """What arrives, which a checkpointed region may keep, for someone who may change it in place."""
    return trip.wait().clone()


def local_permutations(
    choices: list[Tensor],  # [P * n, K] of each chunk; experts that are not here lie outside [0, num_local)
    bounds: list[int] | None,  # rows of each chunk at most; None to have just as many as there are
    num_local: int,
    implementation: str | None,
) -> list[Permutation]:
    """Of each chunk's slots for the experts that are here. Without bounds it waits for the GPU, after all is sorted, so
    that what comes next can be launched at once; but not for the tokens."""
    sort = partial(sort_by_expert, num_experts=num_local, implementation=implementation)
    if bounds is not None:
        return [sort(choice, max_rows=max(bound, 1)) for choice, bound in zip(choices, bounds, strict=True)]
    permutations = list(map(sort, choices))
    counts = torch.stack([permutation.offsets[-1] for permutation in permutations]).tolist()
    # No kept slot lies behind so many rows.
    return [
        permutation._replace(row_to_token=permutation.row_to_token[: max(count, 1)])
        for permutation, count in zip(permutations, counts, strict=True)
    ]
