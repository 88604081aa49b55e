"""The expert feed-forward of all tokens as one differentiable op that saves as little as possible.

Forward:   H = gather(tokens) @ w_up^T      A = activation(H)      Y = A @ w_down^T      out = combine(Y, weights)
Saved:     tokens, H, topk_weights and the integer tensors of the routing. The gathered tokens, A and Y are not
           saved. With recompute="up", H is not saved either.
Backward, with w the routing weight of a row:

    dA' = gather(dout) @ w_down             dw = <dA', A>                    (needs no saved Y)
    dA  = w * dA'      A_w = w * A          dH = dA * activation'(H)         (A is recomputed from H, elementwise)
    dw_down = gather(dout)^T @ A_w          dX = dH @ w_up                   dw_up = dH^T @ gather(tokens)
    dtokens = sum of a token's rows of dX

The identity for dw is from SonicMoE (https://arxiv.org/abs/2512.14080). H is stored without b_up, because rounding
H + b_up moves a value across a clamp's limit more often than rounding H. Every reader of H adds b_up. If the fastest
kernel can add b_down, Y is rounded after the addition, otherwise before. Biases add these terms and gradients:

    dw += <dout, b_down>                    db_down = sum of w * dout        db_up = sum of dH

With `weight_on_input`, H = gather(w * tokens) @ w_up^T. The sum over Y is unweighted, and backward computes

    dA  = dA'          A_w = A              dw = <dX, tokens>                dtokens = sum of w * dX

The op can also choose the experts by a router and sort the slots. `runtime.replay` replays the launches of all these
steps together. With a router, the tokens' gradient has a part that flows through the routing weights. If
`fuses_router_gradient` is true, the launch that sums the rows of dX adds this part: see `router_gradient.py`. Otherwise
the router's gradient op adds this part.

A gather runs inside the GEMM that reads the gathered rows, or as a copy before that GEMM. `selection.choose_copies`
picks the faster of the two.

Backward is a sequence of ops, so that each tensor can be freed after its last use. The table lists the live tensors of
each op besides the operands, `out` and `dout`. Brackets mark copies of gathered rows [R, D]:

    hidden gradients    H, dH, A_w, [gather(dout)]
    down gradients      dH, A_w, [gather(dout)], dw_down
    up gradients        dH, dw_down, dX, dtokens; then dH, dw_down, dtokens, [gather(tokens)], dw_up

Adapters add a low-rank product to each of the four products with a weight. The GEMM sums both products in one
reduction. The adapters' scale is multiplied into up_b and down_b. With G = gather(dout) and X = gather(tokens):

    H  = X @ w_up^T + (X @ up_a^T) @ up_b^T         Y  = A @ w_down^T + (A @ down_a^T) @ down_b^T
    dA' = G @ w_down + (G @ down_b) @ down_a        dX = dH @ w_up + (dH @ up_b) @ up_a
    ddown_b = G^T @ (A_w @ down_a^T)                ddown_a = (G @ down_b)^T @ A_w
    dup_b = dH^T @ (X @ up_a^T)                     dup_a = (dH @ up_b)^T @ X

Forward saves X @ up_a^T [R, r]. Quantised weights are frozen. With many rows, each GEMM that reads such a weight has a
further live tensor, a dequantised copy. Forward needs copies of w_up and w_down. Backward needs a copy of w_down for
the hidden gradients, and of w_up for dtokens.

dw_up, the largest gradient, is allocated last, when the fewest other tensors are live. dw_down is computed first, so
that A_w and the copy gather(dout) can be freed. Except with few rows per expert, A_w and this copy together are larger
than dw_down. H is freed after the first op if autograd does not retain the graph. With recompute="up", dH overwrites H.

With precision "fp8", the products of forward and of the gradients of rows have e4m3 operands. Rows have a scale for
each 128 columns, and weights have a scale for each 128 x 128 block. Sums are float32. The table says when each operand
is quantised:

    tokens, dout    once per token, before GEMMs gather the rows
    A               when the activation is computed from H; forward makes A only in e4m3
    dH              when backward computes dH; dw_up reads a second dH in the dtype of the tokens
    weights         before the op, by the caller (`ScaledForms`), or inside the op, right before each product

dw_up and dw_down are products of the same tensors as without FP8, in the dtype of the tokens. `ScaledForms` from the
caller are also saved for backward. With "fp8_saved", H is saved in e4m3 with scales, in a bit more than half the bytes
of 16-bit numbers. Backward dequantises H and overwrites the result with dH.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gemm.kernel import device_cc
from ..permutation.sort import check_num_experts
from ..quantization.fp8_rows import empty_scaled_rows, launch_quantize_rows
from ..routing.linear import check_linear_router
from ..routing.linear_op import RouterNeeds, launch_routing, routing_gradients_op
from ..runtime.registered_ops import Call, registered_op, run_as_one, save_for_backward, take_saved_tensors
from ..runtime.replay import Replayed
from ..runtime.row_layout import empty_rows
from .gradient_ops import (
    SavedForBackward,
    UpGradients,
    down_gradients_op,
    empty_low,
    hidden_gradients_op,
    up_gradients_op,
)
from .main_grad import is_accumulated, main_grad_of, mark_added
from .operand_checks import check_fp8_gpu, check_operands, warn_if_unmeasured
from .operands import ExpertOperands
from .row_products import Rows
from .steps import activate, down


class _Outputs(NamedTuple):
    out: Tensor  # [T, D]
    preactivation: Tensor | None  # H [R, 2F or F], bytes of e4m3 with "fp8_saved"; None if backward recomputes H
    scales: Tensor | None  # [R, 2F / 128 or F / 128] float32, for H in e4m3
    low: Tensor | None  # [R, r]: gathered tokens @ up_a^T; None without an adapter of w_up
    buffer: Tensor | None  # permutation and the router's choice: see `SortedSlots`; None if the caller sorted


@registered_op("fused_experts")
def fused_experts_op(operands: ExpertOperands) -> _Outputs:
    operands, buffer = _place_slots(operands)
    topk_weights, rows = operands.topk_weights, operands.rows
    assert topk_weights is not None and rows is not None
    if operands.precision is not None and operands.tokens.is_cuda:
        _check_fp8(operands)
    tokens, experts = rows.as_read(operands.tokens), operands.computed()
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
    return _Outputs(out, preactivation, scales, low, buffer)


def _place_slots(operands: ExpertOperands) -> tuple[ExpertOperands, Tensor | None]:
    """Choose experts if there is a router, then sort the slots. If the caller has sorted the slots, change nothing.
    Return the operands and the field `buffer` of `_Outputs`."""
    if operands.rows is not None:
        return operands, None
    _check_chosen(operands)
    sorted_slots = operands.empty_slots()
    if operands.router is not None:
        topk_weights, topk_experts = sorted_slots.choice(operands.tokens.shape[0])
        launch_routing(operands.tokens, operands.router, topk_weights, topk_experts)
        operands = operands._replace(topk_weights=topk_weights, topk_experts=topk_experts)
    assert operands.topk_experts is not None
    permutation = sorted_slots.sort(operands.topk_experts)
    rows = Rows.of(permutation, reserved_sms=0, batch_invariant=operands.batch_invariant)
    return operands._replace(rows=rows), sorted_slots.buffer


def _check_chosen(operands: ExpertOperands) -> None:
    tokens, experts, topk_weights, topk_experts, router, *_ = operands
    num_experts = operands.num_experts
    check_num_experts(num_experts)
    if router is not None:
        check_linear_router(tokens, router.w_router)
        if router.w_router.shape[0] != num_experts:
            raise ValueError(f"fused_experts: w_router must have E={num_experts} rows, got {router.w_router.shape[0]}")
    check_operands(tokens, topk_weights, topk_experts, None, *experts.weights, experts.activation)


def _check_fp8(operands: ExpertOperands) -> None:
    num_experts, d_model, d_ff = operands.experts.weights.w_down.shape
    rows_per_expert, cc = operands.num_rows // num_experts, device_cc(operands.tokens.device)
    check_fp8_gpu(cc)
    warn_if_unmeasured(cc, d_model, d_ff, 2 ** rows_per_expert.bit_length() // 2)


@fused_experts_op.register_fake
def _(operands):
    tokens, num_rows, d_up = operands.tokens, operands.num_rows, operands.d_up
    preactivation = scales = buffer = None
    if operands.precision == "fp8_saved" and not operands.recompute:
        values, scales = empty_scaled_rows(tokens, num_rows, d_up)
        preactivation = values.view(torch.uint8)
    elif not operands.recompute:
        preactivation = empty_rows(tokens, num_rows, d_up)
    if operands.rows is None:
        _check_chosen(operands)
        buffer = operands.empty_slots().buffer
    low = empty_low(tokens, operands, operands.experts.adapters.up_b)
    return _Outputs(tokens.new_empty(tokens.shape), preactivation, scales, low, buffer)


def _setup(ctx: Any, call: Call, output: _Outputs) -> None:
    ctx.set_materialize_grads(False)
    operands: ExpertOperands = call.args[0]
    # Keep the weights in `ctx`, because saved tensors that autograd returns may lack the attribute `main_grad`.
    ctx.weights = operands.experts.weights if operands.adds_to_main_grad else None
    # Do not save the selection bias: backward does not read it, and would raise if a saved bias changed in place.
    if "selection_bias" in ctx.names:
        kept = [None if name == "selection_bias" else t for name, t in zip(ctx.names, call.tensors, strict=True)]
        call = call._replace(tensors=tuple(kept))
    save_for_backward(ctx, call, output[1:])


_gradients = Replayed("fused_experts_gradients", frees_operands=True)


def _backward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> dict[str, Tensor | None]:
    """Return the gradients by operand name. `run_as_one` replays the launches of all ops as one list, unless gradients
    are enabled, a tensor is not plain, or a dispatch mode or profiler observes the ops."""
    if dout is None:
        return {}
    main_grads = {} if ctx.weights is None else _main_grads(ctx)
    saved = take_saved_tensors(ctx)
    is_given = [tensor is not None for tensor in saved]
    tensors = [dout, *[tensor for tensor in saved if tensor is not None], *main_grads.values()]
    del saved
    names = ctx.names

    def compute(tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
        dout, saved, needed = tensors[0], [_saved(ctx, tensors[1:], is_given)], fused_experts_op.needed(ctx)
        tensors.clear()
        return tuple(map(compute_gradients(dout, saved, needed, main_grads).get, names))

    key = ctx.places.number, ctx.others, ctx.needs_input_grad, tuple(main_grads)
    found = dict(zip(names, run_as_one(_gradients, key, tensors, compute), strict=True))
    return found | {name: mark_added(getattr(ctx.weights, name)) for name in main_grads}


def _main_grads(ctx: Any) -> dict[str, Tensor]:
    """Return, by weight name, the `main_grad` of each weight for which `is_accumulated` returns True."""
    nodes = {name: node for name, (node, _) in zip(ctx.names, ctx.next_functions, strict=False)}
    names = [name for name in ("w_up", "w_down") if name in fused_experts_op.needed(ctx)]
    names = [name for name in names if is_accumulated(name, nodes[name])]
    return {name: main_grad_of(name, getattr(ctx.weights, name)) for name in names}


def _saved(ctx: Any, tensors: list[Tensor], is_given: list[bool]) -> SavedForBackward:
    given = iter(tensors)
    (operands,), results = fused_experts_op.saved(ctx, [next(given) if given_ else None for given_ in is_given])
    return read_by_backward(operands, *results)


def read_by_backward(
    operands: ExpertOperands,
    preactivation: Tensor | None,
    scales: Tensor | None,
    low: Tensor | None,
    buffer: Tensor | None,
) -> SavedForBackward:
    """Return what the backward pass reads: operands and results of the forward pass. `_Outputs` lists the results."""
    if buffer is not None:
        sorted_slots = operands.slots_in(buffer)
        operands = operands._replace(sorted_slots=sorted_slots)
        if operands.router is not None:
            topk_weights, topk_experts = sorted_slots.choice(operands.tokens.shape[0])
            operands = operands._replace(topk_weights=topk_weights, topk_experts=topk_experts)
    return SavedForBackward(operands, preactivation, scales, low)


def compute_gradients(
    dout: Tensor,  # [T, D]
    of_forward: list[SavedForBackward],  # one item, removed here so that the caller keeps no tensor alive
    needed: set[str],  # names of operands that need a gradient
    main_grads: dict[str, Tensor],  # name of a weight -> its `main_grad`
) -> dict[str, Tensor | None]:
    """Return the gradients by operand name. Drop each tensor after its last use, which the file's docstring lists."""
    saved = of_forward.pop()
    is_traced = type(dout) is not Tensor or torch.compiler.is_dynamo_compiling()
    if not is_traced:  # traced ops slice the buffer inside: Inductor would compile a slice made here twice
        saved = saved._replace(operands=saved.operands._replace(rows=saved.operands.placed(), sorted_slots=None))
    operands, low, experts, router = saved.operands, saved.low, saved.operands.experts, saved.operands.router
    needs_router = router is not None and not needed.isdisjoint({"tokens", "w_router", "logit_bias"})
    needs_weights = "topk_weights" in needed or needs_router
    needs_tokens = "tokens" in needed or (needs_weights and experts.weight_on_input)
    hidden = hidden_gradients_op(dout, saved, needs_tokens, needs_weights, "w_down" in needed, is_traced)
    del saved
    dpreactivation, weighted, dtopk_weights, drows, down_low, up_low, *scaled = hidden
    del hidden
    gradients: dict[str, Tensor | None] = {}
    if needed & {"w_down", "b_down", "down_a", "down_b"}:
        needs = _needs(needed, "down")
        made = down_gradients_op(dout, drows, weighted, down_low, operands, main_grads.get("w_down"), *needs)
        gradients |= {"w_down": made.dw_down, "b_down": made.db_down, "down_a": made.ddown_a}
        gradients["down_b"] = None if made.ddown_b is None else made.ddown_b.transpose(1, 2)
    del weighted, drows, down_low
    needs = _needs(needed, "up")
    made = None
    if needs_tokens and scaled[0] is not None:  # compute dtokens first, so that dH in e4m3 can be freed
        only_tokens = True, False, False, False
        made = up_gradients_op(dpreactivation, up_low, low, *scaled, dtopk_weights, operands, None, *only_tokens)
        gradients["tokens"], dtopk_weights = made.dtokens, _of_input(made, dtopk_weights)
        needs_tokens = False
    del scaled, made
    if needs_tokens or any(needs):
        given = None, None, dtopk_weights, operands, main_grads.get("w_up")
        made = up_gradients_op(dpreactivation, up_low, low, *given, needs_tokens, *needs)
        if needs_tokens:
            gradients["tokens"], dtopk_weights = made.dtokens, _of_input(made, dtopk_weights)
        gradients |= {"w_up": made.dw_up, "b_up": made.db_up, "up_a": made.dup_a}
        gradients["up_b"] = None if made.dup_b is None else made.dup_b.transpose(1, 2)
    if needs_router:
        return gradients | _router_gradients(operands, dtopk_weights, gradients.get("tokens"), needed)
    return gradients | {"topk_weights": dtopk_weights}


def _needs(needed: set[str], projection: str) -> tuple[bool, bool, bool]:
    """Return three flags: whether the gradients of a projection's weight, bias and adapter are needed."""
    factors = {f"{projection}_a", f"{projection}_b"}
    return f"w_{projection}" in needed, f"b_{projection}" in needed, not needed.isdisjoint(factors)


def _of_input(made: UpGradients, dtopk_weights: Tensor) -> Tensor:
    return dtopk_weights if made.dtopk_weights is None else made.dtopk_weights


def _router_gradients(
    operands: ExpertOperands, dtopk_weights: Tensor, dtokens: Tensor | None, needed: set[str]
) -> dict[str, Tensor | None]:
    """Return the gradients of the router's operands. The tokens' gradient has a part through the routing weights. If no
    earlier launch has added this part to `dtokens`, also return `dtokens` plus this part."""
    router, topk_weights, topk_experts = operands.router, operands.topk_weights, operands.topk_experts
    assert router is not None and topk_weights is not None and topk_experts is not None
    needs = RouterNeeds.of(needed - {"tokens"} if operands.fuses_router_gradient() else needed)
    if not any(needs):
        return {}
    choice = topk_weights, topk_experts
    dtokens = dtokens if needs.needs_tokens else None
    made = routing_gradients_op(operands.tokens, router, *choice, dtopk_weights, None, dtokens, needs)
    gradients: dict[str, Tensor | None] = {"w_router": made.w_router, "logit_bias": made.logit_bias}
    return gradients if made.tokens is None else gradients | {"tokens": made.tokens}


fused_experts_op.register_autograd(_backward, setup_context=_setup)
