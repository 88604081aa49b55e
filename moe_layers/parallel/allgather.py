"""Expert parallelism by all-gather: every rank receives every token, and computes its own experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moe_kernels import Permutation, sort_by_expert

from ..checks import first_three
from ..experts.dispatcher import Pending
from ..experts.grouped import ExpertRows
from ..routing.result import Slots
from .collectives import check_on_device, wait
from .rank_dispatcher import (
    GRADIENTS,
    Chunk,
    ExpertsOfRank,
    RankDispatcher,
    gradients_needed,
    packing_of,
    row_bytes,
    split,
)


class AllGatherDispatcher(RankDispatcher):
    """Gathers all ranks' tokens, computes the slots of local experts, and reduce-scatters the sums of the outputs.

    All P ranks must have equally many tokens. Each rank sends its T tokens to P - 1 ranks, whatever the routing. With K
    slots per token and even routing, an all-to-all sends T * K * (P - 1) / P tokens instead. If P <= K, an all-gather
    therefore sends no more tokens than an all-to-all.

    A rank may compute at most `max_rows_factor` times as many rows as its tokens have slots. More rows are an error.
    The T tokens of a rank have T * K slots, or fewer with a capacity or `TokenExpertPairs`. Without a limit, the host
    waits for the number of rows while the tokens are in flight.
    """

    def dispatch(self, chunks: Sequence[Chunk], experts: ExpertsOfRank) -> Iterator[ExpertRows]:
        ranks, implementation = self.ranks, experts.implementation
        num_local = experts.num_experts // ranks.size
        bounds, offsets = self._count_rows(chunks, experts)
        choices = [ranks.all_gather(slots.topk_experts) for _, slots in chunks]
        packing = packing_of(chunks[0][0], experts)
        gathered = [(ranks.gathering(tokens, packing), ranks.gathering(slots.topk_weights)) for tokens, slots in chunks]
        choices = [wait(choice) - ranks.rank * num_local for choice in choices]  # [P * T, K]
        permutations = local_permutations(choices, bounds, num_local, implementation)
        for (tokens, topk_weights), permutation, ends in zip(gathered, permutations, offsets, strict=True):
            yield ExpertRows(tokens.wait(), topk_weights.wait(), permutation, ends)

    def combine(self, out: Tensor, rows: ExpertRows) -> Pending:  # out [P * T, D]: sums over local experts
        assert rows.offsets is not None
        scattering = self.ranks.scattering(out)

        def arrive() -> Tensor:  # [T, D]
            # Copy the output of a single chunk. A checkpointed region keeps the original, and the caller may change
            # the output in place. Several chunks are copied later, when they are concatenated.
            return scattering.wait().clone() if self.chunks == 1 else scattering.wait()

        return Pending(rows.offsets, arrive)

    def _count_rows(self, chunks: Sequence[Chunk], experts: ExpertsOfRank) -> tuple[list[int] | None, list[Tensor]]:
        """Return each chunk's row limit (None without `max_rows_factor`), and offsets [E] of each chunk's sorted slots.

        Fail by `check_on_device` if T, K, bytes per token or needed gradients differ between ranks, or if any rank has
        more rows than its limit."""
        offsets = _slot_offsets(chunks, experts)
        sizes = sum(len(tokens) for tokens, _ in chunks), *_agreed(*chunks[0], experts)
        own = [offsets[0].new_full((1,), size) for size in sizes]
        num_sizes, bounds = len(sizes), None
        if self.max_rows_factor is not None:
            bounds = [self._bound(slots, self.max_rows_factor) for _, slots in chunks]
            own += [offsets[0].new_full((1,), bound) for bound in bounds]
            zeros = offsets[0].new_zeros(len(offsets), 1)
            own.append(torch.diff(torch.stack(offsets), prepend=zeros).flatten())  # [chunks * E]: slots per expert
        numbers = wait(self.ranks.all_gather(torch.cat(own))).view(self.ranks.size, -1)
        sizes = numbers[:, :num_sizes]
        message = f"{self.name}: to gather tokens, all ranks must have equally many tokens and slots, "
        message += "equally many bytes per token, and need the same gradients"
        if sizes.device.type == "cpu":
            cure = "the alltoall dispatcher takes any T" if (sizes[:, 3] == sizes[0, 3]).all() else GRADIENTS
            message += f", got [T, K, bytes, gradients] of [{first_three(sizes.tolist())}]; {cure}"
        check_on_device((sizes == sizes[0]).all(), message)
        if bounds is not None:
            self._check_bounds(numbers[:, num_sizes:], bounds)
        return bounds, offsets

    def _bound(self, slots: Slots, factor: float) -> int:
        """Return a chunk's row limit: at most the number of all ranks' slots, so that the limit fits int32."""
        return min(math.ceil(factor * self.num_slots(slots)), self.ranks.size * slots.topk_experts.numel())

    def _check_bounds(
        self,
        numbers: Tensor,  # [P, chunks + chunks * E]: each chunk's row limit, then numbers of slots by expert
        own: list[int],
    ) -> None:
        """Fail by `check_on_device` on all ranks if any rank has more rows than its limit."""
        num_chunks, num_ranks = len(own), self.ranks.size
        bounds, counts = numbers[:, :num_chunks], numbers[:, num_chunks:]
        num_rows = counts.reshape(num_ranks, num_chunks, num_ranks, -1).sum((0, 3))  # [chunks, P]
        for chunk, bound in enumerate(own):
            check_on_device(
                (num_rows[chunk] <= bounds[:, chunk]).all(),
                f"{self.name}: with max_rows_factor={self.max_rows_factor} a rank may compute at most "
                f"that many times its own slots, here {bound}, got more",
            )


class PaddedAllGatherDispatcher(AllGatherDispatcher):
    """Works like `AllGatherDispatcher` without `max_rows_factor`, but ranks may have different numbers of tokens.

    Ranks with fewer tokens than the maximum send padding. The host synchronises to read the maximum number of tokens
    before any token is sent.
    """

    def pending(self, tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> Iterator[Pending]:
        missing = self._longest(tokens, slots, experts) - len(tokens)
        if missing:
            tokens, weights = (functional.pad(part, (0, 0, 0, missing)) for part in (tokens, slots.topk_weights))
            choice = functional.pad(slots.topk_experts, (0, 0, 0, missing), value=-1)
            slots = Slots(choice, weights, logits=weights, max_rows=self.num_slots(slots))  # nothing reads these logits
        return super().pending(tokens, slots, experts)

    def _longest(self, tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> int:
        """Return the largest number of tokens of any rank. Raise ValueError if `_agreed` differs between ranks."""
        (chunk,) = split(tokens, slots, [len(tokens)])
        sizes = len(tokens), *_agreed(*chunk, experts)
        own = [slots.topk_experts.new_full((1,), size) for size in sizes]
        numbers = wait(self.ranks.all_gather(torch.cat(own))).view(self.ranks.size, -1).tolist()
        if len({tuple(agreed) for _, *agreed in numbers}) > 1:
            raise ValueError(
                f"{self.name}: all ranks must have equally many slots and bytes per token, and need the same "
                f"gradients, got [T, K, bytes, gradients] of {first_three(numbers)} by rank; {GRADIENTS}"
            )
        return max(num_tokens for num_tokens, *_ in numbers)

    def _count_rows(self, chunks: Sequence[Chunk], experts: ExpertsOfRank) -> tuple[None, list[Tensor]]:
        return None, _slot_offsets(chunks, experts)


def _agreed(tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> tuple[int, int, int]:
    """Return (K, bytes per token, bit mask of needed gradients). Each number must be equal on all ranks."""
    return slots.topk_experts.shape[1], row_bytes(tokens), gradients_needed(tokens, slots, experts)


def _slot_offsets(chunks: Sequence[Chunk], experts: ExpertsOfRank) -> list[Tensor]:  # [E] of each chunk
    """Sort each chunk's slots by expert, and return the exclusive end row of each expert."""
    sort = partial(sort_by_expert, num_experts=experts.num_experts, implementation=experts.implementation)
    return [sort(slots.topk_experts).offsets for _, slots in chunks]


def local_permutations(
    choices: list[Tensor],  # [P * n, K] of each chunk with n tokens per rank; remote experts lie outside [0, num_local)
    bounds: list[int] | None,  # maximum number of rows of each chunk; None: no limit, the host reads the number of rows
    num_local: int,
    implementation: str | None,
) -> list[Permutation]:
    """Return the permutation of each chunk's slots for local experts. If `bounds` is None, the host synchronises once,
    after all sorts are launched. The host never waits for tokens, which may still be in flight."""
    sort = partial(sort_by_expert, num_experts=num_local, implementation=implementation)
    if bounds is not None:
        return [sort(choice, max_rows=max(bound, 1)) for choice, bound in zip(choices, bounds, strict=True)]
    permutations = list(map(sort, choices))
    counts = torch.stack([permutation.offsets[-1] for permutation in permutations]).tolist()
    # Cut off the rows from `count` on, because these rows hold no slots of local experts.
    return [
        permutation._replace(row_to_token=permutation.row_to_token[: max(count, 1)])
        for permutation, count in zip(permutations, counts, strict=True)
    ]
