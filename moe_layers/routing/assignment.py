"""Which expert computes which token, where it is not each token's own top-k.

An assignment takes the place of the router's choice. The way to the logits stays, and so does the router's way from
scores to weights, with gradients through them; a slot of no expert is -1 and weighs nothing.

| assignment | a token's experts | looks at other tokens |
|---|---|---|
| `RoundRobinAssignment` | `top_k`, in turn, whatever the logits | at how many tokens come before, if there is padding |
| `CustomAssignment` | what the callable says | as the callable does |
| `ExpertChoice` | 0 to E, the same number of tokens for each expert | at all of the call: not causal |
| `TokenRounding` | its top-k, less or more so that tiles are full | at all of the call: not causal |

Where an expert looks at the tokens of a call, a token's result depends on how a batch is split into calls and on which
sequences it comes with; a sampler that sees one token at a time computes something else. `layer.router.assignment =
None` gives the choice back to the router. Padding is never chosen, and changes nothing for the others but the number of
tokens that `ExpertChoice` counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import RouterSpec, Routing, routing_weights

from .capacity import Slots


class Assignment(ABC):
    """Decides experts and weights in place of a router. See each for what it depends on."""

    decides_counts = False  # how many tokens an expert gets

    @abstractmethod
    def __call__(
        self,
        routed: Routing,
        spec: RouterSpec,
        token_mask: Tensor | None,  # [T]
    ) -> Slots:
        """What it decides from the logits of `routed`, whose own choice has `top_k` experts. Does not wait."""

    @abstractmethod
    def num_slots(self, num_experts: int, top_k: int) -> int | None:
        """K', the slots of each token; None where the logits decide it: no choice can be replayed then."""

    def weigh(
        self,
        logits: Tensor,  # [T, E] as scored
        topk_experts: Tensor,  # [T, K'] int32; -1 for none
        spec: RouterSpec,
    ) -> Tensor:  # [T, K']
        """The weights of a choice that may be another's. Asked where `num_slots` is known."""
        return routing_weights(logits, topk_experts, spec)

    def check(self, owner: str, spec: RouterSpec) -> None:
        """Raises ValueError unless it can act on a router of this kind."""
        if self.decides_counts and (spec.num_groups > 1 or spec.sparsemixer_jitter is not None):
            raise ValueError(
                f"{owner}: {type(self).__name__} needs a router without groups that is no SparseMixer, got {spec}"
            )


@dataclass(frozen=True)
class RoundRobinAssignment(Assignment):
    """The experts take turns: numbers of slots differ by at most one. For benchmarks.

    A token's experts depend on how many tokens come before it, and on nothing else; their weights are the router's.
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
