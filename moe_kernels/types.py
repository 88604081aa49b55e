"""Data types that the ops pass to each other.

Letters: T tokens, D d_model, F d_ff of one expert, E experts, K top_k, R = T * K rows. A *slot* is one (token, k)
choice with the flat index t * K + k. A *row* is a slot moved to expert order.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """A router's decision for each token."""

    topk_experts: Tensor  # [T, K] int32, distinct, by falling logit; the lower id first on ties
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E]


class TileTable(NamedTuple):
    """The tiles of a grouped GEMM's rows. Group G is the tail: padding rows, which belong to no group."""

    bounds: Tensor  # [G + 2] int32: group g owns rows bounds[g] to bounds[g + 1]
    tiles: Tensor  # [capacity, 2] int32: group, row block inside the group
    num_tiles: Tensor  # [2] int32: entries of the groups, and entries with the tail; later entries continue its count
    order: Tensor  # [G] int32: groups by falling number of rows, ties by id
    block_rows: int


class Permutation(NamedTuple):
    """The position of each slot when rows are sorted by expert."""

    offsets: Tensor  # [E] int32: exclusive END row of each expert
    slot_to_row: Tensor  # [T, K] int32; -1 for a dropped slot
    row_to_token: Tensor  # [R] int32, R = T * K or max_rows; rows at or past offsets[-1] are padding
    tile_table: TileTable


class ExpertWeights(NamedTuple):
    """Expert weights in the layout of `fused_experts`."""

    w_up: Tensor  # [E, 2F, D], or [E, F, D] if not gated
    w_down: Tensor  # [E, D, F]
    b_up: Tensor | None = None  # [E, 2F], or [E, F]
    b_down: Tensor | None = None  # [E, D]


class ExpertAdapters(NamedTuple):
    """Low-rank adapters (LoRA) of expert weights: w_up[e] + scale * up_b[e] @ up_a[e], and w_down likewise.

    Ranks r of the two pairs are independent. A pair is given as a whole or not at all. The first axis of `up_a` and
    `down_b` may have length 1: all experts share it.

    Source: https://arxiv.org/abs/2106.09685.
    """

    up_a: Tensor | None = None  # [E or 1, r, D]
    up_b: Tensor | None = None  # [E, 2F or F, r]
    down_a: Tensor | None = None  # [E, r, F]
    down_b: Tensor | None = None  # [E or 1, D, r]
    scale: float = 1.0
