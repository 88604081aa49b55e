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
_JAGGED_GROUPS = 16  # the number of groups is not part of the key


def arguments_of(key: str, device: torch.device | str) -> Arguments:
    """Return random operands of unit scale, with the largest number of rows that the key covers.

    Raises:
        ValueError: the key does not have the form of an `Arguments.table_key`.
    """
    form, *words = key.split(" ")
    fields = dict(word.split("=", 1) for word in words if "=" in word)
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
        """Return [..., K, N] stored by rows or by columns."""
        *batch, rows, columns = shape
        stored = self.normal(*batch, columns, rows).mT if layout == "column" else self.normal(*shape)
        return stored.mul_(scale)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def ends(self, num_groups: int, num_rows: int) -> Tensor:  # [G] int32
        return torch.arange(1, num_groups + 1, dtype=torch.int32, device=self.device) * num_rows

    def index(self, num_rows: int) -> Tensor:  # [R] int32
        return torch.randperm(num_rows, device=self.device).int()


def _grouped_gemm(make: _Operands, *, B: str, gather: str, epilogue: str, G: str, K: str, N: str, rows: str):
    num_groups, size_k, size_n, num_rows = int(G), int(K), int(N), int(G) * int(rows)
    options: dict[str, Any] = {"offsets": make.ends(num_groups, int(rows))}
    if gather == "A":
        options["row_to_token"] = make.index(num_rows)
    if epilogue != "none":
        options |= {"epilogue": epilogue, "preactivation": make.empty(num_rows, size_n)}
    return GroupedGemmArguments(
        make.normal(num_rows, size_k),
        make.matrix(num_groups, size_k, size_n, layout=B, scale=size_k**-0.5),
        make.empty(num_rows, size_n // 2 if epilogue != "none" and is_gated(epilogue) else size_n),
        **options,
    )


def _decoding_gemm(make: _Operands, *, weight: str, B: str, gather: str, G: str, K: str, N: str, rows: str):
    num_groups, size_k, size_n, num_rows = int(G), int(K), int(N), int(G) * int(rows)
    shape = (num_groups, size_n, size_k) if B == "column" else (num_groups, size_k, size_n)
    b = QuantizedMatrices(quantize(make.normal(*shape).mul_(size_k**-0.5), weight), B == "column")
    table = empty_tile_table(ends := make.ends(num_groups, int(rows)), num_rows, num_groups, _BLOCK_ROWS)
    if ends.device.type != "meta":
        write_table(table, ends, num_rows)
    return DecodingGemmArguments.of(
        make.normal(num_rows, size_k),
        b,
        make.empty(num_rows, size_n),
        row_to_token=make.index(num_rows) if gather == "A" else None,
        tile_table=table,
    )


def _block_scaled_gemm(make: _Operands, *, B: str, gather: str, G: str, K: str, N: str, rows: str):
    num_groups, size_k, size_n, num_rows = int(G), int(K), int(N), int(G) * int(rows)
    shape = (num_groups, size_n, size_k) if B == "column" else (num_groups, size_k, size_n)
    b, scale_b = quantize_blocks(torch.randn(shape, device=make.device).mul_(size_k**-0.5), BLOCK, BLOCK)
    a, scale_a = quantize_blocks(torch.randn(num_rows, size_k, device=make.device), 1, BLOCK)
    return BlockScaledGemmArguments(
        a,
        b.mT if B == "column" else b,
        torch.empty(num_rows, size_n, dtype=torch.bfloat16, device=make.device),
        scale_a.t().contiguous().t(),
        scale_b.mT if B == "column" else scale_b,
        row_to_token=make.index(num_rows) if gather == "A" else None,
        offsets=make.ends(num_groups, int(rows)),
    )


def _wgrad(make: _Operands, *, gather: str, G: str, K: str, N: str, rows: str):
    num_groups, num_rows = int(G), int(G) * int(rows)
    names = {"A": "a_row_to_token", "dout": "dout_row_to_token"}
    gathers: dict[str, Any] = {names[part]: make.index(num_rows) for part in gather.split("+") if part != "none"}
    return WgradArguments(
        make.normal(num_rows, int(K)),
        make.normal(num_rows, int(N)),
        make.empty(num_groups, int(K), int(N)),
        offsets=make.ends(num_groups, int(rows)),
        **gathers,
    )


def _jagged_gemm(make: _Operands, *, B: str, K: str, N: str, rows: str):
    a, b = make.normal(int(rows), int(K)), make.matrix(int(K), int(N), layout=B, scale=int(K) ** -0.5)
    groups = torch.arange(_JAGGED_GROUPS + 1, dtype=torch.int32, device=make.device)
    offsets = groups * int(rows) // _JAGGED_GROUPS
    return JaggedGemmArguments(a, b, make.empty(int(rows), int(N)), offsets)


def _gemm(make: _Operands, *, B: str, G: str, K: str, N: str, rows: str, epilogue: str | None = None):
    b = make.matrix(int(G), int(K), int(N), layout=B, scale=int(K) ** -0.5)
    a, out = make.normal(int(G), int(rows), int(K)), make.empty(int(G), int(rows), int(N))
    return GemmArguments(a, b, out, epilogue=epilogue)


def _list(make: _Operands, *, A: str, B: str, G: str, M: str, N: str, K: str, area: str, epilogue: str | None = None):
    """Return problems of the largest sizes that the key covers. Their total area may exceed that of the key."""
    pairs = [
        (make.matrix(int(M), int(K), layout=_of(A, g)), make.matrix(int(K), int(N), layout=_of(B, g)))
        for g in range(int(G))
    ]
    a_list, b_list = zip(*pairs, strict=True)
    out_list = [make.empty(int(M), int(N)) for _ in pairs]
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
