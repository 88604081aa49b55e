"""Computes the gradient of tokens in one pass: the part through the experts plus the part through the routing weights.

dX [R, D] is the gradient of the rows, and dw is the gradient of a token's routing weights w. If w is a softmax over the
logits of the token's chosen experts alone, no other logit has a gradient, and

    dlogits = w * (dw - sum of w * dw)      dtokens = sum over a token's rows of (dX[row] + dlogits * w_router[expert])

Therefore the part through the routing weights needs no product of a [T, E] gradient with w_router.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..permutation.permute import combine_block
from ..runtime.launch import launch_kernel
from ..runtime.row_layout import alignment
from ..runtime.triton import cdiv, next_power_of_2, tl, triton

_MOST_COLUMNS = 1024  # maximum BLOCK_D: number of columns that one program loads from a row of dX and from w_router


def launch_combine_with_router(
    rows: Tensor,  # [R, D]
    topk_weights: Tensor,  # [T, K] float32 contiguous
    dweights: Tensor,  # [T, K] float32 contiguous
    slot_to_row: Tensor,  # [T, K] int32 contiguous
    bounds: Tensor,  # [E + 2] int32: expert e has the rows bounds[e]:bounds[e + 1]
    w_router: Tensor,  # [E, D]
) -> Tensor:  # [T, D]
    """Return the gradient of the tokens, accumulated in float32 and rounded once. Dropped slots add nothing."""
    num_tokens, top_k = slot_to_row.shape
    d_model = rows.shape[1]
    if top_k == 0:
        return rows.new_zeros(num_tokens, d_model)
    out = rows.new_empty(num_tokens, d_model)
    if out.numel():
        slot_experts, dlogits = _slot_terms(topk_weights, dweights, slot_to_row, bounds)
        block_d = min(combine_block(d_model), _MOST_COLUMNS)
        launch_kernel(
            _combine_with_router_kernel,
            (num_tokens, cdiv(d_model, block_d)),
            rows,
            rows.stride(),
            slot_to_row,
            slot_experts,
            dlogits,
            w_router,
            w_router.stride(),
            out,
            d_model,
            TOP_K=top_k,
            ALIGNED=alignment(d_model, rows.stride(0), w_router.stride(0)),
            BLOCK_D=block_d,
            num_warps=max(1, block_d // 256),
        )
    return out


def _slot_terms(
    topk_weights: Tensor, dweights: Tensor, slot_to_row: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor]:  # experts [T, K] int32, dlogits [T, K] float32
    """Return the expert of each slot and the gradient of its logit. A dropped slot gets an arbitrary expert."""
    num_tokens, top_k = slot_to_row.shape
    slot_experts, dlogits = torch.empty_like(slot_to_row), torch.empty_like(topk_weights)
    num_experts, block_k = bounds.shape[0] - 2, next_power_of_2(top_k)
    block_t = max(1, 256 // block_k)
    launch_kernel(
        _slot_terms_kernel,
        (cdiv(num_tokens, block_t),),
        topk_weights,
        dweights,
        slot_to_row,
        bounds,
        slot_experts,
        dlogits,
        num_tokens,
        NUM_EXPERTS=num_experts,
        SEARCH_STEPS=(num_experts - 1).bit_length(),
        TOP_K=top_k,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=2,
    )
    return slot_experts, dlogits


@triton.jit(do_not_specialize=["num_tokens"])
def _slot_terms_kernel(
    weights_ptr,  # [T, K] contiguous
    dweights_ptr,  # [T, K] contiguous
    slot_to_row_ptr,  # [T, K] contiguous
    bounds_ptr,  # [E + 2]
    experts_ptr,  # [T, K] contiguous
    dlogits_ptr,  # [T, K] contiguous
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes the expert of each slot of BLOCK_T tokens, and the gradient of the slot's router logit. Grid:
    (cdiv(T, BLOCK_T),)."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    slot, mask = t * TOP_K + k, (t < num_tokens) & (k < TOP_K)
    weight = tl.load(weights_ptr + slot, mask=mask, other=0.0)
    dweight = tl.load(dweights_ptr + slot, mask=mask, other=0.0)
    # Subtract the weighted mean of dweight before multiplying by the weight, to lose less precision. If one expert
    # has nearly all the weight, its dweight and the mean nearly cancel.
    dlogit = weight * (dweight - tl.sum(weight * dweight, 1, keep_dims=True))
    tl.store(dlogits_ptr + slot, dlogit, mask=mask)
    row = tl.load(slot_to_row_ptr + slot, mask=mask, other=-1)
    # Find by binary search the last expert whose rows begin at or before this row.
    expert = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for step in tl.static_range(SEARCH_STEPS):
        later = expert + (1 << (SEARCH_STEPS - 1 - step))
        start = tl.load(bounds_ptr + later, mask=later < NUM_EXPERTS, other=2147483647)
        expert = tl.where(start <= row, later, expert)
    tl.store(experts_ptr + slot, expert, mask=mask)


@triton.jit
def _combine_with_router_kernel(
    rows_ptr,
    rows_strides,  # [R, D]
    slot_to_row_ptr,  # [T, K] contiguous
    experts_ptr,  # [T, K] contiguous
    dlogits_ptr,  # [T, K] contiguous
    w_router_ptr,
    w_router_strides,  # [E, D]
    out_ptr,  # [T, D] contiguous
    D,
    TOP_K: tl.constexpr,
    ALIGNED: tl.constexpr,  # common divisor of D and both row strides
    BLOCK_D: tl.constexpr,
):
    """One program writes BLOCK_D columns of a token's gradient: the sum of rows[row] + dlogit * w_router[expert] over
    the token's slots. Grid: (T, cdiv(D, BLOCK_D))."""
    t = tl.program_id(0).to(tl.int64)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    D = D // ALIGNED * ALIGNED
    rows_stride, w_router_stride = rows_strides[0] // ALIGNED * ALIGNED, w_router_strides[0] // ALIGNED * ALIGNED
    total = tl.zeros((BLOCK_D,), tl.float32)  # [BLOCK_D]
    for k in range(TOP_K):
        row = tl.load(slot_to_row_ptr + t * TOP_K + k).to(tl.int64)
        expert = tl.load(experts_ptr + t * TOP_K + k).to(tl.int64)
        dlogit = tl.load(dlogits_ptr + t * TOP_K + k)
        mask = d < tl.where(row >= 0, D, 0)
        # Rows are read once, so rows should not evict the router's weight from the L1 cache.
        row_ptrs = rows_ptr + row * rows_stride + d * rows_strides[1]
        value = tl.load(row_ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        router_ptrs = w_router_ptr + expert * w_router_stride + d * w_router_strides[1]
        router = tl.load(router_ptrs, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, value + dlogit * router, 0.0)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
