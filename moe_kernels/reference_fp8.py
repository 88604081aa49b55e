"""Specification of GEMMs with block-scaled e4m3 operands, and of experts that train with such GEMMs.

A block's scale is its largest absolute value divided by 448, the largest number of e4m3. Rows have blocks of 1 x 128
along the reduction, and weights have blocks of 128 x 128, as in section 3.3 of https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .specs import Activation
from .types import Permutation

BLOCK = 128
LARGEST = 448.0  # the largest e4m3 number
SMALLEST = 1e-30  # lower bound of a block's nonzero maximum when its scale is computed; keeps 1 / scale finite


def quantize_blocks(
    matrix: Tensor,  # [..., M, N]
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor]:  # values [..., M, N] e4m3, scales [..., ceil(M / rows), ceil(N / columns)] float32
    """Divide each value by its block's scale in float32, and round the quotient to e4m3. Return (values, scales).

    The largest magnitude of a block becomes 448, unless that magnitude is below 1e-30. A block of zeros has scale 1. If
    a block contains NaN, all values of the block become NaN. If a block contains an infinity, the infinity becomes NaN
    and the scale becomes infinite.
    """
    size_m, size_n = matrix.shape[-2:]
    padded = functional.pad(matrix.float(), (0, -size_n % columns, 0, -size_m % rows))
    # [..., M / rows, rows, N / columns, columns]
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    inverse = torch.where(largest == 0, 1.0, LARGEST / largest.clamp(min=SMALLEST))
    values = (blocks * inverse).flatten(-4, -3).flatten(-2)[..., :size_m, :size_n]
    return values.contiguous().to(torch.float8_e4m3fn), (1.0 / inverse).squeeze((-3, -1))


def dequantize_blocks(
    values: Tensor,  # [..., M, N] e4m3
    scales: Tensor,  # [..., ceil(M / rows), ceil(N / columns)] float32
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:  # [..., M, N]
    """Return each value times its block's scale, computed in `dtype`."""
    size_m, size_n = values.shape[-2:]
    spread = scales.to(dtype).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return values.to(dtype) * spread[..., :size_m, :size_n]


def _rounded_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:  # [R, K]
    return dequantize_blocks(*quantize_blocks(rows, 1, BLOCK), 1, BLOCK, dtype)


def _rounded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:  # [E, out, in]
    return dequantize_blocks(*quantize_blocks(weight, BLOCK, BLOCK), BLOCK, BLOCK, dtype)


def _product(
    rows: Tensor,  # [R, K]
    matrices: Tensor,  # [E, K, N], already rounded to e4m3
    offsets: Tensor,  # [E] int32
) -> Tensor:  # [R, N]
    """Round rows to e4m3 and multiply each by its expert's matrix. Round the products once, to the dtype of `rows`."""
    return reference.grouped_gemm(_rounded_rows(rows, matrices.dtype), matrices, offsets).to(rows.dtype)


class _Undifferentiable(torch.autograd.Function):
    """Returns `gradient`, connected to `sources` in the autograd graph. Backward raises NotImplementedError."""

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dout: Tensor):
        raise NotImplementedError("fused_experts: precision='fp8' has no gradients of gradients; omit the precision")


def _first_order(backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]]) -> Callable[[Any, Tensor], Any]:
    """Wrap a backward function, so that gradients of gradients raise NotImplementedError: rounding has no derivative.
    PyTorch's `once_differentiable` does not always raise: with `autograd.grad` it gives wrong values."""

    @functools.wraps(backward)
    def run(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = backward(ctx, dout)
        return tuple(g if g is None else _Undifferentiable.apply(g, dout, *ctx.saved_tensors) for g in gradients)

    return run


class _Linear(torch.autograd.Function):
    """Computes rows @ weight^T per expert from e4m3 operands. The GEMM for the gradient of the rows also has e4m3
    operands. The GEMM for the gradient of the weight does not round its operands."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:  # [R, in], [E, out, in] -> [R, out]
        return _product(rows, _rounded_weight(weight, _wide(rows)).mT, offsets)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_first_order
    def backward(ctx, dout: Tensor):
        rows, weight, offsets = ctx.saved_tensors
        drows = _product(dout, _rounded_weight(weight, _wide(rows)), offsets)
        return drows, reference.grouped_gemm_wgrad(dout, rows, offsets), None


class _WeightedLinear(torch.autograd.Function):
    """Computes rows @ weight^T. A token's result is the sum of its rows' products, each times its routing weight w.
    `kept` is `rows`, or a less precise copy of `rows`. The backward pass reads `kept` instead of `rows`, and gives the
    gradient of the rows to `kept` only. g is the upstream gradient of each row's token. dA' is the gradient of the
    rows without the factor w. For dA', g is rounded to e4m3 before the multiplication by w:

        dA' = e4m3(g) @ e4m3(weight)    dkept = w * dA'    dw = <dA', kept>    dweight = g^T @ (w * kept)
    """

    @staticmethod
    def forward(
        rows: Tensor, kept: Tensor, weight: Tensor, weights: Tensor, slot_to_row: Tensor, offsets: Tensor
    ) -> Tensor:
        product = _product(rows, _rounded_weight(weight, _wide(rows)).mT, offsets)
        return reference.combine(product, weights, slot_to_row)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_first_order
    def backward(ctx, dout: Tensor):  # [T, D]
        _, rows, weight, weights, slot_to_row, offsets = ctx.saved_tensors
        slot = reference.row_to_slot(slot_to_row)[: len(rows)]  # each row's slot; T * K for padding rows
        padded = functional.pad(dout, (0, 0, 0, 1)).index_select(0, slot // max(slot_to_row.shape[1], 1))
        row_weights = reference.row_weights(weights, slot_to_row, len(rows))[:, None]  # [R, 1]
        dproduct = _product(padded, _rounded_weight(weight, _wide(rows)), offsets)  # dA' in the docstring
        dslots = functional.pad((dproduct.to(weights.dtype) * rows).sum(1), (0, 1))
        dweights = dslots[torch.where(slot_to_row < 0, len(rows), slot_to_row)]
        dweight = reference.grouped_gemm_wgrad(padded, (row_weights * rows).to(rows.dtype), offsets)
        return None, (row_weights * dproduct).to(rows.dtype), dweight, dweights, None, None


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def fused_experts(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    w_up: Tensor,  # [E, 2F, D], or [E, F, D] with a plain activation
    w_down: Tensor,  # [E, D, F]
    *,
    b_up: Tensor | None = None,  # [E, 2F], or [E, F]
    b_down: Tensor | None = None,  # [E, D]
    activation: str | Activation = "swiglu",
    weight_on_input: bool = False,
    saves_fp8: bool = False,
) -> Tensor:  # [T, D]
    """Compute `reference.fused_experts` with e4m3 operands in four of its six GEMMs: the two of the forward pass, and
    the two that compute gradients of rows. The other two GEMMs, for gradients of weights, have operands in the dtype of
    the tokens. With `saves_fp8`, the backward pass reads the pre-activations as e4m3 numbers with scales."""
    offsets, slot_to_row = permutation.offsets, permutation.slot_to_row
    rows = reference.permute(tokens, permutation)  # [R, D]
    if weight_on_input:
        weights = reference.row_weights(topk_weights, slot_to_row, len(rows))
        rows = (rows.to(weights.dtype) * weights[:, None]).to(tokens.dtype)
    preactivation = _Linear.apply(rows, w_up, offsets)  # [R, 2F] or [R, F]
    activated = reference.apply_activation(reference.add_bias(preactivation, b_up, offsets), activation)
    kept = activated
    if saves_fp8:
        rounded = _rounded_rows(preactivation.detach(), _wide(rows)).to(rows.dtype)
        # `read` has the values of `rounded`, and passes its gradient to `preactivation`.
        read = preactivation + (rounded - preactivation).detach()
        kept = reference.apply_activation(reference.add_bias(read, b_up, offsets), activation)
    weights = torch.ones_like(topk_weights) if weight_on_input else topk_weights
    out = _WeightedLinear.apply(activated, kept, w_down, weights, slot_to_row, offsets)
    if b_down is None:
        return out
    biases = reference.add_bias(out.new_zeros(len(rows), out.shape[1]), b_down, offsets)
    return out + reference.combine(biases, weights, slot_to_row)
