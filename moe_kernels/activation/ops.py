"""The ops of the activations, forward and backward, and the launches of their kernels. `functions.py` defines each
activation. One kernel computes all elementwise results of the expert op's backward and reads each input once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..quantization.fp8_rows import empty_scaled_rows
from ..reference_fp8 import BLOCK
from ..runtime.checks import check_shapes
from ..runtime.dispatch import choose
from ..runtime.launch import launch_kernel
from ..runtime.registered_ops import registered_op
from ..runtime.row_layout import alignment, empty_rows
from ..runtime.triton import cdiv, next_power_of_2
from ..specs import Activation, as_activation
from ..types import ScaledRows
from .functions import ACTIVATIONS
from .kernels import activation_backward_kernel, activation_kernel, weighted_activation_backward_kernel


def apply_activation(
    preactivation: Tensor,  # [R, 2F] gate columns, then up columns, or interleaved; [R, F] for a plain activation
    activation: str | Activation = "swiglu",
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, F]
    """Apply a gated or plain activation. The result is computed in float32 and rounded once. Differentiable.

    "swiglu", the default, is silu(gate) * up (https://arxiv.org/abs/2002.05202). `Activation` lists all activations.

    Shapes: preactivation [R, 2F] or [R, F]; result [R, F].

    Raises:
        ValueError: the activation is unknown, or it is gated and the number of columns is odd.
    """
    activation = as_activation("apply_activation", activation)
    sizes = check_shapes("apply_activation", preactivation=(preactivation, "R N"))
    if activation.gated and sizes["N"] % 2:
        rule = f"{activation.name!r} needs an even number of columns, gate and up"
        raise ValueError(f"apply_activation: {rule}, got {sizes['N']}")
    if choose("apply_activation", implementation, preactivation) == "reference":
        return reference.apply_activation(preactivation, activation)
    return _activation_op(preactivation, *settings_of(activation))


def settings_of(activation: Activation) -> tuple[str, float | None, float | None, bool]:
    """Return the four values that describe an activation in the signatures of ops."""
    return activation.name, activation.limit, activation.alpha, activation.interleaved


class RowBias(NamedTuple):
    """A bias per expert, and the expert of each row."""

    bias: Tensor  # [E, N] contiguous
    row_to_expert: Tensor  # [R] int32, within [0, E)


def _block(num_columns: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile that keeps four warps busy without spilling registers."""
    block_f = min(next_power_of_2(num_columns), 512)
    return max(1, 2048 // block_f), block_f


def _width(preactivation: Tensor, activation: Activation) -> int:
    return preactivation.shape[1] // (1 + activation.gated)


def launch_activation(
    preactivation: Tensor, activation: Activation, bias: RowBias | None = None, out: Tensor | None = None
) -> Tensor:
    """Return activation(preactivation + bias), in `out` if given, else in a new contiguous tensor. The caller has
    checked the arguments."""
    if out is None:
        out = preactivation.new_empty(preactivation.shape[0], _width(preactivation, activation))
    _launch_forward(preactivation, activation, bias, out, None)
    return out


def launch_scaled_activation(
    preactivation: Tensor, activation: Activation, bias: RowBias | None = None
) -> ScaledRows:  # [R, F]
    """Return activation(preactivation + bias) in e4m3 with scales. Before quantisation, the activation is rounded to
    the dtype of `preactivation`."""
    out = empty_scaled_rows(preactivation, preactivation.shape[0], _width(preactivation, activation))
    _launch_forward(preactivation, activation, bias, out.values.view(torch.uint8), out.scales)
    return out


def _launch_forward(
    preactivation: Tensor, activation: Activation, bias: RowBias | None, out: Tensor, scales: Tensor | None
) -> None:
    num_rows, d_ff = out.shape
    if out.numel():
        block_r, block_f = _block(d_ff if scales is None else max(d_ff, BLOCK))
        launch_kernel(
            activation_kernel,
            (cdiv(num_rows, block_r), cdiv(d_ff, block_f)),
            preactivation,
            preactivation.stride(),
            *(bias or (None, None)),
            out,
            out.stride(0),
            scales,
            num_rows,
            d_ff,
            activation.limit,
            activation.alpha,
            FORWARD=ACTIVATIONS[activation.name].forward,
            GATED=activation.gated,
            INTERLEAVED=activation.interleaved,
            ALIGNED=alignment(d_ff, preactivation.stride(0), out.stride(0)),
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )


@registered_op("activation")
def _activation_op(
    preactivation: Tensor, activation: str, limit: float | None, alpha: float | None, interleaved: bool
) -> Tensor:
    return launch_activation(preactivation, Activation(activation, limit, alpha, interleaved))


@_activation_op.register_fake
def _(preactivation, activation, limit, alpha, interleaved):
    return preactivation.new_empty(preactivation.shape[0], _width(preactivation, Activation(activation)))


def _activation_setup(ctx, inputs, output):
    preactivation, *ctx.activation = inputs
    ctx.save_for_backward(preactivation)


def _activation_backward(ctx, dactivated):
    (preactivation,) = ctx.saved_tensors
    return _activation_backward_op(preactivation, dactivated, *ctx.activation), None, None, None, None


_activation_op.register_autograd(_activation_backward, setup_context=_activation_setup)


@registered_op("activation_backward")
def _activation_backward_op(
    preactivation: Tensor,
    dactivated: Tensor,
    activation: str,
    limit: float | None,
    alpha: float | None,
    interleaved: bool,
) -> Tensor:
    kind = Activation(activation, limit, alpha, interleaved)
    num_rows, d_ff = dactivated.shape
    dpreactivation = preactivation.new_empty(preactivation.shape)
    if dpreactivation.numel():
        block_r, block_f = _block(d_ff)
        launch_kernel(
            activation_backward_kernel,
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
            INTERLEAVED=interleaved,
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )
    return dpreactivation


@_activation_backward_op.register_fake
def _(preactivation, dactivated, activation, limit, alpha, interleaved):
    return preactivation.new_empty(preactivation.shape)


class Destination(NamedTuple):
    """Two tensors with S rows for results of `launch_weighted_activation_backward`, and the row of each slot in them.
    This row may differ from the slot's row in the inputs."""

    dpreactivation: Tensor  # [S, 2F], or [S, F] if not gated; the column stride is 1
    weighted: Tensor  # [S, F]; the column stride is 1
    slot_to_row: Tensor  # [T, K] contiguous, in [0, S); -1 for a dropped slot


def launch_weighted_activation_backward(
    preactivation: Tensor,  # [R, 2F], or [R, F] if not gated; the column stride is 1
    dweighted: Tensor,  # [R, F] with column stride 1: dA', the gradient of w * A
    topk_weights: Tensor,  # [T, K] float32 contiguous
    slot_to_row: Tensor,  # [T, K] contiguous
    activation: Activation,
    bias: RowBias | None = None,
    *,
    row_to_token: Tensor | None = None,  # [R] int32
    destination: Destination | None = None,
    scaled: ScaledRows | None = None,  # [R, 2F or F]
) -> tuple[Tensor, Tensor]:  # dpreactivation shaped like preactivation, dtopk_weights [T, K] float32
    """Run the elementwise step of the expert op's backward. Read `preactivation` and `dweighted` once. Return (dH, dw).

    H is the preactivation plus the bias, and A = activation(H) is recomputed. dA' is `dweighted`, and w is a row's
    routing weight. The results are dH = w * dA' * activation'(H), dw = <dA', A> and A_w = w * A. Rows of dropped slots
    are not written.

    Args:
        row_to_token: if given and R < T * K, programs handle rows instead of slots. Give `row_to_token` if most slots
            may be dropped. Default: None.
        destination: receives dH and A_w. Default: None; A_w then overwrites dA' in `dweighted`.
        scaled: receives a second copy of dH, in e4m3 with scales. Default: None. `can_scale_gradient` must return True.
            If `destination` is also given, its `slot_to_row` must equal the argument `slot_to_row`.
    """
    (num_rows, d_ff), (num_tokens, top_k) = dweighted.shape, slot_to_row.shape
    num_items = num_slots = num_tokens * top_k
    if row_to_token is not None and num_rows < num_slots:
        num_items, dweights = num_rows, torch.zeros_like(topk_weights)
    else:
        row_to_token, dweights = None, torch.empty_like(topk_weights)
    if destination is None:
        dpreactivation, weighted, slot_to_result = empty_rows(preactivation, *preactivation.shape), dweighted, None
    else:
        dpreactivation, weighted, slot_to_result = destination
    scaled_arguments: tuple[Any, ...] = (None, None, None)
    if scaled is not None:
        scaled_arguments = scaled.values.view(torch.uint8), scaled.scales, num_rows
    if num_slots:
        block_s, block_f = _slot_block(d_ff)
        launch_kernel(
            weighted_activation_backward_kernel,
            (cdiv(num_items, block_s),),
            preactivation,
            preactivation.stride(0),
            *(bias or (None, None)),
            dweighted,
            dweighted.stride(0),
            topk_weights,
            slot_to_row,
            row_to_token,
            dpreactivation,
            dpreactivation.stride(0),
            weighted,
            weighted.stride(0),
            slot_to_result,
            dweights,
            *scaled_arguments,
            num_items,
            d_ff,
            activation.limit,
            activation.alpha,
            BACKWARD=ACTIVATIONS[activation.name].backward,
            GATED=activation.gated,
            INTERLEAVED=activation.interleaved,
            TOP_K=None if row_to_token is None else top_k,
            ALIGNED=alignment(d_ff, *(t.stride(0) for t in (preactivation, dweighted, dpreactivation, weighted))),
            BLOCK_S=block_s,
            BLOCK_F=block_f,
        )
    return dpreactivation, dweights


def can_scale_gradient(activation: Activation, d_ff: int) -> bool:
    """Return whether no block of 128 preactivation columns holds both gate and up columns. All columns of a block share
    a scale, but the kernel quantises gate and up columns separately."""
    return not activation.gated or (not activation.interleaved and d_ff % BLOCK == 0)


def _slot_block(d_ff: int) -> tuple[int, int]:
    """Return (slots, columns) that one program of the weighted backward handles at once."""
    if d_ff <= 512:
        return 8, 128
    return (4, 256) if d_ff < 2048 else (1, 1024)
