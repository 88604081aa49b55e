"""Assignments in which each expert selects among all tokens of a call: expert choice and token rounding."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels import RouterSpec, Routing, routing_weights
from moe_kernels.reference import SCORES

from ..checks import check_choice, check_positive
from .assignment import Assignment
from .capacity import even_share, positive_ratio
from .result import Slots, spread_slots


class _AcrossTokens(Assignment):
    """Base of assignments that give a token any number of experts. Each token has E slots. Slot e holds expert e, or -1
    for no expert."""

    decides_counts = True

    @abstractmethod
    def takes(
        self,
        routed: Routing,
        order: Tensor,  # [E, T] int64: each expert's tokens, highest score first, ties in token order, padding last
        token_mask: Tensor | None,  # [T]
    ) -> Tensor:  # [E, T] bool, in the order of `order`
        """Return whether each expert takes each token. The caller excludes padding."""

    @abstractmethod
    def max_rows(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        """Return an upper bound on the number of token-expert pairs."""

    def num_slots(self, num_experts: int, top_k: int) -> int:
        return num_experts

    def __call__(self, routed: Routing, spec: RouterSpec, token_mask: Tensor | None) -> Slots:
        logits = routed.logits
        scores = SCORES[spec.score](logits.detach()).nan_to_num(nan=torch.inf, posinf=torch.inf)  # [T, E]
        if token_mask is not None:
            scores = torch.where(token_mask[:, None], scores, -torch.inf)
        order = scores.t().sort(dim=1, descending=True, stable=True).indices  # [E, T]
        takes = self.takes(routed, order, token_mask)
        is_chosen = torch.zeros_like(takes).scatter(1, order, takes).t()  # [T, E]
        if token_mask is not None:
            is_chosen = is_chosen & token_mask[:, None]
        ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
        experts = torch.where(is_chosen, ids, -1)
        max_rows = min(self.max_rows(*logits.shape, top_k=routed.topk_experts.shape[1]), experts.numel())
        return Slots(experts, routing_weights(logits, experts, spec), logits, max(max_rows, 1))


@dataclass(frozen=True)
class ExpertChoice(_AcrossTokens):
    """Each expert takes the ceil(factor * T * top_k / num_experts) tokens that score highest for this expert.

    All experts take equally many tokens. A token gets every expert that takes the token, possibly none. A token without
    experts passes only through the residual connection. T counts all tokens of the call, including padding, which no
    expert takes. The scores are the router's, such as a softmax over the experts. On ties the first token wins. NaN
    counts as the highest score. A selection bias is ignored, because a bias would not change an expert's order of
    tokens. Weights follow the router's rule, applied to the experts that took the token. For the paper's weights, which
    are the plain scores, set the router's `normalize=False`.

    Forward and backward allocate ceil(factor * T * top_k / num_experts) rows per expert, at most T. Choice and
    weights are [T, E], and the weights are saved for backward.

    Source: https://arxiv.org/abs/2202.09368.

    Args:
        factor: the paper's capacity factor divided by top_k. The default 1 computes as many rows as top-k routing.

    Raises:
        ValueError: `factor` is not a positive number.
    """

    factor: float = 1.0
    _ratio: tuple[int, int] = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "_ratio", positive_ratio("ExpertChoice", self.factor))

    def max_rows(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return num_experts * even_share(self._ratio, num_tokens * top_k, num_experts)

    def takes(self, routed: Routing, order: Tensor, token_mask: Tensor | None) -> Tensor:
        num_experts, num_tokens = order.shape
        rank = torch.arange(num_tokens, device=order.device)
        capacity = even_share(self._ratio, num_tokens * routed.topk_experts.shape[1], num_experts)
        return (rank < capacity).expand(order.shape)


# Maps each value of `rounding` to a function of the multiple. To round a count, add the function's result to the count,
# and round the sum down to the multiple.
_ADDED = {"down": lambda multiple: 0, "nearest": lambda multiple: multiple // 2, "up": lambda multiple: multiple - 1}


@dataclass(frozen=True)
class TokenRounding(_AcrossTokens):
    """Rounds each expert's number of top-k tokens to a multiple of `multiple`, so that no GEMM tile is partly empty.

    An expert with too many tokens drops the tokens that score lowest for this expert, the last tokens on ties. An
    expert with too few tokens adds the highest-scoring tokens among those that did not choose this expert. A token may
    therefore get more or fewer experts than top_k, possibly none. Weights follow the router's rule, applied to the
    experts that the token gets. If a call has fewer tokens than the multiple, no expert gets any token. Use this
    assignment only for training, with many more tokens than the multiple.

    All experts together have at most T * top_k rows plus the rows that rounding adds. Choice and weights are [T, E],
    and the weights are saved for backward.

    Source: https://arxiv.org/abs/2512.14080.

    Args:
        multiple: counts are rounded to multiples of this number. The default 128 is the height of a GEMM tile.
        rounding: "nearest" (default; half rounds up), "down" (only drops) or "up" (only adds, if tokens suffice).

    Raises:
        ValueError: `multiple` is not a positive integer, or `rounding` is unknown.
    """

    multiple: int = 128
    rounding: str = "nearest"

    def __post_init__(self):
        check_positive("TokenRounding", multiple=self.multiple)
        check_choice("TokenRounding", "rounding", self.rounding, tuple(_ADDED))

    def max_rows(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        return num_tokens * top_k + num_experts * _ADDED[self.rounding](self.multiple)

    def takes(self, routed: Routing, order: Tensor, token_mask: Tensor | None) -> Tensor:
        num_experts, num_tokens = order.shape
        choice, available = routed.topk_experts, num_tokens
        if token_mask is not None:
            choice, available = torch.where(token_mask[:, None], choice, -1), token_mask.sum()
        position = torch.arange(num_tokens, device=order.device).expand(order.shape)  # [E, T]
        token_to_position = torch.empty_like(order).scatter(1, order, position)
        # Scatter instead of gathering by `order`: Inductor of PyTorch 2.11 cannot compile a sum over gathered values.
        is_choice = spread_slots(choice, 1, num_experts).t().long()  # [E, T] in token order
        is_chosen = torch.zeros_like(order).scatter(1, token_to_position, is_choice)
        num_chosen = is_chosen.cumsum(1)  # [E, T] running count, highest score first
        counts = num_chosen[:, -1:]
        # Rank the chosen tokens before all other tokens, and within each of these groups by descending score.
        rank = torch.where(is_chosen > 0, num_chosen - 1, counts + position - num_chosen)
        rounded = (counts + _ADDED[self.rounding](self.multiple)) // self.multiple * self.multiple
        return rank < rounded.clamp(max=available // self.multiple * self.multiple)
