"""Device functions that choose the k highest of a token's logits, by falling value. On ties the lower expert is
first."""

from ..runtime.triton import tl, triton


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
    """Return an int32 with the order of the value. -inf maps above -(2**31), the key of an expert that is taken or does
    not exist."""
    return ordered(ranked(logits).to(tl.int32, bitcast=True))


@triton.jit
def choose_highest(keys, E_P2: tl.constexpr, TOP_K: tl.constexpr, K_P2: tl.constexpr):
    """Return the experts of the highest keys, [BLOCK_T, K_P2]. On ties the lower expert is first."""
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
    """Return (experts as `choose_highest`, whether each token's choice is unsure [BLOCK_T]) in less than half the time.

    The id of the expert replaces the last bits of its key. One maximum then finds both, and no two keys are equal. The
    choice is unsure if two successive keys differ only in the id: the replaced bits would decide their order.
    """
    # The shift drops one bit of the value, so that a difference of two keys fits 32 bits.
    expert = tl.arange(0, E_P2)[None, :]
    short = ((keys >> 1) & -E_P2) | (E_P2 - 1 - expert)
    k = tl.arange(0, K_P2)[None, :]
    chosen = tl.zeros((keys.shape[0], K_P2), tl.int32)
    best = tl.max(short, 1)
    is_unsure = tl.zeros((keys.shape[0],), tl.int32)
    for step in range(TOP_K):
        chosen = tl.where(k == step, (E_P2 - 1 - (best & (E_P2 - 1)))[:, None], chosen)
        # As unsigned numbers, the differences key - best are larger for keys below the best than for all others, and
        # largest for the nearest. The next maximum takes one addition and one comparison per key.
        nearest = tl.max((short - best[:, None]).to(tl.uint32, bitcast=True), 1)
        following = best + nearest.to(tl.int32, bitcast=True)
        is_unsure |= ((following & -E_P2) == (best & -E_P2)).to(tl.int32)
        best = following
    return chosen, is_unsure
