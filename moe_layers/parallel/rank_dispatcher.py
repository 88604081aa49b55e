"""The base class of expert parallelism's dispatchers. The base class splits tokens into chunks and scales gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from moe_kernels import Activation
from moe_kernels.quantization.ops import pack_rows, unpack_rows
from moe_kernels.runtime.pytorch import disable_dynamo

from ..autocast import autocast
from ..experts.dispatcher import Pending
from ..experts.grouped import ExpertRows
from ..routing.result import Slots
from .collectives import Packing, Ranks

Chunk = tuple[Tensor, Slots]  # consecutive tokens [T, D] in the dtype in which they are sent, and their slots


class ExpertsOfRank(Protocol):
    """Interface through which dispatchers use the experts of this rank.

    The experts are a `GroupedExperts`, or experts of a transformers model. With the overlapped dispatcher, a call of
    the experts passes tokens, weights and adapters to `rows.plan`.
    """

    num_experts: int  # number of experts of all ranks together
    activation: Activation
    implementation: str | None
    precision: str | None
    recompute: str | None
    weight_on_input: bool
    batch_invariant: bool
    reserved_sms: int
    w_up: Any

    def parameters(self) -> Iterable[Tensor]: ...

    def __call__(self, rows: ExpertRows) -> Tensor: ...


@dataclass(eq=False)
class RankDispatcher(ABC):
    """Sends tokens to the ranks of their experts, and sends the outputs back.

    Args:
        ranks: the ranks over which the experts are sharded. Each rank holds equally many experts.
        max_rows_factor: limit on the rows that a rank computes, as a multiple of its even share of each chunk's rows.
            Default: None, no limit.
        chunks: number of parts into which tokens are split; one part is sent while another is computed. Default: 1.
        gradient_scale: scale of the gradients of the experts' parameters. Default: 1. Backward multiplies the gradient
            of the outputs by the scale, because this gradient usually has fewer elements than the parameters. Backward
            then divides the gradients of tokens and routing weights by the scale. The division is exact if the scale is
            a power of two.
        name: name of the layer in errors.
    """

    ranks: Ranks
    _: KW_ONLY
    max_rows_factor: float | None = None
    chunks: int = 1
    gradient_scale: float = 1.0
    name: str = "ExpertParallel"

    @disable_dynamo
    def run(self, tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> PendingChunks:  # tokens [T, D]
        """Send all tokens, and compute the experts chunk by chunk. Return the outputs, which may still be in flight."""
        tokens = scale_gradient(tokens, 1 / self.gradient_scale)
        slots = slots._replace(topk_weights=scale_gradient(slots.topk_weights, 1 / self.gradient_scale))
        return PendingChunks(list(self.pending(tokens, slots, experts)), len(tokens), self.gradient_scale)

    def pending(self, tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> Iterator[Pending]:
        """Yield each chunk's outputs as a `Pending`, before the outputs have arrived."""
        chunks = split(tokens, slots, self.lengths(len(tokens)))
        for rows in self.dispatch(chunks, experts):
            yield self.combine(experts(rows), rows)

    def lengths(self, num_tokens: int) -> list[int]:
        """Return the number of tokens of each chunk. The numbers differ by at most one."""
        return [(num_tokens + self.chunks - 1 - chunk) // self.chunks for chunk in range(self.chunks)]

    @abstractmethod
    def dispatch(self, chunks: Sequence[Chunk], experts: ExpertsOfRank) -> Iterator[ExpertRows]:
        """Start to send all chunks, then yield each chunk's rows as soon as they have arrived."""

    @abstractmethod
    def combine(self, out: Tensor, rows: ExpertRows) -> Pending:
        """Start to send a chunk's outputs back to their tokens."""

    def num_slots(self, slots: Slots) -> int:
        """Return an upper bound on the number of slots that are not dropped, over all experts."""
        num_slots = slots.topk_experts.numel()
        return num_slots if slots.max_rows is None else min(slots.max_rows, num_slots)


def packing_of(tokens: Tensor, experts: ExpertsOfRank) -> Packing | None:
    """Return the conversion with which tokens are sent as e4m3 and scales, or None if `experts.precision` is None."""
    if experts.precision is None:
        return None
    pack = partial(pack_rows, implementation=experts.implementation)
    return Packing(pack, partial(unpack_rows, num_columns=tokens.shape[1], implementation=experts.implementation))


def row_bytes(tokens: Tensor) -> int:
    """Return the number of bytes per token. If the ranks' numbers differed, collectives would mix up tokens or hang."""
    return tokens.shape[1] * tokens.element_size()


GRADIENTS = (
    "gradients are the sum of 1 for tokens, 2 for routing weights, 4 for experts, and more for shared adapter factors; "
    "use requires_grad_() of the input, and no_grad(), on all ranks or on none"
)


def gradients_needed(tokens: Tensor, slots: Slots, experts: ExpertsOfRank) -> int:
    """Return a bit mask of the tensors that need gradients. The masks of all ranks must be equal, because backward
    communicates only these gradients. A rank would wait forever for a gradient that another rank does not need."""
    if not torch.is_grad_enabled():
        return 0
    parameters = list(experts.parameters())
    needed = [tensor.requires_grad for tensor in (tokens, slots.topk_weights)]
    needed.append(any(needed) or any(parameter.requires_grad for parameter in parameters))
    needed += [
        each.requires_grad for each in parameters if isinstance(each, DTensor) and each.placements == (Replicate(),)
    ]
    return sum(bit << place for place, bit in enumerate(needed)) % (2**31 - 1)  # ranks send the mask as int32


def split(tokens: Tensor, slots: Slots, lengths: list[int]) -> list[Chunk]:
    """Split tokens and slots into chunks of these lengths."""
    device_type = tokens.device.type
    if torch.is_autocast_enabled(device_type):  # send tokens in autocast's dtype, in which the experts compute
        tokens = autocast(tokens, device_type)
    if len(lengths) == 1:
        return [(tokens, slots)]
    parts = zip(*(tensor.split(lengths) for tensor in (tokens, *slots[:3])), strict=True)
    # `max_rows` bounds the slots of all chunks together. One chunk may hold all these slots, so each chunk gets the
    # whole bound, or its number of slots if that number is smaller.
    num_rows = slots.topk_experts.numel() if slots.max_rows is None else slots.max_rows
    return [(part, Slots(*rest, max_rows=min(num_rows, rest[0].numel()))) for part, *rest in parts]


class PendingChunks:
    """Outputs of all chunks, in flight. `Pending` is not used here, because its field `wait` holds a new function in
    each call, and compiled code would guard on that function."""

    def __init__(self, chunks: list[Pending], num_tokens: int, gradient_scale: float):
        self.chunks = chunks
        self.num_tokens = num_tokens
        self.gradient_scale = gradient_scale
        self.offsets = reduce(torch.add, [chunk.offsets for chunk in chunks])

    @disable_dynamo
    def wait(self) -> Tensor:  # [T, D]
        parts = [chunk.wait() for chunk in self.chunks]
        out = scale_gradient(parts[0] if len(parts) == 1 else torch.cat(parts), self.gradient_scale)
        return out if len(out) == self.num_tokens else out[: self.num_tokens]  # cut off padding


def scale_gradient(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else _ScaledGradient.apply(tensor, scale)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.scale, None
