"""Multiplies packed rows of several groups by one shared matrix, with gradients.

    out[start:end] = a_packed[start:end] @ b        with start, end = group_offsets[g], group_offsets[g + 1]

A kernel's tile may hold rows of several groups, because all groups multiply the same matrix (`gemm/kernels/jagged.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...errors import first_three
from ...runtime.checks import can_be_read, check_dtype, check_same_device, check_shapes
from ...runtime.dispatch import choose, without_autocast
from ...runtime.registered_ops import registered_op
from ...runtime.triton import cdiv
from ...runtime.upload import upload
from .. import selection
from ..arguments.grouped import WgradArguments
from ..arguments.jagged import JaggedGemmArguments
from ..kernels.families import num_programs
from ..kernels.jagged import make_jagged_table
from .grouped_checks import check_values


class PackedGroups(NamedTuple):
    """Groups of rows that are packed one after another."""

    a_packed: Tensor  # [R, K]
    group_offsets: Tensor  # [G + 1] int32: group g owns rows group_offsets[g] to group_offsets[g + 1]


def pack_groups(
    a_list: Sequence[Tensor],  # [M, K] each
) -> PackedGroups:
    """Copy groups of rows into one tensor for `jagged_gemm`. Differentiable. Offsets are uploaded asynchronously.

    Shapes: a_list [M, K] each; result a_packed [R, K], group_offsets [G + 1] int32.

    Raises:
        ValueError: the list is empty, or groups disagree in columns, dtype or device.
        NotImplementedError: a CUDA graph is being captured.
    """
    kinds = {(tuple(a.shape[1:]), a.dtype, a.device) for a in a_list}
    if len(kinds) != 1 or a_list[0].dim() != 2:
        raise ValueError(
            "pack_groups: a_list must hold matrices [M, K] of one K, dtype and device, got "
            f"{first_three((list(a.shape), a.dtype, str(a.device)) for a in a_list) or 'none'}"
        )
    offsets = torch.tensor([0, *accumulate(len(a) for a in a_list)], dtype=torch.int32, device="cpu")
    group_offsets = torch.empty_like(offsets, device=a_list[0].device)
    return PackedGroups(torch.cat(tuple(a_list)), upload("pack_groups", offsets, group_offsets))


def jagged_gemm(
    a_packed: Tensor,  # [R, K]
    b: Tensor,  # [K, N]
    group_offsets: Tensor,  # [G + 1] int32 or int64
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, N]
    """Multiply each group of rows by the same matrix. Differentiable in `a_packed` and `b`.

    Operands of different dtypes are first converted to the promoted dtype, which is also the result's dtype. Operands
    may have any strides. Accumulates in float32 and rounds once. Float32 operands use TF32 only if
    `torch.backends.cuda.matmul.fp32_precision` is "tf32", for example after
    `torch.set_float32_matmul_precision("high")`. In the result, rows at or past the last offset are zeros. These rows
    of `a_packed` affect neither the result nor a gradient. The gradient of `b` is summed in a fixed order and stored
    like `b`. Deterministic, without host synchronisation.

    Shapes: a_packed [R, K], b [K, N], group_offsets [G + 1] int32 or int64; result [R, N].

    Args:
        group_offsets: 0, then the exclusive END row of each group: one number more than the offsets of `grouped_gemm`.
            CPU offsets are checked. A check on a GPU would need a host synchronisation, so GPU offsets are clamped to a
            non-decreasing sequence within [0, R]. If the first GPU offset exceeds 0, rows before it are zeros.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, or CPU offsets do not start with 0 or are not
            sorted within [0, R].
    """
    check_shapes("jagged_gemm", a_packed=(a_packed, "R K"), b=(b, "K N"))
    check_same_device("jagged_gemm", a_packed=a_packed, b=b, group_offsets=group_offsets)
    if not (a_packed.is_floating_point() and b.is_floating_point()):
        raise ValueError(f"jagged_gemm: operands must be floating-point, got {a_packed.dtype} and {b.dtype}")
    _check_offsets(group_offsets, len(a_packed))
    dtype = torch.promote_types(a_packed.dtype, b.dtype)
    a_packed, b = a_packed.to(dtype), b.to(dtype)
    if choose("jagged_gemm", implementation, a_packed) == "reference":
        with without_autocast(a_packed):
            return reference.jagged_gemm(a_packed, b, group_offsets)
    return _jagged_gemm_op(a_packed, b, group_offsets)


def _check_offsets(group_offsets: Tensor, num_rows: int) -> None:
    check_dtype("jagged_gemm", "group_offsets", group_offsets, torch.int32, torch.int64)
    if group_offsets.dim() != 1 or len(group_offsets) < 2:
        raise ValueError(
            f"jagged_gemm: group_offsets must be [G + 1] with at least one group, got {list(group_offsets.shape)}"
        )
    check_values("jagged_gemm", "group_offsets", group_offsets, num_rows)
    if can_be_read(group_offsets) and group_offsets[0]:
        raise ValueError(
            f"jagged_gemm: group_offsets must start with 0, got {int(group_offsets[0])}; "
            "for end rows, as grouped_gemm takes them, pass torch.nn.functional.pad(offsets, (1, 0))"
        )


@registered_op("jagged_gemm")
def _jagged_gemm_op(a: Tensor, b: Tensor, group_offsets: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    selection.run(JaggedGemmArguments(a, b, out, group_offsets))
    return out


@_jagged_gemm_op.register_fake
def _(a, b, group_offsets):
    return a.new_empty(a.shape[0], b.shape[1])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dout):
    a, b, group_offsets = ctx.saved_tensors
    needs_a, needs_b, *_ = ctx.needs_input_grad
    da = _jagged_gemm_op(dout, b.t(), group_offsets) if needs_a else None
    db = _jagged_wgrad_op(a, dout, group_offsets, b.stride(0) < b.stride(1)) if needs_b else None
    return da, db, None


_jagged_gemm_op.register_autograd(_backward, setup_context=_setup)

_LEAST_PART_ROWS = 256


@registered_op("jagged_gemm_wgrad")
def _jagged_wgrad_op(a: Tensor, dout: Tensor, group_offsets: Tensor, transposed: bool) -> Tensor:
    """Return a.T @ dout over the rows of all groups, stored by columns if `transposed`. The reduction is long, but the
    result has few tiles. The rows are therefore cut into parts that run in parallel."""
    left, right = (dout, a) if transposed else (a, dout)
    num_rows, size_k, size_n = *left.shape, right.shape[1]
    num_tiles = max(cdiv(size_k, 128) * cdiv(size_n, 128), 1)
    parts = max(1, min(num_programs(left) // num_tiles, num_rows // _LEAST_PART_ROWS))
    partial = left.new_empty(parts, size_k, size_n, dtype=torch.float32)
    table = make_jagged_table(group_offsets, num_rows, 65536, parts=parts)
    selection.run(WgradArguments(left, right, partial, tile_table=table))
    total = partial.sum(0).to(a.dtype)
    return total.t() if transposed else total


@_jagged_wgrad_op.register_fake
def _(a, dout, group_offsets, transposed):
    return dout.new_empty(dout.shape[1], a.shape[1]).t() if transposed else a.new_empty(a.shape[1], dout.shape[1])
