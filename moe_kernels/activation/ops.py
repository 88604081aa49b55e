"""Activations of the expert feed-forward: forward, and backward with everything the expert op needs from one read.

What each activation computes is in `functions.py`; here are the ops and the kernels around it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..activation_spec import Activation, as_activation
from ..runtime.checks import check_shapes
from ..runtime.dispatch import choose
from ..runtime.launch import launch_kernel
from ..runtime.ops import registered_op
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from .functions import ACTIVATIONS


def apply_activation(
    preactivation: Tensor,  # [R, 2F] gate columns, then up columns; [R, F] for a plain activation
    activation: str | Activation = "swiglu",
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, F]
    """Apply a gated or plain activation, computed in float32 from the stored values and rounded once. Differentiable.

    "swiglu" is silu(gate) * up (https://arxiv.org/abs/2002.05202); `Activation` lists the others.

    Raises:
        ValueError: an unknown activation, or a gated one of an odd number of columns.
    """
    activation = as_activation("apply_activation", activation)
    sizes = check_shapes("apply_activation", preactivation=(preactivation, "R N"))
    if activation.gated and sizes["N"] % 2:
        rule = f"{activation.name!r} needs an even number of columns, gate then up"
        raise ValueError(f"apply_activation: {rule}, got {sizes['N']}")
    if choose("apply_activation", implementation, preactivation) == "reference":
        return reference.apply_activation(preactivation, activation)
    return _activation_op(preactivation, activation.name, activation.limit, activation.alpha)


class RowBias(NamedTuple):
    """A bias per expert, and the expert of each row."""

    bias: Tensor  # [E, N] contiguous
    row_to_expert: Tensor  # [R] int32, within [0, E)


def _bias_arguments(bias: RowBias | None) -> tuple[Any, Any]:
    return (None, None) if bias is None else (bias.bias, bias.row_to_expert)


def _block(num_columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile that keeps four warps busy without spilling."""
    block_f = min(next_power_of_2(num_columns), 512)
    return max(1, 2048 // block_f), block_f


def _width(preactivation: Tensor, activation: Activation) -> int:
    return preactivation.shape[1] // (1 + activation.gated)


def launch_activation(preactivation: Tensor, activation: Activation, bias: RowBias | None = None) -> Tensor:
    """Return activation(H + bias) as a new tensor. The arguments are already checked."""
    num_rows, d_ff = preactivation.shape[0], _width(preactivation, activation)
    out = preactivation.new_empty(num_rows, d_ff)
    if out.numel():
        block_r, block_f = _block(d_ff)
        launch_kernel(
            _activation_kernel,
            (cdiv(num_rows, block_r), cdiv(d_ff, block_f)),
            preactivation,
            preactivation.stride(),
            *_bias_arguments(bias),
            out,
            num_rows,
            d_ff,
            activation.limit,
            activation.alpha,
            FORWARD=ACTIVATIONS[activation.name].forward,
            GATED=activation.gated,
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )
    return out


@registered_op("activation")
def _activation_op(preactivation: Tensor, activation: str, limit: float | None, alpha: float | None) -> Tensor:
    return launch_activation(preactivation, Activation(activation, limit, alpha))


@_activation_op.register_fake
def _(preactivation, activation, limit, alpha):
    return preactivation.new_empty(preactivation.shape[0], _width(preactivation, Activation(activation)))


def _activation_setup(ctx, inputs, output):
    preactivation, *ctx.activation = inputs
    ctx.save_for_backward(preactivation)


def _activation_backward(ctx, dactivated):
    (preactivation,) = ctx.saved_tensors
    return _activation_backward_op(preactivation, dactivated, *ctx.activation), None, None, None


_activation_op.register_autograd(_activation_backward, setup_context=_activation_setup)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    preactivation_ptr,
    preactivation_strides,  # [R, 2F], or [R, F] if not GATED
    bias_ptr,  # [E, 2F or F] contiguous, or None
    row_to_expert_ptr,  # [R], with a bias
    out_ptr,  # [R, F] contiguous
    num_rows,
    F,
    limit,
    alpha,
    FORWARD: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes out[r:r + BLOCK_R, f:f + BLOCK_F]. Grid: (cdiv(R, BLOCK_R), cdiv(F, BLOCK_F))."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = (r < num_rows) & (f < F)
    pointer = preactivation_ptr + r * preactivation_strides[0] + f * preactivation_strides[1]
    gate = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(pointer + F * preactivation_strides[1], mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        expert = tl.load(row_to_expert_ptr + r, mask=r < num_rows, other=0).to(tl.int64)  # [BLOCK_R, 1]
        gate, up = _add_bias(gate, up, bias_ptr, expert, f, F, mask, GATED)
    tl.store(out_ptr + r * F + f, FORWARD(gate, up, limit, alpha).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_bias(gate, up, bias_ptr, expert, f, F, mask, GATED: tl.constexpr):
    """Gate and up of rows and columns, with their experts' biases."""
    pointer = bias_ptr + expert * (F * (2 if GATED else 1)) + f
    gate += tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up += tl.load(pointer + F, mask=mask, other=0.0).to(tl.float32)
    else:
        up = gate
    return gate, up


@registered_op("activation_backward")
def _activation_backward_op(
    preactivation: Tensor, dactivated: Tensor, activation: str, limit: float | None, alpha: float | None
) -> Tensor:
    kind = Activation(activation, limit, alpha)
    num_rows, d_ff = dactivated.shape
    dpreactivation = preactivation.new_empty(preactivation.shape)
    if dpreactivation.numel():
        block_r, block_f = _block(d_ff)
        launch_kernel(
            _activation_backward_kernel,
            (cdiv(num_rows, block_r), cdiv(d_ff, block_f)),
            preactivation,
            preactivation.stride(),
            dactivated,
            dactivated.stride(),
            dpreactivation,
            num_rows,
            d_ff,
            kind.limit,
            kind.alpha,
            BACKWARD=ACTIVATIONS[activation].backward,
            GATED=kind.gated,
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )
    return dpreactivation


@_activation_backward_op.register_fake
def _(preactivation, dactivated, activation, limit, alpha):
    return preactivation.new_empty(preactivation.shape)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_backward_kernel(
    preactivation_ptr,
    preactivation_strides,  # [R, 2F], or [R, F] if not GATED
    dactivated_ptr,
    dactivated_strides,  # [R, F]
    dpreactivation_ptr,  # as preactivation, contiguous
    num_rows,
    F,
    limit,
    alpha,
    BACKWARD: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes the gate's and the up gradients of a tile. Grid: (cdiv(R, BLOCK_R), cdiv(F, BLOCK_F))."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = (r < num_rows) & (f < F)
    pointer = preactivation_ptr + r * preactivation_strides[0] + f * preactivation_strides[1]
    gate = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(pointer + F * preactivation_strides[1], mask=mask, other=0.0).to(tl.float32)
    dactivated = tl.load(
        dactivated_ptr + r * dactivated_strides[0] + f * dactivated_strides[1], mask=mask, other=0.0
    ).to(tl.float32)
    _, dgate, dup = BACKWARD(gate, up, dactivated, limit, alpha)
    if GATED:
        out = dpreactivation_ptr + r * (2 * F) + f
        tl.store(out + F, dup.to(dpreactivation_ptr.dtype.element_ty), mask=mask)
    else:
        out = dpreactivation_ptr + r * F + f
    tl.store(out, dgate.to(dpreactivation_ptr.dtype.element_ty), mask=mask)


class Destination(NamedTuple):
    """Other tensors for the results, with their own rows for the slots."""

    dpreactivation: Tensor  # [S, 2F], or [S, F] if not gated; contiguous
    weighted: Tensor  # [S, F] contiguous
    slot_to_row: Tensor  # [T, K] contiguous, in [0, S); -1 for a dropped slot


def launch_weighted_activation_backward(
    preactivation: Tensor,  # [R, 2F], or [R, F] if not gated; contiguous
    dweighted: Tensor,  # [R, F] contiguous: gradient of the weighted activation, weight not yet applied
    topk_weights: Tensor,  # [T, K] float32 contiguous
    slot_to_row: Tensor,  # [T, K] contiguous
    activation: Activation,
    bias: RowBias | None = None,
    *,
    row_to_token: Tensor | None = None,  # [R] int32
    destination: Destination | None = None,
) -> tuple[Tensor, Tensor]:  # dpreactivation as preactivation, dtopk_weights [T, K] float32
    """The elementwise middle of the expert op's backward, one read of H and dA'.

    With a row's weight w:  dA = w * dA',  A_w = w * A,  dw = <dA', A>,  dH = dA * activation'(H). The activation is
    recomputed from H as stored, plus the bias. A_w overwrites dA' in `dweighted`. With a destination, dH and A_w are
    written there instead. Rows of dropped slots are not written.

    Args:
        row_to_token: for inputs with mostly dropped slots. If there are fewer rows than slots, each program then
            handles rows instead of slots.
    """
    (num_rows, d_ff), (num_tokens, top_k) = dweighted.shape, slot_to_row.shape
    num_items = num_slots = num_tokens * top_k
    if row_to_token is not None and num_rows < num_slots:
        num_items, dweights = num_rows, torch.zeros_like(topk_weights)
    else:
        row_to_token, dweights = None, torch.empty_like(topk_weights)
    if destination is None:
        dpreactivation, weighted, slot_to_result = torch.empty_like(preactivation), dweighted, None
    else:
        dpreactivation, weighted, slot_to_result = destination
    if num_slots:
        block_s, block_f = _slot_block(d_ff)
        launch_kernel(
            _weighted_activation_backward_kernel,
            (cdiv(num_items, block_s),),
            preactivation,
            *_bias_arguments(bias),
            dweighted,
            topk_weights,
            slot_to_row,
            row_to_token,
            dpreactivation,
            weighted,
            slot_to_result,
            dweights,
            num_items,
            d_ff,
            activation.limit,
            activation.alpha,
            BACKWARD=ACTIVATIONS[activation.name].backward,
            GATED=activation.gated,
            TOP_K=None if row_to_token is None else top_k,
            BLOCK_S=block_s,
            BLOCK_F=block_f,
        )
    return dpreactivation, dweights


def _slot_block(d_ff: int) -> tuple[int, int]:
    """(slots, columns) that one program of the weighted backward handles at once."""
    if d_ff <= 512:
        return 8, 128
    return (4, 256) if d_ff < 2048 else (1, 1024)


@triton.jit(do_not_specialize=["num_items"])
def _weighted_activation_backward_kernel(
    preactivation_ptr,  # [R, 2F], or [R, F] if not GATED; contiguous
    bias_ptr,  # [E, 2F or F] contiguous, or None
    row_to_expert_ptr,  # [R], with a bias
    dweighted_ptr,  # [R, F] contiguous
    weights_ptr,  # [T * K]
    slot_to_row_ptr,  # [T * K]
    row_to_token_ptr,  # [R], or None to handle slots
    dpreactivation_ptr,  # as preactivation, contiguous
    weighted_ptr,  # [R, F] contiguous, or dweighted_ptr
    destination_ptr,  # [T * K]: each slot's row in the two results, or None if slot_to_row holds for them
    dweights_ptr,  # [T * K]; zeros if programs handle rows
    num_items,  # slots or rows
    F,
    limit,
    alpha,
    BACKWARD: tl.constexpr,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,  # None if programs handle slots
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes the rows of BLOCK_S slots, or BLOCK_S rows, and their weights' gradients.

    Grid: (cdiv(num_items, BLOCK_S),).
    """
    item = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    if row_to_token_ptr is None:
        slot, is_kept = item, item < num_items
        row = tl.load(slot_to_row_ptr + slot, mask=is_kept, other=-1).to(tl.int64)[:, None]
    else:
        first = tl.load(row_to_token_ptr + item, mask=item < num_items, other=0).to(tl.int64) * TOP_K
        slot = tl.full((BLOCK_S,), -1, tl.int64)
        for k in tl.static_range(TOP_K):
            slot = tl.where(tl.load(slot_to_row_ptr + first + k) == item, first + k, slot)
        is_kept = (slot >= 0) & (item < num_items)
        row = tl.where(is_kept, item, -1)[:, None]
    weight = tl.load(weights_ptr + slot, mask=is_kept, other=0.0)
    dtype: tl.constexpr = dweighted_ptr.dtype.element_ty
    products = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)  # [BLOCK_S, BLOCK_F]
    if bias_ptr is not None:
        expert = tl.load(row_to_expert_ptr + row, mask=row >= 0, other=0).to(tl.int64)  # [BLOCK_S, 1]
    out_row = row
    if destination_ptr is not None:
        out_row = tl.load(destination_ptr + slot, mask=is_kept, other=-1).to(tl.int64)[:, None]
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)[None, :]
        mask = (f < F) & (row >= 0)
        if GATED:
            offset = row * (2 * F) + f
            up = tl.load(preactivation_ptr + offset + F, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(preactivation_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        else:
            offset = row * F + f
            gate = tl.load(preactivation_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            up = gate
        if bias_ptr is not None:
            gate, up = _add_bias(gate, up, bias_ptr, expert, f, F, mask, GATED)
        dweighted = tl.load(dweighted_ptr + row * F + f, mask=mask, other=0.0).to(tl.float32)
        activated, dgate, dup = BACKWARD(gate, up, weight[:, None] * dweighted, limit, alpha)
        # Forward multiplied the rounded activation, so the weight's gradient uses the rounded value.
        activated = activated.to(dtype).to(tl.float32)
        products += dweighted * activated
        mask = mask & (out_row >= 0)
        tl.store(weighted_ptr + out_row * F + f, (weight[:, None] * activated).to(dtype), mask=mask)
        offset = out_row * (2 * F if GATED else F) + f
        tl.store(dpreactivation_ptr + offset, dgate.to(dtype), mask=mask)
        if GATED:
            tl.store(dpreactivation_ptr + offset + F, dup.to(dtype), mask=mask)
    tl.store(dweights_ptr + slot, tl.sum(products, 1), mask=is_kept)
