"""What a router gives the gradient of its tokens, on the rows of the experts that it chose.

Where a token's weights w are a softmax over the logits of its chosen experts alone, no other logit has a gradient, and

    dlogits = w * (dw - sum of w * dw)      dtokens = sum over the chosen experts of dlogits * w_router[expert]

A row of dX has one expert and one token: the term adds `dlogits * w_router[expert]` to it, and the sum over a token's
rows, which is taken anyway, does the rest. So neither a [T, E] product nor a pass that adds its result is needed.
"""

from __future__ import annotations

from torch import Tensor

from ._triton import cdiv, next_power_of_2, tl, triton
from .launching import launch_kernel

_BLOCK_SLOTS = 512


def launch_chosen_dlogits(
    topk_weights: Tensor,  # [T, K] float32 contiguous
    dweights: Tensor,  # [T, K] float32 contiguous
    slot_to_row: Tensor | None,  # [T, K] contiguous, all within [0, T * K); None leaves them in order
) -> Tensor:  # [T * K] float32
    """The gradients of the chosen logits, those of a slot at its row."""
    num_tokens, top_k = topk_weights.shape
    dlogits = topk_weights.new_empty(num_tokens * top_k)
    if num_tokens:
        K_P2 = next_power_of_2(top_k)
        block_t = max(1, _BLOCK_SLOTS // K_P2)
        launch_kernel(
            _chosen_dlogits_kernel,
            (cdiv(num_tokens, block_t),),
            topk_weights,
            dweights,
            slot_to_row,
            dlogits,
            num_tokens,
            TOP_K=top_k,
            K_P2=K_P2,
            BLOCK_T=block_t,
        )
    return dlogits


@triton.jit(do_not_specialize=["num_tokens"])
def _chosen_dlogits_kernel(
    weights_ptr,  # [T, K] contiguous
    dweights_ptr,  # [T, K] contiguous
    slot_to_row_ptr,  # [T, K] contiguous, or None
    dlogits_ptr,  # [T * K]
    num_tokens,
    TOP_K: tl.constexpr,
    K_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes the dlogits of BLOCK_T tokens, each to its row. Grid: (cdiv(T, BLOCK_T),)."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, K_P2)
    slot = t[:, None] * TOP_K + k[None, :]
    mask = (t < num_tokens)[:, None] & (k < TOP_K)[None, :]
    weights = tl.load(weights_ptr + slot, mask=mask, other=0.0)  # [BLOCK_T, K_P2]
    dweights = tl.load(dweights_ptr + slot, mask=mask, other=0.0)
    # Less the mean before it is multiplied: where one expert has nearly all, they nearly cancel.
    dlogits = weights * (dweights - tl.sum(weights * dweights, 1)[:, None])
    place = slot
    if slot_to_row_ptr is not None:
        place = tl.load(slot_to_row_ptr + slot, mask=mask, other=0).to(tl.int64)
    tl.store(dlogits_ptr + place, dlogits, mask=mask)
