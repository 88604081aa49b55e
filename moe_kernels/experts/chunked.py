"""The steps of `fused_experts` and of its backward, on tokens that come in parts.

    forward, of each part:    H = gather(tokens) @ w_up^T     A = activation(H)    out = combine(A @ w_down^T)
    backward, of each part:   dA' = gather(dout) @ w_down     dw = <dA', A>        A_w and dH, to the rows of all parts
    then of all at once:      dX = dH @ w_up                  dtokens = sum of a token's rows of dX
    and last, of all at once: dw_down = gather(dout)^T @ A_w  dw_up = dH^T @ gather(tokens)

A part's outputs are there before the next part's tokens need be, the gradients of tokens before those of the weights,
which are one product over the rows of all parts: not a sum of one for each. What is done can travel meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..activation.ops import Destination, launch_weighted_activation_backward
from ..activation_spec import Activation
from ..permutation.permute import launch_slot_products
from ..types import ExpertWeights, Permutation
from .expert_bias import launch_segment_sum
from .rows import Rows, Up


class Activated(NamedTuple):
    preactivation: Tensor  # [R, 2F or F], for backward
    activated: Tensor  # [R, F]


class ExpertsInParts:
    """What `fused_experts` computes, step by step, by the Triton kernels. Autograd sees nothing of it.

    Deterministic, and the same bits for any `reserved_sms`.

    Args:
        parts: the permutation of each part's slots.
        reserved_sms: of the GPU, that persistent GEMMs leave to communication beside them.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        parts: list[Permutation],
        *,
        reserved_sms: int = 0,
    ):
        self.weights = weights._replace(
            **{name: bias.contiguous() for name in ("b_up", "b_down") if (bias := getattr(weights, name)) is not None}
        )
        self.activation = activation
        self.parts = [_rows(part, reserved_sms) for part in parts]
        self.reserved_sms = reserved_sms

    def activate(self, part: int, tokens: Tensor) -> Activated:  # tokens [T, D]
        """The first half of the forward of a part."""
        rows, weights = self.parts[part], self.weights
        copy = rows.choose_copies(tokens, weights.w_up, weights.w_down).tokens_forward
        return Activated(*Up(tokens, weights.w_up, weights.b_up, self.activation, None, copy)(rows))

    def outputs(
        self,
        part: int,
        activated: Tensor,  # [R, F]
        topk_weights: Tensor,  # [T, K] float32 contiguous
        columns: slice = slice(None),
    ) -> Tensor:  # [T, columns]
        """The second half, of all columns or of some neighbours, so that these can travel before the others."""
        rows, (_, w_down, _, b_down) = self.parts[part], self.weights
        bias = None if b_down is None else b_down[:, columns].contiguous()
        expert_out = rows.gemm(activated, w_down[:, columns].transpose(1, 2), bias=bias)  # [R, columns]
        return rows.combine(expert_out, topk_weights)

    def backward(self, whole: Permutation) -> BackwardInParts:
        """
        Args:
            whole: the permutation of the slots of all parts, one part after another. With one part it is that part's.
        """
        return BackwardInParts(self, _rows(whole, self.reserved_sms))


class BackwardInParts:
    """Each part's `backward_part`, in any order, then `tokens_gradient` and `weight_gradients`, in any order."""

    def __init__(self, experts: ExpertsInParts, whole: Rows):
        self.experts = experts
        self.whole = whole
        self._dpreactivation: Tensor | None = None  # [R, 2F or F] of all parts
        self._weighted: Tensor | None = None  # [R, F] A_w of all parts

    def backward_part(
        self,
        part: int,
        dout: Tensor,  # [T, D] contiguous
        topk_weights: Tensor,  # [T, K] float32 contiguous
        preactivation: Tensor,  # [R, 2F or F]
    ) -> Tensor:  # [T, K] float32: the gradient of topk_weights
        rows, (w_up, w_down, b_up, b_down) = self.experts.parts[part], self.experts.weights
        copy = rows.choose_copies(dout, w_up, w_down).dout
        dactivated = rows.gemm(rows.permute(dout) if copy else dout, w_down, gather=not copy)  # [R, F] dA'
        dpreactivation, dweights = launch_weighted_activation_backward(
            preactivation,
            dactivated,
            topk_weights,
            rows.slot_to_row,
            self.experts.activation,
            rows.row_bias(b_up),
            row_to_token=rows.row_to_token,
            destination=self._destination(part, dactivated, preactivation),
        )
        if len(self.experts.parts) == 1:  # the rows are those of all
            self._dpreactivation, self._weighted = dpreactivation, dactivated
        if b_down is not None:
            dweights += launch_slot_products(dout, b_down, rows.slot_experts())
        return dweights

    def tokens_gradient(self) -> Tensor:  # [T, D] of all parts' tokens
        whole = self.whole
        return whole.combine(whole.gemm(self._dpreactivation, self.experts.weights.w_up), None)

    def weight_gradients(
        self,
        tokens: Tensor,  # [T, D] of all parts, contiguous
        dout: Tensor,  # [T, D] of all parts, contiguous
        topk_weights: Tensor,  # [T, K] of all parts, float32 contiguous
        needed: tuple[bool, ...],  # of each of the weights
    ) -> ExpertWeights:
        """Those that are needed, the others None."""
        whole, (w_up, w_down, b_up, b_down) = self.whole, self.experts.weights
        copies, dpreactivation = whole.choose_copies(tokens, w_up, w_down), self._dpreactivation
        needs_up, needs_down, needs_b_up, needs_b_down = needed
        dw_up = dw_down = db_up = db_down = None
        if needs_down:
            drows = whole.permute(dout) if copies.dout else dout
            dw_down = whole.wgrad(drows, self._weighted, gather_a=not copies.dout)
            del drows
        if needs_up:
            rows_in = whole.permute(tokens) if copies.tokens_backward else tokens
            dw_up = whole.wgrad(dpreactivation, rows_in, gather_dout=not copies.tokens_backward)
        if needs_b_up:
            db_up = launch_segment_sum(dpreactivation, whole.table.bounds).to(b_up.dtype)
        if needs_b_down:
            db_down = whole.bias_gradient(dout, topk_weights).to(b_down.dtype)
        return ExpertWeights(dw_up, dw_down, db_up, db_down)

    def _destination(self, part: int, dactivated: Tensor, preactivation: Tensor) -> Destination | None:
        if len(self.experts.parts) == 1:
            return None
        whole = self.whole
        if self._weighted is None:
            num_rows = len(whole.row_to_token)
            self._dpreactivation = preactivation.new_empty(num_rows, preactivation.shape[1])
            self._weighted = dactivated.new_empty(num_rows, dactivated.shape[1])
        lengths = [len(rows.slot_to_row) for rows in self.experts.parts]
        return Destination(self._dpreactivation, self._weighted, whole.slot_to_row.split(lengths)[part])


def _rows(permutation: Permutation, reserved_sms: int) -> Rows:
    slot_to_row = permutation.slot_to_row.contiguous()
    return Rows(slot_to_row, permutation.row_to_token.contiguous(), permutation.tile_table, reserved_sms, None)
