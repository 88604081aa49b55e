"""Cases of `grouped_gemm` and `grouped_gemm_wgrad`, with all their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from moe_kernels import grouped_gemm, grouped_gemm_wgrad, reference

from .case import Case, with_upstream
from .tensors import ends, gaps_of, lay_out


@dataclass(frozen=True)
class _GroupedCase(Case):
    """A product of rows in groups. The last layout is that of out, or of the upstream gradient."""

    sizes: tuple[int, ...]  # rows of each group
    tail: int  # rows after the last group, which hold NaN
    size_k: int
    size_n: int
    dtype: str
    frozen: tuple[str, ...]
    layouts: tuple[str, ...]
    seed: int

    @property
    def num_rows(self) -> int:
        return sum(self.sizes) + self.tail

    def with_tail(self, rows: Tensor, value: float = torch.nan) -> Tensor:
        """Return the rows with NaN, or another value, after the last group."""
        tail = torch.arange(len(rows), device=rows.device) >= sum(self.sizes)
        return torch.where(tail.view(-1, *[1] * (rows.dim() - 1)), value, rows)

    def upstream(self, dout: Tensor) -> Tensor:
        return lay_out(self.with_tail(dout), self.layouts[2])

    def written_to_out(self, like: Tensor, shape: tuple[int, ...], op: Callable[..., Tensor]) -> Tensor:
        """Return what `op` writes to an `out` of this shape. It must fill `out`, and write nothing around it."""
        out = lay_out(like.new_full(shape, torch.nan, dtype=self.out_dtype(like) or like.dtype), self.layouts[2])
        around = gaps_of(out)
        assert op(out=out) is out
        assert around().isnan().all(), "wrote beside out"
        return out.clone()

    def group_of_row(self, device: str | torch.device) -> Tensor:  # for rows before the tail
        sizes = torch.tensor(self.sizes, device=device)
        return torch.arange(len(sizes), device=device).repeat_interleave(sizes)


@dataclass(frozen=True)
class GroupedGemm(_GroupedCase):
    """A product. Layouts are those of a, b and out, or the upstream gradient."""

    wide: bool  # a float32 result
    into_out: bool  # use `out=`
    bias: bool
    row_scale: bool
    activation: str | None

    @property
    def integers(self) -> bool:
        # The gradient of a row's scale is float32.
        return super().integers or (self.dtype != "float64" and self.row_scale)

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(name for name in ("bias", "row_scale") if getattr(self, name))

    def draw(self, device: str, seed: int) -> tuple[Tensor, ...]:
        random = self.random(device, seed)
        # Products of products have twice the bits.
        most = random.most if self.activation is None and not self.row_scale else 7
        a = lay_out(self.with_tail(random.values(self.num_rows, self.size_k, most=most)), self.layouts[0])
        scale = max(self.size_k, 1) ** -0.5
        b = random.values(len(self.sizes), self.size_k, self.size_n, scale=scale, layout=self.layouts[1])
        bias = random.values(len(self.sizes), self.size_n)
        row_scale = self.with_tail(random.factors(self.num_rows))
        drawn = {"bias": bias, "row_scale": row_scale}
        return a, b, ends(self.sizes, device), *(drawn[name] for name in self.options)

    def run(self, op, a, b, offsets, *options) -> Tensor:
        options = dict(zip(self.options, options, strict=True))
        out = op(a, b, offsets, **options, activation=self.activation, out_dtype=self.out_dtype(a))
        return with_upstream(out, self.upstream, integers=self.integers)

    def run_into_out(self, op, a, b, offsets, *options) -> Tensor:
        columns = self.size_n if self.activation is None else self.size_n // 2
        options = dict(zip(self.options, options, strict=True), activation=self.activation)
        return self.written_to_out(a, (self.num_rows, columns), partial(op, a, b, offsets, **options))

    def formula(self, a, b, offsets, *options) -> Tensor:
        options = dict(zip(self.options, options, strict=True))
        group = self.group_of_row(a.device)
        head = slice(len(group))
        rows = torch.einsum("rk,rkn->rn", a[head], b[group])
        if "bias" in options:
            rows = rows + options["bias"][group]
        if "row_scale" in options:
            rows = rows * options["row_scale"][head, None]
        if self.activation is not None:
            rows = reference.apply_activation(rows, self.activation)
        return torch.cat([rows, rows.new_zeros(self.tail, rows.shape[1])])

    def check(self, device: str) -> None:
        self.compare(device, grouped_gemm, reference.grouped_gemm, ("a", "b", *self.options))


@dataclass(frozen=True)
class GroupedWgrad(_GroupedCase):
    """A weight gradient. Layouts are those of a, dout and out, or the upstream gradient."""

    wide: bool  # a float32 result
    into_out: bool  # use `out=`

    def draw(self, device: str, seed: int) -> tuple[Tensor, ...]:
        random = self.random(device, seed)
        a = self.with_tail(random.values(self.num_rows, self.size_k, most=random.most))
        dout = self.with_tail(random.values(self.num_rows, self.size_n))
        return lay_out(a, self.layouts[0]), lay_out(dout, self.layouts[1]), ends(self.sizes, device)

    def run(self, op, a, dout, offsets) -> Tensor:
        out = op(a, dout, offsets, out_dtype=self.out_dtype(a))
        for group, size in enumerate(self.sizes):
            assert size or not out[group].any(), "an empty group's gradient must be exact zeros"
        return with_upstream(out, partial(lay_out, layout=self.layouts[2]), integers=self.integers)

    def run_into_out(self, op, a, dout, offsets) -> Tensor:
        return self.written_to_out(a, (len(self.sizes), self.size_k, self.size_n), partial(op, a, dout, offsets))

    def formula(self, a, dout, offsets) -> Tensor:
        starts = [0, *accumulate(self.sizes)]
        groups = [slice(start, start + size) for start, size in zip(starts, self.sizes, strict=False)]
        return torch.stack([torch.einsum("rk,rn->kn", a[rows], dout[rows]) for rows in groups])

    def check(self, device: str) -> None:
        self.compare(device, grouped_gemm_wgrad, reference.grouped_gemm_wgrad, ("a", "dout"))
