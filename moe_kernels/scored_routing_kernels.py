"""The kernels of `scored_routing`: one for the choice and its weights, one for the gradient of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._triton import cdiv, next_power_of_2, tl, triton
from .highest import ordered
from .launching import launch_kernel


class Facts(NamedTuple):
    """A spec as the kernels see it. Ops take no dataclass, so it travels as fields; backward needs the last five."""

    by_logit: bool
    num_groups: int
    top_groups: int
    top2_sum: bool
    excluded_zero: bool
    score: str
    normalize: bool
    norm_epsilon: float
    norm_minimum: float
    scale: float


def _blocks(num_experts: int) -> dict[str, int]:
    """One warp owns whole rows, so that a reduction takes no shared memory; more than 512 experts take more warps."""
    E_P2 = next_power_of_2(num_experts)
    return {"E_P2": E_P2, "BLOCK_T": max(1, 512 // E_P2), "num_warps": max(1, E_P2 // 512)}


def launch_forward(logits: Tensor, selection_bias: Tensor | None, top_k: int, facts: Facts) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    topk_experts = logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    topk_weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    if num_tokens:
        blocks = _blocks(num_experts)
        launch_kernel(
            _scored_routing_kernel,
            (cdiv(num_tokens, blocks["BLOCK_T"]),),
            logits,
            logits.stride(),
            None if selection_bias is None else selection_bias.contiguous(),
            topk_experts,
            topk_weights,
            num_tokens,
            num_experts,
            facts.norm_epsilon,
            facts.norm_minimum,
            facts.scale,
            SCORE=facts.score,
            BY_LOGIT=facts.by_logit,
            NUM_GROUPS=facts.num_groups,
            TOP_GROUPS=facts.top_groups,
            G_P2=next_power_of_2(facts.num_groups),
            TOP2_SUM=facts.top2_sum and num_experts > facts.num_groups,
            EXCLUDED_ZERO=facts.excluded_zero,
            NORMALIZE=facts.normalize,
            TOP_K=top_k,
            K_P2=next_power_of_2(top_k),
            **blocks,
        )
    return topk_weights, topk_experts


def launch_backward(
    dweights: Tensor,  # [T, K]
    topk_experts: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    dlogits_direct: Tensor | None,  # [T, E]: a gradient to add
    split_dtype: torch.dtype | None,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> Tensor:  # [T, E] float32; [T, 2E] with a split dtype: [high | low]
    num_tokens, num_experts = logits.shape
    num_columns = num_experts if split_dtype is None else 2 * num_experts
    dlogits = dweights.new_empty(num_tokens, num_columns, dtype=split_dtype)
    if num_tokens:
        blocks = _blocks(num_experts)
        launch_kernel(
            _scored_routing_backward_kernel,
            (cdiv(num_tokens, blocks["BLOCK_T"]),),
            logits,
            logits.stride(),
            dlogits_direct,
            (0, 0) if dlogits_direct is None else dlogits_direct.stride(),
            topk_experts,
            dweights.contiguous(),
            dlogits,
            num_tokens,
            num_experts,
            norm_epsilon,
            norm_minimum,
            scale,
            SCORE=score,
            NORMALIZE=normalize,
            SPLIT=split_dtype is not None,
            TOP_K=topk_experts.shape[1],
            **blocks,
        )
    return dlogits


@triton.jit
def _scores(logits, exists, SCORE: tl.constexpr):
    """[BLOCK_T, E_P2]; experts that do not exist score zero under a softmax."""
    if SCORE == "softmax":
        logits = tl.where(exists, logits, float("-inf"))
        numerator = tl.exp(logits - tl.max(logits, 1)[:, None])
        return numerator / tl.sum(numerator, 1)[:, None]
    if SCORE == "sigmoid":
        return tl.sigmoid(logits)
    # softplus(x) = max(x, 0) + log(1 + small). The quotient gives log(1 + small) where 1 + small has rounded small.
    small = tl.exp(-tl.abs(logits))
    rounded = 1.0 + small
    lost = rounded == 1.0
    log1p = tl.where(lost, small, tl.log(rounded) * (small / tl.where(lost, 1.0, rounded - 1.0)))
    return tl.sqrt(tl.maximum(logits, 0.0) + log1p)


@triton.jit
def _keep_groups(
    keys,  # [BLOCK_T, E_P2] without NaN
    expert,  # [E_P2]
    E,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    G_P2: tl.constexpr,
    E_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Which experts are in one of a token's best groups, [BLOCK_T, E_P2]."""
    group_of_expert = expert // (E // NUM_GROUPS)
    groups = tl.arange(0, G_P2)
    taken: tl.constexpr = -(2**31)
    worth = tl.full((BLOCK_T, G_P2), taken, tl.int32)
    for group in range(NUM_GROUPS):
        inside = (group_of_expert == group)[None, :]
        best = tl.max(tl.where(inside, keys, float("-inf")), 1)  # [BLOCK_T]
        if TOP2_SUM:
            is_best = inside & (keys == best[:, None])
            first = tl.min(tl.where(is_best, expert[None, :], E_P2), 1)
            others = inside & (expert[None, :] != first[:, None])
            best += tl.max(tl.where(others, keys, float("-inf")), 1)
            best = tl.where(best == best, best, float("inf"))
        value = ordered((best + 0.0).to(tl.int32, bitcast=True))
        worth = tl.where((groups == group)[None, :], value[:, None], worth)
    kept = tl.zeros((BLOCK_T, E_P2), tl.int1)
    for _ in range(TOP_GROUPS):
        is_best = worth == tl.max(worth, 1)[:, None]
        winner = tl.min(tl.where(is_best, groups[None, :], G_P2), 1)
        worth = tl.where(groups[None, :] == winner[:, None], taken, worth)
        kept = kept | (group_of_expert[None, :] == winner[:, None])
    return kept


@triton.jit(do_not_specialize=["num_tokens"])
def _scored_routing_kernel(
    logits_ptr,
    logits_strides,  # [T, E]
    bias_ptr,  # [E] contiguous, or None
    experts_ptr,  # [T, K] contiguous
    weights_ptr,  # [T, K] contiguous
    num_tokens,
    E,
    norm_epsilon,
    norm_minimum,
    scale,
    SCORE: tl.constexpr,
    BY_LOGIT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    G_P2: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    EXCLUDED_ZERO: tl.constexpr,
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
    scores = _scores(logits, exists, SCORE)
    if BY_LOGIT:
        keys = logits
    else:
        keys = scores
    if bias_ptr is not None:
        keys += tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    keys = tl.where(keys == keys, keys, float("inf"))
    if NUM_GROUPS > 1:
        kept = _keep_groups(keys, expert, E, NUM_GROUPS, TOP_GROUPS, TOP2_SUM, G_P2, E_P2, BLOCK_T)
        if EXCLUDED_ZERO:
            keys = tl.where(kept, keys, 0.0)
        else:
            keys = tl.where(kept, keys, float("-inf"))
    # The key of a float is above that of -inf, which is above the key of an expert that is taken or does not exist.
    taken: tl.constexpr = -(2**31)
    keys = tl.where(exists, ordered((keys + 0.0).to(tl.int32, bitcast=True)), taken)
    k = tl.arange(0, K_P2)
    chosen = tl.zeros((BLOCK_T, K_P2), tl.int32)
    weights = tl.zeros((BLOCK_T, K_P2), tl.float32)
    for step in range(TOP_K):
        is_best = keys == tl.max(keys, 1)[:, None]
        winner = tl.min(tl.where(is_best, expert[None, :], E_P2), 1)  # [BLOCK_T]
        is_winner = expert[None, :] == winner[:, None]
        score = tl.sum(tl.where(is_winner, scores, 0.0), 1)
        keys = tl.where(is_winner, taken, keys)
        chosen = tl.where((k == step)[None, :], winner[:, None], chosen)
        weights = tl.where((k == step)[None, :], score[:, None], weights)
    if NORMALIZE:
        norm = tl.sum(weights, 1) + norm_epsilon
        weights = weights / tl.where(norm < norm_minimum, norm_minimum, norm)[:, None]
    out = t[:, None] * TOP_K + k[None, :]
    mask = (t < num_tokens)[:, None] & (k < TOP_K)[None, :]
    tl.store(experts_ptr + out, chosen, mask=mask)
    tl.store(weights_ptr + out, weights * scale, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _scored_routing_backward_kernel(
    logits_ptr,
    logits_strides,  # [T, E]
    direct_ptr,  # None if there is nothing to add
    direct_strides,  # [T, E]
    experts_ptr,  # [T, K] contiguous
    dweights_ptr,  # [T, K] contiguous
    dlogits_ptr,  # [T, E] contiguous; [T, 2E] if SPLIT
    num_tokens,
    E,
    norm_epsilon,
    norm_minimum,
    scale,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TOP_K: tl.constexpr,
    E_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes dlogits of BLOCK_T tokens. Grid: (cdiv(T, BLOCK_T),)."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = t < num_tokens
    expert = tl.arange(0, E_P2)
    exists = (expert < E)[None, :]
    mask = token_mask[:, None] & exists
    pointer = logits_ptr + t[:, None] * logits_strides[0] + expert[None, :] * logits_strides[1]
    logits = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, E_P2]
    scores = _scores(logits, exists, SCORE)
    dscores = tl.zeros((BLOCK_T, E_P2), tl.float32)
    chosen_scores = tl.zeros((BLOCK_T, E_P2), tl.float32)
    for step in range(TOP_K):
        winner = tl.load(experts_ptr + t * TOP_K + step, mask=token_mask, other=0)
        dweight = tl.load(dweights_ptr + t * TOP_K + step, mask=token_mask, other=0.0) * scale
        is_winner = expert[None, :] == winner[:, None]
        dscores = tl.where(is_winner, dweight[:, None], dscores)
        chosen_scores = tl.where(is_winner, scores, chosen_scores)
    if NORMALIZE:
        # w = s / n with n = sum of s + epsilon: ds = (dw - sum(dw * s) / n) / n; a clamped n is a constant.
        norm = tl.sum(chosen_scores, 1) + norm_epsilon
        is_clamped = norm < norm_minimum
        norm = tl.where(is_clamped, norm_minimum, norm)[:, None]
        mean = tl.where(is_clamped, 0.0, tl.sum(dscores * chosen_scores, 1))[:, None] / norm
        for step in range(TOP_K):
            winner = tl.load(experts_ptr + t * TOP_K + step, mask=token_mask, other=0)
            dscores = tl.where(expert[None, :] == winner[:, None], (dscores - mean) / norm, dscores)
    if SCORE == "softmax":
        gradient = scores * (dscores - tl.sum(scores * dscores, 1)[:, None])
    elif SCORE == "sigmoid":
        gradient = dscores * scores * (1.0 - scores)
    else:
        gradient = tl.where(scores == 0.0, 0.0, dscores * tl.sigmoid(logits) * 0.5 / scores)
    if direct_ptr is not None:
        pointer = direct_ptr + t[:, None] * direct_strides[0] + expert[None, :] * direct_strides[1]
        gradient += tl.load(pointer, mask=mask, other=0.0)
    if SPLIT:
        high = gradient.to(dlogits_ptr.dtype.element_ty)
        low = (gradient - high.to(tl.float32)).to(dlogits_ptr.dtype.element_ty)
        out = dlogits_ptr + t[:, None] * (2 * E) + expert[None, :]
        tl.store(out, high, mask=mask)
        tl.store(out + E, low, mask=mask)
    else:
        tl.store(dlogits_ptr + t[:, None] * E + expert[None, :], gradient, mask=mask)
