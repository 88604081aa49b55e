"""An op on logits, with its kernels, for most routers other than the plain softmax.

    scores = f(logits)     chosen = top-k of scores [+ bias] in the best groups
    w = scale * s / max(sum of s + epsilon, minimum)     or, without normalisation, w = scale * s

s is the score of a chosen expert. The sum is over the chosen experts of a token. One kernel computes the forward pass,
and a second kernel computes the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel, with_strides
from ..runtime.registered_ops import registered_op
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from ..specs import RouterSpec
from .linear import empty_dlogits, store_gradient
from .topk import choose_by_short_keys, choose_highest, empty_choice, key, ordered


class ScoreSettings(NamedTuple):
    """The settings of a `RouterSpec` that the kernels use."""

    by_logit: bool
    num_groups: int
    topk_groups: int
    top2_sum: bool
    score: str
    normalize: bool
    norm_epsilon: float
    norm_minimum: float
    scale: float


def score_settings(spec: RouterSpec) -> ScoreSettings:
    """Return the settings that the ops take."""
    return ScoreSettings(
        spec.chooses_by_logit,
        spec.num_groups,
        spec.topk_groups,
        spec.group_score == "top2_sum",
        spec.score,
        spec.normalize,
        spec.norm_epsilon,
        spec.norm_minimum,
        spec.scale,
    )


def _blocks(num_places: int) -> dict[str, int]:
    """Return the number of tokens and of warps per program. `num_places` is the padded number of experts. A warp holds
    512 logits, so reductions over up to 512 experts need no shared memory."""
    return {"BLOCK_T": max(1, 512 // num_places), "num_warps": max(1, num_places // 512)}


def launch_forward(
    logits: Tensor,  # [T, E]
    selection_bias: Tensor | None,  # [E]
    topk_weights: Tensor,  # [T, K] float32 contiguous, written here
    topk_experts: Tensor,  # [T, K] int32 contiguous, written here
    settings: ScoreSettings,
) -> None:
    num_tokens, num_experts = logits.shape
    top_k = topk_weights.shape[1]
    if num_tokens:
        places = {
            "G_P2": next_power_of_2(settings.num_groups),
            "S_P2": next_power_of_2(num_experts // settings.num_groups),
        }
        blocks = _blocks(places["G_P2"] * places["S_P2"])
        launch_kernel(
            _scored_routing_kernel,
            (cdiv(num_tokens, blocks["BLOCK_T"]),),
            *with_strides(logits),
            None if selection_bias is None else selection_bias.contiguous(),
            topk_experts,
            topk_weights,
            num_tokens,
            settings.norm_epsilon,
            settings.norm_minimum,
            settings.scale,
            E=num_experts,
            SCORE=settings.score,
            BY_LOGIT=settings.by_logit,
            NUM_GROUPS=settings.num_groups,
            TOPK_GROUPS=settings.topk_groups,
            TOP2_SUM=settings.top2_sum and num_experts > settings.num_groups,
            NORMALIZE=settings.normalize,
            TOP_K=top_k,
            K_P2=next_power_of_2(top_k),
            **places,
            **blocks,
        )


def launch_backward(
    dweights: Tensor,  # [T, K]
    topk_experts: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    dlogits_direct: Tensor | None,  # [T, E]: a gradient to add to the result
    split_dtype: torch.dtype | None,
    settings: ScoreSettings,
) -> Tensor:  # see `empty_dlogits`
    num_tokens, num_experts = logits.shape
    dlogits = empty_dlogits(dweights, num_experts, split_dtype)
    if num_tokens:
        E_P2 = next_power_of_2(num_experts)
        blocks = _blocks(E_P2)
        launch_kernel(
            _scored_routing_backward_kernel,
            (cdiv(num_tokens, blocks["BLOCK_T"]),),
            *with_strides(logits),
            *with_strides(dlogits_direct),
            topk_experts.contiguous(),  # hooks of saved tensors may have changed strides
            dweights.contiguous(),
            dlogits,
            num_tokens,
            num_experts,
            settings.norm_epsilon,
            settings.norm_minimum,
            settings.scale,
            SCORE=settings.score,
            NORMALIZE=settings.normalize,
            SPLIT=split_dtype is not None,
            TOP_K=topk_experts.shape[1],
            E_P2=E_P2,
            **blocks,
        )
    return dlogits


@registered_op("scored_routing")
def scored_routing_op(
    logits: Tensor, selection_bias: Tensor | None, top_k: int, settings: ScoreSettings
) -> tuple[Tensor, Tensor]:
    choice = empty_choice(logits, top_k)
    launch_forward(logits, selection_bias, *choice, settings)
    return choice


@scored_routing_op.register_fake
def _(logits, selection_bias, top_k, settings):
    return empty_choice(logits, top_k)


def _setup(ctx, call, output):
    logits, _, _, ctx.settings = call.args
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _backward(ctx, dweights, _):
    logits, topk_experts = ctx.saved_tensors
    if dweights is None:
        return {}
    dlogits = scored_backward_op(dweights, topk_experts, logits, None, None, ctx.settings)
    return {"logits": dlogits.to(logits.dtype)}


scored_routing_op.register_autograd(_backward, setup_context=_setup)


scored_backward_op = registered_op("scored_routing_backward")(launch_backward)


@scored_backward_op.register_fake
def _(dweights, topk_experts, logits, dlogits_direct, split_dtype, settings):
    return empty_dlogits(dweights, logits.shape[1], split_dtype)


# Key of lanes past the last expert, and of experts to ignore. All other keys are higher, even the key of -inf.
_TAKEN = tl.constexpr(-(2**31))  # pyright: ignore[reportCallIssue]  # for pyright, tl.constexpr is Any


@triton.jit
def _softmax_terms(logits, exists, SCORE: tl.constexpr):
    """Return (highest logit, sum of exp(logit - highest)) per token for a softmax, [BLOCK_T]. Return zeros for other
    scores."""
    if SCORE == "softmax":
        logits = tl.where(exists, logits, float("-inf"))
        highest = tl.max(logits, 1)
        return highest, tl.sum(tl.exp(logits - highest[:, None]), 1)
    else:
        unused = tl.zeros((logits.shape[0],), tl.float32)
        return unused, unused


@triton.jit
def _scores(logits, highest, total, SCORE: tl.constexpr):
    """Return the scores of `logits`, [BLOCK_T, ...]. `highest` and `total` are the results of `_softmax_terms` for all
    logits of each token."""
    if SCORE == "softmax":
        return tl.exp(logits - highest[:, None]) / total[:, None]
    if SCORE == "sigmoid":
        return tl.sigmoid(logits)
    # The score is sqrt(softplus(x)), softplus(x) = max(x, 0) + log(1 + small), small = exp(-|x|). The quotient
    # small / (rounded - 1) corrects the rounding of 1 + small.
    small = tl.exp(-tl.abs(logits))
    rounded = 1.0 + small
    lost = rounded == 1.0
    log1p = tl.where(lost, small, tl.log(rounded) * (small / tl.where(lost, 1.0, rounded - 1.0)))
    return tl.sqrt(tl.maximum(logits, 0.0) + log1p)


@triton.jit
def _in_best_groups(
    keys,  # [BLOCK_T, G_P2, S_P2] int32 from `topk.key`
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    G_P2: tl.constexpr,
):
    """Return a mask of the TOPK_GROUPS best groups of each token, [BLOCK_T, G_P2]. The lower index wins ties."""
    worth = tl.max(keys, 2)  # [BLOCK_T, G_P2]
    if TOP2_SUM:
        is_best = keys == worth[:, :, None]
        below = tl.max(tl.where(is_best, _TAKEN, keys), 2)
        second = tl.where(tl.sum(is_best.to(tl.int32), 2) > 1, worth, below)
        both = ordered(worth).to(tl.float32, bitcast=True) + ordered(second).to(tl.float32, bitcast=True)
        worth = key(both)
    group = tl.arange(0, G_P2)
    worth = tl.where((group < NUM_GROUPS)[None, :], worth, _TAKEN)
    other = worth[:, None, :]
    is_lower = (group[None, :] < group[:, None])[None, :, :]
    is_better = (other > worth[:, :, None]) | ((other == worth[:, :, None]) & is_lower)  # [BLOCK_T, G_P2, G_P2]
    return tl.sum(is_better.to(tl.int32), 2) < TOPK_GROUPS


@triton.jit(do_not_specialize=["num_tokens"])
def _scored_routing_kernel(
    logits_ptr,
    logits_strides,  # [T, E]
    bias_ptr,  # [E] contiguous, or None
    experts_ptr,  # [T, K] contiguous
    weights_ptr,  # [T, K] contiguous
    num_tokens,
    norm_epsilon,
    norm_minimum,
    scale,
    E: tl.constexpr,
    SCORE: tl.constexpr,
    BY_LOGIT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_P2: tl.constexpr,
    G_P2: tl.constexpr,
    S_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes the experts and weights of BLOCK_T tokens. Grid: (cdiv(T, BLOCK_T),).

    A token's logits are laid out as G_P2 groups of S_P2 experts. Both numbers are padded to powers of two, so the last
    elements of a group, and the last groups, may have no expert.
    """
    SIZE: tl.constexpr = E // NUM_GROUPS
    E_P2: tl.constexpr = G_P2 * S_P2
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    place = tl.arange(0, E_P2)
    expert = place // S_P2 * SIZE + place % S_P2
    exists = ((place // S_P2 < NUM_GROUPS) & (place % S_P2 < SIZE))[None, :]
    pointer = logits_ptr + t[:, None] * logits_strides[0] + expert[None, :] * logits_strides[1]
    logits = tl.load(pointer, mask=(t < num_tokens)[:, None] & exists, other=0.0).to(tl.float32)  # [BLOCK_T, E_P2]
    highest, total = _softmax_terms(logits, exists, SCORE)
    keys = logits if BY_LOGIT else _scores(logits, highest, total, SCORE)
    if bias_ptr is not None:
        keys += tl.load(bias_ptr + expert[None, :], mask=exists, other=0.0).to(tl.float32)
    keys = tl.where(exists, key(keys), _TAKEN)
    if NUM_GROUPS > 1:
        grouped = tl.reshape(keys, (BLOCK_T, G_P2, S_P2))
        kept = _in_best_groups(grouped, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, G_P2)
        excluded: tl.constexpr = -0x7F800001  # the key of minus infinity
        keys = tl.reshape(tl.where(kept[:, :, None], grouped, excluded), (BLOCK_T, E_P2))
        keys = tl.where(exists, keys, _TAKEN)
    chosen, is_unsure = choose_by_short_keys(keys, E_P2, TOP_K, K_P2)
    if tl.max(is_unsure, 0) != 0:
        chosen = choose_highest(keys, E_P2, TOP_K, K_P2)
    chosen = chosen // S_P2 * SIZE + chosen % S_P2
    k = tl.arange(0, K_P2)
    mask = (t < num_tokens)[:, None] & (k < TOP_K)[None, :]
    pointer = logits_ptr + t[:, None] * logits_strides[0] + chosen * logits_strides[1]
    chosen_logits = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    weights = tl.where(mask, _scores(chosen_logits, highest, total, SCORE), 0.0)  # [BLOCK_T, K_P2]
    if NORMALIZE:
        norm = tl.sum(weights, 1) + norm_epsilon
        weights = weights / tl.where(norm < norm_minimum, norm_minimum, norm)[:, None]
    out = t[:, None] * TOP_K + k[None, :]
    tl.store(experts_ptr + out, chosen, mask=mask)
    tl.store(weights_ptr + out, weights * scale, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _scored_routing_backward_kernel(
    logits_ptr,
    logits_strides,  # [T, E]
    direct_ptr,  # a gradient to add to dlogits, or None
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
    highest, total = _softmax_terms(logits, exists, SCORE)
    scores = tl.where(exists, _scores(logits, highest, total, SCORE), 0.0)
    dscores = tl.zeros((BLOCK_T, E_P2), tl.float32)
    chosen_scores = tl.zeros((BLOCK_T, E_P2), tl.float32)
    for step in range(TOP_K):
        winner = tl.load(experts_ptr + t * TOP_K + step, mask=token_mask, other=0)
        dweight = tl.load(dweights_ptr + t * TOP_K + step, mask=token_mask, other=0.0) * scale
        is_winner = expert[None, :] == winner[:, None]
        dscores = tl.where(is_winner, dweight[:, None], dscores)
        chosen_scores = tl.where(is_winner, scores, chosen_scores)
    if NORMALIZE:
        # w = s / n with n = sum of s + epsilon, so ds = (dw - sum(dw * s) / n) / n. If n is clamped, ds = dw / n.
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
    store_gradient(gradient, direct_ptr, direct_strides, dlogits_ptr, t[:, None], expert[None, :], E, mask, SPLIT)
