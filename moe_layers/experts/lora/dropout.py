"""Computes the experts in training if an adapter applies dropout to its input.

    H = X @ w_up^T + sum over adapters of scale * (drop(X) @ up_a^T) @ up_b^T
    Y = A @ w_down^T + sum over adapters of scale * (drop(A) @ down_a^T) @ down_b^T         A = activation(H)

X holds the token of each slot. Each row, adapter and projection has its own mask, as in PEFT with experts that consist
of linear layers. Each step is a separate op whose inputs autograd keeps: X, H, A and Y, and per adapter the masks and
the masked X and A. Autograd also keeps dequantised copies of quantised weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moe_kernels import Activation, Permutation, apply_activation, combine, grouped_gemm, permute
from moe_kernels.quantization.ops import dequantize
from moe_kernels.types import ExpertWeights, QuantizedWeight, Weight

from .adapters import TARGETS, ActiveAdapter, scaled_factors


def compute_with_dropout(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    weights: ExpertWeights,
    adapters: Sequence[ActiveAdapter],
    *,
    activation: Activation,
    weight_on_input: bool,
    implementation: str | None,
) -> Tensor:  # [T, D]
    """Compute the result of `fused_experts` with dropout on the adapters' inputs."""
    offsets, options = permutation.offsets, {"implementation": implementation}
    rows = permute(tokens, permutation, **options)  # [R, D]
    if weight_on_input:
        # Scatter the routing weights to the rows [R]. Slots without a row write to an extra element, which is cut off.
        num_rows = len(permutation.row_to_token)
        row = torch.where(permutation.slot_to_row < 0, num_rows, permutation.slot_to_row).flatten().long()
        row_weights = topk_weights.new_zeros(num_rows + 1).scatter(0, row, topk_weights.flatten())[:num_rows]
        rows = (rows.to(row_weights.dtype) * row_weights[:, None]).to(rows.dtype)
    up, down = ([(scaled_factors(part, target), rate) for part, rate in adapters] for target in TARGETS)
    preactivation = _adapted_product(rows, weights.w_up, weights.b_up, up, offsets, **options)  # [R, 2F] or [R, F]
    activated = apply_activation(preactivation, activation, **options)  # [R, F]
    out = _adapted_product(activated, weights.w_down, weights.b_down, down, offsets, **options)  # [R, D]
    return combine(out, None if weight_on_input else topk_weights, permutation.slot_to_row, **options)


def _adapted_product(
    rows: Tensor,  # [R, in]
    weight: Weight,  # [E, out, in]
    bias: Tensor | None,  # [E, out]
    adapters: Sequence[tuple[tuple[Tensor, Tensor] | None, float]],  # each adapter's (a, scale * b), dropout
    offsets: Tensor,  # [E]
    *,
    implementation: str | None,
) -> Tensor:  # [R, out]
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight, rows.dtype, implementation=implementation)
    out = grouped_gemm(rows, weight.transpose(1, 2), offsets, bias=bias, implementation=implementation)
    for factors, dropout in adapters:
        if factors is not None:
            product = functional.dropout(rows, dropout)
            for factor in factors:
                factor = factor.to(rows.dtype).expand(len(weight), -1, -1)
                product = grouped_gemm(product, factor.transpose(1, 2), offsets, implementation=implementation)
            out = out + product
    return out
