"""Makes arguments for the key of a table entry, so that the entry's kernel can run again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm.arguments.base import Arguments
from ..gemm.arguments.block_scaled import BlockScaledGemmArguments
from ..gemm.arguments.decoding import DecodingGemmArguments, QuantizedMatrices
from ..gemm.arguments.dense import GemmArguments
from ..gemm.arguments.grouped import GroupedGemmArguments, WgradArguments
from ..gemm.arguments.jagged import JaggedGemmArguments
from ..gemm.arguments.list import GroupedGemmListArguments
from ..gemm.tile_table import empty_tile_table, write_table
from ..quantization.quantize import quantize
from ..reference_fp8 import BLOCK, quantize_blocks
from ..specs import is_gated

_BLOCK_ROWS = 128
_JAGGED_GROUPS = 16  # number of groups, which is arbitrary because keys do not contain the number


def arguments_of(key: str, device: torch.device | str) -> Arguments:
    """Return arguments with random operands and the largest number of rows that the key covers.

    Raises:
        ValueError: the key was not made by `Arguments.table_key`, or was made for an `ActivationGradientArguments`.
    """
    form, *words = key.split(" ")
    pairs = (word.split("=", 1) for word in words if "=" in word)
    fields: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in pairs}
    dtypes = [word for word in words if "=" not in word]
    if form not in _MAKERS or len(dtypes) != 1 or not isinstance(getattr(torch, dtypes[0], None), torch.dtype):
        raise ValueError(f"tuning: a key must name a form of GEMM and its dtype, got {key!r}")
    try:
        return _MAKERS[form](_Operands(getattr(torch, dtypes[0]), device), **fields)
    except TypeError as error:
        raise ValueError(f"tuning: a key of {form} must have the fields of one, got {key!r}") from error


class _Operands:
    def __init__(self, dtype: torch.dtype, device: torch.device | str):
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def matrix(self, *shape: int, layout: str, scale: float = 1.0) -> Tensor:
        """Return random matrices [..., K, N] whose elements are stored by rows or by columns."""
        *batch, rows, columns = shape
        stored = self.normal(*batch, columns, rows).mT if layout == "column" else self.normal(*shape)
        return stored.mul_(scale)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def ends(self, num_groups: int, num_rows: int) -> Tensor:  # [G] int32
        return torch.arange(1, num_groups + 1, dtype=torch.int32, device=self.device) * num_rows

    def index(self, num_rows: int) -> Tensor:  # [R] int32
        return torch.randperm(num_rows, device=self.device).int()


def _grouped_gemm(make: _Operands, *, B: str, gather: str, epilogue: str, G: int, K: int, N: int, rows: int):
    options: dict[str, Any] = {"offsets": make.ends(G, rows)}
    if gather == "A":
        options["row_to_token"] = make.index(G * rows)
    if epilogue != "none":
        options |= {"epilogue": epilogue, "preactivation": make.empty(G * rows, N)}
    return GroupedGemmArguments(
        make.normal(G * rows, K),
        make.matrix(G, K, N, layout=B, scale=K**-0.5),
        make.empty(G * rows, N // 2 if epilogue != "none" and is_gated(epilogue) else N),
        **options,
    )


def _decoding_gemm(make: _Operands, *, weight: str, B: str, gather: str, G: int, K: int, N: int, rows: int):
    shape = (G, N, K) if B == "column" else (G, K, N)
    b = QuantizedMatrices(quantize(make.normal(*shape).mul_(K**-0.5), weight), B == "column")
    table = empty_tile_table(ends := make.ends(G, rows), G * rows, G, _BLOCK_ROWS)
    if ends.device.type != "meta":
        write_table(table, ends, G * rows)
    index = make.index(G * rows) if gather == "A" else None
    a, out = make.normal(G * rows, K), make.empty(G * rows, N)
    return DecodingGemmArguments.of(a, b, out, row_to_token=index, tile_table=table)


def _block_scaled_gemm(make: _Operands, *, B: str, gather: str, G: int, K: int, N: int, rows: int):
    shape = (G, N, K) if B == "column" else (G, K, N)
    b, scale_b = quantize_blocks(torch.randn(shape, device=make.device).mul_(K**-0.5), BLOCK, BLOCK)
    a, scale_a = quantize_blocks(torch.randn(G * rows, K, device=make.device), 1, BLOCK)
    return BlockScaledGemmArguments(
        a,
        b.mT if B == "column" else b,
        torch.empty(G * rows, N, dtype=torch.bfloat16, device=make.device),
        scale_a.t().contiguous().t(),
        scale_b.mT if B == "column" else scale_b,
        row_to_token=make.index(G * rows) if gather == "A" else None,
        offsets=make.ends(G, rows),
    )


def _wgrad(make: _Operands, *, gather: str, G: int, K: int, N: int, rows: int):
    names = {"A": "a_row_to_token", "dout": "dout_row_to_token"}
    gathers: dict[str, Any] = {names[part]: make.index(G * rows) for part in gather.split("+") if part != "none"}
    a, dout = make.normal(G * rows, K), make.normal(G * rows, N)
    return WgradArguments(a, dout, make.empty(G, K, N), offsets=make.ends(G, rows), **gathers)


def _jagged_gemm(make: _Operands, *, B: str, K: int, N: int, rows: int):
    a, b = make.normal(rows, K), make.matrix(K, N, layout=B, scale=K**-0.5)
    groups = torch.arange(_JAGGED_GROUPS + 1, dtype=torch.int32, device=make.device)
    return JaggedGemmArguments(a, b, make.empty(rows, N), groups * rows // _JAGGED_GROUPS)


def _gemm(make: _Operands, *, B: str, G: int, K: int, N: int, rows: int, epilogue: str | None = None):
    b = make.matrix(G, K, N, layout=B, scale=K**-0.5)
    return GemmArguments(make.normal(G, rows, K), b, make.empty(G, rows, N), epilogue=epilogue)


def _list(make: _Operands, *, A: str, B: str, G: int, M: int, N: int, K: int, area: int, epilogue: str | None = None):
    """Return G products of one size. The sum of all M * N may exceed `area`, the largest sum of the table entry."""
    a_list = [make.matrix(M, K, layout=_of(A, g)) for g in range(G)]
    b_list = [make.matrix(K, N, layout=_of(B, g)) for g in range(G)]
    out_list = [make.empty(M, N) for _ in range(G)]
    return GroupedGemmListArguments(a_list, b_list, out_list, epilogue=epilogue)


def _of(layout: str, problem: int) -> str:
    return ("row", "column")[problem % 2] if layout == "mixed" else layout


_MAKERS = {
    "grouped_gemm": _grouped_gemm,
    "wgrad": _wgrad,
    "decoding_gemm": _decoding_gemm,
    "block_scaled_gemm": _block_scaled_gemm,
    "jagged_gemm": _jagged_gemm,
    "gemm": _gemm,
    "grouped_gemm_list": _list,
}
