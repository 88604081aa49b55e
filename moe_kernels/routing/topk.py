"""Device functions that choose a token's k highest logits, in descending order. The lower expert index wins ties."""

import torch
from torch import Tensor

from ..runtime.triton import tl, triton


def empty_choice(
    like: Tensor,  # [T, ...]
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Return uninitialised weights [T, K] and experts [T, K] of a choice, on the device of `like`."""
    shape = like.shape[0], top_k
    return like.new_empty(shape, dtype=torch.float32), like.new_empty(shape, dtype=torch.int32)


@triton.jit
def ordered(bits):
    """Map the bits of a float32 to an int32 of the same order, or back: the function is its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ranked(logits):
    """Return logits with NaN replaced by infinity, so that NaN ranks highest, and with -0.0 replaced by 0.0."""
    return tl.where(logits == logits, logits, float("inf")) + 0.0


@triton.jit
def key(logits):
    """Return int32 keys: a larger logit has a larger key. Even the key of -inf is above -(2**31), the key of experts
    that are already chosen or do not exist."""
    return ordered(ranked(logits).to(tl.int32, bitcast=True))


@triton.jit
def choose_highest(keys, E_P2: tl.constexpr, TOP_K: tl.constexpr, K_P2: tl.constexpr):
    """Return the experts of the highest keys, [BLOCK_T, K_P2], in descending order. The lower index wins ties."""
    TAKEN: tl.constexpr = -(2**31)
    expert = tl.arange(0, E_P2)[None, :]
    k = tl.arange(0, K_P2)[None, :]
    chosen = tl.zeros((keys.shape[0], K_P2), tl.int32)
    for step in range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        winner = tl.min(tl.where(keys == best, expert, E_P2), 1)[:, None]
        keys = tl.where(expert == winner, TAKEN, keys)
        chosen = tl.where(k == step, winner, chosen)
    return chosen


@triton.jit
def choose_by_short_keys(keys, E_P2: tl.constexpr, TOP_K: tl.constexpr, K_P2: tl.constexpr):
    """Return (experts [BLOCK_T, K_P2], is_unsure [BLOCK_T]) in less than half the time of `choose_highest`.

    The id of the expert replaces the last bits of its key. One maximum then finds key and expert, and no two keys are
    equal. The choice is unsure if two successive keys differ only in the id: the replaced bits may decide their order.
    """
    # `keys >> 1` drops one bit of each key, so that a difference of two keys fits 32 bits.
    expert = tl.arange(0, E_P2)[None, :]
    short = ((keys >> 1) & -E_P2) | (E_P2 - 1 - expert)
    k = tl.arange(0, K_P2)[None, :]
    chosen = tl.zeros((keys.shape[0], K_P2), tl.int32)
    best = tl.max(short, 1)
    is_unsure = tl.zeros((keys.shape[0],), tl.int32)
    for step in range(TOP_K):
        chosen = tl.where(k == step, (E_P2 - 1 - (best & (E_P2 - 1)))[:, None], chosen)
        # `best` is the last chosen key. For lower keys, key - best is negative, and therefore large as an unsigned
        # number. The next lower key has the largest difference. The search takes an addition and a comparison per key.
        nearest = tl.max((short - best[:, None]).to(tl.uint32, bitcast=True), 1)
        following = best + nearest.to(tl.int32, bitcast=True)
        is_unsure |= ((following & -E_P2) == (best & -E_P2)).to(tl.int32)
        best = following
    return chosen, is_unsure
