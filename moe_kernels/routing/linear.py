"""The GEMMs of a linear router: its logits, and the gradients of tokens and weights.

The functions run inside registered ops. If Inductor's graph contained the GEMMs, Inductor would compile them a second
time for small numbers of tokens. For a 16-bit router, the GEMM kernels also add a bias and an addend and round the sum.
A kernel launch takes a quarter of the host time of a cuBLAS call through PyTorch, and can be part of a `LaunchList`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.batch_invariance import invariant_product
from ..runtime.checks import check_same_device, check_same_dtype, check_shapes
from ..runtime.dispatch import kernel_obstacle, once_per_form
from ..runtime.launch import launch_kernel, with_strides
from ..runtime.triton import cdiv, tl, triton

_BUSY = 64  # number of programs that keeps about half of the 132 SMs of an H200 busy
_BLOCK_D, _BLOCK_T = 128, 64  # sizes of the blocks of columns and tokens for the weight's gradient
_SUMMED = 512  # sums per program of `_sum_of_shares_kernel`; with 4 per thread, loads and 16-bit stores share a layout


@once_per_form
def check_linear_router(tokens: Tensor, w_router: Tensor) -> None:
    """Raise ValueError unless shapes, devices and dtypes fit. Both tensors must have the same floating-point dtype,
    except that 16-bit tokens allow a float32 weight."""
    check_shapes("linear_routing", tokens=(tokens, "T D"), w_router=(w_router, "E D"))
    if w_router.dtype != torch.float32 or tokens.dtype not in (torch.bfloat16, torch.float16):
        check_same_dtype("linear_routing", tokens=tokens, w_router=w_router)
    check_same_device("linear_routing", tokens=tokens, w_router=w_router)


def halves_dtype(tokens: Tensor, w_router: Tensor) -> torch.dtype | None:
    """Return the dtype of the router's GEMMs if they are 16-bit, or None if they are float32.

    16-bit GEMMs take tokens and weight unchanged. The gradient of the logits is split into two 16-bit matrices,
    [high | low]. The relative error of high + low is at most the square of the 16-bit relative rounding error. A GEMM
    with both halves costs twice as much as with `high` only.
    """
    runs = kernel_obstacle(tokens) is None
    return tokens.dtype if runs and w_router.dtype == tokens.dtype and tokens.dtype.itemsize == 2 else None


def router_logits(
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    logit_bias: Tensor | None,  # [E]
    dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:  # [T, E]
    """Return tokens @ w_router.T + logit_bias, accumulated in float32 and rounded to `dtype`."""
    if not batch_invariant and halves_dtype(tokens, w_router) is not None:
        return launch_product(tokens, w_router.t(), dtype, bias=logit_bias)
    if batch_invariant:
        logits = invariant_product(tokens.to(w_router.dtype), w_router.t(), torch.float32)
    else:
        logits = torch.mm(tokens.float(), w_router.float().t())
    return (logits if logit_bias is None else logits.add_(logit_bias)).to(dtype)


def router_gradients(
    dlogits: Tensor,  # [T, E] float32, or [T, 2E] as [high | low]
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    dtokens: Tensor | None,  # [T, D]: a gradient to add to the tokens' gradient
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the tokens and of `w_router`, each None unless its entry of `needs` is True."""
    is_split = dlogits.shape[1] != w_router.shape[0]
    of_tokens = dw_router = None
    if needs[0] and is_split and not batch_invariant:
        of_tokens = launch_product(dlogits, w_router, tokens.dtype, addend=dtokens)
    elif needs[0]:
        weights = torch.cat([w_router, w_router]) if is_split else w_router.float()
        product = invariant_product(dlogits, weights, dlogits.dtype) if batch_invariant else dlogits @ weights
        of_tokens = product.to(tokens.dtype)
        of_tokens = of_tokens if dtokens is None else of_tokens.add_(dtokens)
    if needs[1] and is_split:
        dw_router = launch_weight_gradient(dlogits, tokens, w_router.dtype)
    elif needs[1]:
        dw_router = (dlogits.t() @ tokens.float()).to(w_router.dtype)
    return of_tokens, dw_router


def empty_dlogits(
    dweights: Tensor,  # [T, K] float32
    num_experts: int,
    split_dtype: torch.dtype | None,
) -> Tensor:  # [T, E] float32; [T, 2E] if `split_dtype` is given
    """Return an uninitialised gradient of the logits. `halves_dtype` explains the split."""
    num_columns = num_experts if split_dtype is None else 2 * num_experts
    return dweights.new_empty(dweights.shape[0], num_columns, dtype=split_dtype)


def launch_product(
    a: Tensor,  # [M, K] 16-bit
    b: Tensor,  # [K, N], or [K / 2, N] for both halves of a's columns
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
        launch_kernel(
            _product_kernel,
            (cdiv(m, block_m), cdiv(n, block_n)),
            *with_strides(a),
            *with_strides(b),
            None if bias is None else bias.contiguous(),
            *with_strides(addend),
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
    """Return (BLOCK_M, BLOCK_N, BLOCK_K, num_warps): the largest tile that gives `_BUSY` programs, or a small one."""
    for size, block_k, num_warps in ((128, 64, 8), (64, 128, 4)):
        if cdiv(m, size) * cdiv(n, size) >= _BUSY:
            return size, size, block_k, num_warps
    return (16, 16, 256, 4) if m <= 512 else (16, 32, 128, 2)


def launch_weight_gradient(
    dlogits: Tensor,  # [T, 2E] 16-bit contiguous: [high | low]
    tokens: Tensor,  # [T, D] 16-bit
    out_dtype: torch.dtype,
) -> Tensor:  # [E, D]
    """Return (high + low)^T @ tokens, accumulated in float32 and rounded once. Each program sums over a share of the
    tokens. A second launch adds these sums in a fixed order."""
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
        *with_strides(tokens),
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
    b_ptr,  # [B_ROWS, N]; row k % B_ROWS multiplies column k of a
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
    """One program writes a tile of a @ b + bias + addend. Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))."""
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
    dlogits_ptr,  # [T, 2E] contiguous: high parts, then low parts
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
    """One program sums (high + low)^T @ tokens over its share. Grid: (cdiv(E, BLOCK_E), cdiv(D, BLOCK_D), shares)."""
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
    """One program writes out[i:i + BLOCK], the sum of `parts` over the shares. Grid: (cdiv(N, BLOCK),)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    part = parts_ptr + i
    for _ in range(num_shares):
        total += tl.load(part, mask=i < N, other=0.0)
        part += N
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < N)


@triton.jit
def store_gradient(
    gradient,  # [BLOCK_T, E_P2] float32
    direct_ptr,  # [T, E], added to the gradient, or None
    direct_strides,
    dlogits_ptr,  # [T, E] contiguous; [T, 2E] if SPLIT
    t,  # [BLOCK_T, 1]
    expert,  # [1, E_P2]
    E,
    mask,
    SPLIT: tl.constexpr,
):
    """Write the gradient of the logits of BLOCK_T tokens: 16-bit halves [high | low] if SPLIT, else float32."""
    if direct_ptr is not None:
        gradient += tl.load(direct_ptr + t * direct_strides[0] + expert * direct_strides[1], mask=mask, other=0.0)
    if SPLIT:
        high = gradient.to(dlogits_ptr.dtype.element_ty)
        low = (gradient - high.to(tl.float32)).to(dlogits_ptr.dtype.element_ty)
        out = dlogits_ptr + t * (2 * E) + expert
        tl.store(out, high, mask=mask)
        tl.store(out + E, low, mask=mask)
    else:
        tl.store(dlogits_ptr + t * E + expert, gradient, mask=mask)
