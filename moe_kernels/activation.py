"""Activations of the expert feed-forward: forward, and backward with everything the expert op needs from one read.

An activation is two small functions on float32 values: `forward(gate, up)` gives the activated value, and
`backward(gate, up, dactivated)` gives (activated, dgate, dup). To add one, write the two functions, an entry in
`ACTIVATIONS` and its plain form in `reference.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from ._checks import check_shapes
from ._dispatch import choose, registered_op
from ._triton import tl, triton


@triton.jit
def swiglu(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_backward(gate, up, dactivated):
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dactivated * up * (sigmoid + silu * (1.0 - sigmoid))
    return silu * up, dgate, dactivated * silu


class Activation(NamedTuple):
    """The device functions of one activation."""

    forward: Any
    backward: Any


ACTIVATIONS = {"swiglu": Activation(swiglu, swiglu_backward)}


def check_activation(op: str, activation: str) -> None:
    """Raises ValueError unless `activation` is known."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")


def gated_activation(
    preactivation: Tensor,  # [R, 2F] gate columns, then up columns
    activation: str = "swiglu",
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, F]
    """activation(gate) * up, computed in float32 from the stored values and rounded once. Differentiable.

    "swiglu" is silu(gate) * up (https://arxiv.org/abs/2002.05202).

    Raises:
        ValueError: unknown activation, or an odd number of columns.
    """
    check_activation("gated_activation", activation)
    sizes = check_shapes("gated_activation", preactivation=(preactivation, "R 2F"))
    if sizes["2F"] % 2:
        raise ValueError(f"gated_activation: preactivation must have an even number of columns, got {sizes['2F']}")
    if choose("gated_activation", implementation, preactivation) == "reference":
        return reference.gated_activation(preactivation, activation)
    return _activation_op(preactivation, activation)


def _block(num_columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile that keeps four warps busy without spilling."""
    block_f = min(triton.next_power_of_2(num_columns), 512)
    return max(1, 2048 // block_f), block_f


def launch_activation(preactivation: Tensor, activation: str) -> Tensor:
    """activation(H) as a new tensor; arguments are already checked."""
    num_rows, d_ff = preactivation.shape[0], preactivation.shape[1] // 2
    out = preactivation.new_empty(num_rows, d_ff)
    if out.numel():
        block_r, block_f = _block(d_ff)
        _activation_kernel[(triton.cdiv(num_rows, block_r), triton.cdiv(d_ff, block_f))](
            preactivation,
            preactivation.stride(),
            out,
            num_rows,
            d_ff,
            FORWARD=ACTIVATIONS[activation].forward,
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )
    return out


@registered_op("gated_activation")
def _activation_op(preactivation: Tensor, activation: str) -> Tensor:
    return launch_activation(preactivation, activation)


@_activation_op.register_fake
def _(preactivation, activation):
    return preactivation.new_empty(preactivation.shape[0], preactivation.shape[1] // 2)


def _activation_setup(ctx, inputs, output):
    preactivation, ctx.activation = inputs
    ctx.save_for_backward(preactivation)


def _activation_backward(ctx, dactivated):
    (preactivation,) = ctx.saved_tensors
    return _activation_backward_op(preactivation, dactivated, ctx.activation), None


_activation_op.register_autograd(_activation_backward, setup_context=_activation_setup)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    preactivation_ptr,
    preactivation_strides,  # [R, 2F]
    out_ptr,  # [R, F] contiguous
    num_rows,
    F,
    FORWARD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes out[r:r + BLOCK_R, f:f + BLOCK_F]. Grid: (cdiv(R, BLOCK_R), cdiv(F, BLOCK_F))."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = (r < num_rows) & (f < F)
    gate_ptr = preactivation_ptr + r * preactivation_strides[0] + f * preactivation_strides[1]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + F * preactivation_strides[1], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + r * F + f, FORWARD(gate, up).to(out_ptr.dtype.element_ty), mask=mask)


@registered_op("gated_activation_backward")
def _activation_backward_op(preactivation: Tensor, dactivated: Tensor, activation: str) -> Tensor:
    num_rows, d_ff = dactivated.shape
    dpreactivation = preactivation.new_empty(num_rows, 2 * d_ff)
    if dpreactivation.numel():
        block_r, block_f = _block(d_ff)
        _activation_backward_kernel[(triton.cdiv(num_rows, block_r), triton.cdiv(d_ff, block_f))](
            preactivation,
            preactivation.stride(),
            dactivated,
            dactivated.stride(),
            dpreactivation,
            num_rows,
            d_ff,
            BACKWARD=ACTIVATIONS[activation].backward,
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )
    return dpreactivation


@_activation_backward_op.register_fake
def _(preactivation, dactivated, activation):
    return preactivation.new_empty(preactivation.shape)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_backward_kernel(
    preactivation_ptr,
    preactivation_strides,  # [R, 2F]
    dactivated_ptr,
    dactivated_strides,  # [R, F]
    dpreactivation_ptr,  # [R, 2F] contiguous
    num_rows,
    F,
    BACKWARD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes the gate and up gradients of a tile. Grid: (cdiv(R, BLOCK_R), cdiv(F, BLOCK_F))."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = (r < num_rows) & (f < F)
    gate_ptr = preactivation_ptr + r * preactivation_strides[0] + f * preactivation_strides[1]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + F * preactivation_strides[1], mask=mask, other=0.0).to(tl.float32)
    dactivated = tl.load(
        dactivated_ptr + r * dactivated_strides[0] + f * dactivated_strides[1], mask=mask, other=0.0
    ).to(tl.float32)
    _, dgate, dup = BACKWARD(gate, up, dactivated)
    out = dpreactivation_ptr + r * (2 * F) + f
    tl.store(out, dgate.to(dpreactivation_ptr.dtype.element_ty), mask=mask)
    tl.store(out + F, dup.to(dpreactivation_ptr.dtype.element_ty), mask=mask)


def launch_weighted_activation_backward(
    preactivation: Tensor,  # [R, 2F] contiguous
    dweighted: Tensor,  # [R, F] contiguous: gradient of the weighted activation, weight not yet applied
    topk_weights: Tensor,  # [T, K] float32 contiguous
    slot_to_row: Tensor,  # [T, K] contiguous
    activation: str,
) -> tuple[Tensor, Tensor]:  # dpreactivation [R, 2F], dtopk_weights [T, K] float32
    """The elementwise middle of the expert op's backward, one read of H and dA'.

    With a row's weight w:  dA = w * dA',  A_w = w * A,  dw = <dA', A>,  dH = dA * activation'(H). The activation is
    recomputed from H as stored. A_w takes the place of dA' in `dweighted`. Rows of dropped slots are not written.
    """
    d_ff, num_slots = dweighted.shape[1], slot_to_row.numel()
    dpreactivation = torch.empty_like(preactivation)
    dweights = torch.empty_like(topk_weights)
    if num_slots:
        _weighted_activation_backward_kernel[(triton.cdiv(num_slots, 4),)](
            preactivation,
            dweighted,
            topk_weights,
            slot_to_row,
            dpreactivation,
            dweights,
            num_slots,
            d_ff,
            BACKWARD=ACTIVATIONS[activation].backward,
            BLOCK_S=4,
            BLOCK_F=min(triton.next_power_of_2(d_ff), 256),
        )
    return dpreactivation, dweights


@triton.jit(do_not_specialize=["num_slots"])
def _weighted_activation_backward_kernel(
    preactivation_ptr,  # [R, 2F] contiguous
    dweighted_ptr,  # [R, F] contiguous; becomes the weighted activation
    weights_ptr,  # [T * K]
    slot_to_row_ptr,  # [T * K]
    dpreactivation_ptr,  # [R, 2F] contiguous
    dweights_ptr,  # [T * K]
    num_slots,
    F,
    BACKWARD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes the rows of BLOCK_S slots and their weights' gradients. Grid: (cdiv(T * K, BLOCK_S),)."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.load(slot_to_row_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int64)[:, None]
    weight = tl.load(weights_ptr + slot, mask=slot < num_slots, other=0.0)
    dtype: tl.constexpr = dweighted_ptr.dtype.element_ty
    products = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)  # [BLOCK_S, BLOCK_F]
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)[None, :]
        mask = (f < F) & (row >= 0)
        gate = tl.load(preactivation_ptr + row * (2 * F) + f, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(preactivation_ptr + row * (2 * F) + F + f, mask=mask, other=0.0).to(tl.float32)
        dweighted = tl.load(dweighted_ptr + row * F + f, mask=mask, other=0.0).to(tl.float32)
        activated, dgate, dup = BACKWARD(gate, up, weight[:, None] * dweighted)
        # Forward multiplied by the rounded activation, so its rounded value is what the weight's gradient sees.
        activated = activated.to(dtype).to(tl.float32)
        products += dweighted * activated
        tl.store(dweighted_ptr + row * F + f, (weight[:, None] * activated).to(dtype), mask=mask)
        out = dpreactivation_ptr + row * (2 * F) + f
        tl.store(out, dgate.to(dtype), mask=mask)
        tl.store(out + F, dup.to(dtype), mask=mask)
    tl.store(dweights_ptr + slot, tl.sum(products, 1), mask=slot < num_slots)
