"""Assignments decide which experts compute a token, in place of the token's own top-k.

An assignment replaces the router's choice. The router still computes the logits and, except with `CustomAssignment`,
the weights of the assigned experts, with gradients. A slot without an expert is -1 and has weight zero.

| assignment | a token's experts | depends on other tokens |
|---|---|---|
| `RoundRobinAssignment` | the next `top_k` in turn, independent of the logits | on the number of tokens before it |
| `CustomAssignment` | decided by the callable | if the callable does |
| `ExpertChoice` | 0 to E, the same number of tokens for each expert | on the whole call: not causal |
| `TokenRounding` | its top-k, plus or minus some, so that GEMM tiles are full | on the whole call: not causal |

With a choice that depends on the whole call, a token's result depends on other sequences and on the split of a batch
into calls. A sampler that processes one token at a time then gets other results than a call on whole sequences. To
return the choice to the router, set `layer.router.assignment = None`. Padding gets no expert and does not affect other
tokens, except that `ExpertChoice` counts padding in the number of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels import RouterSpec, Routing, routing_weights

from ..checks import check_positive
from .result import Slots


class Assignment(ABC):
    """Decides experts and weights in place of a router. Subclasses document what their decision depends on."""

    decides_counts = False  # whether the assignment decides how many tokens an expert gets

    @abstractmethod
    def __call__(
        self,
        routed: Routing,
        spec: RouterSpec,
        token_mask: Tensor | None,  # [T]
    ) -> Slots:
        """Return slots decided from the logits of `routed`, which also holds the router's choice of `top_k` experts.

        An expert id lies in [0, E), or is -1 for no expert. Only ids on the CPU are checked. Implementations must not
        synchronise the host.
        """

    @abstractmethod
    def num_slots(self, num_experts: int, top_k: int) -> int | None:
        """Return K', the number of slots per token. Return None if K' depends on the logits, which rules out replay."""

    def check(self, owner: str, spec: RouterSpec) -> None:
        """Raise ValueError unless the assignment supports a router with these settings."""
        if self.decides_counts and (spec.num_groups > 1 or spec.sparsemixer_jitter is not None):
            raise ValueError(
                f"{owner}: {type(self).__name__} needs a router without groups that is no SparseMixer, got {spec}"
            )


@dataclass(frozen=True)
class RoundRobinAssignment(Assignment):
    """Assigns the experts in turn, for benchmarks. The experts' numbers of slots differ by at most one. A token's
    experts depend only on the number of earlier tokens. The router computes the weights."""

    def num_slots(self, num_experts: int, top_k: int) -> int:
        return top_k

    def __call__(self, routed: Routing, spec: RouterSpec, token_mask: Tensor | None) -> Slots:
        num_tokens, top_k = routed.topk_experts.shape
        device = routed.logits.device
        position = torch.arange(num_tokens, device=device) if token_mask is None else token_mask.cumsum(0) - 1
        slot = position[:, None] * top_k + torch.arange(top_k, device=device)
        experts = (slot % routed.logits.shape[1]).int()
        return Slots(experts, routing_weights(routed.logits, experts, spec), routed.logits)


class TokenExpertPairs(NamedTuple):
    """Pairs of a token and an expert, in any order. A token may have any number of experts, including none.

    A pair that is listed twice counts twice. Pairs whose token or expert does not exist are ignored.

    Shapes: tokens [P] int32 or int64, experts [P] int32, weights [P] float32 or float64.
    """

    tokens: Tensor  # [P] int32 or int64
    experts: Tensor  # [P] int32
    weights: Tensor  # [P] float32 or float64


def slots_of_pairs(
    pairs: TokenExpertPairs, num_tokens: int, max_experts_per_token: int
) -> tuple[Tensor, Tensor]:  # experts [T, K'] int32, weights [T, K']
    """Return each token's experts and weights in the order of the pairs, padded with -1 and 0.

    Gradients flow to the weights. The result is deterministic, and the host does not synchronise. To sort the slots to
    P rows instead of T * K', pass `max_rows=P` to `sort_by_expert`.

    Args:
        max_experts_per_token: K', the maximum number of pairs of a token. Further pairs of the token are ignored.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    tokens, experts, weights = pairs
    shapes = {tuple(tensor.shape) for tensor in pairs}
    if len(shapes) > 1 or tokens.dim() != 1:
        raise ValueError(
            f"slots_of_pairs: tokens, experts and weights must be [P], got {[list(tensor.shape) for tensor in pairs]}"
        )
    check_slot_dtypes("slots_of_pairs", experts, weights)
    if tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots_of_pairs: tokens must be int32 or int64, got {tokens.dtype}")
    exists = (tokens >= 0) & (tokens < num_tokens) & (experts >= 0)
    ordered, order = torch.where(exists, tokens.long(), num_tokens).sort(stable=True)
    pair = torch.arange(tokens.shape[0], device=tokens.device)
    rank = pair - torch.searchsorted(ordered, ordered)
    # Each ignored pair gets its own position after the slots. These positions are cut off later.
    num_slots = num_tokens * max_experts_per_token
    has_slot = (rank < max_experts_per_token) & (ordered < num_tokens)
    slot = torch.where(has_slot, ordered * max_experts_per_token + rank, num_slots + pair)  # [P]
    empty = experts.new_full((num_slots + tokens.shape[0],), -1)
    topk_experts = empty.scatter(0, slot, experts[order])[:num_slots]
    topk_weights = weights.new_zeros(empty.shape).scatter(0, slot, weights[order])[:num_slots]
    shape = num_tokens, max_experts_per_token
    return topk_experts.view(shape), topk_weights.view(shape)


@dataclass(frozen=True)
class CustomAssignment(Assignment):
    """Calls `route(logits)`, which returns (experts [T, K'] int32, weights [T, K']) or `TokenExpertPairs`.

    Logits are [T, E], in float32 unless the layer is float64. Logits include padding tokens, whose result is ignored. A
    slot whose expert lies outside [0, E) adds nothing, and its weight gets no gradient. Gradients flow through the
    weights to the tensors from which `route` computed the weights. The layer synchronises with the GPU only if `route`
    does. The choice cannot be replayed, because only `route` can compute the weights.

    Args:
        route: a callable, but no module, because the layer would not register the module's parameters.
        max_experts_per_token: limit on a token's pairs; further pairs are ignored. Default: the number of experts.

    Raises:
        ValueError: `route` is a module or not callable, or `max_experts_per_token` is not positive. In forward: `route`
            returns a wrong shape, dtype or device.
    """

    route: Callable[[Tensor], tuple[Tensor, Tensor] | TokenExpertPairs]
    max_experts_per_token: int | None = None

    def __post_init__(self):
        if not callable(self.route) or isinstance(self.route, nn.Module):
            raise ValueError(
                f"CustomAssignment: route must be a callable that is no nn.Module, got {type(self.route).__name__}"
            )
        if self.max_experts_per_token is not None:
            check_positive("CustomAssignment", max_experts_per_token=self.max_experts_per_token)

    def num_slots(self, num_experts: int, top_k: int) -> None:
        return None

    def __call__(self, routed: Routing, spec: RouterSpec, token_mask: Tensor | None) -> Slots:
        logits, max_rows = routed.logits, None
        num_tokens, num_experts = logits.shape
        decided = self.route(logits)
        if isinstance(decided, TokenExpertPairs):
            max_rows = max(len(decided.tokens), 1)
            exists = (decided.experts >= 0) & (decided.experts < num_experts)
            decided = decided._replace(experts=torch.where(exists, decided.experts, -1))
            experts, weights = slots_of_pairs(decided, num_tokens, self.max_experts_per_token or num_experts)
        else:
            is_pair = isinstance(decided, tuple | list) and len(decided) == 2
            if not is_pair or not all(isinstance(part, Tensor) for part in decided):
                raise ValueError(
                    f"CustomAssignment: route must return two tensors or TokenExpertPairs, got {type(decided).__name__}"
                )
            experts, weights = decided
        has_slots = experts.dim() == 2 and experts.shape[0] == num_tokens and experts.shape[1] > 0
        if not has_slots or weights.shape != experts.shape:
            raise ValueError(
                f"CustomAssignment: route must return experts and weights [T={num_tokens}, K'], K' > 0, "
                f"got {list(experts.shape)} and {list(weights.shape)}"
            )
        check_slot_dtypes("CustomAssignment", experts, weights)
        if experts.device != logits.device or weights.device != logits.device:
            raise ValueError(
                f"CustomAssignment: route must return tensors on {logits.device}, "
                f"got {experts.device} and {weights.device}"
            )
        exists = (experts >= 0) & (experts < num_experts)
        return Slots(torch.where(exists, experts, -1), torch.where(exists, weights, 0.0), logits, max_rows)


def check_slot_dtypes(op: str, experts: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless experts are int32 and weights float32 or float64."""
    if experts.dtype != torch.int32 or weights.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{op}: experts must be int32 and weights float32 or float64, got {experts.dtype} and {weights.dtype}"
        )


def as_assignment(owner: str, assignment: Assignment | Callable | None) -> Assignment | None:
    """Return the assignment, or a function wrapped in `CustomAssignment`. Raise ValueError for a class."""
    if assignment is None or isinstance(assignment, Assignment):
        return assignment
    if isinstance(assignment, type):
        raise ValueError(f"{owner}: assignment must be an object or a function, got the class {assignment.__name__}")
    return CustomAssignment(assignment)
