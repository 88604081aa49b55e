"""Matrix products of a 16-bit linear router. The kernels also add bias and addend and round, in the same pass.

A launch costs the host a quarter of the time of a cuBLAS call through PyTorch. A list of launches can contain it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, tl, triton

_BUSY = 64  # programs that keep most SMs of a large GPU busy
_BLOCK_D, _BLOCK_T = 128, 64  # tile of the weight's gradient
_SUMMED = 512  # values per program; with 4 per thread, float32 is read and 16 bits are written without an exchange


def launch_product(
    a: Tensor,  # [M, K] 16-bit
    b: Tensor,  # [K, N], or [K / 2, N] for both halves of K
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,  # [N]
    addend: Tensor | None = None,  # [M, N]
) -> Tensor:  # [M, N]
    """Return a @ b + bias + addend, accumulated in float32 and rounded once."""
    (m, k), (rows, n) = a.shape, b.shape
    out = a.new_empty(m, n, dtype=out_dtype)
    if m:
        block_m, block_n, block_k, num_warps = _blocks(m, n)
        strides = None if addend is None else addend.stride()
        launch_kernel(
            _product_kernel,
            (cdiv(m, block_m), cdiv(n, block_n)),
            a,
            a.stride(),
            b,
            b.stride(),
            None if bias is None else bias.contiguous(),
            addend,
            strides,
            out,
            m,
            n,
            k,
            rows,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=num_warps,
            num_stages=3,
        )
    return out


def _blocks(m: int, n: int) -> tuple[int, int, int, int]:
    """Return rows, columns, depth and warps of a program. Tiles are the largest that still give enough programs to
    occupy the GPU."""
    for size, block_k, num_warps in ((128, 64, 8), (64, 128, 4)):
        if cdiv(m, size) * cdiv(n, size) >= _BUSY:
            return size, size, block_k, num_warps
    return (16, 16, 256, 4) if m <= 512 else (16, 32, 128, 2)


def launch_weight_gradient(
    dlogits: Tensor,  # [T, 2E] 16-bit contiguous: [high | low]
    tokens: Tensor,  # [T, D] 16-bit
    out_dtype: torch.dtype,
) -> Tensor:  # [E, D]
    """Return (high + low)^T @ tokens, accumulated in float32 and rounded once.

    Programs sum over shares of the tokens, and the shares are summed in a fixed order.
    """
    num_tokens, d_model = tokens.shape
    num_experts = dlogits.shape[1] // 2
    out = tokens.new_empty(num_experts, d_model, dtype=out_dtype)
    if not out.numel():
        return out
    block_e = 16 if num_experts <= 16 else 64
    tiles = cdiv(num_experts, block_e) * cdiv(d_model, _BLOCK_D)
    num_shares = max(1, min(cdiv(num_tokens, 4 * _BLOCK_T), cdiv(3 * _BUSY, tiles)))
    parts = tokens.new_empty(num_shares, num_experts, d_model, dtype=torch.float32)
    launch_kernel(
        _weight_gradient_kernel,
        (cdiv(num_experts, block_e), cdiv(d_model, _BLOCK_D), num_shares),
        dlogits,
        tokens,
        tokens.stride(),
        parts,
        num_tokens,
        cdiv(num_tokens, num_shares),
        num_experts,
        d_model,
        BLOCK_E=block_e,
        BLOCK_D=_BLOCK_D,
        BLOCK_T=_BLOCK_T,
        num_warps=4,
        num_stages=3,
    )
    size, block = out.numel(), _SUMMED
    launch_kernel(
        _sum_of_shares_kernel, (cdiv(size, block),), parts, out, size, num_shares, BLOCK=block, num_warps=block // 128
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a_ptr,  # [M, K]
    a_strides,
    b_ptr,  # [B_ROWS, N]; row k % B_ROWS meets column k of a
    b_strides,
    bias_ptr,  # [N] contiguous, or None
    addend_ptr,  # [M, N], or None
    addend_strides,
    out_ptr,  # [M, N] contiguous
    M,
    N,
    K,
    B_ROWS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes out[BLOCK_M, BLOCK_N]. Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    lane = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + row * a_strides[0]
    b_columns = b_ptr + column * b_strides[1]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + lane
        a = tl.load(a_rows + k[None, :].to(tl.int64) * a_strides[1], mask=(row < M) & (k < K)[None, :], other=0.0)
        b_row = (k % B_ROWS)[:, None].to(tl.int64)
        b = tl.load(b_columns + b_row * b_strides[0], mask=(column < N) & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total)
    mask = (row < M) & (column < N)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    if addend_ptr is not None:
        addend = addend_ptr + row * addend_strides[0] + column * addend_strides[1]
        total += tl.load(addend, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "share"])
def _weight_gradient_kernel(
    dlogits_ptr,  # [T, 2E] contiguous
    tokens_ptr,  # [T, D]
    tokens_strides,
    parts_ptr,  # [shares, E, D] contiguous
    num_tokens,
    share,  # number of tokens per program
    E,
    D,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes parts[share, BLOCK_E, BLOCK_D]. Grid: (cdiv(E, BLOCK_E), cdiv(D, BLOCK_D), shares)."""
    first_expert = tl.program_id(0) * BLOCK_E
    expert = first_expert + tl.arange(0, BLOCK_E)[None, :]
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, num_tokens)
    lane = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for first in range(begin, end, BLOCK_T):
        token = (first + lane).to(tl.int64)
        exists = (first + lane < end)[:, None]
        high_ptr = dlogits_ptr + token[:, None] * (2 * E) + expert
        tokens = tokens_ptr + token[:, None] * tokens_strides[0] + column.to(tl.int64) * tokens_strides[1]
        x = tl.load(tokens, mask=exists & (column < D), other=0.0)
        total = tl.dot(tl.trans(tl.load(high_ptr, mask=exists & (expert < E), other=0.0)), x, total)
        total = tl.dot(tl.trans(tl.load(high_ptr + E, mask=exists & (expert < E), other=0.0)), x, total)
    row = first_expert + tl.arange(0, BLOCK_E)[:, None]
    out = parts_ptr + (tl.program_id(2).to(tl.int64) * E + row) * D + column
    tl.store(out, total, mask=(row < E) & (column < D))


@triton.jit(do_not_specialize=["num_shares"])
def _sum_of_shares_kernel(
    parts_ptr,  # [shares, N]
    out_ptr,  # [N]
    N,
    num_shares,
    BLOCK: tl.constexpr,
):
    """One program writes out[BLOCK]. Grid: (cdiv(N, BLOCK),)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    part = parts_ptr + i
    for _ in range(num_shares):
        total += tl.load(part, mask=i < N, other=0.0)
        part += N
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < N)
