"""Batched GEMM by grouped GEMM kernels. Each matrix of the batch is one group of M rows.

A [L, M, K] and out [L, M, N] must store their matrices one after another, and are viewed as [L * M, K] and [L * M, N].
The tile table is made from group sizes that the host knows. If B has no batch axis, all rows form one group.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...runtime.launch import Launch
from ...runtime.triton import cdiv
from ..arguments.base import is_one_behind_another
from ..arguments.dense import GemmArguments
from ..arguments.grouped import GroupedGemmArguments
from ..kernel import Status
from .families import WrappedGroupedGemm, padded, plain_products
from .hopper.grouped import WARP_SPECIALIZED_KERNELS
from .tma import TMA_KERNELS

_TABLE_LAUNCHES = 1e9  # number of multiplications that take as long as the launches that make a tile table


class BatchedGemm(WrappedGroupedGemm):
    """Computes `out[l] = A[l] @ B[l]` by a grouped GEMM kernel. A and out must hold adjacent matrices."""

    arguments_class = GemmArguments
    form = "gemm"

    def supports_design(self, args: GemmArguments) -> Status:
        if args.out.dim() == 3 and args.A.dim() == 2:
            return Status("Operand `A`: this kernel takes none shared by a batch")
        for name in ("A", "out"):
            tensor = getattr(args, name)
            if tensor.dim() == 3 and not is_one_behind_another(tensor):
                return Status(f"Operand `{name}`: expected matrices one after another, got strides {tensor.stride()}")
        return self.grouped.supports_design(_grouped(args))

    def estimate(self, args: GemmArguments) -> float:
        elements = args.num_batches * padded(args.rows_per_matrix, args.out.shape[-1], self.metadata.design)
        return elements * args.A.shape[-1] + (_TABLE_LAUNCHES if self.metadata_bytes(args) else 0)

    def _launch(self, args: GemmArguments) -> Launch:
        args = args if args.tile_table is not None else self.with_metadata(args, None)
        return self.grouped._launch(_grouped(args))

    def scratch_bytes(self, args: GemmArguments) -> int:
        return self.grouped.scratch_bytes(_grouped(args))

    def metadata_bytes(self, args: GemmArguments) -> int:
        """Return the number of bytes of the tile table and the offsets, or 0 if `args` already has the tile table."""
        num_bytes = self.grouped.metadata_bytes(_grouped(args))
        return num_bytes + _offsets_bytes(args) if num_bytes else 0

    def with_metadata(self, args: GemmArguments, memory: Tensor | None) -> GemmArguments:
        grouped = _grouped(args)
        if memory is None:
            grouped = _with_offsets(grouped)
        else:
            num_bytes = _offsets_bytes(args)
            grouped = _with_offsets(grouped, memory[:num_bytes].view(torch.int32)[: len(grouped.B)])
            memory = memory[num_bytes:]
        return dataclasses.replace(args, tile_table=self.grouped.tile_table(grouped, memory))


def _rows(tensor: Tensor) -> Tensor:
    """Return matrices [L, M, C], which must be stored one after another, as a view [L * M, C]."""
    if tensor.dim() == 2:
        return tensor
    num_batches, num_rows, num_columns = tensor.shape
    return tensor.as_strided((num_batches * num_rows, num_columns), tensor.stride()[1:])


def _grouped(args: GemmArguments) -> GroupedGemmArguments:
    """Return the arguments, without offsets, of a grouped GEMM that computes the product of `args`. No rows follow the
    last group, so `zero_tail` is False."""
    b = args.B if args.B.dim() == 3 else args.B.unsqueeze(0)
    table = args.tile_table
    return GroupedGemmArguments(
        _rows(args.A), b, _rows(args.out), args.accumulator_type, tile_table=table, zero_tail=False
    )


def _offsets_bytes(args: GemmArguments) -> int:
    return cdiv(4 * args.num_batches, 16) * 16


def _with_offsets(grouped: GroupedGemmArguments, memory: Tensor | None = None) -> GroupedGemmArguments:
    """Return `grouped` with offsets [G] int32. The offsets are stored in `memory` if given, else in a new tensor."""
    num_rows, num_groups = len(grouped.out), len(grouped.B)
    size = num_rows // num_groups
    if memory is None:
        memory = torch.empty(num_groups, dtype=torch.int32, device=grouped.out.device)
    torch.arange(size, num_rows + 1, size, out=memory, device=memory.device)
    return dataclasses.replace(grouped, offsets=memory)


BATCHED_KERNELS = tuple(map(BatchedGemm, plain_products(*WARP_SPECIALIZED_KERNELS, *TMA_KERNELS)))
