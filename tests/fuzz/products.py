"""Cases of `grouped_gemm_list`, `jagged_gemm` and `batched_gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from moe_kernels import batched_gemm, grouped_gemm_list, jagged_gemm, reference

from .case import Case, with_upstream
from .grouped import _GroupedCase
from .tensors import ends, lay_out


@dataclass(frozen=True)
class GemmList(Case):
    problems: tuple[tuple[int, int, int], ...]  # M, N, K of each
    dtype: str
    wide: bool  # float32 results
    frozen: tuple[str, ...]
    layouts: tuple[str, ...]  # for a and b, alternating over the problems
    seed: int

    def draw(self, device: str, seed: int) -> tuple[Tensor, Tensor]:
        """Return the values of all matrices a, then of all b, concatenated."""
        random = self.random(device, seed)
        numbers = (sum(prod(shape) for shape in self.shapes(side)) for side in (0, 1))
        return tuple(random.values(number, most=most) for number, most in zip(numbers, (random.most, 2), strict=True))

    def shapes(self, side: int) -> list[tuple[int, int]]:
        return [(k, n) if side else (m, k) for m, n, k in self.problems]

    def matrices(self, values: Tensor, side: int) -> list[Tensor]:
        shapes = self.shapes(side)
        parts = values.split([prod(shape) for shape in shapes])
        turns = [self.layouts[(2 * g + side) % len(self.layouts)] for g in range(len(shapes))]
        return [lay_out(part.view(shape), turn) for part, shape, turn in zip(parts, shapes, turns, strict=True)]

    def run(self, op, a, b) -> Tensor:
        outs = op(self.matrices(a, 0), self.matrices(b, 1), out_dtype=self.out_dtype(a))
        return with_upstream(torch.cat([out.flatten() for out in outs]), lambda dout: dout, integers=self.integers)

    def formula(self, a, b) -> Tensor:
        pairs = zip(self.matrices(a, 0), self.matrices(b, 1), strict=True)
        return torch.cat([(a[:, :, None] * b[None]).sum(1).flatten() for a, b in pairs])

    def check(self, device: str) -> None:
        self.compare(device, grouped_gemm_list, reference.grouped_gemm_list, ("a", "b"))


@dataclass(frozen=True)
class JaggedGemm(_GroupedCase):
    """A product with one matrix. Layouts are those of a, b and the upstream gradient."""

    dtype_b: str
    long_offsets: bool

    @property
    def integers(self) -> bool:
        return torch.promote_types(getattr(torch, self.dtype), getattr(torch, self.dtype_b)) == torch.float32

    def draw(self, device: str, seed: int) -> tuple[Tensor, ...]:
        random = self.random(device, seed)
        a = lay_out(self.with_tail(random.values(self.num_rows, self.size_k, most=random.most)), self.layouts[0])
        b = random.values(self.size_k, self.size_n, layout=self.layouts[1], dtype=getattr(torch, self.dtype_b))
        offsets = ends((0, *self.sizes), device)
        return a, b, offsets.long() if self.long_offsets else offsets

    def run(self, op, a, b, offsets) -> Tensor:
        out = op(a, b, offsets)
        return with_upstream(out, self.upstream, integers=self.integers)

    def formula(self, a, b, offsets) -> Tensor:
        return self.with_tail(a, 0.0) @ b

    def check(self, device: str) -> None:
        self.compare(device, jagged_gemm, reference.jagged_gemm, ("a", "b"))


@dataclass(frozen=True)
class BatchedGemm(Case):
    batch: int
    shared: str | None  # the operand without a batch; "both" is a dense product
    size_m: int
    size_k: int
    size_n: int
    dtype: str
    wide: bool  # a float32 result
    frozen: tuple[str, ...]
    layouts: tuple[str, ...]  # for a, b, the upstream gradient
    seed: int

    def draw(self, device: str, seed: int) -> tuple[Tensor, Tensor]:
        random = self.random(device, seed)
        shapes = (self.size_m, self.size_k), (self.size_k, self.size_n)
        batches = (() if self.shared in (name, "both") else (self.batch,) for name in ("a", "b"))
        return tuple(
            random.values(*batch, *shape, most=most, layout=layout)
            for batch, shape, most, layout in zip(batches, shapes, (random.most, 2), self.layouts, strict=False)
        )

    def run(self, op, a, b) -> Tensor:
        out = op(a, b, out_dtype=self.out_dtype(a))
        return with_upstream(out, partial(lay_out, layout=self.layouts[2]), integers=self.integers)

    def formula(self, a, b) -> Tensor:
        return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)

    def check(self, device: str) -> None:
        self.compare(device, batched_gemm, reference.batched_gemm, ("a", "b"))
