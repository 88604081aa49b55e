"""Expert parallelism in which every process sees every token, and computes the share of its own experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels import sort_by_expert

from .collectives import Ranks, check_on_device, wait
from .dispatcher import Dispatched, split_slots
from .dropping import Slots
from .experts import GroupedExperts


class AllGatherDispatcher:
    """Gather the tokens of all processes, compute the slots of the experts that are here, and reduce-scatter the sums.

    All shapes follow from T, however the tokens are routed. It moves P - 1 times the tokens, which is no more than an
    all-to-all moves while P is at most top_k. All processes must have equally many tokens.

    Args:
        ranks: that share the experts, as many for each.
        row_bound: the rows computed here are at most so many times T * K. None counts them; the host waits for the
            count while the tokens are under way.
        chunks: parts of the tokens, of which one travels while another is computed.
    """

    def __init__(self, ranks: Ranks, row_bound: float | None = None, chunks: int = 1):
        self.ranks = ranks
        self.row_bound = row_bound
        self.chunks = chunks

    @torch.compiler.disable
    def __call__(
        self,
        tokens: Tensor,  # [T, D]
        slots: Slots,
        experts: GroupedExperts,
    ) -> Dispatched:
        ranks, implementation = self.ranks, experts.implementation
        num_local = experts.num_experts // ranks.size
        chunks = split_slots(tokens, slots, self.chunks)
        offsets = [
            sort_by_expert(part.topk_experts, experts.num_experts, implementation=implementation).offsets
            for _, part in chunks
        ]
        num_rows = self._count_rows(slots, offsets)  # [P, chunks]
        max_rows = None if self.row_bound is None else self._bounds(num_rows, [part for _, part in chunks])
        choices = [ranks.all_gather(part.topk_experts) for _, part in chunks]
        gathered = [(ranks.gathering(part.topk_weights), ranks.gathering(tokens)) for tokens, part in chunks]
        if max_rows is None:
            max_rows = num_rows[ranks.rank].tolist()  # waits for the GPU, but not for the tokens
        returning = []
        for choice, (topk_weights, tokens), most in zip(choices, gathered, max_rows, strict=True):
            local = wait(choice) - ranks.rank * num_local  # [P * T, K]
            permutation = sort_by_expert(local, num_local, max_rows=max(most, 1), implementation=implementation)
            shares = experts(tokens.arrive(), topk_weights.arrive(), permutation)  # [P * T, D]
            returning.append(ranks.scattering(shares))

        def arrive() -> Tensor:
            parts = [trip.arrive() for trip in returning]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return Dispatched(arrive, sum(offsets))

    def _count_rows(self, slots: Slots, offsets: list[Tensor]) -> Tensor:  # [P, chunks]
        """The slots for the experts of each process. Raises ValueError unless all processes have as many tokens."""
        num_tokens, top_k = slots.topk_experts.shape
        counts = torch.diff(torch.stack(offsets), prepend=offsets[0].new_zeros(len(offsets), 1))  # [chunks, E]
        facts = [counts.new_full((1,), num_tokens), counts.new_full((1,), top_k), counts.flatten()]
        facts = wait(self.ranks.all_gather(torch.cat(facts))).view(self.ranks.size, -1)
        sizes = facts[:, :2]
        message = "ExpertParallel: with the allgather dispatcher all processes must have as many tokens and slots"
        if sizes.device.type == "cpu":
            message += f", got [T, K] of {sizes.tolist()}; the alltoall dispatcher takes any"
        check_on_device((sizes == sizes[0]).all(), message)
        return facts[:, 2:].view(self.ranks.size, len(offsets), self.ranks.size, -1).sum((0, 3)).t()

    def _bounds(self, num_rows: Tensor, parts: list[Slots]) -> list[int]:
        """Rows computed for each chunk at most. Raises ValueError if some process has more."""
        sizes = [part.topk_experts.numel() if part.max_rows is None else part.max_rows for part in parts]
        bounds = [math.ceil(self.row_bound * size) for size in sizes]
        for chunk, bound in enumerate(bounds):
            check_on_device(
                (num_rows[:, chunk] <= bound).all(),
                f"ExpertParallel: with row_bound={self.row_bound} every process must get at most {bound} slots, "
                "got more",
            )
        return bounds
