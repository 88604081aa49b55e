"""Data types that the ops pass to each other.

Letters: T tokens, D d_model, F d_ff of one expert, E experts, K top_k, R = T * K rows. A *slot* is one (token, k)
choice with the flat index t * K + k. A *row* is a slot moved to expert order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """A router's decision for each token.

    Shapes: topk_experts [T, K] int32, topk_weights [T, K] float32, logits [T, E].
    """

    topk_experts: Tensor  # [T, K] int32, distinct, in descending order of score plus bias; lower ids win ties
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E]


class TileTable(NamedTuple):
    """Tiles of the rows of a grouped GEMM with G groups. The tail, the padding rows at the end, counts as group G."""

    bounds: Tensor  # [G + 2] int32: group g has the rows bounds[g]:bounds[g + 1]
    tiles: Tensor  # [capacity, 2] int32: (group, row block in group); unused entries are blocks past the tail's end
    num_tiles: Tensor  # [4] int32: numbers of tiles without and with the tail, then two counters of `hopper/pace.py`
    order: Tensor  # [G] int32: groups in descending order of their number of rows; lower ids win ties
    block_rows: int  # maximum number of rows of a tile


class Permutation(NamedTuple):
    """The position of each slot when rows are sorted by expert.

    Shapes: offsets [E] int32, slot_to_row [T, K] int32, row_to_token [R] int32.
    """

    offsets: Tensor  # [E] int32: exclusive END row of each expert
    slot_to_row: Tensor  # [T, K] int32; -1 for a dropped slot
    row_to_token: Tensor  # [R] int32, R = T * K or max_rows; rows at or past offsets[-1] are padding
    tile_table: TileTable


@dataclass(frozen=True)
class WeightFormat:
    """Number format and scale blocks of a quantised weight; `moe_kernels.quantization.formats` defines and checks them.

    Attributes:
        name: "fp8", "mxfp4", "nf4" or "int8".
        block: (rows, columns) of one expert's [out, in] matrix that share a scale. 0 columns mean the whole row. NF4's
            blocks are ranges of the flattened weight.
        nested_block: the number of NF4 scales that share a second-level scale. None, the default, means float32 scales.
    """

    name: str
    block: tuple[int, int]
    nested_block: int | None = None

    def __str__(self) -> str:
        rows, columns = self.block
        nested = "" if self.nested_block is None else f", scales in blocks of {self.nested_block}"
        return f"{self.name} ({rows}x{columns or 'row'}{nested})"


class QuantizedWeight(NamedTuple):
    """A frozen weight [E, out, in], stored as the tensors of its quantised format. All tensors are contiguous.

    The table assumes the default blocks of each format: fp8 128 x 128, nf4 64. Quotients are rounded up.

    | format | values | scales |
    | --- | --- | --- |
    | fp8 | [E, out, in] float8_e4m3fn | [E, out / 128, in / 128] in float32, 16 bits or e8m0 |
    | mxfp4 | [E, out, in / 2] or [E, out, in / 32, 16] uint8 | [E, out, in / 32] uint8 or float8_e8m0fnu |
    | nf4 | out * in * E / 2 bytes of any shape | one per block, any shape: float32, or uint8 if nested |
    | int8 | [E, out, in] int8 | the largest absolute value of each row, E * out float32 |

    Other fields: shape [E, out, in], codes [16] float32, nested_codes [256] float32, nested_scales [blocks of scales]
    float32, nested_offset [] float32.
    """

    values: Tensor
    scales: Tensor
    format: WeightFormat
    shape: torch.Size  # [E, out, in]
    codes: Tensor | None = None  # [16] float32: the value of each 4-bit number of NF4 (bitsandbytes' "quant_map")
    nested_codes: Tensor | None = None  # [256] float32: the value of each uint8 of nested scales
    nested_scales: Tensor | None = None  # [blocks of scales] float32
    nested_offset: Tensor | None = None  # [] float32, added to nested scales

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class ScaledRows(NamedTuple):
    """Rows in e4m3 with a scale for each 128 columns of a row: the operand of GEMMs with precision "fp8"."""

    values: Tensor  # [R, K] float8_e4m3fn, contiguous
    scales: Tensor  # [R, ceil(K / 128)] float32, column-major

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


class ScaledForms(NamedTuple):
    """The experts' weights in e4m3 with a float32 scale for each 128 x 128 block, both untransposed and transposed
    ("turned"). If a field is None, the weight is quantised before the GEMM that reads this field. All tensors are
    contiguous."""

    up: Tensor | None = None  # [E, 2F or F, D] float8_e4m3fn
    up_scales: Tensor | None = None  # [E, (2F or F) / 128, D / 128]; quotients here and below are rounded up
    up_turned: Tensor | None = None  # [E, D, 2F or F]
    up_turned_scales: Tensor | None = None  # [E, D / 128, (2F or F) / 128]
    down: Tensor | None = None  # [E, D, F]
    down_scales: Tensor | None = None  # [E, D / 128, F / 128]
    down_turned: Tensor | None = None  # [E, F, D]
    down_turned_scales: Tensor | None = None  # [E, F / 128, D / 128]


class ScaledWeight(NamedTuple):
    """A trained weight [E, out, in], `master`, and its e4m3 copies from `ScaledForms`. GEMMs read only copies. If a
    copy is None, it is made from `master` right before the GEMM that reads it."""

    master: Tensor
    values: Tensor | None  # [E, out, in]
    scales: Tensor | None  # [E, out / 128, in / 128]
    turned: Tensor | None  # [E, in, out]
    turned_scales: Tensor | None  # [E, in / 128, out / 128]

    @property
    def shape(self) -> torch.Size:  # [E, out, in]
        return self.master.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.master.dtype


Weight = Tensor | QuantizedWeight


class ExpertWeights(NamedTuple):
    """Expert weights in the layout of `fused_experts`. Both matrices are tensors, or both are quantised."""

    w_up: Weight  # [E, 2F, D], or [E, F, D] if not gated
    w_down: Weight  # [E, D, F]
    b_up: Tensor | None = None  # [E, 2F], or [E, F]
    b_down: Tensor | None = None  # [E, D]


class ExpertAdapters(NamedTuple):
    """Low-rank adapters (LoRA) of expert weights: w_up[e] + scale * up_b[e] @ up_a[e], and the same for w_down.

    The pairs (up_a, up_b) and (down_a, down_b) may have different ranks r. Both factors of a pair are given or neither.
    `up_a` and `down_b` may have a first axis of length 1: all experts then share the factor.

    Shapes: up_a [E or 1, r, D], up_b [E, 2F or F, r], down_a [E, r, F], down_b [E or 1, D, r], in any floating-point
    dtype. `fused_experts` checks shapes and dtypes.

    Source: https://arxiv.org/abs/2106.09685.
    """

    up_a: Tensor | None = None  # [E or 1, r, D]
    up_b: Tensor | None = None  # [E, 2F or F, r]
    down_a: Tensor | None = None  # [E, r, F]
    down_b: Tensor | None = None  # [E or 1, D, r]
    scale: float = 1.0
