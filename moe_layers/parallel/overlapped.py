"""Expert parallelism by all-gather, with communication overlapped with computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels import Permutation, sort_by_expert
from moe_kernels.experts.chunked import ExpertsInParts
from moe_kernels.experts.steps import Adapters
from moe_kernels.runtime.dispatch import runs_kernels
from moe_kernels.runtime.pytorch import unseen_by_modes
from moe_kernels.types import ExpertAdapters, ExpertWeights, QuantizedWeight, TileTable

from ..experts.dispatcher import Pending
from ..experts.grouped import ExpertRows
from ..experts.stored import QuantizedExperts
from ..routing.result import Slots
from .allgather import AllGatherDispatcher, local_permutations
from .collectives import Ranks, wait
from .rank_dispatcher import ExpertsOfRank, split
from .symmetric_memory import Scattering, Transport, transport_for

_MOST_PIECES = 4  # maximum number of column slices of a chunk's output
_TILE_COLUMNS = 256  # number of columns of a GEMM tile; slices should hold whole tiles


class OverlappedDispatcher(AllGatherDispatcher):
    """Gathers tokens and reduce-scatters sums like `AllGatherDispatcher`, but overlaps transfers with computation.

    A chunk's tokens are sent while the previous chunk is computed. A chunk's outputs are sent while the next chunk is
    computed. No computation hides the first chunk's transfer. The first chunk is therefore small: each later chunk has
    three times as many tokens. The last chunk's outputs are sent in column slices. Backward sends the gradients of
    outputs chunk by chunk, and sends the gradients of tokens while weight gradients are computed. Each weight
    gradient is one product over all chunks, so more chunks need no further gradient memory. On GPUs, tokens are copied
    from GPU to GPU, see `PeerCopies`. A checkpointed region communicates again when the region is recomputed. Forward
    hooks of the experts see uninitialised outputs, because the outputs arrive later.

    With the reference implementation this class works like an `AllGatherDispatcher` with the same number of chunks.
    """

    transport: Callable[[Ranks, torch.device], Transport] = staticmethod(transport_for)

    def pending(self, tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> Iterator[Pending]:
        check_overlaps(experts)  # check again, because the experts may have changed since they were sharded
        whole, lengths = split(tokens, slots, [len(tokens)]), self.lengths(len(tokens))
        if not runs_kernels(experts.implementation, whole[0][0]):
            yield from super().pending(tokens, slots, experts)
            return
        # Count slots by chunk only if `max_rows_factor` limits each chunk's rows. Otherwise count all slots at once.
        chunks = whole if self.max_rows_factor is None else split(*whole[0], lengths)
        bounds, offsets = self._count_rows(chunks, experts)
        transport = self.transport(self.ranks, tokens.device)
        plan = _Plan(self.ranks, transport, slots.topk_experts, lengths, bounds, experts)
        out = experts(ExpertRows(tokens, slots.topk_weights, None, plan=plan))
        yield Pending(reduce(torch.add, offsets), partial(plan.wait, out))

    def lengths(self, num_tokens: int) -> list[int]:
        shares = 3 * self.chunks - 2
        ends = [num_tokens * (3 * chunk + 1) // shares for chunk in range(self.chunks)]
        return [end - start for start, end in pairwise([0, *ends])]


def check_overlaps(experts: ExpertsOfRank) -> None:
    """Raise NotImplementedError if the experts have an option that `OverlappedDispatcher` does not support."""
    if experts.weight_on_input or experts.recompute is not None or experts.batch_invariant:
        settings = {name: getattr(experts, name) for name in ("weight_on_input", "recompute", "batch_invariant")}
        raise NotImplementedError(f"ExpertParallel: the overlapped dispatcher has none of {settings}")
    if experts.precision is not None:
        raise NotImplementedError(
            f"ExpertParallel: the overlapped dispatcher has no precision={experts.precision!r}; use 'allgather' or "
            "'alltoall'"
        )
    if isinstance(experts.w_up, QuantizedExperts | QuantizedWeight):
        raise NotImplementedError(
            f"ExpertParallel: the overlapped dispatcher needs plain weights, got {experts.w_up.format}; "
            "use 'allgather' or 'alltoall'"
        )


class _Plan:
    """Transfers the tokens and outputs of one call in chunks, and computes this rank's experts."""

    def __init__(
        self,
        ranks: Ranks,
        transport: Transport,
        topk_experts: Tensor,  # [T, K] int32
        lengths: list[int],  # number of tokens of each chunk
        bounds: list[int] | None,  # maximum number of rows of each chunk; None: count rows, with host synchronisation
        experts: ExpertsOfRank,
    ):
        self.ranks = ranks
        self.transport = transport
        self.lengths = lengths
        self.num_local = experts.num_experts // ranks.size
        self.activation = experts.activation
        self.reserved_sms = experts.reserved_sms
        self._topk_experts = topk_experts
        self._bounds = bounds
        # Each entry is (chunk, columns, transfer) of an output in flight.
        self.scatterings: list[tuple[int, slice, Scattering]] = []

    def __call__(
        self, tokens: Tensor, topk_weights: Tensor, weights: ExpertWeights, adapters: ExpertAdapters | None
    ) -> Tensor:  # [T, D]
        """Compute the experts. Return an uninitialised tensor, into which `wait` writes the outputs."""
        factors = Adapters() if adapters is None else Adapters.of(adapters, weights)
        with torch.cuda.device_of(tokens):
            return _Overlapped.apply(self, tokens, topk_weights.float(), *weights, *factors)

    def wait(self, out: Tensor) -> Tensor:
        with torch.no_grad(), torch.cuda.device_of(out):
            parts = out.detach().split(self.lengths)
            for part, columns, scattering in self.scatterings:
                scattering(parts[part][:, columns])
        self.scatterings = []
        return out

    def columns(self, part: int, tokens: Tensor) -> list[slice]:
        """Return the column slices in which a chunk's output is sent. Only the last chunk's output is split, because no
        later computation can hide the transfer of that output as a whole."""
        if part < len(self.lengths) - 1:
            return [slice(None)]
        d_model = tokens.shape[1]
        width = d_model // math.gcd(_MOST_PIECES, d_model // _TILE_COLUMNS) if d_model % _TILE_COLUMNS == 0 else d_model
        return [slice(start, start + width) for start in range(0, d_model, width)]

    def begin(self, tokens: Tensor, topk_weights: Tensor) -> None:
        """Reserve memory that suffices for forward and for backward. If backward reserved a larger allocation, the
        forward's allocation would never be freed."""
        parts = *topk_weights.split(self.lengths), *tokens.split(self.lengths)
        self.transport.begin(tokens.nbytes, *(self.ranks.size * part.nbytes for part in parts))

    def gather_slots(self, topk_weights: Tensor) -> Tensor:  # [P * T, 2 * K] int32
        """Start to gather choices [T, K] and float32 weights [T, K], viewed as int32. A single collective gathers both
        tensors, because a collective takes more time on the host than on the GPU."""
        return self.ranks.all_gather(torch.cat([self._topk_experts, topk_weights.view(torch.int32)], 1))

    def parts(self, slots: Tensor) -> tuple[list[Tensor], list[Tensor], list[Permutation]]:
        """Return weights, choices and permutations by chunk. A chunk with n tokens per rank has weights and choices
        [P * n, K], and the permutation of the slots for local experts. Without row limits the host synchronises."""
        by_rank = wait(slots).unflatten(0, (self.ranks.size, -1))  # [P, T, 2 * K]
        parts = [part.flatten(0, 1).chunk(2, 1) for part in by_rank.split(self.lengths, 1)]
        choices = [choice - self.ranks.rank * self.num_local for choice, _ in parts]
        topk_weights = [weights.contiguous().view(torch.float32) for _, weights in parts]
        permutations = local_permutations(choices, self._bounds, self.num_local, "triton")
        return topk_weights, choices, permutations

    def whole(self, choices: list[Tensor], parts: list[Permutation]) -> Permutation:
        """Return one permutation of the slots of all chunks, in the order of the chunks."""
        if len(parts) == 1:
            return parts[0]
        num_rows = sum(len(part.row_to_token) for part in parts)
        max_rows = None if self._bounds is None else max(num_rows, 1)
        choice = torch.cat(choices)
        permutation = sort_by_expert(choice, self.num_local, max_rows=max_rows, implementation="triton")
        return permutation._replace(row_to_token=permutation.row_to_token[:num_rows])

    def experts(
        self, weights: Sequence[Any], parts: list[Permutation], whole: Permutation | None = None
    ) -> ExpertsInParts:
        options = {"adapters": Adapters(*weights[4:]), "reserved_sms": self.reserved_sms}
        return ExpertsInParts(ExpertWeights(*weights[:4]), self.activation, parts, whole, **options)


class _Overlapped(torch.autograd.Function):
    """Maps (plan, tokens [T, D], topk_weights [T, K], weights, adapters) to the output [T, D]. `_Plan.wait` later
    writes the values of the output."""

    @staticmethod
    def forward(ctx, plan: _Plan, tokens: Tensor, topk_weights: Tensor, *weights: Tensor | None) -> Tensor:
        tokens, transport = tokens.contiguous(), plan.transport
        plan.begin(tokens, topk_weights)
        slots = plan.gather_slots(topk_weights)
        gathering = transport.gather(tokens, plan.lengths)
        weights_of_parts, choices, parts = plan.parts(slots)
        experts = plan.experts(weights, parts)
        preactivations = []
        for part, weights_of_part in enumerate(weights_of_parts):
            tokens_of_part = gathering.wait(part)
            with unseen_by_modes():
                preactivation, activated, _ = experts.activate(part, tokens_of_part)
            preactivations.append(preactivation)
            for columns in plan.columns(part, tokens):
                with unseen_by_modes():
                    out = experts.outputs(part, activated, weights_of_part, columns)
                plan.scatterings.append((part, columns, transport.scatter(out)))
            del tokens_of_part, preactivation, activated
        ctx.plan, ctx.block_rows = plan, parts[0].tile_table.block_rows
        # Save the choices as tensors, not as attributes of `ctx`. Under checkpointing, saved tensors come from the
        # recomputation, and the recomputation may choose other experts.
        of_parts = weights_of_parts, preactivations, choices, *zip(*map(_integers, parts), strict=True)
        ctx.save_for_backward(gathering.whole, *weights, *chain(*of_parts))
        return torch.empty_like(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        plan, dout = ctx.plan, dout.contiguous()
        tokens, *saved = ctx.saved_tensors
        weights, saved, num_parts, transport = saved[:8], saved[8:], len(plan.lengths), plan.transport
        of_parts = (saved[first : first + num_parts] for first in range(0, len(saved), num_parts))
        topk_weights, preactivations, choices, *integers = of_parts
        ctx.maybe_clear_saved_tensors()  # drop autograd's references, so that `del` frees memory
        del saved
        parts = [_permutation(*each, block_rows=ctx.block_rows) for each in zip(*integers, strict=True)]
        _, needs_tokens, needs_topk_weights, *needed = ctx.needs_input_grad
        dtopk_weights = topk_weights[0].new_empty(len(dout), topk_weights[0].shape[1])
        plan.begin(dout, dtopk_weights)
        gathering = transport.gather(dout, plan.lengths)
        backward = plan.experts(weights, parts, plan.whole(choices, parts))
        of_topk_weights, of_tokens = [], []
        for part, weights_of_part in enumerate(topk_weights):
            dout_of_part = gathering.wait(part)
            with unseen_by_modes():
                share = backward.backward_part(part, dout_of_part, weights_of_part, preactivations.pop(0))
            of_topk_weights.append(transport.scatter(share))
        if needs_tokens:
            with unseen_by_modes():
                shares = backward.tokens_gradient().split([plan.ranks.size * length for length in plan.lengths])
            of_tokens = list(map(transport.scatter, shares))
        with unseen_by_modes():
            gradients = backward.gradients(tokens, gathering.whole, torch.cat(topk_weights), needed)
        _arrive(of_topk_weights, dtopk_weights, plan.lengths)
        dtokens = torch.empty_like(dout) if needs_tokens else None
        _arrive(of_tokens, dtokens, plan.lengths)
        return None, dtokens, dtopk_weights if needs_topk_weights else None, *gradients


def _integers(permutation: Permutation) -> tuple[Tensor, ...]:
    return *permutation[:3], *permutation.tile_table[:4]


def _permutation(*integers: Tensor, block_rows: int) -> Permutation:
    return Permutation(*integers[:3], tile_table=TileTable(*integers[3:], block_rows=block_rows))


def _arrive(scatterings: list[Scattering], out: Tensor | None, lengths: list[int]) -> None:
    """Wait for each chunk's transfer, and write the result to the chunk's part of `out`."""
    for scattering, part in zip(scatterings, () if out is None else out.split(lengths), strict=True):
        scattering(part)
