"""The highest of a token's logits, inside kernels: by value, and among equals the lower expert first."""

from ..runtime.triton import tl, triton


@triton.jit
def ordered(bits):
    """Between the bits of a float32 and an int32 of the same order; its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ranked(logits):
    """What logits are ranked by: NaN with the highest, and -0.0 and 0.0 as one value."""
    return tl.where(logits == logits, logits, float("inf")) + 0.0


@triton.jit
def key(logits):
    """int32 of the same order. That of -inf is above -(2**31), the key of an expert that is taken or does not exist."""
    return ordered(ranked(logits).to(tl.int32, bitcast=True))


@triton.jit
def choose_highest(keys, E_P2: tl.constexpr, TOP_K: tl.constexpr, K_P2: tl.constexpr):
    """The experts of the highest keys, [BLOCK_T, K_P2]; among equals the lower expert first."""
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
    """(the same in less than half the time, whether it is unsure of a token's [BLOCK_T]).

    The last bits of a key make way for the expert, so that one maximum finds both, and no two keys are equal. Where two
    that follow each other in the order differ in nothing else, the bits that are gone would decide.
    """
    # One bit less of the value, so that a difference of two keys fits 32 bits.
    expert = tl.arange(0, E_P2)[None, :]
    short = ((keys >> 1) & -E_P2) | (E_P2 - 1 - expert)
    k = tl.arange(0, K_P2)[None, :]
    chosen = tl.zeros((keys.shape[0], K_P2), tl.int32)
    best = tl.max(short, 1)
    is_unsure = tl.zeros((keys.shape[0],), tl.int32)
    for step in range(TOP_K):
        chosen = tl.where(k == step, (E_P2 - 1 - (best & (E_P2 - 1)))[:, None], chosen)
        # Less the best, a key below it is as unsigned number above all others, and the higher, the nearer: the
        # next maximum takes one addition and one comparison per key.
        nearest = tl.max((short - best[:, None]).to(tl.uint32, bitcast=True), 1)
        following = best + nearest.to(tl.int32, bitcast=True)
        is_unsure |= ((following & -E_P2) == (best & -E_P2)).to(tl.int32)
        best = following
    return chosen, is_unsure
