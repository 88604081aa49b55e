"""The GEMMs on the rows of one chunk of tokens. For each GEMM, `Rows` decides which kernel runs, in which form the
kernel reads the weight, and whether the kernel or a separate copy gathers the rows."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation.functions import EPILOGUES, PLAIN_EPILOGUES
from ..activation.ops import RowBias, launch_activation, launch_scaled_activation
from ..gemm import selection
from ..gemm.arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from ..gemm.arguments.block_scaled import COLUMNS_WORTH_A_COPY, BlockScaledGemmArguments
from ..gemm.arguments.decoding import DecodingGemmArguments, QuantizedMatrices
from ..gemm.arguments.grouped import GroupedGemmArguments, WgradArguments
from ..gemm.batch_invariance import ASSUMED_ROWS, canonical_layout
from ..gemm.kernels.pointer_decoding import MAX_ROWS
from ..gemm.passes import launch_bias_and_scale
from ..permutation.permute import launch_combine, launch_permute
from ..quantization.fp8_rows import launch_quantize_rows
from ..quantization.fp8_weights import launch_quantize_weight
from ..quantization.kernels import launch_dequantize
from ..runtime.row_layout import empty_aligned, empty_rows, has_aligned_rows
from ..runtime.triton import cdiv
from ..specs import Activation
from ..types import ExpertWeights, Permutation, QuantizedWeight, ScaledRows, ScaledWeight, TileTable, Weight
from .expert_bias import row_to_expert
from .slot_values import launch_row_weights, launch_slot_sums


class ScaledMatrices(NamedTuple):
    """An e4m3 weight with a scale per 128 x 128 block, as the second operand of a grouped GEMM."""

    values: Tensor  # [E, K, N], stored as [E, N, K]
    scales: Tensor  # [E, K / 128, N / 128], rounded up
    dtype: torch.dtype  # dtype of the products

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


Matrices = Tensor | QuantizedMatrices | ScaledMatrices


class Rows(NamedTuple):
    """The index tensors of a permutation. The methods choose kernels and launch them on the permutation's rows."""

    slot_to_row: Tensor  # [T, K] contiguous
    row_to_token: Tensor  # [R] contiguous
    table: TileTable
    reserved_sms: int = 0  # number of SMs that persistent GEMMs leave free
    assumed_rows: int | None = None  # number of rows per expert for which kernels are chosen; None: the actual number

    @classmethod
    def of(cls, permutation: Permutation, *, reserved_sms: int, batch_invariant: bool = False) -> Rows:
        slot_to_row, row_to_token = permutation.slot_to_row.contiguous(), permutation.row_to_token.contiguous()
        assumed_rows = ASSUMED_ROWS if batch_invariant else None
        return cls(slot_to_row, row_to_token, permutation.tile_table, reserved_sms, assumed_rows)

    def as_read(self, tokens: Tensor) -> Tensor:  # [T, D]
        """Return the tokens. With batch invariance, return them contiguous and at an address divisible by 16."""
        return tokens if self.assumed_rows is None else canonical_layout(tokens)

    def matrices(
        self, weight: Weight | ScaledWeight, dtype: torch.dtype, *, transposed: bool = False
    ) -> Matrices:  # [E, out, in]; [E, in, out] if transposed
        """Return the weight as a GEMM's second operand. A `QuantizedWeight` stays quantised if the GEMM decodes
        the weight (see `decodes`). Otherwise it is dequantised here."""
        if isinstance(weight, QuantizedWeight) and self.decodes(weight):
            return QuantizedMatrices(weight, transposed)
        if isinstance(weight, ScaledWeight):
            return _scaled_matrices(weight, transposed)
        dense = weight if isinstance(weight, Tensor) else launch_dequantize(weight, dtype)
        if self._is_aligned_by_copy(dense):
            dense = empty_aligned(dense, dense.device).copy_(dense)
        return dense.transpose(1, 2) if transposed else dense

    def _is_aligned_by_copy(self, matrices: Tensor) -> bool:
        """Return whether GEMMs use an aligned copy of these matrices. A weight is copied to aligned rows before GEMMs
        read the weight. A gradient is written to aligned rows, then copied to contiguous memory."""
        num_rows = self.row_to_token.shape[0] if self.assumed_rows is None else self.assumed_rows * matrices.shape[0]
        return is_worth_aligning(matrices, num_rows)

    def decodes(self, weight: QuantizedWeight) -> bool:
        """Return whether GEMMs decode the weight while they load it: below 512 rows per expert on average. With batch
        invariance GEMMs never decode, because the number of rows must not decide how a result is computed."""
        return self.assumed_rows is None and self.row_to_token.shape[0] < MAX_ROWS * weight.shape[0]

    def gemm(
        self,
        a: Tensor | ScaledRows,
        b: Matrices,
        *,
        bias: Tensor | None = None,  # [E, N]
        gather: bool = False,
        extra: tuple[Tensor, Tensor] | None = None,  # [R, r] and [E, r, N]
        out: Tensor | None = None,  # [R, N]; ignored if the matrices are in e4m3
    ) -> Tensor:  # [R, N]
        """Return each row times its expert's matrix, plus the bias. With `gather`, `a` has a row per token. The product
        of the `extra` tensors is added before rounding. If only the matrices are in e4m3, `a` is quantised."""
        if isinstance(b, ScaledMatrices):
            return self._scaled_gemm(a, b, bias, gather)
        assert isinstance(a, Tensor)
        operands, settings = self._operands(bias, gather, extra), self._settings()
        if out is None:
            out = empty_rows(a, self.row_to_token.shape[0], b.shape[2])
        if isinstance(b, QuantizedMatrices):
            selection.run(DecodingGemmArguments.of(a, b, out, **operands))
        else:
            selection.run_product(GroupedGemmArguments(a, b, out, **operands, **settings))
        return out

    def _operands(
        self, bias: Tensor | None, gather: bool, extra: tuple[Tensor, Tensor] | None
    ) -> dict[str, Tensor | TileTable | None]:
        extra_a, extra_b = extra or (None, None)
        index = self.row_to_token if gather else None
        return {"row_to_token": index, "tile_table": self.table, "bias": bias, "extra_a": extra_a, "extra_b": extra_b}

    def _settings(self) -> dict[str, Any]:
        return {"zero_tail": False, "reserved_sms": self.reserved_sms, "assumed_rows": self.assumed_rows}

    def _scaled_gemm(
        self, a: Tensor | ScaledRows, b: ScaledMatrices, bias: Tensor | None, gather: bool
    ) -> Tensor:  # [R, N]
        scaled = launch_quantize_rows(a) if isinstance(a, Tensor) else a
        if gather and b.shape[2] >= COLUMNS_WORTH_A_COPY:
            scaled, gather = self._permute_scaled(scaled), False
        out = empty_rows(b.values, self.row_to_token.shape[0], b.shape[2], dtype=b.dtype)
        operands = scaled.values, b.values, out, scaled.scales, b.scales
        index = self.row_to_token if gather else None
        settings = self._settings()
        selection.run(BlockScaledGemmArguments(*operands, row_to_token=index, tile_table=self.table, **settings))
        if bias is not None:
            launch_bias_and_scale(out, bias, None, self.table)
        return out

    def activated_gemm(
        self,
        a: Tensor,
        b: Matrices,
        activation: Activation,
        bias: Tensor | None,
        *,
        gather: bool,
        extra: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | ScaledRows]:
        """Return the product [R, 2F or F] without bias, and the activation [R, F] of the product plus the bias. The
        activation is in e4m3 if the matrices are in e4m3."""
        if isinstance(b, ScaledMatrices):
            preactivation = self.gemm(a, b, gather=gather)
            return preactivation, launch_scaled_activation(preactivation, activation, self.row_bias(bias))
        num_rows, num_columns = self.row_to_token.shape[0], b.shape[2]
        preactivation = empty_rows(a, num_rows, num_columns)
        out = empty_rows(a, num_rows, num_columns // (1 + activation.gated))
        in_epilogue = activation.name in (*EPILOGUES, *PLAIN_EPILOGUES)
        if in_epilogue and activation.published and not activation.interleaved and isinstance(b, Tensor):
            operands = {**self._operands(bias, gather, extra), **self._settings()}
            epilogue = {"epilogue": activation.name, "preactivation": preactivation}
            if selection.run_if_supported(GroupedGemmArguments(a, b, out, **operands, **epilogue)):
                return preactivation, out
        self.gemm(a, b, gather=gather, extra=extra, out=preactivation)
        return preactivation, launch_activation(preactivation, activation, self.row_bias(bias), out)

    def activation_gradient(
        self,
        a: Tensor,
        b: Matrices,
        activation: Activation,
        topk_weights: Tensor,  # [T, K] float32 contiguous
        preactivation: Tensor,  # H [R, 2F]
        *,
        gather: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return dH, A_w [R, F] and the gradient of the routing weights [T, K], computed by one GEMM. A_w is the
        activation times each row's routing weight. With `overwrite`, dH overwrites H. Return None if there is no fused
        kernel or if separate kernels are faster."""
        fusible = activation.gated and activation.published and not activation.interleaved
        if not fusible or not isinstance(b, Tensor) or self.assumed_rows is not None:
            return None
        num_rows, d_ff = preactivation.shape[0], b.shape[2]
        if not is_worth_fusing(b, num_rows):
            return None
        # Look for a kernel before allocating the results. Expanded tensors of one row stand for the results here.
        dpreactivation, weighted = (preactivation.new_empty(1, n).expand(num_rows, n) for n in (2 * d_ff, d_ff))
        row_weights, row_sums = topk_weights.new_empty(num_rows), topk_weights.new_empty(num_rows, cdiv(d_ff, COLUMNS))
        args = ActivationGradientArguments(
            a,
            b,
            dpreactivation,
            preactivation,
            weighted,
            row_weights,
            row_sums,
            activation.name,
            row_to_token=self.row_to_token if gather else None,
            tile_table=self.table,
            reserved_sms=self.reserved_sms,
        )
        if selection.find(args) is None:
            return None
        dpreactivation = preactivation if overwrite else empty_rows(preactivation, num_rows, 2 * d_ff)
        weighted = empty_rows(preactivation, num_rows, d_ff)
        launch_row_weights(topk_weights, self.slot_to_row, row_weights)
        selection.run(dataclasses.replace(args, out=dpreactivation, weighted=weighted))
        return dpreactivation, weighted, launch_slot_sums(row_sums, self.slot_to_row)

    def wgrad(
        self,
        a: Tensor,
        dout: Tensor,
        *,
        gather_a: bool = False,
        gather_dout: bool = False,
        add_to: Tensor | None = None,  # [E, K, N]
    ) -> Tensor:
        """Return the products [E, K, N] of a.T @ dout over each expert's rows. If `add_to` is given, add the products
        to `add_to` and return `add_to`."""
        out = add_to
        if out is None:
            out = a.new_empty(self.table.order.shape[0], a.shape[1], dout.shape[1])
            out = empty_aligned(out, out.device) if self._is_aligned_by_copy(out) else out
        args = WgradArguments(
            a,
            dout,
            out,
            a_row_to_token=self.row_to_token if gather_a else None,
            dout_row_to_token=self.row_to_token if gather_dout else None,
            tile_table=self.table,
            reserved_sms=self.reserved_sms,
            accumulate=add_to is not None,
        )
        selection.run(args)
        return out.contiguous() if add_to is None else add_to

    def choose_copies(self, tokens: Tensor, weights: ExpertWeights) -> selection.Copies:
        """Return `selection.Copies`: True for a gather by a separate copy, False for a gather inside the GEMM.
        `tokens` may also be `dout`, because only dtype and device are read."""
        d_ff, w_up = weights.w_down.shape[2], weights.w_up
        if isinstance(w_up, ScaledWeight) or (isinstance(w_up, QuantizedWeight) and self.decodes(w_up)):
            return selection.Copies(False, False, False)
        if isinstance(w_up, QuantizedWeight):
            w_up = torch.empty(w_up.shape, dtype=tokens.dtype, device="meta")
        elif self._is_aligned_by_copy(w_up):
            w_up = empty_aligned(w_up, torch.device("meta"))
        return selection.choose_copies(tokens, w_up, d_ff, self.row_to_token.shape[0], self.assumed_rows)

    def permute(self, tokens: Tensor, topk_weights: Tensor | None = None) -> Tensor:  # [R, D]
        """Copy each token to its rows, multiplied by the slots' weights if given."""
        rows = empty_rows(tokens, self.row_to_token.shape[0], tokens.shape[1])
        launch_permute(tokens, topk_weights, self.slot_to_row, rows)
        return rows

    def _permute_scaled(self, tokens: ScaledRows) -> ScaledRows:  # [T, D] -> [R, D]
        values = tokens.values.new_empty(self.row_to_token.shape[0], tokens.values.shape[1])
        whole = torch.int64  # copy 8 e4m3 numbers at once, as one int64
        launch_permute(tokens.values.view(whole), None, self.slot_to_row, values.view(whole))
        return ScaledRows(values, tokens.scales.t().index_select(1, self.row_to_token).t())

    def combine(self, rows: Tensor, topk_weights: Tensor | None) -> Tensor:  # [T, D]
        """Return the sum of each token's rows, weighted by `topk_weights` if given."""
        return launch_combine(rows, topk_weights, self.slot_to_row)

    def row_bias(self, bias: Tensor | None) -> RowBias | None:
        return None if bias is None else RowBias(bias, row_to_expert(self.table.bounds, len(self.row_to_token)))

    def slot_experts(self) -> Tensor:  # [T, K] int32
        """Return the expert of each slot, or -1 for a dropped slot."""
        row_experts = row_to_expert(self.table.bounds, len(self.row_to_token))
        experts = row_experts.index_select(0, self.slot_to_row.clamp(min=0).flatten()).view(self.slot_to_row.shape)
        return torch.where(self.slot_to_row >= 0, experts, -1)


_ROWS_WORTH_AN_ALIGNED_WEIGHT = 512  # minimum number of rows per expert for which an aligned copy saves time
_ROWS_NOT_WORTH_FUSING = 128  # maximum number of rows per expert for which a fused activation gradient saves no time
_LONGEST_FUSED = 3072  # maximum length of the reduction for which a fused activation gradient saves time


def is_worth_aligning(matrices: Tensor, num_rows: int) -> bool:
    """Return whether TMA saves more time than a copy to aligned rows costs. `matrices` is an operand or the result of a
    GEMM. TMA needs rows that start at multiples of 16 bytes."""
    many = num_rows >= _ROWS_WORTH_AN_ALIGNED_WEIGHT * matrices.shape[0]
    is_copied = many and matrices.element_size() == 2 and selection.target_cc(matrices.device) >= 90
    return is_copied and not has_aligned_rows(matrices)


def is_worth_fusing(b: Tensor, num_rows: int) -> bool:  # [E, K, F]
    """Return whether a GEMM with the activation's gradient in its epilogue is faster than a GEMM and a second kernel.

    Tiles of the fused GEMM are half as wide, because shared memory also holds their part of H. Operands are therefore
    read more often. The cost of these reads grows with the length of the reduction, but the cost of the second kernel
    does not. With few rows, kernels of other designs are faster.
    """
    return num_rows > _ROWS_NOT_WORTH_FUSING * b.shape[0] and b.shape[1] <= _LONGEST_FUSED


def _scaled_matrices(weight: ScaledWeight, transposed: bool) -> ScaledMatrices:
    """Return the matrices [E, out, in], or [E, in, out] if transposed. The axis of the reduction is contiguous in
    memory."""
    is_kept = (weight.values if transposed else weight.turned) is not None
    forms = weight if is_kept else launch_quantize_weight(weight.master, as_is=transposed, transposed=not transposed)
    values, scales = (forms.values, forms.scales) if transposed else (forms.turned, forms.turned_scales)
    assert values is not None and scales is not None
    return ScaledMatrices(values.mT, scales.mT, weight.dtype)
