"""The sum of the partial results that several ranks computed for one rank's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.checks import check_same_device, check_same_dtype, check_shapes
from ..runtime.dispatch import choose
from ..runtime.launch import launch_kernel
from ..runtime.registered_ops import on_device_of
from ..runtime.triton import cdiv, tl, triton

_BLOCK = 1024


def sum_shares(
    own: Tensor,  # [T, D] contiguous
    received: Tensor,  # [P, T, D] contiguous
    rank: int,
    out: Tensor,  # [T, D], each row contiguous
) -> None:
    """Write the sum of the partial results of P ranks to `out`. `own` replaces `received[rank]`, which is not read.

    Accumulates in float32, in the order of the ranks, and rounds once. Deterministic. Runs only with Triton. Not
    differentiable.

    Raises:
        NotImplementedError: Triton kernels cannot run on the device, or cannot compute in the dtype.
        ValueError: a shape, dtype or device disagrees with the signature, a tensor is not contiguous, or `rank` is not
            in [0, P).
    """
    check_shapes("sum_shares", own=(own, "T D"), received=(received, "P T D"), out=(out, "T D"))
    check_same_device("sum_shares", own=own, received=received, out=out)
    check_same_dtype("sum_shares", own=own, received=received, out=out)
    if not 0 <= rank < len(received):
        raise ValueError(f"sum_shares: rank must be in [0, {len(received)}), got {rank}")
    if not (own.is_contiguous() and received.is_contiguous() and out[:1].is_contiguous()):
        strides = own.stride(), received.stride(), out.stride()
        raise ValueError(f"sum_shares: own, received and each row of out must be contiguous, got strides {strides}")
    choose("sum_shares", "triton", own)
    if out.numel():
        on_device_of(own, launch_sum_shares, own, received, rank, out)
        torch.autograd.graph.increment_version(out)


def launch_sum_shares(own: Tensor, received: Tensor, rank: int, out: Tensor) -> None:
    """Compute `sum_shares` for checked tensors that are not empty."""
    num_rows, num_columns = (1, out.numel()) if out.is_contiguous() else out.shape
    launch_kernel(
        _sum_shares_kernel,
        (num_rows * cdiv(num_columns, _BLOCK),),
        own,
        received,
        out,
        out.stride(0),
        num_columns,
        rank,
        out.numel(),
        NUM_SHARES=len(received),
        BLOCK=_BLOCK,
        num_warps=_BLOCK // 256,  # 8 columns per thread, 16 bytes of a 16-bit dtype
    )


# Triton specialises all integers except `rank`. If Triton knows that 16 divides `size` and `columns`, loads read 16
# bytes at a time.
@triton.jit(do_not_specialize=["rank"])
def _sum_shares_kernel(
    own_ptr,  # [rows, columns] contiguous
    received_ptr,  # [P, rows, columns] contiguous
    out_ptr,  # [rows, columns]
    out_stride,  # distance between rows
    columns,
    rank,
    size,  # rows * columns
    NUM_SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes out[r, c:c + BLOCK], the sum of the ranks' results. Grid: (rows * cdiv(columns, BLOCK),)."""
    num_blocks = (columns - 1) // BLOCK + 1
    r = (tl.program_id(0) // num_blocks).to(tl.int64)
    c = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)  # [BLOCK]
    for share in tl.static_range(NUM_SHARES):
        start = tl.where(share == rank, own_ptr, received_ptr + share * tl.cast(size, tl.int64))
        total += tl.load(start + r * columns + c, mask=c < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + r * out_stride + c, total.to(out_ptr.dtype.element_ty), mask=c < columns)
