"""The gradient of tokens: the sum over their rows, and what it gets through the routing weights, in one pass.

Where a token's weights w are a softmax over the logits of its chosen experts alone, no other logit has a gradient, and

    dlogits = w * (dw - sum of w * dw)      dtokens = sum over its rows of dX[row] + dlogits * w_router[expert]

So neither a product with a [T, E] gradient nor a pass that adds its result is needed.
"""

from __future__ import annotations

from torch import Tensor

from ._triton import cdiv, tl, triton
from .launching import launch_kernel
from .permutation import combine_block

_CACHED_BYTES = 2**17  # of the router, which an SM keeps beside the rows that it streams


def launch_combine_with_router(
    rows: Tensor,  # [R, D]
    topk_weights: Tensor,  # [T, K] float32 contiguous
    dweights: Tensor,  # [T, K] float32 contiguous
    slot_to_row: Tensor,  # [T, K] int32 contiguous
    row_to_expert: Tensor,  # [R] int32
    w_router: Tensor,  # [E, D]
) -> Tensor:  # [T, D]
    """In float32, rounded once. Nothing of a dropped slot."""
    num_tokens, top_k = slot_to_row.shape
    d_model = rows.shape[1]
    out = rows.new_empty(num_tokens, d_model)
    if out.numel():
        block_d = _block(w_router)
        launch_kernel(
            _combine_with_router_kernel,
            (num_tokens, cdiv(d_model, block_d)),
            rows,
            rows.stride(),
            topk_weights,
            dweights,
            slot_to_row,
            row_to_expert,
            w_router,
            w_router.stride(),
            out,
            d_model,
            TOP_K=top_k,
            BLOCK_D=block_d,
            num_warps=max(1, block_d // 256),
        )
    return out


def _block(w_router: Tensor) -> int:
    """Columns per program: so many that these of all experts stay in an SM's cache, as all programs that run at about
    the same time have the same ones; but no fewer than memory reads well."""
    num_experts, d_model = w_router.shape
    cached = _CACHED_BYTES // (num_experts * w_router.element_size())
    return min(combine_block(d_model), max(1 << cached.bit_length() - 1, 256)) if cached else 256


@triton.jit
def _combine_with_router_kernel(
    rows_ptr,
    rows_strides,  # [R, D]
    weights_ptr,  # [T, K] contiguous
    dweights_ptr,  # [T, K] contiguous
    slot_to_row_ptr,  # [T, K] contiguous
    row_to_expert_ptr,  # [R]
    w_router_ptr,
    w_router_strides,  # [E, D]
    out_ptr,  # [T, D] contiguous
    D,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program writes out[t, d:d + BLOCK_D]. Grid: (T, cdiv(D, BLOCK_D))."""
    t = tl.program_id(0).to(tl.int64)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    mean = 0.0
    for k in range(TOP_K):
        mean += tl.load(weights_ptr + t * TOP_K + k) * tl.load(dweights_ptr + t * TOP_K + k)
    total = tl.zeros((BLOCK_D,), tl.float32)  # [BLOCK_D]
    for k in range(TOP_K):
        row = tl.load(slot_to_row_ptr + t * TOP_K + k).to(tl.int64)
        expert = tl.load(row_to_expert_ptr + row, mask=row >= 0, other=0).to(tl.int64)
        # Less the mean before it is multiplied: where one expert has nearly all, they nearly cancel.
        dlogit = tl.load(weights_ptr + t * TOP_K + k) * (tl.load(dweights_ptr + t * TOP_K + k) - mean)
        mask = d < tl.where(row >= 0, D, 0)
        # Rows are read once: they are to leave the cache of the SM to the router.
        row_ptrs = rows_ptr + row * rows_strides[0] + d * rows_strides[1]
        value = tl.load(row_ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        router_ptrs = w_router_ptr + expert * w_router_strides[0] + d * w_router_strides[1]
        router = tl.load(router_ptrs, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, value + dlogit * router, 0.0)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
