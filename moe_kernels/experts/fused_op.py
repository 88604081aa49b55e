"""The expert feed-forward of all tokens as one differentiable op that saves as little as possible.

Forward:   H = gather(tokens) @ w_up^T      A = activation(H)      Y = A @ w_down^T      out = combine(Y, weights)
Saved:     tokens, H, topk_weights and the routing integers. The gathered tokens, A and Y are not saved; with
           recompute="up" H is not either.
Backward, with w the routing weight of a row:

    dA' = gather(dout) @ w_down             dw = <dA', A>                    (needs no saved Y)
    dA  = w * dA'      A_w = w * A          dH = dA * activation'(H)         (A is recomputed from H, elementwise)
    dw_down = gather(dout)^T @ A_w          dX = dH @ w_up                   dw_up = dH^T @ gather(tokens)
    dtokens = sum of a token's rows of dX

The identity for dw is from SonicMoE (https://arxiv.org/abs/2512.14080). H is stored without b_up, which is added
wherever H is read: rounding the sum would move more values across the limits of clamps. b_down is added before Y is
rounded. With biases

    dw += <dout, b_down>                    db_down = sum of w * dout        db_up = sum of dH

With the weights on the input, H = gather(w * tokens) @ w_up^T, the sum over Y is unweighted, and in backward

    dA  = dA'          A_w = A              dw = <dX, tokens>                dtokens = sum of w * dX

The tokens' gradient has a part that flows through the routing weights. With `w_router` it is added where the rows of
dX are summed: see `router_gradient.py`.

A gather is part of the GEMM that reads its rows, or a copy before that GEMM. `selection.choose_copies` picks the faster
one.

Backward is a sequence of ops, so that memory is free as soon as nothing reads it any more. Live tensors of each op
besides the operands, `out` and `dout`; brackets hold the copies of gathered rows [R, D]:

    hidden gradients    H, dH, A_w, [gather(dout)]
    dw_down, db_down    dH, A_w, [gather(dout)], dw_down
    dtokens, db_up      dH, dw_down, dX, dtokens
    dw_up               dH, dw_down, dtokens, [gather(tokens)], dw_up

Adapters add a product of low rank to each of the four GEMMs, as more steps of the same reduction. With G =
gather(dout), X = gather(tokens), and the adapters' scale in up_b and down_b:

    H  = X @ w_up^T + (X @ up_a^T) @ up_b^T         Y  = A @ w_down^T + (A @ down_a^T) @ down_b^T
    dA' = G @ w_down + (G @ down_b) @ down_a        dX = dH @ w_up + (dH @ up_b) @ up_a
    ddown_b = G^T @ (A_w @ down_a^T)                ddown_a = (G @ down_b)^T @ A_w
    dup_b = dH^T @ (X @ up_a^T)                     dup_a = (dH @ up_b)^T @ X

X @ up_a^T [R, r] is saved.

Quantised weights are frozen. With many rows, each of the four GEMMs that read one has its dequantised copy as a further
live tensor: w_up in forward, w_down in forward and with the hidden gradients, w_up with dtokens.

dw_up, the largest gradient, is allocated last, next to the fewest other tensors. dw_down is computed first, because it
replaces A_w and a copy [R, D], which are larger unless there are few rows per expert. H is freed after the first op if
autograd does not retain the graph. With recompute="up" dH overwrites H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..permutation.permute import launch_slot_products
from ..runtime.memory import empty_rows
from ..runtime.ops import registered_op
from ..runtime.packing import save_for_backward, saved_for_backward
from .rows import Rows
from .steps import (
    Experts,
    HiddenGradients,
    activate,
    b_down_gradient,
    b_up_gradient,
    copies_dout,
    copy_dout,
    down,
    down_adapter_gradients,
    hidden_gradients,
    tokens_gradient,
    up_adapter_gradients,
    up_input_gradient,
    w_down_gradient,
    w_up_gradient,
)


class ExpertOperands(NamedTuple):
    """Operands of forward and backward."""

    tokens: Tensor  # [T, D]
    topk_weights: Tensor  # [T, K] float32 contiguous
    experts: Experts
    w_router: Tensor | None  # [E, D]
    rows: Rows
    recompute: bool  # compute H again in backward


class _Outputs(NamedTuple):
    out: Tensor  # [T, D]
    preactivation: Tensor  # H [R, 2F or F], empty if backward computes it again
    low: Tensor  # X @ up_a^T [R, r], empty without adapters


@registered_op("fused_experts")
def fused_experts_op(operands: ExpertOperands) -> _Outputs:
    tokens, topk_weights, experts, _, rows, recompute = operands
    preactivation, activated, low = activate(experts, rows, tokens, topk_weights)
    if recompute:
        preactivation = tokens.new_empty(0)
    expert_out = down(experts, rows, activated)  # [R, D]
    del activated
    out = rows.combine(expert_out, experts.output_weights(topk_weights))
    return _Outputs(out, preactivation, tokens.new_empty(0) if low is None else low)


@fused_experts_op.register_fake
def _(operands):
    tokens = operands.tokens
    preactivation = tokens.new_empty(0) if operands.recompute else empty_rows(tokens, *hidden_shape(operands))
    low = _empty_low(tokens, operands, operands.experts.adapters.up_b)
    return _Outputs(tokens.new_empty(tokens.shape), preactivation, low)


def hidden_shape(operands: ExpertOperands) -> tuple[int, int]:
    return operands.rows.row_to_token.shape[0], operands.experts.weights.w_up.shape[1]


def _empty_low(like: Tensor, operands: ExpertOperands, b: Tensor | None) -> Tensor:
    """Rows multiplied by one factor of an adapter whose other factor is `b`, unwritten."""
    return like.new_empty(0) if b is None else empty_rows(like, operands.rows.row_to_token.shape[0], b.shape[2])


class _Saved(NamedTuple):
    operands: ExpertOperands
    preactivation: Tensor
    low: Tensor


def _setup(ctx: Any, inputs: tuple[ExpertOperands], output: _Outputs) -> None:
    (operands,), (_, preactivation, low) = inputs, output
    ctx.set_materialize_grads(False)
    save_for_backward(ctx, _Saved(operands, preactivation, low))


def _backward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients. Each tensor is dropped after its last use: see the table at the top."""
    if dout is None:
        return fused_experts_op.gradients()
    operands, preactivation, low = saved_for_backward(ctx)
    _, _, experts, w_router, rows, _ = operands
    needed = fused_experts_op.needed(ctx)
    hidden = _hidden_gradients_op(
        dout,
        preactivation,
        operands,
        needed["w_down"] and copies_dout(experts, rows, dout),
        needed["topk_weights"] or w_router is not None,
    )
    del preactivation
    gradients = down_gradients(needed, dout, hidden, operands)
    dpreactivation, dtopk_weights, up_low = hidden.dpreactivation, hidden.dtopk_weights, hidden.up_low
    del hidden
    if needed["tokens"] or (needed["topk_weights"] and experts.weight_on_input):
        gradients["tokens"], of_input = _tokens_gradient_op(dpreactivation, up_low, dtopk_weights, operands)
        dtopk_weights = of_input if experts.weight_on_input else dtopk_weights
    gradients["topk_weights"] = dtopk_weights
    gradients |= up_gradients(needed, dpreactivation, up_low, low, operands)
    return fused_experts_op.gradients(**gradients)


def down_gradients(
    needed: dict[str, bool], dout: Tensor, hidden: HiddenGradients, operands: ExpertOperands
) -> dict[str, Tensor]:
    """The needed gradients of the down-projection's operands."""
    _, topk_weights, experts, _, rows, _ = operands
    gradients = {}
    if needed["w_down"]:
        gradients["w_down"] = _w_down_gradient_op(dout, hidden.drows, hidden.weighted, experts, rows)
    if needed["b_down"]:
        gradients["b_down"] = _b_down_gradient_op(dout, topk_weights, experts, rows)
    if needed["down_a"] or needed["down_b"]:
        factors = _down_adapter_gradients_op(dout, hidden.weighted, hidden.down_low, experts, rows)
        gradients |= {"down_a": factors.da, "down_b": factors.db.transpose(1, 2)}
    return gradients


def up_gradients(
    needed: dict[str, bool], dpreactivation: Tensor, up_low: Tensor, low: Tensor, operands: ExpertOperands
) -> dict[str, Tensor]:
    """The needed gradients of the up-projection's operands; dw_up, the largest, last."""
    tokens, topk_weights, experts, _, rows, _ = operands
    gradients = {}
    if needed["b_up"]:
        gradients["b_up"] = _b_up_gradient_op(dpreactivation, experts, rows)
    if needed["up_a"] or needed["up_b"]:
        factors = _up_adapter_gradients_op(dpreactivation, low, up_low, tokens, topk_weights, experts, rows)
        gradients |= {"up_a": factors.da, "up_b": factors.db.transpose(1, 2)}
    if needed["w_up"]:
        gradients["w_up"] = _w_up_gradient_op(dpreactivation, tokens, topk_weights, experts, rows)
    return gradients


fused_experts_op.register_autograd(_backward, setup_context=_setup)


@registered_op("experts_hidden_gradients")
def _hidden_gradients_op(
    dout: Tensor,
    preactivation: Tensor,
    operands: ExpertOperands,
    keep_drows: bool,
    needs_topk_weights: bool,
) -> HiddenGradients:
    """`drows` is empty unless it is kept, and unwritten if it is kept where GEMMs gather."""
    tokens, topk_weights, experts, _, rows, recompute = operands
    if recompute:
        preactivation, *_ = activate(experts, rows, tokens, topk_weights)
    hidden = hidden_gradients(
        experts, rows, dout, topk_weights, preactivation, overwrite=recompute, needs_topk_weights=needs_topk_weights
    )
    dpreactivation, weighted, dtopk_weights, drows, *low = hidden
    if not keep_drows or drows is None:
        drows = _empty_drows(dout, rows, keep_drows)
    low = (dout.new_empty(0) if part is None else part for part in low)
    return HiddenGradients(dpreactivation, weighted, dtopk_weights, drows, *low)


def _empty_drows(dout: Tensor, rows: Rows, keep_drows: bool) -> Tensor:
    return empty_rows(dout, rows.row_to_token.shape[0], dout.shape[1]) if keep_drows else dout.new_empty(0)


@_hidden_gradients_op.register_fake
def _(dout, preactivation, operands, keep_drows, needs_topk_weights):
    (num_rows, d_up), w_down = hidden_shape(operands), operands.experts.weights.w_down
    return HiddenGradients(
        empty_rows(dout, num_rows, d_up),
        empty_rows(dout, num_rows, w_down.shape[2]),
        operands.topk_weights.new_empty(operands.topk_weights.shape),
        _empty_drows(dout, operands.rows, keep_drows),
        _empty_low(dout, operands, operands.experts.adapters.down_b),
        _empty_low(dout, operands, operands.experts.adapters.up_b),
    )


@registered_op("experts_w_down_gradient")
def _w_down_gradient_op(dout: Tensor, drows: Tensor, weighted: Tensor, experts: Experts, rows: Rows) -> Tensor:
    copied = drows if drows.dim() == 2 else None
    if not copies_dout(experts, rows, rows.as_read(dout)):
        copied = None
    elif copied is None:
        copied = copy_dout(experts, rows, dout)
    return w_down_gradient(experts, rows, dout, copied, weighted)


@_w_down_gradient_op.register_fake
def _(dout, drows, weighted, experts, rows):
    return torch.empty_like(experts.weights.w_down, dtype=dout.dtype, requires_grad=False)


class _FactorGradients(NamedTuple):
    da: Tensor  # [E, r, in]
    db: Tensor  # [E, r, out], transposed


@registered_op("experts_down_adapter_gradients")
def _down_adapter_gradients_op(
    dout: Tensor, weighted: Tensor, down_low: Tensor, experts: Experts, rows: Rows
) -> _FactorGradients:
    return _FactorGradients(*down_adapter_gradients(experts, rows, dout, weighted, down_low))


@_down_adapter_gradients_op.register_fake
def _(dout, weighted, down_low, experts, rows):
    _, _, a, b = experts.adapters
    return _FactorGradients(dout.new_empty(a.shape), dout.new_empty(b.shape[0], b.shape[2], b.shape[1]))


@registered_op("experts_up_adapter_gradients")
def _up_adapter_gradients_op(
    dpreactivation: Tensor,
    low: Tensor,
    up_low: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    rows: Rows,
) -> _FactorGradients:
    return _FactorGradients(*up_adapter_gradients(experts, rows, tokens, dpreactivation, low, up_low, topk_weights))


@_up_adapter_gradients_op.register_fake
def _(dpreactivation, low, up_low, tokens, topk_weights, experts, rows):
    a, b, _, _ = experts.adapters
    return _FactorGradients(tokens.new_empty(a.shape), tokens.new_empty(b.shape[0], b.shape[2], b.shape[1]))


@registered_op("experts_w_up_gradient")
def _w_up_gradient_op(
    dpreactivation: Tensor, tokens: Tensor, topk_weights: Tensor, experts: Experts, rows: Rows
) -> Tensor:
    return w_up_gradient(experts, rows, tokens, dpreactivation, topk_weights)


@_w_up_gradient_op.register_fake
def _(dpreactivation, tokens, topk_weights, experts, rows):
    return torch.empty_like(experts.weights.w_up, dtype=dpreactivation.dtype, requires_grad=False)


class _InputGradients(NamedTuple):
    dtokens: Tensor  # [T, D]
    dtopk_weights: Tensor  # [T, K], empty unless the weights are on the input


@registered_op("experts_tokens_gradient")
def _tokens_gradient_op(
    dpreactivation: Tensor, up_low: Tensor, dtopk_weights: Tensor, operands: ExpertOperands
) -> _InputGradients:
    tokens, topk_weights, experts, w_router, rows, _ = operands
    adapted = experts.adapters.up_a is not None
    dup_input = up_input_gradient(experts, rows, dpreactivation, up_low if adapted else None)  # dX [R, D]
    dtokens = tokens_gradient(experts, rows, dup_input, topk_weights, dtopk_weights, w_router)
    if not experts.weight_on_input:
        return _InputGradients(dtokens, topk_weights.new_empty(0))
    return _InputGradients(dtokens, launch_slot_products(rows.as_read(tokens), dup_input, rows.slot_to_row))


@_tokens_gradient_op.register_fake
def _(dpreactivation, up_low, dtopk_weights, operands):
    weights = operands.topk_weights
    shape = weights.shape if operands.experts.weight_on_input else 0
    return _InputGradients(dpreactivation.new_empty(operands.tokens.shape), weights.new_empty(shape))


@registered_op("experts_b_up_gradient")
def _b_up_gradient_op(dpreactivation: Tensor, experts: Experts, rows: Rows) -> Tensor:
    return b_up_gradient(experts, rows, dpreactivation)


@_b_up_gradient_op.register_fake
def _(dpreactivation, experts, rows):
    return dpreactivation.new_empty(experts.weights.b_up.shape)


@registered_op("experts_b_down_gradient")
def _b_down_gradient_op(dout: Tensor, topk_weights: Tensor, experts: Experts, rows: Rows) -> Tensor:
    return b_down_gradient(experts, rows, dout, topk_weights)


@_b_down_gradient_op.register_fake
def _(dout, topk_weights, experts, rows):
    return dout.new_empty(experts.weights.b_down.shape)
