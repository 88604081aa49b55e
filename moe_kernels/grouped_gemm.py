"""Grouped GEMM over contiguous row ranges, its input gradient and its weight gradient.

    grouped_gemm:        out[start:end] = a[start:end] @ b[g]              rows are ragged
    its input gradient:  the same with b transposed, by strides, not in memory
    grouped_gemm_wgrad:  out[g] = a[start:end].T @ dout[start:end]         the reduction is ragged

with `start, end = offsets[g - 1], offsets[g]`, the convention of `torch.nn.functional.grouped_mm`. The kernels are in
`gemm/`; `tuning.select` chooses one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from ._checks import check_dtype, check_same_device, check_same_dtype, check_shapes
from ._dispatch import choose, registered_op
from .catalog import GroupedGemmArguments, WgradArguments
from .tuning import select


def grouped_gemm(
    a: Tensor,  # [R, K]
    b: Tensor,  # [G, K, N]
    offsets: Tensor,  # [G] int32, exclusive END row of each group
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, N]
    """Multiply each group of rows by its own matrix. Differentiable in `a` and `b`.

    Any strides: a stored [G, N, K] weight goes in as `.transpose(-2, -1)` without a copy. Accumulates in float32 and
    rounds once; float32 operands use TF32 only after `torch.set_float32_matmul_precision`. Rows at or past
    `offsets[-1]` are zeros in the result and are never read, so NaN there reaches neither it nor a gradient. The
    gradient of `b` has `b`'s strides, zeros for empty groups. Deterministic, and never waits for the GPU.

    Args:
        offsets: on the CPU they are checked; on a GPU, where a check would wait, they are clamped to a non-decreasing
            sequence within [0, R].
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, or CPU offsets are not sorted within [0, R].
    """
    check_shapes("grouped_gemm", a=(a, "R K"), b=(b, "G K N"), offsets=(offsets, "G"))
    check_same_dtype("grouped_gemm", a=a, b=b)
    _check_offsets("grouped_gemm", offsets, len(a), a=a, b=b)
    if choose("grouped_gemm", implementation, a) == "reference":
        return reference.grouped_gemm(a, b, offsets)
    return _grouped_gemm_op(a, b, offsets)


def grouped_gemm_wgrad(
    a: Tensor,  # [R, K]
    dout: Tensor,  # [R, N]
    offsets: Tensor,  # [G] int32, exclusive END row of each group
    *,
    implementation: str | None = None,
) -> Tensor:  # [G, K, N]
    """The weight gradient of `grouped_gemm`: each group's `a.T @ dout`, exact zeros for an empty group.

    Accumulates in float32 and rounds once. Any strides. Rows at or past `offsets[-1]` are not read. Deterministic.
    Not differentiable with "triton".

    Raises:
        ValueError: as `grouped_gemm`.
    """
    check_shapes("grouped_gemm_wgrad", a=(a, "R K"), dout=(dout, "R N"), offsets=(offsets, "G"))
    check_same_dtype("grouped_gemm_wgrad", a=a, dout=dout)
    _check_offsets("grouped_gemm_wgrad", offsets, len(a), a=a, dout=dout)
    if choose("grouped_gemm_wgrad", implementation, a) == "reference":
        return reference.grouped_gemm_wgrad(a, dout, offsets)
    return _wgrad_op(a, dout, offsets, False)


def _check_offsets(op: str, offsets: Tensor, num_rows: int, **operands: Tensor) -> None:
    check_dtype(op, "offsets", offsets, torch.int32)
    check_same_device(op, offsets=offsets, **operands)
    if len(offsets) == 0:
        raise ValueError(f"{op}: offsets must have at least one group, got none")
    # While a graph is traced there are no values to check; the kernels clamp them.
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        values = offsets.tolist()
        if values != sorted(values) or values[0] < 0 or values[-1] > num_rows:
            raise ValueError(f"{op}: offsets must be non-decreasing and within [0, R={num_rows}], got {values}")


@registered_op("grouped_gemm")
def _grouped_gemm_op(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[2])
    args = GroupedGemmArguments(a, b, out, offsets=offsets)
    select(args).run(args)
    return out


@_grouped_gemm_op.register_fake
def _(a, b, offsets):
    return a.new_empty(a.shape[0], b.shape[2])


def _grouped_gemm_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_gemm_backward(ctx, dout):
    a, b, offsets = ctx.saved_tensors
    needs_a, needs_b, _ = ctx.needs_input_grad
    da = _grouped_gemm_op(dout, b.transpose(1, 2), offsets) if needs_a else None
    db = _wgrad_op(a, dout, offsets, _is_transposed(b)) if needs_b else None
    return da, db, None


_grouped_gemm_op.register_autograd(_grouped_gemm_backward, setup_context=_grouped_gemm_setup)


def _is_transposed(b: Tensor) -> bool:
    """Whether b [G, K, N] is stored as [G, N, K]."""
    return b.stride(1) < b.stride(2)


def empty_wgrad(like: Tensor, num_groups: int, size_k: int, size_n: int, transposed: bool) -> Tensor:
    """An unwritten [G, K, N] gradient, stored as [G, N, K] if `transposed`."""
    if transposed:
        return like.new_empty(num_groups, size_n, size_k).transpose(1, 2)
    return like.new_empty(num_groups, size_k, size_n)


@registered_op("grouped_gemm_wgrad")
def _wgrad_op(a: Tensor, dout: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    out = empty_wgrad(a, len(offsets), a.shape[1], dout.shape[1], transposed)
    args = WgradArguments(a, dout, out, offsets=offsets)
    select(args).run(args)
    return out


@_wgrad_op.register_fake
def _(a, dout, offsets, transposed):
    return empty_wgrad(a, offsets.shape[0], a.shape[1], dout.shape[1], transposed)
