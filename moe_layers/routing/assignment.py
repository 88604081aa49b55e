"""Assignments decide which expert computes which token, in place of each token's own top-k.

An assignment replaces the router's choice. The router still computes the logits and, except with `CustomAssignment`,
the weights of the assigned experts, with gradients. A slot without an expert is -1 and has weight zero.

| assignment | a token's experts | depends on other tokens |
|---|---|---|
| `RoundRobinAssignment` | `top_k`, in turn, independent of the logits | on the number of tokens before it |
| `CustomAssignment` | decided by the callable | if the callable does |
| `ExpertChoice` | 0 to E, the same number of tokens for each expert | on the whole call: not causal |
| `TokenRounding` | its top-k, plus or minus some, so that GEMM tiles are full | on the whole call: not causal |

If the choice depends on all tokens of a call, a token's result depends on how a batch is split into calls and on the
other sequences. A sampler that processes one token at a time then gets other results. Set `layer.router.assignment =
None` to return the choice to the router. Padding is never chosen and does not affect other tokens, except that
`ExpertChoice` counts padding in the number of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import RouterSpec, Routing, routing_weights

from .slots import Slots


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
        """Return slots decided from the logits of `routed`. The router's own choice in `routed` has `top_k` experts. Do
        not synchronise the host.

        Ids lie in [0, E), or are -1. Only ids on the CPU are checked.
        """

    @abstractmethod
    def num_slots(self, num_experts: int, top_k: int) -> int | None:
        """Return K', the number of slots per token. None: K' depends on the logits, so no choice can be replayed."""

    def weigh(
        self,
        logits: Tensor,  # [T, E], after the router's soft cap
        topk_experts: Tensor,  # [T, K'] int32; -1 means no expert
        spec: RouterSpec,
    ) -> Tensor:  # [T, K']
        """Return the weights of a choice, which may be replayed. Called only if `num_slots` is not None."""
        return routing_weights(logits, topk_experts, spec)

    def check(self, owner: str, spec: RouterSpec) -> None:
        """Raise ValueError unless the assignment supports a router of this kind."""
        if self.decides_counts and (spec.num_groups > 1 or spec.sparsemixer_jitter is not None):
            raise ValueError(
                f"{owner}: {type(self).__name__} needs a router without groups that is no SparseMixer, got {spec}"
            )


@dataclass(frozen=True)
class RoundRobinAssignment(Assignment):
    """Assigns the experts in turn, so that their numbers of slots differ by at most one. For benchmarks.

    A token's experts depend only on the number of tokens before it. The router computes the weights.
    """

    def num_slots(self, num_experts: int, top_k: int) -> int:
        return top_k

    def __call__(self, routed: Routing, spec: RouterSpec, token_mask: Tensor | None) -> Slots:
        num_tokens, top_k = routed.topk_experts.shape
        device = routed.logits.device
        position = torch.arange(num_tokens, device=device) if token_mask is None else token_mask.cumsum(0) - 1
        slot = position[:, None] * top_k + torch.arange(top_k, device=device)
        experts = (slot % routed.logits.shape[1]).int()
        return Slots(experts, self.weigh(routed.logits, experts, spec), routed.logits)
