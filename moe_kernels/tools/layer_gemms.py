"""The GEMMs of one expert layer as kernel arguments, in every form that the expert op may choose."""

from __future__ import annotations

import argparse
import dataclasses

import torch
from torch import Tensor

from ..gemm.arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from ..gemm.arguments.base import Arguments
from ..gemm.arguments.block_scaled import COLUMNS_WORTH_A_COPY, BlockScaledGemmArguments
from ..gemm.arguments.decoding import DecodingGemmArguments, QuantizedMatrices
from ..gemm.arguments.grouped import GroupedGemmArguments, WgradArguments
from ..gemm.kernel import device_cc
from ..gemm.rule import is_worth_aligning
from ..quantization.quantize import quantize
from ..reference_fp8 import BLOCK, quantize_blocks
from ..runtime.row_layout import empty_aligned, empty_rows
from ..runtime.triton import cdiv
from ..specs import is_gated
from ..testing import Case, make_inputs, make_permutation
from ..types import QuantizedWeight, TileTable, WeightFormat

NUM_FORMS = 12  # number of forms in `LayerForms.all`
NUM_PRODUCTS = 4  # of rows and weights in a step: the number of forms in `decoding` and in `block_scaled`


def parse_layer(text: str) -> Case:
    """Parse T,D,F,E,K from a command line.

    Raises:
        argparse.ArgumentTypeError: the text is not five valid sizes of a layer.
    """
    try:
        num_tokens, d_model, d_ff, num_experts, top_k = sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a layer must be T,D,F,E,K, got {text!r}") from error
    if min(sizes) < 1 or top_k > num_experts:
        raise argparse.ArgumentTypeError(f"T, D, F, E and K must be at least 1, and K at most E, got {text!r}")
    return Case(num_tokens, d_model, d_ff, num_experts, top_k)


class LayerForms:
    """Arguments by form, made on request. All forms share the random rows in expert order."""

    def __init__(
        self,
        tokens: Tensor,  # [T, D]
        w_up: Tensor,  # [E, 2F, D], or [E, F, D] with a plain activation
        w_down: Tensor,  # [E, D, F]
        row_to_token: Tensor,  # [R] int32
        tile_table: TileTable,
        activation: str,
    ):
        self.tokens, self.w_up, self.w_down, self.activation = tokens, w_up, w_down, activation
        self.row_to_token, self._table = row_to_token, tile_table
        num_rows, d_model, d_ff = len(row_to_token), tokens.shape[1], w_down.shape[2]
        columns = (d_model, d_ff, w_up.shape[1])
        self._rows = [empty_rows(tokens, num_rows, n).normal_() for n in columns]
        self._out = [empty_rows(tokens, num_rows, n) for n in columns]

    @classmethod
    def drawn(cls, case: Case, dtype: torch.dtype, device: torch.device | str, activation: str) -> LayerForms:
        """Return forms of random tokens and weights. Every expert gets an equal share of the rows."""
        inputs = make_inputs(dataclasses.replace(case, routing="even"), dtype, device)
        _, permutation = make_permutation(inputs, case.top_k)
        w_up = inputs.w_up if is_gated(activation) else inputs.w_up[:, : case.d_ff].contiguous()
        operands = inputs.tokens, w_up, inputs.w_down
        return cls(*operands, permutation.row_to_token, permutation.tile_table, activation)

    @classmethod
    def without_memory(cls, case: Case, dtype: torch.dtype, activation: str) -> LayerForms:
        """Return forms on the meta device: shapes and strides to query kernels with."""

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        num_experts, num_rows = case.num_experts, case.num_tokens * case.top_k
        sizes = ((num_experts + 2,), (-(-num_rows // 128) + num_experts + 1, 2), (2,), (num_experts,))
        table = TileTable(*(empty(*size, dtype=torch.int32) for size in sizes), block_rows=128)
        return cls(
            empty(case.num_tokens, case.d_model),
            empty(num_experts, (1 + is_gated(activation)) * case.d_ff, case.d_model),
            empty(num_experts, case.d_model, case.d_ff),
            empty(num_rows, dtype=torch.int32),
            table,
            activation,
        )

    def as_read(self, cc: int | None = None) -> LayerForms:
        """Return the forms with the weights that GEMMs read: these, or aligned copies.

        Args:
            cc: compute capability; None for that of the tensors' device.
        """
        if cc is None:
            cc = device_cc(self.tokens.device) if self.tokens.is_cuda else 0
        w_up, w_down = (
            empty_aligned(weight, weight.device).copy_(weight)
            if is_worth_aligning(weight, len(self.row_to_token), cc)
            else weight
            for weight in (self.w_up, self.w_down)
        )
        return LayerForms(self.tokens, w_up, w_down, self.row_to_token, self._table, self.activation)

    def all(self) -> dict[str, Arguments]:
        """Return every form: "_gather" reads the tokens' rows through an index, "up_plain" omits the activation."""
        tokens, index, w_up, w_down = self.tokens, self.row_to_token, self.w_up, self.w_down
        rows_d, rows_f, rows_2f = self._rows
        out_d, out_f, out_2f = self._out
        up = {"epilogue": self.activation, "preactivation": out_2f}
        up_b = w_up.transpose(1, 2)
        dw_up, dw_down = _gradient_of(w_up), _gradient_of(w_down)
        return {
            "up": self._gemm(rows_d, up_b, out_f, **up),
            "up_gather": self._gemm(tokens, up_b, out_f, row_to_token=index, **up),
            "up_plain": self._gemm(rows_d, up_b, out_2f),
            "up_plain_gather": self._gemm(tokens, up_b, out_2f, row_to_token=index),
            "down": self._gemm(rows_f, w_down.transpose(1, 2), out_d),
            "down_dgrad": self._gemm(rows_d, w_down, out_f),
            "down_dgrad_gather": self._gemm(tokens, w_down, out_f, row_to_token=index),
            "up_dgrad": self._gemm(rows_2f, w_up, out_d),
            "up_wgrad": self._wgrad(rows_2f, rows_d, dw_up),
            "up_wgrad_gather": self._wgrad(rows_2f, tokens, dw_up, dout_row_to_token=index),
            "down_wgrad": self._wgrad(rows_d, rows_f, dw_down),
            "down_wgrad_gather": self._wgrad(tokens, rows_f, dw_down, a_row_to_token=index),
        }

    def activation_gradient(self, gather: bool) -> ActivationGradientArguments:
        """Return "down_dgrad" with the gradient of the activation, which must be gated."""
        (rows_d, _, rows_2f), (_, out_f, out_2f) = self._rows, self._out
        num_rows, blocks = len(rows_d), cdiv(out_f.shape[1], COLUMNS)
        row_weights, row_sums = (rows_d.new_ones(size, dtype=torch.float32) for size in (num_rows, (num_rows, blocks)))
        written = out_2f, rows_2f, out_f, row_weights, row_sums
        options = {"row_to_token": self.row_to_token if gather else None, "tile_table": self._table}
        a = self.tokens if gather else rows_d
        return ActivationGradientArguments(a, self.w_down, *written, self.activation, **options)

    def decoding(self, format: str | WeightFormat) -> dict[str, Arguments]:
        """Return the forms of quantised weights with few rows."""
        up, down = quantize(self.w_up, format), quantize(self.w_down, format)
        _, rows_f, rows_2f = self._rows
        out_d, out_f, out_2f = self._out
        gather = {"row_to_token": self.row_to_token}

        def form(a: Tensor, weight: QuantizedWeight, transposed: bool, out: Tensor, **options: Tensor) -> Arguments:
            b = QuantizedMatrices(weight, transposed)
            return DecodingGemmArguments.of(a, b, out, tile_table=self._table, **options)

        return {
            "up_gather": form(self.tokens, up, True, out_2f, **gather),
            "down": form(rows_f, down, True, out_d),
            "down_dgrad_gather": form(self.tokens, down, False, out_f, **gather),
            "up_dgrad": form(rows_2f, up, False, out_d),
        }

    def block_scaled(self) -> dict[str, Arguments]:
        """Return the products of `precision="fp8"`: rows and weights in e4m3. Wide ones read copied rows."""
        rows_d, rows_f, rows_2f = self._rows
        out_d, out_f, out_2f = self._out

        def form(a: Tensor, weight: Tensor, out: Tensor, row_to_token: Tensor | None = None) -> Arguments:
            values, scales = quantize_blocks(a, 1, BLOCK)
            b, scale_b = quantize_blocks(weight, BLOCK, BLOCK)  # [E, N, K]
            scales = scales.t().contiguous().t()  # as the kernels store them
            options = {"tile_table": self._table, "row_to_token": row_to_token, "zero_tail": False}
            return BlockScaledGemmArguments(values, b.mT, out, scale_a=scales, scale_b=scale_b.mT, **options)

        def of_tokens(weight: Tensor, out: Tensor) -> Arguments:
            if out.shape[1] >= COLUMNS_WORTH_A_COPY:
                return form(rows_d, weight, out)
            return form(self.tokens, weight, out, self.row_to_token)

        return {
            "up": of_tokens(self.w_up, out_2f),
            "down": form(rows_f, self.w_down, out_d),
            "down_dgrad": of_tokens(self.w_down.mT.contiguous(), out_f),
            "up_dgrad": form(rows_2f, self.w_up.mT.contiguous(), out_d),
        }

    def _gemm(self, a: Tensor, b: Tensor, out: Tensor, **options) -> GroupedGemmArguments:
        return GroupedGemmArguments(a, b, out, tile_table=self._table, zero_tail=False, **options)

    def _wgrad(self, a: Tensor, dout: Tensor, out: Tensor, **options) -> WgradArguments:
        return WgradArguments(a, dout, out, tile_table=self._table, **options)


def _gradient_of(weight: Tensor) -> Tensor:
    """Return memory for the gradient, with rows as the weight's."""
    return torch.empty_like(weight) if weight.is_contiguous() else empty_aligned(weight, weight.device)
