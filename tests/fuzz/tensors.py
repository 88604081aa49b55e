"""Tensors for fuzzing: random values in every layout that an op supports, with NaN wherever nothing may read."""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod

import torch
from torch import Tensor

LAYOUTS = ("rows", "columns", "padded", "gaps")


def lay_out(
    tensor: Tensor,  # [..., M, N]
    layout: str,
) -> Tensor:
    """Return the same values in other memory.

    "rows": contiguous. "columns": the transpose is contiguous. "padded": rows at odd distances, from an odd address on.
    "gaps": no axis is contiguous. NaN fills the memory between the elements.
    """
    *batch, rows, columns = tensor.shape
    if layout == "rows":
        return tensor.contiguous()
    if layout == "columns":
        return tensor.mT.contiguous().mT
    if layout == "padded":
        width = columns + 3
        memory = tensor.new_full((prod(batch) * rows * width + 1,), torch.nan)[1:]
        return memory.view(*batch, rows, width)[..., :columns].copy_(tensor)
    if layout == "gaps":
        return tensor.new_full((*batch, 2 * rows, 3 * columns), torch.nan)[..., ::2, ::3].copy_(tensor)
    raise ValueError(f"lay_out: layout must be one of {LAYOUTS}, got {layout!r}")


def gaps_of(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that reads the tensor's memory outside its own elements."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    is_gap = torch.ones_like(memory, dtype=torch.bool)
    is_gap.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return lambda: memory[is_gap]


class Random:
    """Draws tensors of one dtype from a seed. Values of the shorter dtypes are exact in float64.

    The error budget compares largest errors. Errors of 16-bit results come from their last rounding. Errors of float32
    results come from a few large sums, whose order is arbitrary, so they depend on chance. In float32, values are
    therefore integers, small enough that every sum is exact in any order, and the budget is one unit in the last place.
    Where a result jumps, as the gradient of a clamped activation does, the first sums must also be exact in 16 bits;
    otherwise chance decides the side of the jump. There, values are multiples of a power of two.

    Args:
        integers: draw integers.
        multiples: draw small multiples of the power of two next to the scale.
    """

    def __init__(self, dtype: str, device: str, seed: int, *, integers: bool = False, multiples: bool = False):
        self.dtype, self.device = getattr(torch, dtype), device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.integers, self.multiples = integers, multiples
        # For tensors that are float32 whatever the dtype of the rows, such as routing weights.
        self.wide = torch.promote_types(self.dtype, torch.float32)

    def values(
        self, *shape: int, scale: float = 1.0, most: int = 2, layout: str = "rows", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draw normal values times `scale`, integers up to `most`, or such integers times a power of 2 near `scale`."""
        if self.integers or self.multiples:
            values = torch.randint(-most, most + 1, shape, device=self.device, generator=self.generator)
            values = values * 2.0 ** round(log2(scale)) if self.multiples else values
        else:
            values = scale * torch.randn(*shape, device=self.device, generator=self.generator)
        values = values.to(dtype or self.dtype)
        return lay_out(values, layout) if len(shape) > 1 else values

    def factors(self, *shape: int) -> Tensor:
        """Draw factors of unit scale; for integers, powers of two."""
        values = torch.randn(*shape, device=self.device, generator=self.generator)
        return (values.sign() * 2.0 ** values.round() if self.integers else values).to(self.wide)

    @property
    def most(self) -> int:
        """Return the largest integer whose products with small ones stay exact in sums of fewer bits than float32."""
        return {torch.float32: 4095, torch.float16: 2047}.get(self.dtype, 255)

    def chance(self, *shape: int, of: float) -> Tensor:
        """Draw True with this probability."""
        return torch.rand(*shape, device=self.device, generator=self.generator) < of


def ends(sizes: tuple[int, ...], device: str) -> Tensor:  # [G] int32
    """Return exclusive end rows of groups of these sizes."""
    return torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0).int()
