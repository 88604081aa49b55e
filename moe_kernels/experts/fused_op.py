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

The op can also choose the experts by a router and sort the slots, in one launch list with the rest. The tokens'
gradient then has a part that flows through the routing weights. If these are a softmax over the chosen logits, it is
added where the rows of dX are summed: see `router_gradient.py`. Else the router's own gradient is added to dtokens.

A gather is part of the GEMM that reads its rows, or a copy before that GEMM. `selection.choose_copies` picks the faster
one.

Backward is a sequence of ops, so that memory is free as soon as nothing reads it any more. Live tensors of each op
besides the operands, `out` and `dout`; brackets hold the copies of gathered rows [R, D]:

    hidden gradients    H, dH, A_w, [gather(dout)]
    down gradients      dH, A_w, [gather(dout)], dw_down
    up gradients        dH, dw_down, dX, dtokens; then dH, dw_down, dtokens, [gather(tokens)], dw_up

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

With precision "fp8" the products of forward and of the gradients of rows have e4m3 operands. Rows have a scale for each
128 columns, weights one for each 128 x 128 block; sums are float32. Tensors are quantised where they are made:

    tokens, dout    once per token, before GEMMs gather their rows
    A               where the activation is computed from H; no other form of A is made in forward
    dH              where backward computes it, beside the form in the dtype of the tokens that dw_up reads
    weights         by the caller (`ScaledForms`), or here for each product, right before it

dw_up and dw_down are products in the dtype of the tokens of the same tensors as without FP8. The same tensors are
saved, and the given forms of the weights. With "fp8_saved" H is saved in e4m3, too, in a bit more than half the bytes;
backward reads it back, and overwrites it by dH.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation.ops import can_scale_gradient
from ..gemm.kernel import device_cc
from ..permutation.permute import launch_slot_products
from ..permutation.sort import BLOCK_ROWS, SortedSlots
from ..quantization.scaling import empty_scaled_rows, launch_dequantize_rows, launch_quantize_rows
from ..routing.linear import check_linear_router
from ..routing.linear_op import linear_routing_op, needed_of_router, routing_gradients_op
from ..runtime.memory import empty_rows
from ..runtime.ops import registered_op
from ..runtime.packing import save_for_backward, saved_for_backward
from ..specs import is_gated
from ..types import ScaledRows
from .checks import check_operands
from .fp8_support import check_fp8_gpu, warn_if_unmeasured
from .operands import ExpertOperands
from .steps import (
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


class _Outputs(NamedTuple):
    out: Tensor  # [T, D]
    preactivation: Tensor | None  # H [R, 2F or F], bytes of e4m3 with "fp8_saved"; None if backward computes it again
    scales: Tensor | None  # [R, 2F / 128 or F / 128] of H in e4m3
    low: Tensor | None  # X @ up_a^T [R, r] with adapters
    topk_weights: Tensor | None  # [T, K] of a router; the next likewise
    topk_experts: Tensor | None  # [T, K]
    buffer: Tensor | None  # of `SortedSlots`, where no rows are given


@registered_op("fused_experts")
def fused_experts_op(operands: ExpertOperands) -> _Outputs:
    operands, made = _place_slots(operands)
    tokens, topk_weights, rows = operands.tokens, operands.topk_weights, operands.placed()
    assert topk_weights is not None
    if operands.precision is not None and tokens.is_cuda:
        _check_fp8(operands)
    experts = operands.computed()
    preactivation, activated, low = activate(experts, rows, tokens, topk_weights)
    scales = None
    if operands.recompute:
        preactivation = None
    elif operands.precision == "fp8_saved":
        values, scales = launch_quantize_rows(preactivation)
        preactivation = values.view(torch.uint8)
    expert_out = down(experts, rows, activated)  # [R, D]
    del activated
    out = rows.combine(expert_out, experts.output_weights(topk_weights))
    return _Outputs(out, preactivation, scales, low, *made)


def _place_slots(operands: ExpertOperands) -> tuple[ExpertOperands, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Choose experts and sort the slots, as far as the caller has not. Return also the last three of `_Outputs`."""
    if operands.rows is not None:
        return operands, (None, None, None)
    _check_chosen(operands)
    topk_weights = topk_experts = None
    if operands.router is not None:
        topk_weights, topk_experts, _ = linear_routing_op(operands.tokens, operands.router)
        operands = operands._replace(topk_weights=topk_weights, topk_experts=topk_experts)
    assert operands.topk_experts is not None
    sorted_slots = SortedSlots.empty(operands.topk_experts, operands.num_experts)
    sorted_slots.sort(operands.topk_experts)
    return operands._replace(sorted_slots=sorted_slots), (topk_weights, topk_experts, sorted_slots.buffer)


def _check_chosen(operands: ExpertOperands) -> None:
    tokens, experts, topk_weights, topk_experts, router, *_ = operands
    if router is not None:
        check_linear_router(tokens, router.w_router)
    check_operands(tokens, topk_weights, topk_experts, None, *experts.weights, is_gated(experts.activation))


def _check_fp8(operands: ExpertOperands) -> None:
    num_experts, d_model, d_ff = operands.experts.weights.w_down.shape
    rows_per_expert, cc = operands.num_rows // num_experts, device_cc(operands.tokens.device)
    check_fp8_gpu(cc)
    warn_if_unmeasured(cc, d_model, d_ff, 2 ** rows_per_expert.bit_length() // 2)


@fused_experts_op.register_fake
def _(operands):
    tokens, num_rows, d_up = operands.tokens, operands.num_rows, operands.d_up
    preactivation = scales = topk_weights = topk_experts = buffer = None
    if operands.precision == "fp8_saved" and not operands.recompute:
        values, scales = empty_scaled_rows(tokens, num_rows, d_up)
        preactivation = values.view(torch.uint8)
    elif not operands.recompute:
        preactivation = empty_rows(tokens, num_rows, d_up)
    if operands.rows is None:
        _check_chosen(operands)
        topk_experts = tokens.new_empty(tokens.shape[0], operands.top_k, dtype=torch.int32)
        buffer = SortedSlots.empty(topk_experts, operands.num_experts).buffer
    if operands.router is not None:
        topk_weights = tokens.new_empty(tokens.shape[0], operands.top_k, dtype=torch.float32)
    else:
        topk_experts = None
    low = _empty_low(tokens, operands, operands.experts.adapters.up_b)
    out = tokens.new_empty(tokens.shape)
    return _Outputs(out, preactivation, scales, low, topk_weights, topk_experts, buffer)


def _empty_low(like: Tensor, operands: ExpertOperands, b: Tensor | None) -> Tensor | None:
    """Rows multiplied by one factor of an adapter whose other factor is `b`, unwritten."""
    return None if b is None else empty_rows(like, operands.num_rows, b.shape[2])


class _Saved(NamedTuple):
    operands: ExpertOperands
    preactivation: Tensor | None
    scales: Tensor | None
    low: Tensor | None


def _setup(ctx: Any, inputs: tuple[ExpertOperands], output: _Outputs) -> None:
    ctx.set_materialize_grads(False)
    operands, (_, preactivation, scales, low, topk_weights, topk_experts, buffer) = inputs[0], output
    if buffer is not None:
        sorted_slots = SortedSlots(buffer, operands.top_k, operands.num_experts, BLOCK_ROWS)
        topk_weights = operands.topk_weights if topk_weights is None else topk_weights
        found = {"topk_weights": topk_weights, "topk_experts": topk_experts, "sorted_slots": sorted_slots}
        operands = operands._replace(**found)
    save_for_backward(ctx, _Saved(operands, preactivation, scales, low))


def _backward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> dict[str, Tensor | None]:
    """Compute the gradients. Each tensor is dropped after its last use: see the table at the top."""
    if dout is None:
        return {}
    saved, needed = saved_for_backward(ctx), fused_experts_op.needed(ctx)
    operands, low, experts, router = saved.operands, saved.low, saved.operands.experts, saved.operands.router
    needs_router = router is not None and not needed.isdisjoint({"tokens", "w_router", "logit_bias"})
    needs_weights = "topk_weights" in needed or needs_router
    needs_tokens = "tokens" in needed or (needs_weights and experts.weight_on_input)
    is_traced = type(dout) is not Tensor or torch.compiler.is_dynamo_compiling()
    hidden = _hidden_op(dout, saved, needs_tokens, needs_weights, "w_down" in needed, is_traced)
    del saved
    dpreactivation, weighted, dtopk_weights, drows, down_low, up_low, *scaled = hidden
    del hidden
    gradients: dict[str, Tensor | None] = {}
    if needed & {"w_down", "b_down", "down_a", "down_b"}:
        made = _down_op(dout, drows, weighted, down_low, operands, *_needs(needed, "down"))
        gradients |= {"w_down": made.dw_down, "b_down": made.db_down, "down_a": made.ddown_a}
        gradients["down_b"] = None if made.ddown_b is None else made.ddown_b.transpose(1, 2)
    del weighted, drows, down_low
    needs = _needs(needed, "up")
    made = None
    if needs_tokens and scaled[0] is not None:  # free dH in e4m3 before the gradients of weights
        made = _up_op(dpreactivation, up_low, low, *scaled, dtopk_weights, operands, True, False, False, False)
        gradients["tokens"], dtopk_weights = made.dtokens, _of_input(made, dtopk_weights)
        needs_tokens = False
    del scaled, made
    if needs_tokens or any(needs):
        made = _up_op(dpreactivation, up_low, low, None, None, dtopk_weights, operands, needs_tokens, *needs)
        if needs_tokens:
            gradients["tokens"], dtopk_weights = made.dtokens, _of_input(made, dtopk_weights)
        gradients |= {"w_up": made.dw_up, "b_up": made.db_up, "up_a": made.dup_a}
        gradients["up_b"] = None if made.dup_b is None else made.dup_b.transpose(1, 2)
    if needs_router:
        return gradients | _router_gradients(operands, dtopk_weights, gradients.get("tokens"), needed)
    return gradients | {"topk_weights": dtopk_weights}


def _needs(needed: set[str], projection: str) -> tuple[bool, bool, bool]:
    """Whether the gradients of a projection's weight, bias and adapter are needed."""
    factors = {f"{projection}_a", f"{projection}_b"}
    return f"w_{projection}" in needed, f"b_{projection}" in needed, not needed.isdisjoint(factors)


def _of_input(made: _UpGradients, dtopk_weights: Tensor) -> Tensor:
    return dtopk_weights if made.dtopk_weights is None else made.dtopk_weights


def _router_gradients(
    operands: ExpertOperands, dtopk_weights: Tensor, dtokens: Tensor | None, needed: set[str]
) -> dict[str, Tensor | None]:
    """The gradients of the router's operands, and that of the tokens through the experts and the router."""
    router, topk_weights, topk_experts = operands.router, operands.topk_weights, operands.topk_experts
    assert router is not None and topk_weights is not None and topk_experts is not None
    needs = needed_of_router(needed - {"tokens"} if operands.fuses_router_gradient() else needed)
    if not any(needs):
        return {}
    choice = topk_weights, topk_experts
    dtokens = dtokens if needs[0] else None
    made = routing_gradients_op(operands.tokens, router, *choice, dtopk_weights, None, dtokens, *needs)
    gradients: dict[str, Tensor | None] = {"w_router": made.w_router, "logit_bias": made.logit_bias}
    return gradients if made.tokens is None else gradients | {"tokens": made.tokens}


fused_experts_op.register_autograd(_backward, setup_context=_setup)


class _HiddenGradients(NamedTuple):
    dpreactivation: Tensor  # dH [R, 2F or F]
    weighted: Tensor  # A_w [R, F]
    dtopk_weights: Tensor  # [T, K] float32, where the weights multiply the output
    drows: Tensor | None  # [R, D]: gather(dout), where dw_down reads a copy
    down_low: Tensor | None  # gather(dout) @ down_b [R, r] with adapters
    up_low: Tensor | None  # dH @ up_b [R, r] with adapters
    scaled: Tensor | None  # dH in e4m3 [R, 2F or F] with a precision
    scaled_scales: Tensor | None  # [R, 2F / 128 or F / 128]


@registered_op("experts_hidden_gradients")
def _hidden_op(
    dout: Tensor,
    saved: _Saved,
    needs_tokens: bool,
    needs_topk_weights: bool,
    needs_w_down: bool,
    is_traced: bool,
) -> _HiddenGradients:
    """A tracer cannot know whether `drows` is a copy, so it always gets the tensor, unwritten where GEMMs gather."""
    operands, preactivation, scales, _ = saved
    tokens, topk_weights, rows, experts = operands.tokens, operands.topk_weights, operands.placed(), operands.computed()
    assert topk_weights is not None
    is_own = operands.recompute or scales is not None  # not a saved tensor
    if preactivation is None:
        preactivation, *_ = activate(experts, rows, tokens, topk_weights)
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
        dout,
        topk_weights,
        preactivation,
        overwrite=is_own,
        needs_topk_weights=needs_topk_weights,
        scaled=scaled,
    )
    if needs_scaled and scaled is None:
        scaled = launch_quantize_rows(made.dpreactivation)
    dpreactivation, weighted, dtopk_weights, drows, down_low, up_low = made
    if is_traced and needs_w_down and drows is None:
        drows = empty_rows(dout, operands.num_rows, dout.shape[1])
    drows = drows if needs_w_down else None
    scaled = scaled or (None, None)
    return _HiddenGradients(dpreactivation, weighted, dtopk_weights, drows, down_low, up_low, *scaled)


@_hidden_op.register_fake
def _(dout, saved, needs_tokens, needs_topk_weights, needs_w_down, is_traced):
    operands = saved.operands
    num_rows, d_up, adapters = operands.num_rows, operands.d_up, operands.experts.adapters
    needs_scaled = operands.precision is not None and needs_tokens
    return _HiddenGradients(
        empty_rows(dout, num_rows, d_up),
        empty_rows(dout, num_rows, operands.experts.weights.w_down.shape[2]),
        operands.topk_weights.new_empty(operands.topk_weights.shape),
        empty_rows(dout, num_rows, dout.shape[1]) if needs_w_down else None,
        _empty_low(dout, operands, adapters.down_b),
        _empty_low(dout, operands, adapters.up_b),
        *(empty_scaled_rows(dout, num_rows, d_up) if needs_scaled else (None, None)),
    )


class _DownGradients(NamedTuple):
    dw_down: Tensor | None
    db_down: Tensor | None
    ddown_a: Tensor | None
    ddown_b: Tensor | None  # [E, r, D], transposed


@registered_op("experts_down_gradients")
def _down_op(
    dout: Tensor,
    drows: Tensor | None,
    weighted: Tensor,
    down_low: Tensor | None,
    operands: ExpertOperands,
    needs_weight: bool,
    needs_bias: bool,
    needs_factors: bool,
) -> _DownGradients:
    experts, rows = operands.experts, operands.placed()
    dw = db = da = db_factor = None
    if needs_weight:
        if not copies_dout(experts, rows, rows.as_read(dout)):
            drows = None
        elif drows is None:
            drows = copy_dout(experts, rows, dout)
        dw = w_down_gradient(experts, rows, dout, drows, weighted)
    if needs_bias:
        assert operands.topk_weights is not None
        db = b_down_gradient(experts, rows, dout, operands.topk_weights)
    if needs_factors:
        assert down_low is not None
        da, db_factor = down_adapter_gradients(experts, rows, dout, weighted, down_low)
    return _DownGradients(dw, db, da, db_factor)


@_down_op.register_fake
def _(dout, drows, weighted, down_low, operands, needs_weight, needs_bias, needs_factors):
    experts = operands.experts
    w_down, b_down = experts.weights.w_down, experts.weights.b_down
    dw = torch.empty_like(w_down, dtype=dout.dtype, requires_grad=False) if needs_weight else None
    db = dout.new_empty(b_down.shape) if needs_bias else None
    factors = _empty_factors(dout, *experts.adapters[2:]) if needs_factors else (None, None)
    return _DownGradients(dw, db, *factors)


def _empty_factors(like: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(a.shape), like.new_empty(b.shape[0], b.shape[2], b.shape[1])


class _UpGradients(NamedTuple):
    dtokens: Tensor | None
    dtopk_weights: Tensor | None  # [T, K], where the weights multiply the input
    db_up: Tensor | None
    dup_a: Tensor | None
    dup_b: Tensor | None  # [E, r, 2F or F], transposed
    dw_up: Tensor | None


@registered_op("experts_up_gradients")
def _up_op(
    dpreactivation: Tensor,
    up_low: Tensor | None,
    low: Tensor | None,
    scaled: Tensor | None,
    scaled_scales: Tensor | None,
    dtopk_weights: Tensor,
    operands: ExpertOperands,
    needs_tokens: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_factors: bool,
) -> _UpGradients:
    tokens, topk_weights, experts, rows = operands.tokens, operands.topk_weights, operands.experts, operands.placed()
    assert topk_weights is not None
    w_router = operands.router.w_router if operands.router is not None and operands.fuses_router_gradient() else None
    dtokens = dweights = db = da = db_factor = dw = None
    if needs_tokens:
        dhidden = dpreactivation
        if scaled is not None and scaled_scales is not None:
            dhidden = ScaledRows(scaled, scaled_scales)
        dup_input = up_input_gradient(operands.computed(), rows, dhidden, up_low)  # dX [R, D]
        dtokens = tokens_gradient(experts, rows, dup_input, topk_weights, dtopk_weights, w_router)
        if experts.weight_on_input:
            dweights = launch_slot_products(rows.as_read(tokens), dup_input, rows.slot_to_row)
        del dup_input
    if needs_bias:
        db = b_up_gradient(experts, rows, dpreactivation)
    if needs_factors:
        assert low is not None and up_low is not None
        da, db_factor = up_adapter_gradients(experts, rows, tokens, dpreactivation, low, up_low, topk_weights)
    if needs_weight:
        dw = w_up_gradient(experts, rows, tokens, dpreactivation, topk_weights)
    return _UpGradients(dtokens, dweights, db, da, db_factor, dw)


@_up_op.register_fake
def _(
    dpreactivation,
    up_low,
    low,
    scaled,
    scaled_scales,
    dtopk_weights,
    operands,
    needs_tokens,
    needs_weight,
    needs_bias,
    needs_factors,
):
    tokens, weights, experts = operands.tokens, operands.topk_weights, operands.experts
    needs_weights = needs_tokens and experts.weight_on_input
    w_up, b_up = experts.weights.w_up, experts.weights.b_up
    return _UpGradients(
        tokens.new_empty(tokens.shape) if needs_tokens else None,
        weights.new_empty(weights.shape) if needs_weights else None,
        dpreactivation.new_empty(b_up.shape) if needs_bias else None,
        *(_empty_factors(tokens, *experts.adapters[:2]) if needs_factors else (None, None)),
        torch.empty_like(w_up, dtype=dpreactivation.dtype, requires_grad=False) if needs_weight else None,
    )
