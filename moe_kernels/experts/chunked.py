"""The expert feed-forward and its backward, chunk by chunk, so that communication can overlap with computation.

    forward, each chunk:     H = gather(tokens) @ w_up^T     A = activation(H)    out = combine(A @ w_down^T)
    backward, each chunk:    dA' = gather(dout) @ w_down     dw = <dA', A>        A_w and dH, in tensors of all chunks
    then, for all chunks:    dX = dH @ w_up                  dtokens = sum of a token's rows of dX
    last, for all chunks:    dw_down = gather(dout)^T @ A_w  dw_up = dH^T @ gather(tokens)

While a chunk is computed, the outputs of the previous chunk can be sent and the tokens of the next chunk received. The
gradients of tokens can be sent while the gradients of the weights are computed. Each weight gradient is one product
over the rows of all chunks, not a sum of one product per chunk. A_w is A times the routing weights w of the rows. dA'
is the gradient of A_w, and dX is the gradient of the rows gather(tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..activation.ops import Destination
from ..runtime.row_layout import empty_rows
from ..specs import Activation
from ..types import ExpertWeights, Permutation, ScaledRows
from .row_products import Rows
from .steps import (
    Activated,
    Adapters,
    Experts,
    activate,
    b_down_gradient,
    b_up_gradient,
    copy_dout,
    down,
    down_adapter_gradients,
    hidden_gradients,
    up_adapter_gradients,
    up_input_gradient,
    w_down_gradient,
    w_up_gradient,
)


class ExpertsInParts:
    """Computes `fused_experts` and its backward step by step on chunks of tokens, with the Triton kernels. Autograd
    does not record the steps. The weights are plain tensors.

    In backward, call `backward_part` for each chunk, in any order. Then call `tokens_gradient` and `gradients`, in
    either order. Only `backward_part` reads the pre-activations. The caller may free the pre-activations before the
    other two methods allocate their results. Results are deterministic.

    Args:
        parts: the permutation of each chunk's slots.
        whole: one permutation of the slots of all chunks, in the order of the chunks. Only backward reads `whole`.
            None, the default, means the permutation of the first chunk.
        reserved_sms: number of SMs that persistent GEMMs leave to concurrent communication, by default 0. The number
            does not change the bits of the results.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        parts: list[Permutation],
        whole: Permutation | None = None,
        *,
        adapters: Adapters | None = None,
        reserved_sms: int = 0,
    ):
        self.experts = Experts.of(weights, activation)._replace(adapters=adapters or Adapters())
        self.parts = [Rows.of(part, reserved_sms=reserved_sms) for part in parts]
        self.whole = Rows.of(whole or parts[0], reserved_sms=reserved_sms)
        self._hidden: Destination | None = None  # dH and A_w of all chunks; A_w is A times each row's routing weight
        self._up_low: Tensor | None = None  # [R, r] of all chunks: dH times the adapter factor up_b

    def activate(self, part: int, tokens: Tensor) -> Activated:  # tokens [T, D]
        """Return the first half of a chunk's forward: the preactivation H and the activation A."""
        return activate(self.experts, self.parts[part], tokens)

    def outputs(
        self,
        part: int,
        activated: Tensor | ScaledRows,  # [R, F]
        topk_weights: Tensor,  # [T, K] float32 contiguous
        columns: slice = slice(None),
    ) -> Tensor:  # [T, columns]
        """Return output columns of a chunk, by default all. A slice can be sent before other columns are computed."""
        rows, (weights, adapters, *_) = self.parts[part], self.experts
        b_down = None if weights.b_down is None else weights.b_down[:, columns].contiguous()
        down_b = None if adapters.down_b is None else adapters.down_b[:, columns]
        assert isinstance(weights.w_down, Tensor)
        weights = weights._replace(w_down=weights.w_down[:, columns], b_down=b_down)
        experts = self.experts._replace(weights=weights, adapters=adapters._replace(down_b=down_b))
        return rows.combine(down(experts, rows, activated), topk_weights)

    def backward_part(
        self,
        part: int,
        dout: Tensor,  # [T, D] contiguous
        topk_weights: Tensor,  # [T, K] float32 contiguous
        preactivation: Tensor,  # [R, 2F or F]
    ) -> Tensor:  # [T, K] float32: the gradient of topk_weights
        experts, rows = self.experts, self.parts[part]
        destination = self._destination(part, preactivation) if len(self.parts) > 1 else None
        hidden = hidden_gradients(experts, rows, dout, topk_weights, preactivation, destination=destination)
        if destination is None:
            self._hidden = Destination(hidden.dpreactivation, hidden.weighted, rows.slot_to_row)
            self._up_low = hidden.up_low
        return hidden.dtopk_weights

    def tokens_gradient(self) -> Tensor:  # [T, D] of all chunks' tokens
        assert self._hidden is not None
        dup_input = up_input_gradient(self.experts, self.whole, self._hidden.dpreactivation, self._up_low_of_all())
        return self.whole.combine(dup_input, None)

    def gradients(
        self,
        tokens: Tensor,  # [T, D] of all chunks, contiguous
        dout: Tensor,  # [T, D] of all chunks, contiguous
        topk_weights: Tensor,  # [T, K] of all chunks, float32 contiguous
        needed: Sequence[bool],  # whether to compute each gradient, in the order of the result
    ) -> tuple[Tensor | None, ...]:  # gradients of the fields of `ExpertWeights`, then of `Adapters`
        """Return the gradients that `needed` asks for, and None in place of the others. If one factor of an adapter
        needs a gradient, the other factor also gets its gradient. This method recomputes adapters' low-rank products
        [R, r] that no earlier step has kept."""
        experts, whole, hidden, up_low = self.experts, self.whole, self._hidden, self._up_low_of_all()
        up_a, _, _, down_b = experts.adapters
        needs_w_up, needs_w_down, needs_b_up, needs_b_down, *needs_factors = needed
        assert hidden is not None
        dw_up = dw_down = db_up = db_down = dup_a = dup_b = ddown_a = ddown_b = None
        if needs_w_down:
            dw_down = w_down_gradient(experts, whole, dout, copy_dout(experts, whole, dout), hidden.weighted)
        if needs_w_up:
            dw_up = w_up_gradient(experts, whole, tokens, hidden.dpreactivation)
        if needs_b_up:
            db_up = b_up_gradient(experts, whole, hidden.dpreactivation)
        if needs_b_down:
            db_down = b_down_gradient(experts, whole, dout, topk_weights)
        if up_a is not None and up_low is not None and any(needs_factors[:2]):
            low = whole.gemm(tokens, up_a.transpose(1, 2), gather=True)
            dup_a, dup_b = up_adapter_gradients(experts, whole, tokens, hidden.dpreactivation, low, up_low)
            dup_b = dup_b.transpose(1, 2)
        if down_b is not None and any(needs_factors[2:]):
            down_low = whole.gemm(dout, down_b, gather=True)
            ddown_a, ddown_b = down_adapter_gradients(experts, whole, dout, hidden.weighted, down_low)
            ddown_b = ddown_b.transpose(1, 2)
        return dw_up, dw_down, db_up, db_down, dup_a, dup_b, ddown_a, ddown_b

    def _up_low_of_all(self) -> Tensor | None:
        up_b = self.experts.adapters.up_b
        if self._up_low is None and up_b is not None and self._hidden is not None:
            self._up_low = self.whole.gemm(self._hidden.dpreactivation, up_b)
        return self._up_low

    def _destination(self, part: int, preactivation: Tensor) -> Destination:
        """Return the tensors that hold all chunks' gradients of pre-activations and weighted activations. Also return
        the row in these tensors of each slot of this chunk."""
        whole = self.whole
        if self._hidden is None:
            num_rows, d_ff = len(whole.row_to_token), self.experts.weights.w_down.shape[2]
            dpreactivation = empty_rows(preactivation, num_rows, preactivation.shape[1])
            self._hidden = Destination(dpreactivation, empty_rows(preactivation, num_rows, d_ff), whole.slot_to_row)
        lengths = [len(rows.slot_to_row) for rows in self.parts]
        return self._hidden._replace(slot_to_row=whole.slot_to_row.split(lengths)[part])
