"""Grouped GEMM over contiguous row ranges, its input gradient and its weight gradient.

    grouped_gemm:        out[start:end] = a[start:end] @ b[g]              rows are ragged
    its input gradient:  the same product with b transposed as a view, without a copy
    grouped_gemm_wgrad:  out[g] = a[start:end].T @ dout[start:end]         the reduction is ragged

Group g has the rows from `start = offsets[g - 1]` (0 for the first group) to `end = offsets[g]`, as in
`torch.nn.functional.grouped_mm`. `selection.select` chooses a kernel of `gemm/kernels`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ... import reference
from ...activation.ops import _activation_backward_op, launch_activation, settings_of
from ...reference_fp8 import BLOCK, dequantize_blocks
from ...runtime.checks import check_no_gradient
from ...runtime.dispatch import FLOAT8, choose, is_traced, without_autocast
from ...runtime.registered_ops import registered_op
from ...specs import as_activation
from .. import selection
from ..arguments.block_scaled import BlockScaledGemmArguments
from ..arguments.grouped import GroupedGemmArguments, WgradArguments
from ..kernels.families import RowTileKernel
from ..passes import launch_bias_and_scale, launch_row_scale_backward
from .grouped_checks import check_out, check_product, check_values, check_wgrad, choose_gemm, has_block_scales
from .reference_ops import multiply_groups_op, wgrad_op


def grouped_gemm(
    a: Tensor,  # [R, K]
    b: Tensor,  # [G, K, N]
    offsets: Tensor,  # [G] int32, exclusive END row of each group
    *,
    bias: Tensor | None = None,  # [G, N]
    row_scale: Tensor | None = None,  # [R] float32
    activation: str | None = None,
    scale_a: Tensor | None = None,  # [R] or [R, ceil(K / 128)] float32
    scale_b: Tensor | None = None,  # [G, N] or [G, ceil(K / 128), ceil(N / 128)] float32
    out: Tensor | None = None,  # [R, N]; [R, F] with an activation, N = 2F
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:  # [R, N]; [R, F] with an activation
    """Multiply each group of rows by its own matrix:

        out[start:end] = activation(row_scale * (scale_a * scale_b[g] * (a[start:end] @ b[g]) + bias[g]))

    `row_scale` also scales the bias, so that a routing weight passed as `row_scale` scales an expert's whole output.
    Operands may have any strides: a stored [G, N, K] weight is passed as `.transpose(-2, -1)` without a copy.
    Accumulates in float32. Tensor cores sum 128 float8 products at a time with about 14 bits, and these sums are
    accumulated in float32. Float32 operands use TF32 only if `torch.backends.cuda.matmul.fp32_precision` is "tf32", for
    example after `torch.set_float32_matmul_precision("high")`. In the result, rows at or past `offsets[-1]` are zeros.
    In the operands, these rows affect neither the result nor a gradient, even if they hold NaN. Deterministic, without
    host synchronisation.

    Differentiable in `a`, `b`, `bias` and `row_scale`, unless `a` is float8. The gradient of `b` has `b`'s storage
    order (rows or columns), with zeros for empty groups. The backward pass rounds upstream gradients to the dtype
    of `a` before its GEMMs.

    Shapes: a [R, K], b [G, K, N], offsets [G] int32, bias [G, N], row_scale [R] float32, scale_a [R] or [R, ceil(K /
    128)] float32, scale_b [G, N] or [G, ceil(K / 128), ceil(N / 128)] float32, out [R, N] or [R, F], result
    [R, N] or [R, F].

    Args:
        offsets: CPU offsets are checked. A check on a GPU would need a host synchronisation, so kernels clamp GPU
            offsets to a non-decreasing sequence within [0, R].
        bias: in the dtype of `a` or of the result, or float32.
        activation: the name of a gated activation. The activation gets the gate columns [0, F) and the up columns
            [F, 2F), rounded to `out_dtype`. Default: none.
        scale_a: scale of each row of a float8 `a`, or of each block of 128 values in a row. The fastest kernels need
            block scales that are stored by columns, as `quantize_rows` returns them.
        scale_b: scale of each column of a float8 `b`, or of each block of 128 x 128 values. Use block scales for both
            operands or for neither. With block scales, the fastest kernels need `b` and `scale_b` as transposed views
            of contiguous tensors, such as the values and scales that `quantize` returns.
        out: tensor for the result. `out` must share no memory with an operand, and no input may require a gradient.
        out_dtype: default: `out`'s dtype. Without `out`, the default is `a`'s dtype, or bfloat16 for float8. 16-bit
            operands also allow float32. Float8 (e4m3) operands allow float16, bfloat16 and float32.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, the activation is unknown, CPU offsets are
            not sorted within [0, R], `out` is expanded, an input requires a gradient although `out` is given, or an
            input of a float8 product requires a gradient.
        NotImplementedError: the operands are float8 and the GPU is below compute capability 8.9. Below 8.9, only the
            reference multiplies float8 operands, by upcasting them.
    """
    out_dtype = check_product(a, b, offsets, bias, row_scale, scale_a, scale_b, activation, out, out_dtype)
    check_values("grouped_gemm", "offsets", offsets, a.shape[0])
    if out is not None:
        check_out("grouped_gemm", out, a, b, bias, row_scale, scale_a, scale_b)
    elif a.dtype == FLOAT8:
        check_no_gradient("grouped_gemm", "float8 operands", a, b, bias, row_scale, scale_a, scale_b)
    if choose_gemm("grouped_gemm", implementation, a) == "reference":
        with without_autocast(a):
            if scale_a is not None and scale_b is not None and has_block_scales(scale_a):
                a = dequantize_blocks(a, scale_a, 1, BLOCK, torch.float32)
                b = dequantize_blocks(b, scale_b, BLOCK, BLOCK, torch.float32)
                scale_a = scale_b = None
            others = {"row_scale": row_scale, "scale_a": scale_a, "scale_b": scale_b, "activation": activation}
            others["multiply"] = multiply_groups_op if is_traced(a) else reference.multiply_groups
            return reference.grouped_gemm(a, b, offsets, bias=bias, **others, out=out, out_dtype=out_dtype)
    operands = a, b, offsets, bias, row_scale, scale_a, scale_b
    if out is not None:
        _grouped_gemm_out_op(*operands, activation, out)
        return out
    if activation is not None:
        return _gated_gemm_op(*operands, activation, out_dtype)[0]
    return _grouped_gemm_op(*operands, out_dtype)


def grouped_gemm_wgrad(
    a: Tensor,  # [R, K]
    dout: Tensor,  # [R, N]
    offsets: Tensor,  # [G] int32, exclusive END row of each group
    *,
    out: Tensor | None = None,  # [G, K, N]
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    implementation: str | None = None,
) -> Tensor:  # [G, K, N]
    """Return the weight gradient of `grouped_gemm`: each group's `a.T @ dout`, with exact zeros for empty groups.

    Accumulates in float32 and rounds once. Operands may have any strides. Rows at or past `offsets[-1]` are not read.
    Deterministic. Differentiable in `a` and `dout`.

    Shapes: a [R, K], dout [R, N], offsets [G] int32, out [G, K, N]; result [G, K, N].

    Args:
        out: tensor for the result. `out` must share no memory with an operand, and no input may require a gradient.
        out_dtype: default: `out`'s dtype, or `a`'s dtype without `out`. 16-bit operands also allow float32.
        accumulate: add the product to `out` and round once, for example to sum the gradients of several backward passes
            in float32. Default: False.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, CPU offsets are not sorted within [0, R],
            `out` is expanded, an input requires a gradient although `out` is given, the operands are float8, or
            `accumulate` is set without `out`.
    """
    out_dtype = check_wgrad(a, dout, offsets, out, out_dtype)
    if accumulate and out is None:
        raise ValueError("grouped_gemm_wgrad: accumulate needs out, got none")
    check_values("grouped_gemm_wgrad", "offsets", offsets, a.shape[0])
    if out is not None:
        check_out("grouped_gemm_wgrad", out, a, dout)
    if choose("grouped_gemm_wgrad", implementation, a) == "reference":
        with without_autocast(a):
            if is_traced(a):
                dtype = torch.promote_types(a.dtype, out_dtype)
                matrices = wgrad_op(a.to(dtype), dout.to(dtype), offsets)
                matrices = (matrices + out if accumulate and out is not None else matrices).to(out_dtype)
                return matrices if out is None else out.copy_(matrices)
            options = {"out": out, "out_dtype": out_dtype, "accumulate": accumulate}
            return reference.grouped_gemm_wgrad(a, dout, offsets, **options)
    if out is not None:
        _wgrad_out_op(a, dout, offsets, out, accumulate)
        return out
    return _wgrad_op(a, dout, offsets, False, out_dtype)


def _launch(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str | None,
    out: Tensor,
    preactivation: Tensor | None = None,
) -> None:
    product = out if preactivation is None else preactivation
    if scale_a is not None and scale_b is not None and has_block_scales(scale_a):
        scaled = BlockScaledGemmArguments(a, b, product, scale_a, scale_b, offsets=offsets)
        if bias is not None or row_scale is not None:
            kernel = selection.select(scaled)
            assert isinstance(kernel, RowTileKernel)
            scaled = dataclasses.replace(scaled, tile_table=kernel.tile_table(scaled))  # for both launches below
        selection.run(scaled)
        if scaled.tile_table is not None:
            launch_bias_and_scale(product, bias, row_scale, scaled.tile_table)
    else:
        args = GroupedGemmArguments(
            a, b, product, offsets=offsets, bias=bias, row_scale=row_scale, scale_a=scale_a, scale_b=scale_b
        )
        if activation is not None and bias is None:  # fused kernels would store a preactivation without the bias
            fused = dataclasses.replace(args, out=out, epilogue=activation, preactivation=preactivation)
            if selection.run_if_supported(fused):
                return
        selection.run_product(args)
    if activation is not None:
        out.copy_(launch_activation(product, as_activation("grouped_gemm", activation)))


@registered_op("grouped_gemm_out", mutates=("out",))
def _grouped_gemm_out_op(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str | None,
    out: Tensor,
) -> None:
    preactivation = None if activation is None else out.new_empty(a.shape[0], b.shape[2])
    _launch(a, b, offsets, bias, row_scale, scale_a, scale_b, activation, out, preactivation)


@registered_op("grouped_gemm")
def _grouped_gemm_op(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[2], dtype=out_dtype)
    _launch(a, b, offsets, bias, row_scale, scale_a, scale_b, None, out)
    return out


@_grouped_gemm_op.register_fake
def _(a, b, offsets, bias=None, row_scale=None, scale_a=None, scale_b=None, out_dtype=None):
    return a.new_empty(a.shape[0], b.shape[2], dtype=out_dtype)


def _grouped_gemm_setup(ctx, inputs, output):
    # `inputs` does not contain trailing arguments that have their default value.
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(*(*inputs, None, None)[:5])


_grouped_gemm_op.register_autograd(
    lambda ctx, dout: _product_backward(ctx, dout, *ctx.saved_tensors), setup_context=_grouped_gemm_setup
)


@registered_op("gated_grouped_gemm")
def _gated_gemm_op(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # out [R, F], preactivation [R, 2F]
    out, preactivation = _empty_gated(a, b, out_dtype)
    _launch(a, b, offsets, bias, row_scale, scale_a, scale_b, activation, out, preactivation)
    return out, preactivation


def _empty_gated(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = a.shape[0], b.shape[2]
    return a.new_empty(num_rows, num_columns // 2, dtype=dtype), a.new_empty(num_rows, num_columns, dtype=dtype)


@_gated_gemm_op.register_fake
def _(a, b, offsets, bias, row_scale, scale_a, scale_b, activation, out_dtype):
    return _empty_gated(a, b, out_dtype)


def _gated_gemm_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.num_inputs, ctx.activation = len(inputs), inputs[7]
    ctx.save_for_backward(*inputs[:5], output[1])


def _gated_gemm_backward(ctx, dout, _):
    if dout is None:
        return (None,) * 9
    *inputs, preactivation = ctx.saved_tensors
    if inputs[4] is not None:
        # The gradient of a row's scale is a sum over the columns, in which rounding errors add up. The gradient of the
        # product therefore stays float32.
        preactivation, dout = preactivation.float(), dout.float()
    settings = settings_of(as_activation("grouped_gemm", ctx.activation))
    dpreactivation = _activation_backward_op(preactivation, dout, *settings)
    return _product_backward(ctx, dpreactivation, *inputs)


_gated_gemm_op.register_autograd(_gated_gemm_backward, setup_context=_gated_gemm_setup)


def _product_backward(
    ctx,
    dout: Tensor,  # [R, N] gradient of row_scale * (a @ b + bias)
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return a gradient for each input of the op. Inputs other than a, b, bias and row_scale get None."""
    needs_a, needs_b, _, needs_bias, needs_scale, *_ = (*ctx.needs_input_grad, False, False)
    da = db = dbias = drow_scale = None
    if row_scale is not None:
        dout, drow_scale = _row_scale_backward_op(dout, a, b, offsets, bias, row_scale, needs_scale)
    dout = dout.to(a.dtype)
    if needs_a:
        da = _grouped_gemm_op(dout, b.transpose(1, 2), offsets)
    if needs_b:
        db = _wgrad_op(a, dout, offsets, _is_transposed(b))
    if bias is not None and needs_bias:
        # Summing each group's rows equals a weight gradient with ones in place of `a`.
        ones = dout.new_ones(1, 1).expand(len(dout), 1)
        dbias = _wgrad_op(ones, dout, offsets, False).squeeze(1).to(bias.dtype)
    gradients = (da, db, None, dbias, drow_scale if needs_scale else None)
    return (*gradients, None, None, None, None)[: ctx.num_inputs]


@registered_op("row_scale_backward")
def _row_scale_backward_op(
    dout: Tensor,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor,
    needs_scale: bool,
) -> tuple[Tensor, Tensor]:  # gradient of the unscaled rows [R, N], dtype of `a`; drow_scale [R], empty if not needed
    rows = None
    if needs_scale:
        # The unscaled product is recomputed in float32, so that the forward pass need not save this product.
        rows = a.new_empty(dout.shape, dtype=torch.float32)
        selection.run_product(GroupedGemmArguments(a, b, rows, offsets=offsets, bias=bias))
    drows, drow_scale = launch_row_scale_backward(dout, row_scale, rows, a.dtype, offsets)
    return drows, row_scale.new_empty(0) if drow_scale is None else drow_scale


@_row_scale_backward_op.register_fake
def _(dout, a, b, offsets, bias, row_scale, needs_scale):
    return dout.new_empty(dout.shape, dtype=a.dtype), row_scale.new_empty(row_scale.shape if needs_scale else 0)


def _is_transposed(b: Tensor) -> bool:
    """Return whether b [G, K, N] is stored as [G, N, K]."""
    return b.stride(1) < b.stride(2)


def _launch_wgrad(a: Tensor, dout: Tensor, offsets: Tensor, out: Tensor, accumulate: bool) -> None:
    # The fastest kernels write contiguous rows. For a transposed `out`, compute out[g].T = dout.T @ a instead.
    operands = (dout, a, out.transpose(1, 2)) if _is_transposed(out) else (a, dout, out)
    selection.run(WgradArguments(*operands, offsets=offsets, accumulate=accumulate))


_wgrad_out_op = registered_op("grouped_gemm_wgrad_out", mutates=("out",))(_launch_wgrad)


@registered_op("grouped_gemm_wgrad")
def _wgrad_op(
    a: Tensor, dout: Tensor, offsets: Tensor, transposed: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the gradient [G, K, N], stored as [G, N, K] if `transposed`."""
    out = _empty_wgrad(a, dout, offsets, transposed, out_dtype)
    _launch_wgrad(a, dout, offsets, out, False)
    return out


@_wgrad_op.register_fake
def _empty_wgrad(a, dout, offsets, transposed, out_dtype=None):
    num_groups, size_k, size_n = offsets.shape[0], a.shape[1], dout.shape[1]
    if transposed:
        return a.new_empty(num_groups, size_n, size_k, dtype=out_dtype).transpose(1, 2)
    return a.new_empty(num_groups, size_k, size_n, dtype=out_dtype)


def _wgrad_setup(ctx, inputs, output):
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(*inputs[:3])


def _wgrad_backward(ctx, dmatrices):
    a, dout, offsets = ctx.saved_tensors
    needs_a, needs_dout, *_ = ctx.needs_input_grad
    dmatrices = dmatrices.to(a.dtype)  # [G, K, N]
    da = _grouped_gemm_op(dout, dmatrices.transpose(1, 2), offsets) if needs_a else None
    ddout = _grouped_gemm_op(a, dmatrices, offsets) if needs_dout else None
    return (da, ddout, None, None, None)[: ctx.num_inputs]


_wgrad_op.register_autograd(_wgrad_backward, setup_context=_wgrad_setup)
