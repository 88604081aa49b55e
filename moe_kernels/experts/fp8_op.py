"""The expert feed-forward with e4m3 operands in the products of forward and of the gradients of rows.

The steps are those of `fused_op.py`. Rows that are multiplied have a scale for each 128 columns, weights for each
128 x 128 block; sums are float32. Tensors are quantised where they are made:

    tokens, dout    once per token, before GEMMs gather their rows
    A               where the activation is computed from H; no other form of A is made in forward
    dH              where backward computes it, beside the form in the dtype of the tokens that dw_up reads
    weights         by the caller (`ScaledForms`), or here for each product, right before it

dw_up and dw_down are products in the dtype of the tokens of the same tensors as without FP8. The same tensors are
saved, and the given forms of the weights. With `saves_fp8` H is saved in e4m3, too, in a bit more than half the bytes;
backward reads it back, and overwrites it by dH.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation.ops import can_scale_gradient
from ..gemm.kernel import device_cc
from ..permutation.permute import launch_slot_products
from ..quantization.scaling import empty_scaled_rows, launch_dequantize_rows, launch_quantize_rows
from ..runtime.memory import empty_rows
from ..runtime.ops import registered_op
from ..runtime.packing import save_for_backward, saved_for_backward
from ..types import ScaledForms, ScaledRows
from .fused_op import ExpertOperands, down_gradients, hidden_shape, up_gradients
from .steps import HiddenGradients, activate, down, hidden_gradients, tokens_gradient, up_input_gradient

# Smallest sizes of the layers that were measured to be faster with e4m3 operands, all on compute capability 9.0. With
# fewer rows per expert, quantising the weights once per step takes what the products save.
_LEAST_D_MODEL, _LEAST_D_FF, _LEAST_ROWS = 2048, 768, 1024
_MEASURED_CC = 90

_FIRST_CC = 90  # compute capability of the first GPUs that have the kernels


def check_fp8_gpu(cc: int) -> None:
    """Raise NotImplementedError unless a GPU of compute capability `cc` runs the kernels of precision "fp8"."""
    if cc < _FIRST_CC:
        raise NotImplementedError(
            f"fused_experts: precision='fp8' needs a GPU of compute capability {_FIRST_CC / 10}, this one has {cc / 10}"
        )


@functools.cache
def warn_if_unmeasured(cc: int, d_model: int, d_ff: int, rows_per_expert: int) -> None:
    """Warn once for sizes or a GPU for which nothing says that e4m3 operands are faster."""
    if cc != _MEASURED_CC or d_model < _LEAST_D_MODEL or d_ff < _LEAST_D_FF or rows_per_expert < _LEAST_ROWS:
        message = (
            f'fused_experts: precision="fp8" was measured to be faster on compute capability {_MEASURED_CC / 10}, from '
            f"d_model {_LEAST_D_MODEL}, d_ff {_LEAST_D_FF} and {_LEAST_ROWS} rows per expert on; it may be slower than "
            f"without on {cc / 10}, with {d_model}, {d_ff} and {rows_per_expert}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class _Outputs(NamedTuple):
    out: Tensor  # [T, D]
    preactivation: Tensor  # H [R, 2F or F], bytes of e4m3 with `saves_fp8`, empty if backward computes it again
    scales: Tensor  # [R, 2F / 128 or F / 128] of H in e4m3, else empty


@registered_op("fp8_experts")
def fp8_experts_op(operands: ExpertOperands, forms: ScaledForms, saves_fp8: bool) -> _Outputs:
    tokens, topk_weights, _, _, rows, recompute = operands
    if tokens.is_cuda:
        num_experts, d_model, d_ff = operands.experts.weights.w_down.shape
        rows_per_expert = rows.row_to_token.shape[0] // num_experts
        cc = device_cc(tokens.device)
        check_fp8_gpu(cc)
        warn_if_unmeasured(cc, d_model, d_ff, 2 ** rows_per_expert.bit_length() // 2)
    experts = operands.experts.scaled(forms)
    preactivation, activated, _ = activate(experts, rows, tokens, topk_weights)
    scales = tokens.new_empty(0)
    if recompute:
        preactivation = tokens.new_empty(0)
    elif saves_fp8:
        values, scales = launch_quantize_rows(preactivation)
        preactivation = values.view(torch.uint8)
    expert_out = down(experts, rows, activated)  # [R, D]
    del activated
    return _Outputs(rows.combine(expert_out, experts.output_weights(topk_weights)), preactivation, scales)


@fp8_experts_op.register_fake
def _(operands, forms, saves_fp8):
    tokens = operands.tokens
    out, scales = tokens.new_empty(tokens.shape), tokens.new_empty(0)
    if operands.recompute:
        return _Outputs(out, tokens.new_empty(0), scales)
    if saves_fp8:
        values, scales = empty_scaled_rows(tokens, *hidden_shape(operands))
        return _Outputs(out, values.view(torch.uint8), scales)
    return _Outputs(out, empty_rows(tokens, *hidden_shape(operands)), scales)


class _Saved(NamedTuple):
    operands: ExpertOperands
    forms: ScaledForms
    preactivation: Tensor
    scales: Tensor


def _setup(ctx: Any, inputs: tuple[ExpertOperands, ScaledForms, bool], output: _Outputs) -> None:
    operands, forms, _ = inputs
    ctx.set_materialize_grads(False)
    save_for_backward(ctx, _Saved(operands, forms, output.preactivation, output.scales))


def _backward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients. Each tensor is dropped after its last use."""
    if dout is None:
        return fp8_experts_op.gradients()
    operands, forms, preactivation, scales = saved_for_backward(ctx)
    experts, needed = operands.experts, fp8_experts_op.needed(ctx)
    needs_weights = needed["topk_weights"]
    needs_tokens = needed["tokens"] or (needs_weights and experts.weight_on_input)
    needs_weights |= operands.w_router is not None
    hidden = _hidden_gradients_op(dout, preactivation, scales, operands, forms, needs_tokens, needs_weights)
    del preactivation
    dpreactivation, weighted, dtopk_weights, scaled, scales = hidden
    del hidden
    empty = dout.new_empty(0)
    gradients = down_gradients(
        needed, dout, HiddenGradients(dpreactivation, weighted, dtopk_weights, empty, empty, empty), operands
    )
    del weighted
    if needs_tokens:
        gradients["tokens"], of_input = _tokens_gradient_op(scaled, scales, dtopk_weights, operands, forms)
        dtopk_weights = of_input if experts.weight_on_input else dtopk_weights
    del scaled, scales
    gradients["topk_weights"] = dtopk_weights
    gradients |= up_gradients(needed, dpreactivation, empty, empty, operands)
    return fp8_experts_op.gradients(**gradients)


fp8_experts_op.register_autograd(_backward, setup_context=_setup)


class _HiddenGradients(NamedTuple):
    dpreactivation: Tensor  # dH [R, 2F or F]
    weighted: Tensor  # A_w [R, F]
    dtopk_weights: Tensor  # [T, K] float32, where the weights multiply the output
    scaled: Tensor  # dH in e4m3 [R, 2F or F], empty unless needed; the next likewise
    scales: Tensor  # [R, 2F / 128 or F / 128]


@registered_op("fp8_experts_hidden_gradients")
def _hidden_gradients_op(
    dout: Tensor,
    preactivation: Tensor,
    scales: Tensor,
    operands: ExpertOperands,
    forms: ScaledForms,
    needs_tokens: bool,
    needs_topk_weights: bool,
) -> _HiddenGradients:
    tokens, topk_weights, _, _, rows, recompute = operands
    experts, is_own = operands.experts.scaled(forms), recompute or scales.numel() > 0  # not a saved tensor
    if recompute:
        preactivation, *_ = activate(experts, rows, tokens, topk_weights)
    elif is_own:
        values = preactivation.view(torch.float8_e4m3fn)
        preactivation = launch_dequantize_rows(ScaledRows(values, scales), dout.dtype)
    scaled = None
    if needs_tokens and can_scale_gradient(experts.kind(), experts.weights.w_down.shape[2]):
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
    if scaled is None:
        scaled = launch_quantize_rows(made.dpreactivation) if needs_tokens else empty_scaled_rows(dout, 0, 0)
    return _HiddenGradients(made.dpreactivation, made.weighted, made.dtopk_weights, *scaled)


@_hidden_gradients_op.register_fake
def _(dout, preactivation, scales, operands, forms, needs_tokens, needs_topk_weights):
    num_rows, d_up = hidden_shape(operands)
    weights = operands.topk_weights
    return _HiddenGradients(
        empty_rows(dout, num_rows, d_up),
        empty_rows(dout, num_rows, operands.experts.weights.w_down.shape[2]),
        weights.new_empty(weights.shape),
        *(empty_scaled_rows(dout, num_rows, d_up) if needs_tokens else empty_scaled_rows(dout, 0, 0)),
    )


class _InputGradients(NamedTuple):
    dtokens: Tensor  # [T, D]
    dtopk_weights: Tensor  # [T, K], empty unless the weights are on the input


@registered_op("fp8_experts_tokens_gradient")
def _tokens_gradient_op(
    scaled: Tensor, scales: Tensor, dtopk_weights: Tensor, operands: ExpertOperands, forms: ScaledForms
) -> _InputGradients:
    tokens, topk_weights, _, w_router, rows, _ = operands
    experts = operands.experts.scaled(forms)
    dup_input = up_input_gradient(experts, rows, ScaledRows(scaled, scales), None)  # dX [R, D]
    dtokens = tokens_gradient(experts, rows, dup_input, topk_weights, dtopk_weights, w_router)
    if not experts.weight_on_input:
        return _InputGradients(dtokens, topk_weights.new_empty(0))
    return _InputGradients(dtokens, launch_slot_products(rows.as_read(tokens), dup_input, rows.slot_to_row))


@_tokens_gradient_op.register_fake
def _(scaled, scales, dtopk_weights, operands, forms):
    tokens, weights = operands.tokens, operands.topk_weights
    shape = weights.shape if operands.experts.weight_on_input else 0
    return _InputGradients(tokens.new_empty(tokens.shape), weights.new_empty(shape))
