"""The operands of the expert feed-forward's op, and of the ops that compute its gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..permutation.sort import SortedSlots
from ..routing.linear_op import LinearRouter
from ..types import ScaledForms
from .row_products import Rows
from .steps import Experts


class ExpertOperands(NamedTuple):
    """Operands of the op's forward and backward. Operands that a call does not use are None. Forward gets one of three
    operands: `rows` from the caller, `topk_experts` to sort, or a `router` that chooses the experts. Backward gets
    `topk_weights`, and `rows` or `sorted_slots`."""

    tokens: Tensor  # [T, D]
    experts: Experts
    topk_weights: Tensor | None = None  # [T, K] float32 contiguous
    topk_experts: Tensor | None = None  # [T, K] int32 or int64, contiguous
    router: LinearRouter | None = None
    rows: Rows | None = None
    sorted_slots: SortedSlots | None = None
    batch_invariant: bool = False
    recompute: bool = False  # compute the pre-activations again in backward
    precision: str | None = None
    forms: ScaledForms | None = None  # e4m3 weights; None: the op quantises the weights if `precision` is set
    adds_to_main_grad: bool = False  # add the gradients of weights to `main_grad`

    @property
    def num_experts(self) -> int:
        return self.experts.weights.w_up.shape[0]

    @property
    def d_up(self) -> int:
        return self.experts.weights.w_up.shape[1]

    @property
    def num_rows(self) -> int:
        if self.rows is not None:
            return self.rows.row_to_token.shape[0]
        return self.tokens.shape[0] * self.top_k

    @property
    def top_k(self) -> int:
        if self.router is not None:
            return self.router.top_k
        assert self.topk_weights is not None
        return self.topk_weights.shape[1]

    def computed(self) -> Experts:
        """Return the experts for the forward pass and the gradients of rows. With a `precision`, weights are e4m3."""
        return self.experts if self.precision is None else self.experts.scaled(self.forms or ScaledForms())

    def placed(self) -> Rows:
        """Return `rows` if the caller gave them, else the rows of `sorted_slots`."""
        if self.rows is not None:
            return self.rows
        assert self.sorted_slots is not None
        permutation = self.sorted_slots.permutation(self.tokens.shape[0])
        return Rows.of(permutation, reserved_sms=0, batch_invariant=self.batch_invariant)

    def empty_slots(self) -> SortedSlots:
        """Return uninitialised `sorted_slots`. With a `router`, they have space for its chosen experts and weights."""
        return SortedSlots.empty(self.tokens, self.top_k, self.num_experts, has_choice=self.router is not None)

    def slots_in(self, buffer: Tensor) -> SortedSlots:
        """Return the `sorted_slots` that the forward pass wrote to the buffer."""
        return SortedSlots(buffer, self.top_k, self.num_experts)

    def fuses_router_gradient(self) -> bool:
        """Return whether one launch computes a token's gradient: the sum of the token's rows of dX, plus the gradient
        through the routing weights. `router_gradient.py` contains this launch."""
        router, experts = self.router, self.experts
        return (
            router is not None
            and router.is_softmax_of_chosen
            and router.w_router.dtype == self.tokens.dtype
            and not (experts.weight_on_input or self.batch_invariant)
        )
