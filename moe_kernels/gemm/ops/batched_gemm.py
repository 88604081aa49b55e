"""Dense and batched GEMM with float32 accumulation. `selection.select` chooses a kernel of `gemm/kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ...runtime.checks import check_same_device, check_same_dtype, check_shapes, result_dtype
from ...runtime.dispatch import FLOAT8, choose, without_autocast
from ...runtime.registered_ops import registered_op
from .. import selection
from ..arguments.dense import GemmArguments


def batched_gemm(
    a: Tensor,  # [M, K] or [L, M, K]
    b: Tensor,  # [K, N] or [L, K, N]
    *,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:  # [M, N]; [L, M, N] if an operand is batched
    """Return a @ b for each pair of matrices of a batch. An operand without a batch axis is used in every pair.
    Differentiable in `a` and `b`. Deterministic.

    Operands may have any strides. Accumulates in float32 and rounds once. Float32 operands use TF32 only if
    `torch.backends.cuda.matmul.fp32_precision` is "tf32", for example after
    `torch.set_float32_matmul_precision("high")`. The backward pass rounds upstream gradients to the dtype of `a`.

    Shapes: a [M, K] or [L, M, K], b [K, N] or [L, K, N]; result [M, N] or [L, M, N].

    Args:
        out_dtype: default: `a`'s dtype. 16-bit operands also allow float32.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature.
    """
    shapes = {}
    for name, tensor, pattern in (("a", a, "M K"), ("b", b, "K N")):
        shapes[name] = (tensor, f"L {pattern}" if isinstance(tensor, Tensor) and tensor.dim() == 3 else pattern)
    check_shapes("batched_gemm", **shapes)
    check_same_dtype("batched_gemm", a=a, b=b)
    check_same_device("batched_gemm", a=a, b=b)
    if a.dtype == FLOAT8:
        raise ValueError(f"batched_gemm: operands must have 16 bits or more, got {a.dtype}")
    out_dtype = result_dtype("batched_gemm", a, None, out_dtype)
    if choose("batched_gemm", implementation, a) == "reference":
        with without_autocast(a):
            return reference.batched_gemm(a, b, out_dtype=out_dtype)
    return _batched_gemm_op(a, b, out_dtype)


@registered_op("batched_gemm")
def _batched_gemm_op(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = _empty_product(a, b, out_dtype)
    selection.run(GemmArguments(a, b, out))
    return out


def _empty_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    batch = (a if a.dim() == 3 else b).shape[:-2]
    return a.new_empty(*batch, a.shape[-2], b.shape[-1], dtype=dtype)


_batched_gemm_op.register_fake(_empty_product)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, dout):
    a, b = ctx.saved_tensors
    needs_a, needs_b, *_ = ctx.needs_input_grad
    dout = dout.to(a.dtype)
    da = _summed_product(dout, b.mT, a.dim()) if needs_a else None
    db = _summed_product(a.mT, dout, b.dim()) if needs_b else None
    return da, db, None


def _summed_product(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """Return left @ right as the gradient of an operand with `dim` axes. If the operand has no batch axis, but `left`
    and `right` do, the gradient is the sum of the batch's products. The sum is computed as one longer reduction."""
    if dim == 2 and left.dim() == 3:
        left = left.transpose(0, 1).flatten(1)  # [M, L * K]
        right = right.flatten(0, 1)  # [L * K, N]
    return _batched_gemm_op(left, right, left.dtype)


_batched_gemm_op.register_autograd(_backward, setup_context=_setup)
