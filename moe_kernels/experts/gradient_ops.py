"""The three ops that compute the gradients of the expert feed-forward. `fused_op.py` derives the formulas, and says why
backward is several ops. With `adds_to_main_grad`, an op adds a weight's gradient to `main_grad`. The ops' schemas do
not declare this mutation, because `fused.py` raises an error if `adds_to_main_grad` is used under a tracer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activation.ops import can_scale_gradient
from ..permutation.permute import launch_slot_products
from ..quantization.fp8_rows import empty_scaled_rows, launch_dequantize_rows, launch_quantize_rows
from ..runtime.registered_ops import registered_op
from ..runtime.row_layout import empty_rows
from ..types import ScaledRows
from .operands import ExpertOperands
from .steps import (
    HiddenGradients,
    activate,
    b_down_gradient,
    b_up_gradient,
    copies_dout,
    copy_dout,
    down_adapter_gradients,
    hidden_gradients,
    tokens_gradient,
    up_adapter_gradients,
    up_input_gradient,
    w_down_gradient,
    w_up_gradient,
)


def empty_low(like: Tensor, operands: ExpertOperands, b: Tensor | None) -> Tensor | None:
    """Return an uninitialised tensor [R, r] for a low-rank product of the rows. Return None if `b` [E, out, r], the
    second factor of the adapter, is None."""
    return None if b is None else empty_rows(like, operands.num_rows, b.shape[2])


class SavedForBackward(NamedTuple):
    operands: ExpertOperands
    preactivation: Tensor | None
    scales: Tensor | None
    low: Tensor | None


@registered_op("experts_hidden_gradients")
def hidden_gradients_op(
    dout: Tensor,
    saved: SavedForBackward,
    needs_tokens: bool,
    needs_topk_weights: bool,
    needs_w_down: bool,
    is_traced: bool,
) -> HiddenGradients:
    """Return `HiddenGradients`. The field `drows` is None if w_down needs no gradient, or if GEMMs gather the rows of
    dout. A tracer cannot know whether GEMMs gather. With `is_traced`, `drows` is therefore an uninitialised tensor
    instead of None if GEMMs gather and w_down needs a gradient."""
    operands, preactivation, scales, _ = saved
    tokens, topk_weights, rows, experts = operands.tokens, operands.topk_weights, operands.placed(), operands.computed()
    assert topk_weights is not None
    is_own = operands.recompute or scales is not None  # whether this op computes H itself, so that dH may overwrite H
    if preactivation is None:
        preactivation, *_ = activate(experts, rows, rows.as_read(tokens), topk_weights)
    elif scales is not None:
        values = preactivation.view(torch.float8_e4m3fn)
        preactivation = launch_dequantize_rows(ScaledRows(values, scales), dout.dtype)
    needs_scaled = operands.precision is not None and needs_tokens
    scaled = None
    if needs_scaled and can_scale_gradient(experts.kind(), experts.weights.w_down.shape[2]):
        scaled = empty_scaled_rows(dout, *preactivation.shape)
    made = hidden_gradients(
        experts,
        rows,
        rows.as_read(dout),
        topk_weights,
        preactivation,
        overwrite=is_own,
        needs_topk_weights=needs_topk_weights,
        scaled=scaled,
    )
    if needs_scaled and scaled is None:
        scaled = launch_quantize_rows(made.dpreactivation)
    drows = made.drows if needs_w_down else None
    if is_traced and needs_w_down and drows is None:
        drows = empty_rows(dout, operands.num_rows, dout.shape[1])
    values, scales = scaled or (None, None)
    return made._replace(drows=drows, scaled=values, scaled_scales=scales)


@hidden_gradients_op.register_fake
def _(dout, saved, needs_tokens, needs_topk_weights, needs_w_down, is_traced):
    operands = saved.operands
    num_rows, d_up, adapters = operands.num_rows, operands.d_up, operands.experts.adapters
    needs_scaled = operands.precision is not None and needs_tokens
    return HiddenGradients(
        empty_rows(dout, num_rows, d_up),
        empty_rows(dout, num_rows, operands.experts.weights.w_down.shape[2]),
        operands.topk_weights.new_empty(operands.topk_weights.shape),
        empty_rows(dout, num_rows, dout.shape[1]) if needs_w_down else None,
        empty_low(dout, operands, adapters.down_b),
        empty_low(dout, operands, adapters.up_b),
        *(empty_scaled_rows(dout, num_rows, d_up) if needs_scaled else (None, None)),
    )


class _DownGradients(NamedTuple):
    dw_down: Tensor | None
    db_down: Tensor | None
    ddown_a: Tensor | None
    ddown_b: Tensor | None  # [E, r, D]: transposed gradient of down_b [E, D, r]


@registered_op("experts_down_gradients")
def down_gradients_op(
    dout: Tensor,
    drows: Tensor | None,
    weighted: Tensor,
    down_low: Tensor | None,
    operands: ExpertOperands,
    main_grad: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
    needs_factors: bool,
) -> _DownGradients:
    experts, rows = operands.experts, operands.placed()
    dout = rows.as_read(dout)
    dw = db = da = db_factor = None
    if needs_weight:
        if not copies_dout(experts, rows, dout):
            drows = None
        elif drows is None:
            drows = copy_dout(experts, rows, dout)
        made = w_down_gradient(experts, rows, dout, drows, weighted, main_grad)
        dw = made if main_grad is None else None
    if needs_bias:
        assert operands.topk_weights is not None
        db = b_down_gradient(experts, rows, dout, operands.topk_weights)
    if needs_factors:
        assert down_low is not None
        da, db_factor = down_adapter_gradients(experts, rows, dout, weighted, down_low)
    return _DownGradients(dw, db, da, db_factor)


@down_gradients_op.register_fake
def _(dout, drows, weighted, down_low, operands, main_grad, needs_weight, needs_bias, needs_factors):
    experts = operands.experts
    w_down, b_down = experts.weights.w_down, experts.weights.b_down
    dw = torch.empty_like(w_down, dtype=dout.dtype, requires_grad=False) if needs_weight else None
    db = dout.new_empty(b_down.shape) if needs_bias else None
    factors = _empty_factors(dout, *experts.adapters[2:]) if needs_factors else (None, None)
    return _DownGradients(dw, db, *factors)


def _empty_factors(like: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(a.shape), like.new_empty(b.shape[0], b.shape[2], b.shape[1])


class UpGradients(NamedTuple):
    dtokens: Tensor | None
    dtopk_weights: Tensor | None  # [T, K] with weight_on_input, else None
    db_up: Tensor | None
    dup_a: Tensor | None
    dup_b: Tensor | None  # [E, r, 2F or F]: transposed gradient of up_b [E, 2F or F, r]
    dw_up: Tensor | None


@registered_op("experts_up_gradients")
def up_gradients_op(
    dpreactivation: Tensor,
    up_low: Tensor | None,
    low: Tensor | None,
    scaled: Tensor | None,
    scaled_scales: Tensor | None,
    dtopk_weights: Tensor,
    operands: ExpertOperands,
    main_grad: Tensor | None,
    needs_tokens: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_factors: bool,
) -> UpGradients:
    topk_weights, experts, rows = operands.topk_weights, operands.experts, operands.placed()
    assert topk_weights is not None
    w_router = operands.router.w_router if operands.router is not None and operands.fuses_router_gradient() else None
    tokens = rows.as_read(operands.tokens)
    dtokens = dweights = db = da = db_factor = dw = None
    if needs_tokens:
        dhidden = dpreactivation
        if scaled is not None and scaled_scales is not None:
            dhidden = ScaledRows(scaled, scaled_scales)
        dup_input = up_input_gradient(operands.computed(), rows, dhidden, up_low)  # dX [R, D]
        dtokens = tokens_gradient(experts, rows, dup_input, topk_weights, dtopk_weights, w_router)
        if experts.weight_on_input:
            dweights = launch_slot_products(tokens, dup_input, rows.slot_to_row)
        del dup_input
    if needs_bias:
        db = b_up_gradient(experts, rows, dpreactivation)
    if needs_factors:
        assert low is not None and up_low is not None
        da, db_factor = up_adapter_gradients(experts, rows, tokens, dpreactivation, low, up_low, topk_weights)
    if needs_weight:
        made = w_up_gradient(experts, rows, tokens, dpreactivation, topk_weights, main_grad)
        dw = made if main_grad is None else None
    return UpGradients(dtokens, dweights, db, da, db_factor, dw)


@up_gradients_op.register_fake
def _(dpreactivation, up_low, low, scaled, scaled_scales, dtopk_weights, operands, main_grad, *needs):
    needs_tokens, needs_weight, needs_bias, needs_factors = needs
    tokens, weights, experts = operands.tokens, operands.topk_weights, operands.experts
    needs_weights = needs_tokens and experts.weight_on_input
    w_up, b_up = experts.weights.w_up, experts.weights.b_up
    return UpGradients(
        tokens.new_empty(tokens.shape) if needs_tokens else None,
        weights.new_empty(weights.shape) if needs_weights else None,
        dpreactivation.new_empty(b_up.shape) if needs_bias else None,
        *(_empty_factors(tokens, *experts.adapters[:2]) if needs_factors else (None, None)),
        torch.empty_like(w_up, dtype=dpreactivation.dtype, requires_grad=False) if needs_weight else None,
    )
