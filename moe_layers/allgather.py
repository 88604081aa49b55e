"""Expert parallelism in which every process sees every token, and computes the share of its own experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels import sort_by_expert

from .collectives import Ranks, check_on_device, wait
from .dispatcher import Dispatched, dispatch_dtype
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
        num_local = experts.num_experts // ranks.size
        first = ranks.rank * num_local
        offsets = sort_by_expert(slots.topk_experts, experts.num_experts, implementation=implementation).offsets
        counts = self._gather_counts(slots, offsets)  # [P, E]
        num_rows = counts.view(ranks.size, ranks.size, num_local).sum((0, 2))  # [P] in each process
        max_rows = None if self.row_bound is None else self._bound(num_rows, slots)
        tokens = tokens.to(dispatch_dtype(tokens))
        gathered = [ranks.all_gather(tensor) for tensor in (slots.topk_experts, slots.topk_weights, tokens)]
        local = wait(gathered[0]) - first  # [P * T, K]
        if max_rows is None:
            max_rows = max(int(num_rows[ranks.rank]), 1)  # waits for the GPU, but not for the tokens
        permutation = sort_by_expert(local, num_local, max_rows=max_rows, implementation=implementation)
        topk_weights, tokens = map(wait, gathered[1:])  # [P * T, K], [P * T, D]
        shares = experts(tokens, topk_weights, permutation)  # [P * T, D]
        return Dispatched(wait(ranks.reduce_scatter(shares)), offsets)

    def _gather_counts(self, slots: Slots, offsets: Tensor) -> Tensor:  # [P, E]
        """The slots that each process has for each expert. Raises ValueError unless all have equally many tokens."""
        num_tokens, top_k = slots.topk_experts.shape
        facts = [offsets.new_full((1,), num_tokens), offsets.new_full((1,), top_k)]
        facts = torch.cat([*facts, torch.diff(offsets, prepend=offsets.new_zeros(1))])
        facts = wait(self.ranks.all_gather(facts)).view(self.ranks.size, -1)  # [P, 2 + E]
        sizes = facts[:, :2]
        message = "ExpertParallel: with the allgather dispatcher all processes must have as many tokens and slots"
        if sizes.device.type == "cpu":
            message += f", got [T, K] of {sizes.tolist()}; the alltoall dispatcher takes any"
        check_on_device((sizes == sizes[0]).all(), message)
        return facts[:, 2:]

    def _bound(self, num_rows: Tensor, slots: Slots) -> int:
        """Rows computed in each process at most. Raises ValueError if some has more."""
        num_slots = slots.topk_experts.numel() if slots.max_rows is None else slots.max_rows
        bound = math.ceil(self.row_bound * num_slots)
        check_on_device(
            (num_rows <= bound).all(),
            f"ExpertParallel: with row_bound={self.row_bound} every process must get at most {bound} slots, got more",
        )
        return max(bound, 1)
