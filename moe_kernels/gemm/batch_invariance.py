"""Helpers for ops with `batch_invariant=True`: bit for bit, a token's result does not depend on the other tokens.

The batch can influence a token's result in three ways:

* The number of rows usually decides which kernel multiplies, and each kernel sums in its own order. These ops therefore
  choose the kernel for `ASSUMED_ROWS` rows per group. Only this package's kernels compute a token's result, because
  libraries such as cuBLAS choose by the actual number of rows. Within a kernel, all tiles sum in the same order.
* The address and strides of the tokens also decide between kernels. `canonical_layout` therefore makes the layout
  independent of the batch.
* On a CPU, PyTorch's summation order depends on the shape of a product. PyTorch also computes the ends of a tensor with
  other instructions than the middle. The reference therefore computes each token alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime.checks import check_same_device, check_same_dtype, check_shapes, result_dtype
from ..runtime.dispatch import choose, without_autocast
from ..runtime.registered_ops import registered_op
from . import selection
from .arguments.dense import GemmArguments

ASSUMED_ROWS = 2048  # number of rows per group for which kernels are chosen


def invariant_linear(
    tokens: Tensor,  # [T, D]
    weight: Tensor,  # [N, D]
    *,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:  # [T, N]
    """Return `tokens @ weight.T`. A token's result and gradient do not depend on the other tokens, bit for bit.

    Accumulates in float32 and rounds once. Float32 operands use TF32 only if
    `torch.backends.cuda.matmul.fp32_precision` is "tf32", for example after
    `torch.set_float32_matmul_precision("high")`. Deterministic. Differentiable in `tokens` and `weight`. The gradient
    of `weight` is a sum over all tokens. Upstream gradients are first rounded to the dtype of `tokens`.

    Args:
        out_dtype: dtype of the result. None, the default, is the dtype of `tokens`. 16-bit operands also allow float32.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature.
    """
    check_shapes("invariant_linear", tokens=(tokens, "T D"), weight=(weight, "N D"))
    check_same_dtype("invariant_linear", tokens=tokens, weight=weight)
    check_same_device("invariant_linear", tokens=tokens, weight=weight)
    out_dtype = result_dtype("invariant_linear", tokens, None, out_dtype)
    if choose("invariant_linear", implementation, tokens) == "reference":
        matrix = widened(weight)
        with without_autocast(tokens):
            (out,) = token_by_token(lambda token: (functional.linear(widened(token), matrix),), tokens)
        return out.to(out_dtype)
    return invariant_product(tokens, weight.t(), out_dtype)


def widened(tensor: Tensor) -> Tensor:
    """Return a float32 copy of a 16-bit tensor, and other tensors unchanged. If a tensor is used repeatedly,
    autograd sums the gradients in the tensor's dtype. Therefore widen 16-bit tensors before a loop over tokens."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def token_by_token(op: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `op` to each token alone and return the joined results. Axis 0 of every tensor is the token axis."""
    if not len(tensors[0]):
        return tuple(op(*tensors))
    results = []
    for i in range(len(tensors[0])):
        # Copy the token to separate tensors, so that the alignment of their addresses does not depend on the batch.
        token = (tensor[i : i + 1].clone(memory_format=torch.contiguous_format) for tensor in tensors)
        results.append(op(*token))
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def canonical_layout(rows: Tensor) -> Tensor:
    """Return the same values in a layout independent of the batch: contiguous, at an address divisible by 16."""
    if rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows.view(-1).view(rows.shape)  # a single row may have any row stride; the views reset the stride
    return rows.clone(memory_format=torch.contiguous_format)


@registered_op("invariant_product")
def invariant_product(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    out_dtype: torch.dtype,
) -> Tensor:  # [M, N]
    """Return a @ b, computed by the same kernel for every M. The arguments are already checked."""
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    selection.run(GemmArguments(canonical_layout(a), b, out, assumed_rows=ASSUMED_ROWS))
    return out


@invariant_product.register_fake
def _(a, b, out_dtype):
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, dout):
    a, b = ctx.saved_tensors
    dout = dout.to(a.dtype)
    da = invariant_product(dout, b.t(), a.dtype) if ctx.needs_input_grad[0] else None
    with without_autocast(a):
        db = a.t() @ dout if ctx.needs_input_grad[1] else None
    return da, db, None


invariant_product.register_autograd(_backward, setup_context=_setup)
