"""The expert feed-forward of all tokens as one differentiable op that saves the least it can.

Forward:   H = gather(tokens) @ w_up^T      A = activation(H)      Y = A @ w_down^T      out = combine(Y, weights)
Saved:     tokens, H, topk_weights and the routing integers. Not the gathered tokens, not A, not Y; on request not H.
Backward, with w the routing weight of a row:

    dA' = gather(dout) @ w_down             dw = <dA', A>                    (so no saved Y is needed)
    dA  = w * dA'      A_w = w * A          dH = dA * activation'(H)         (A again from H, elementwise)
    dw_down = gather(dout)^T @ A_w          dX = dH @ w_up                   dw_up = dH^T @ gather(tokens)
    dtokens = sum of a token's rows of dX

The identity for dw is from SonicMoE (https://arxiv.org/abs/2512.14080). With biases H stays without b_up, which is
added wherever H is read, as rounding the sum would move more values across the limits of clamps; b_down is added before
Y is rounded:

    dw += <dout, b_down>                    db_down = sum of w * dout        db_up = sum of dH

With the weights on the input, H = gather(w * tokens) @ w_up^T, the sum over Y is unweighted, and in backward

    dA  = dA'          A_w = A              dw = <dX, tokens>                dtokens = sum of w * dX

The tokens' gradient has a part that comes through the routing weights. With `w_router` it is added where the rows of dX
are summed: see `router_term.py`.

A gather happens inside the GEMM that wants its rows, or as a copy before it, whichever `tuning.choose_copies` says is
faster.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import reference
from ..activation.ops import launch_weighted_activation_backward
from ..activation_spec import Activation, as_activation
from ..gemm.batch_invariance import ASSUMED_ROWS, canonical_layout, token_by_token
from ..permutation.permute import launch_slot_products
from ..runtime.checks import check_dtype, check_same_device, check_same_dtype, check_shapes, once_per_form
from ..runtime.dispatch import choose, without_autocast
from ..runtime.ops import registered_op
from ..types import Permutation, TileTable
from .expert_bias import launch_segment_sum
from .router_gradient import launch_combine_with_router
from .rows import Rows, Up

RECOMPUTE = (None, "up")


def fused_experts(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    w_up: Tensor,  # [E, 2F, D] gate rows, then up rows; [E, F, D] with a plain activation
    w_down: Tensor,  # [E, D, F]
    *,
    b_up: Tensor | None = None,  # [E, 2F], or [E, F]
    b_down: Tensor | None = None,  # [E, D]
    w_router: Tensor | None = None,  # [E, D]
    activation: str | Activation = "swiglu",
    weight_on_input: bool = False,
    recompute: str | None = None,
    reserved_sms: int = 0,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> Tensor:  # [T, D]
    """Each token through its experts, summed with its routing weights.

    Keeps for backward `tokens`, the pre-activations [R, 2F] and the routing; what a frozen operand would need is
    skipped. GEMMs and sums accumulate in float32; rows are stored in the dtype of the tokens. Deterministic, never
    waits for the GPU. Differentiable in `tokens`, `topk_weights`, weights and biases.

    Args:
        permutation: of the same choice of experts as `topk_weights`, from `sort_by_expert`. Dropped slots add nothing.
        w_router: says that `topk_weights` are a softmax over the chosen of the logits `tokens @ w_router.T`, and that
            this op is to give `tokens` the gradient through them, too. Compute them with `tokens.detach()`, and
            read them nowhere else, then: it is faster so. `w_router` itself gets its gradient through `topk_weights`.
            No slot may be dropped, which is not checked: it would wait for the GPU.
        weight_on_input: the routing weight multiplies the token before the expert, not its output.
        recompute: "up" does not keep the pre-activations; backward multiplies by `w_up` once more, with the same bits.
            The reference keeps what autograd keeps.
        reserved_sms: of the GPU, that persistent GEMMs leave to communication beside them. The same bits.
        batch_invariant: the other tokens change no bit of a token's output, nor of the gradients of the token and its
            routing weights. Kernels are chosen whatever the number of rows, and the reference computes token by token.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, activation or recompute is unknown,
            reserved_sms is negative, or there is a w_router with weight_on_input, batch_invariant or fewer rows than
            slots.
    """
    activation = as_activation("fused_experts", activation)
    if recompute not in RECOMPUTE:
        raise ValueError(f"fused_experts: recompute must be one of {RECOMPUTE}, got {recompute!r}")
    if reserved_sms < 0:
        raise ValueError(f"fused_experts: reserved_sms must not be negative, got {reserved_sms}")
    slot_to_row, row_to_token = permutation.slot_to_row, permutation.row_to_token
    _check_operands(
        tokens, topk_weights, slot_to_row, permutation.offsets, w_up, w_down, b_up, b_down, w_router, activation.gated
    )
    if w_router is not None and (weight_on_input or batch_invariant or len(row_to_token) != slot_to_row.numel()):
        raise ValueError(
            "fused_experts: w_router goes with weights on the output, no batch_invariant, and a row for each slot, got "
            f"{weight_on_input=}, {batch_invariant=} and {len(row_to_token)} rows of {slot_to_row.numel()} slots"
        )
    if choose("fused_experts", implementation, tokens) == "reference":
        options = {"activation": activation, "weight_on_input": weight_on_input, "b_up": b_up, "b_down": b_down}
        options |= {} if w_router is None else {"w_router": w_router}
        run = _reference_by_token if batch_invariant else reference.fused_experts
        with without_autocast(tokens):
            return run(tokens, topk_weights, permutation, w_up, w_down, **options)
    out, _ = _fused_experts_op(
        tokens,
        topk_weights.float().contiguous(),
        w_up,
        w_down,
        b_up,
        b_down,
        slot_to_row.contiguous(),
        row_to_token.contiguous(),
        *permutation.tile_table[:4],
        w_router,
        permutation.tile_table.block_rows,
        reserved_sms,
        activation.name,
        activation.limit,
        activation.alpha,
        weight_on_input,
        recompute == "up",
        batch_invariant,
    )
    return out


def _reference_by_token(
    tokens: Tensor, topk_weights: Tensor, permutation: Permutation, w_up: Tensor, w_down: Tensor, **options
) -> Tensor:
    experts = torch.searchsorted(permutation.offsets, permutation.slot_to_row, right=True, out_int32=True)
    experts = torch.where(permutation.slot_to_row < 0, -1, experts)  # [T, K]

    def run(token: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor]:
        own = reference.sort_by_expert(chosen, len(w_up))
        return (reference.fused_experts(token, weights, own, w_up, w_down, **options),)

    (out,) = token_by_token(run, tokens, topk_weights, experts)
    return out


@once_per_form
def _check_operands(
    tokens: Tensor,
    topk_weights: Tensor,
    slot_to_row: Tensor,
    offsets: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    w_router: Tensor | None,
    gated: bool,
) -> None:
    width = "2F" if gated else "F"
    patterns = {"b_up": f"E {width}", "b_down": "E D", "w_router": "E D"}
    given = (("b_up", b_up), ("b_down", b_down), ("w_router", w_router))
    optional = {name: operand for name, operand in given if operand is not None}
    sizes = check_shapes(
        "fused_experts",
        tokens=(tokens, "T D"),
        topk_weights=(topk_weights, "T K"),
        slot_to_row=(slot_to_row, "T K"),
        offsets=(offsets, "E"),
        w_up=(w_up, f"E {width} D"),
        w_down=(w_down, "E D F"),
        **{name: (operand, patterns[name]) for name, operand in optional.items()},
    )
    if gated and sizes["2F"] != 2 * sizes["F"]:
        raise ValueError(
            f"fused_experts: w_up must be [E, 2F, D] and w_down [E, D, F], "
            f"got {list(w_up.shape)} and {list(w_down.shape)}"
        )
    check_same_dtype("fused_experts", tokens=tokens, w_up=w_up, w_down=w_down, **optional)
    check_dtype("fused_experts", "topk_weights", topk_weights, torch.float32, torch.float64)
    check_same_device(
        "fused_experts",
        tokens=tokens,
        topk_weights=topk_weights,
        permutation=offsets,
        w_up=w_up,
        w_down=w_down,
        **optional,
    )


_activation = functools.cache(Activation)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _prepare(
    slot_to_row: Tensor,
    row_to_token: Tensor,
    table: TileTable,
    reserved_sms: int,
    tokens: Tensor,
    batch_invariant: bool,
) -> tuple[Rows, Tensor]:
    """The rows, and the tokens as the kernels are to read them."""
    if batch_invariant:
        return Rows(slot_to_row, row_to_token, table, reserved_sms, ASSUMED_ROWS), canonical_layout(tokens)
    return Rows(slot_to_row, row_to_token, table, reserved_sms, None), tokens


@registered_op("fused_experts")
def _fused_experts_op(
    tokens: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    slot_to_row: Tensor,
    row_to_token: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    order: Tensor,
    w_router: Tensor | None,
    block_rows: int,
    reserved_sms: int,
    activation: str,
    limit: float | None,
    alpha: float | None,
    weight_on_input: bool,
    recompute: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:  # out [T, D], preactivation [R, 2F or F], empty to recompute it
    table = TileTable(bounds, tiles, num_tiles, order, block_rows)
    rows, tokens = _prepare(slot_to_row, row_to_token, table, reserved_sms, tokens, batch_invariant)
    input_weights, output_weights = (topk_weights, None) if weight_on_input else (None, topk_weights)
    copy = weight_on_input or rows.choose_copies(tokens, w_up, w_down).tokens_forward
    kind = _activation(activation, limit, alpha)
    preactivation, activated = Up(tokens, w_up, _contiguous(b_up), kind, input_weights, copy)(rows)
    if recompute:
        preactivation = tokens.new_empty(0)
    expert_out = rows.gemm(activated, w_down.transpose(1, 2), bias=_contiguous(b_down))  # [R, D]
    del activated
    return rows.combine(expert_out, output_weights), preactivation


@_fused_experts_op.register_fake
def _(tokens, topk_weights, w_up, w_down, b_up, b_down, slot_to_row, row_to_token, *rest):
    shape = 0 if rest[-2] else (row_to_token.shape[0], w_up.shape[1])
    return tokens.new_empty(tokens.shape), tokens.new_empty(shape)


def _setup(ctx, inputs, output):
    tensors, ctx.options = inputs[:13], inputs[13:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, dout, _):
    if dout is None:
        return (None,) * 21
    *tensors, preactivation = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:6])
    gradients = _experts_backward_op(dout, preactivation, *tensors, *ctx.options, needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), *(None,) * 15


_fused_experts_op.register_autograd(_backward, setup_context=_setup)


@registered_op("experts_backward")
def _experts_backward_op(
    dout: Tensor,
    preactivation: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    slot_to_row: Tensor,
    row_to_token: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    order: Tensor,
    w_router: Tensor | None,
    block_rows: int,
    reserved_sms: int,
    activation: str,
    limit: float | None,
    alpha: float | None,
    weight_on_input: bool,
    recompute: bool,
    batch_invariant: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # of the first six operands; empty where not needed
    table = TileTable(bounds, tiles, num_tiles, order, block_rows)
    rows, tokens = _prepare(slot_to_row, row_to_token, table, reserved_sms, tokens, batch_invariant)
    dout = canonical_layout(dout) if batch_invariant else dout
    copies = rows.choose_copies(tokens, w_up, w_down)
    input_weights, output_weights = (topk_weights, None) if weight_on_input else (None, topk_weights)
    needs_tokens, needs_weights, needs_up, needs_down, needs_b_up, needs_b_down = needs
    dtokens = dw_up = dw_down = db_up = db_down = None
    kind = _activation(activation, limit, alpha)
    if recompute:
        copy = weight_on_input or copies.tokens_forward
        preactivation, _ = Up(tokens, w_up, _contiguous(b_up), kind, input_weights, copy)(rows)
    # At most H, dH, A_w and one [R, D] are alive at any time.
    drows = rows.permute(dout) if copies.dout else dout.contiguous()
    weighted = rows.gemm(drows, w_down, gather=not copies.dout)  # [R, F] dA'
    dpreactivation, dweights = launch_weighted_activation_backward(
        preactivation,
        weighted,
        torch.ones_like(topk_weights) if weight_on_input else topk_weights,
        slot_to_row,
        kind,
        rows.row_bias(_contiguous(b_up)),
        row_to_token=row_to_token,
    )  # and dA' has become A_w
    if needs_down:
        dw_down = rows.wgrad(drows, weighted, gather_a=not copies.dout)  # [E, D, F]
    del drows, weighted
    if b_down is not None and (needs_weights or w_router is not None) and not weight_on_input:
        dweights += launch_slot_products(dout, b_down, rows.slot_experts())
    if needs_b_down:
        db_down = rows.bias_gradient(dout, output_weights).to(b_down.dtype)  # [E, D]
    if needs_b_up:
        db_up = launch_segment_sum(dpreactivation, bounds).to(b_up.dtype)  # [E, 2F]
    if needs_tokens or (weight_on_input and needs_weights):
        dup_input = rows.gemm(dpreactivation, w_up)  # [R, D]
        if w_router is None:
            dtokens = rows.combine(dup_input, input_weights)
        else:
            dtokens = launch_combine_with_router(dup_input, topk_weights, dweights, slot_to_row, bounds, w_router)
        if weight_on_input:
            dweights = launch_slot_products(tokens, dup_input, slot_to_row)
        del dup_input
    if needs_up:
        copy = weight_on_input or copies.tokens_backward
        up_input = rows.permute(tokens, input_weights) if copy else tokens
        dw_up = rows.wgrad(dpreactivation, up_input, gather_dout=not copy)  # [E, 2F, D]
    gradients = dtokens, dweights, dw_up, dw_down, db_up, db_down
    return tuple(dout.new_empty(0) if gradient is None else gradient for gradient in gradients)


@_experts_backward_op.register_fake
def _(dout, preactivation, tokens, topk_weights, w_up, w_down, b_up, b_down, *rest):
    def like(tensor: Tensor | None, needed: bool) -> Tensor:
        return dout.new_empty(tensor.shape if needed else 0)

    needs_tokens, needs_weights, *needs = rest[-1]
    dtokens = like(tokens, needs_tokens or (rest[-4] and needs_weights))
    rest = map(like, (w_up, w_down, b_up, b_down), needs)
    return dtokens, torch.empty_like(topk_weights), *rest
