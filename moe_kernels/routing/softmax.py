"""The plain softmax router as an op on logits, with its kernels.

    softmax, then top-k, then renormalise  =  top-k, then softmax:  w = softmax(chosen logits)     (normalize=True)
    softmax, then top-k:                                            w = softmax(all logits)[chosen] (normalize=False)

The softmax keeps the order of the logits. Experts are therefore chosen by logit, without the rounding of exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation.functions import exp_negative
from ..runtime.launch import launch_kernel
from ..runtime.registered_ops import registered_op
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from .linear import empty_dlogits, store_gradient
from .topk import choose_by_short_keys, choose_highest, empty_choice, key, ranked


def launch_topk(
    logits: Tensor,  # [T, E]
    topk_weights: Tensor,  # [T, K] float32 contiguous, written here
    topk_experts: Tensor,  # [T, K] int32 contiguous, written here
    normalize: bool,
) -> None:
    num_tokens, num_experts = logits.shape
    top_k = topk_weights.shape[1]
    if num_tokens:
        E_P2 = next_power_of_2(num_experts)
        block_t = max(1, 512 // E_P2)
        launch_kernel(
            _topk_kernel,
            (cdiv(num_tokens, block_t),),
            logits,
            logits.stride(),
            topk_experts,
            topk_weights,
            num_tokens,
            num_experts,
            NORMALIZE=normalize,
            TOP_K=top_k,
            K_P2=next_power_of_2(top_k),
            E_P2=E_P2,
            BLOCK_T=block_t,
            num_warps=1,  # one warp holds all logits of a token, so finding a maximum needs no shared memory
        )


@registered_op("topk_routing")
def topk_routing_op(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    choice = empty_choice(logits, top_k)
    launch_topk(logits, *choice, normalize)
    return choice


@topk_routing_op.register_fake
def _(logits, top_k, normalize):
    return empty_choice(logits, top_k)


def _topk_setup(ctx, inputs, output):
    logits, _, normalize = inputs
    ctx.num_experts, ctx.dtype = logits.shape[1], logits.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(None if normalize else logits, *output)


def _topk_backward(ctx, dweights, _):
    logits, topk_weights, topk_experts = ctx.saved_tensors
    if dweights is None:
        return None, None, None
    dlogits = topk_backward_op(dweights, topk_weights, topk_experts, logits, None, ctx.num_experts, None)
    return dlogits.to(ctx.dtype), None, None


topk_routing_op.register_autograd(_topk_backward, setup_context=_topk_setup)


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_kernel(
    logits_ptr,
    logits_strides,  # [T, E]
    experts_ptr,  # [T, K] contiguous
    weights_ptr,  # [T, K] contiguous
    num_tokens,
    E,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_P2: tl.constexpr,
    E_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes the experts and weights of BLOCK_T tokens. Grid: (cdiv(T, BLOCK_T),)."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, E_P2)
    exists = (expert < E)[None, :]
    pointer = logits_ptr + t[:, None] * logits_strides[0] + expert[None, :] * logits_strides[1]
    logits = tl.load(pointer, mask=(t < num_tokens)[:, None] & exists, other=0.0).to(tl.float32)  # [BLOCK_T, E_P2]
    keys = tl.where(exists, key(logits), -(2**31))
    chosen, is_unsure = choose_by_short_keys(keys, E_P2, TOP_K, K_P2)
    if tl.max(is_unsure, 0) != 0:
        chosen = choose_highest(keys, E_P2, TOP_K, K_P2)
    k = tl.arange(0, K_P2)
    mask = (t < num_tokens)[:, None] & (k < TOP_K)[None, :]
    pointer = logits_ptr + t[:, None] * logits_strides[0] + chosen * logits_strides[1]
    chosen_logits = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    chosen_logits = tl.where((k < TOP_K)[None, :], ranked(chosen_logits), float("-inf"))  # [BLOCK_T, K_P2]
    # The first chosen logit is the highest. `ranked` turned NaN into infinity, and infinity minus infinity makes the
    # weights NaN.
    highest = tl.max(chosen_logits, 1)
    weights = exp_negative(highest[:, None] - chosen_logits)  # [BLOCK_T, K_P2]
    if NORMALIZE:
        total = tl.sum(weights, 1)
    else:
        total = tl.sum(tl.where(exists, exp_negative(highest[:, None] - logits), 0.0), 1)
    weights = tl.div_rn(weights, tl.broadcast_to(total[:, None], (BLOCK_T, K_P2)))
    out = t[:, None] * TOP_K + k[None, :]
    tl.store(experts_ptr + out, chosen, mask=mask)
    tl.store(weights_ptr + out, weights, mask=mask)


@registered_op("topk_routing_backward")
def topk_backward_op(
    dweights: Tensor,  # [T, K]
    topk_weights: Tensor,
    topk_experts: Tensor,
    logits: Tensor | None,  # [T, E]; None if the weights were normalised
    dlogits_direct: Tensor | None,  # [T, E]: a gradient to add to the result
    num_experts: int,
    split_dtype: torch.dtype | None,
) -> Tensor:  # [T, E] float32; [T, 2E] with a split dtype
    """Return the gradient of the logits. A split dtype gives two halves: see `linear.halves_dtype`."""
    num_tokens, top_k = topk_experts.shape
    dlogits = empty_dlogits(dweights, num_experts, split_dtype)
    if num_tokens:
        E_P2 = next_power_of_2(num_experts)
        block_t = max(1, 512 // E_P2)
        launch_kernel(
            _topk_backward_kernel,
            (cdiv(num_tokens, block_t),),
            logits,
            (0, 0) if logits is None else logits.stride(),
            dlogits_direct,
            (0, 0) if dlogits_direct is None else dlogits_direct.stride(),
            topk_experts.contiguous(),  # saved-tensor hooks may have changed strides
            topk_weights.contiguous(),
            dweights.contiguous(),
            dlogits,
            num_tokens,
            num_experts,
            SPLIT=split_dtype is not None,
            TOP_K=top_k,
            K_P2=next_power_of_2(top_k),
            E_P2=E_P2,
            BLOCK_T=block_t,
            num_warps=1,
        )
    return dlogits


@topk_backward_op.register_fake
def _(dweights, topk_weights, topk_experts, logits, dlogits_direct, num_experts, split_dtype):
    return empty_dlogits(dweights, num_experts, split_dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_backward_kernel(
    logits_ptr,  # None for a softmax over the chosen logits, whose gradient needs only the weights
    logits_strides,  # [T, E]
    direct_ptr,  # a gradient to add to dlogits, or None
    direct_strides,  # [T, E]
    experts_ptr,  # [T, K] contiguous
    weights_ptr,  # [T, K] contiguous
    dweights_ptr,  # [T, K] contiguous
    dlogits_ptr,  # [T, E] contiguous; [T, 2E] if SPLIT
    num_tokens,
    E,
    SPLIT: tl.constexpr,
    TOP_K: tl.constexpr,
    K_P2: tl.constexpr,
    E_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes dlogits of BLOCK_T tokens: p * (dw - sum(p * dw)). p is the softmax over the chosen experts if
    `logits_ptr` is None, else over all experts. Grid: (cdiv(T, BLOCK_T),)."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = t < num_tokens
    expert = tl.arange(0, E_P2)
    k = tl.arange(0, K_P2)
    slot = t[:, None] * TOP_K + k[None, :]
    slot_mask = token_mask[:, None] & (k < TOP_K)[None, :]
    weights = tl.load(weights_ptr + slot, mask=slot_mask, other=0.0)
    dweights = tl.load(dweights_ptr + slot, mask=slot_mask, other=0.0)
    mean = tl.sum(weights * dweights, 1)  # [BLOCK_T]
    # Subtract the mean from each chosen dw before multiplying by p, because dw and the mean nearly cancel if one expert
    # has nearly all the weight.
    is_normalized: tl.constexpr = logits_ptr is None
    gradient = tl.zeros((BLOCK_T, E_P2), tl.float32)
    if not is_normalized:
        gradient -= mean[:, None]
    for step in range(TOP_K):
        step_slot = t * TOP_K + step
        chosen = tl.load(experts_ptr + step_slot, mask=token_mask, other=0)
        value = tl.load(dweights_ptr + step_slot, mask=token_mask, other=0.0) - mean
        if is_normalized:
            value *= tl.load(weights_ptr + step_slot, mask=token_mask, other=0.0)
        gradient = tl.where(expert[None, :] == chosen[:, None], value[:, None], gradient)
    exists = (expert < E)[None, :]
    mask = token_mask[:, None] & exists
    if not is_normalized:
        pointer = logits_ptr + t[:, None] * logits_strides[0] + expert[None, :] * logits_strides[1]
        logits = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        logits = tl.where(exists, logits, float("-inf"))
        numerator = exp_negative(tl.max(logits, 1)[:, None] - logits)
        total = tl.sum(numerator, 1)[:, None]
        gradient *= tl.div_rn(numerator, tl.broadcast_to(total, (BLOCK_T, E_P2)))
    store_gradient(gradient, direct_ptr, direct_strides, dlogits_ptr, t[:, None], expert[None, :], E, mask, SPLIT)
