"""Argument checks, which read shapes, dtypes and devices, but never values on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import reference
from ..errors import first_three
from ..types import QuantizedWeight, Weight
from .dispatch import FLOAT8, FLOAT8_CC, is_traced


def can_be_read(tensor: Tensor) -> bool:
    """Return whether a check may read values: the tensor is on the CPU, and no tracer runs. Traced tensors have no
    values."""
    return tensor.device.type == "cpu" and not is_traced(tensor)


def check_shapes(
    op: str, known_sizes: dict[str, int] | None = None, /, **operands: tuple[Weight, str]
) -> dict[str, int]:
    """Match each tensor with its pattern of size names, and return the sizes.

    `check_shapes("combine", rows=(rows, "R D"), weights=(weights, "T K"))` returns {"R": .., "D": .., ...}. A name
    keeps its size from `known_sizes` or from the first operand that uses it.

    Raises:
        ValueError: an operand does not match. The message names the operand, its pattern and its shape.
    """
    sizes = dict(known_sizes or {})
    for name, (tensor, pattern) in operands.items():
        letters = pattern.split()
        if not isinstance(tensor, Tensor | QuantizedWeight):
            raise ValueError(f"{op}: {name} must be a tensor [{', '.join(letters)}], got {type(tensor).__name__}")
        num_known, shape = len(sizes), tensor.shape
        if len(shape) != len(letters) or not _sizes_fit(shape, letters, sizes):
            before = dict(list(sizes.items())[:num_known])
            known = ", ".join(f"{letter}={before[letter]}" for letter in letters if letter in before)
            raise ValueError(
                f"{op}: {name} must be [{', '.join(letters)}]{f' with {known}' if known else ''}, got {list(shape)}"
            )
    return sizes


def _sizes_fit(shape: torch.Size, letters: list[str], sizes: dict[str, int]) -> bool:
    """Return whether each axis has the size that `sizes` gives its letter. Add the sizes of new letters to `sizes`."""
    return all([size == sizes.setdefault(letter, size) for letter, size in zip(letters, shape, strict=True)])


def check_same_device(op: str, **tensors: Weight) -> None:
    """Raise ValueError unless all tensors are on one device."""
    device = next(iter(tensors.values())).device
    if any([tensor.device != device for tensor in tensors.values()]):
        raise ValueError(f"{op}: all tensors must be on one device, got {_differing('device', tensors)}")


def check_same_dtype(op: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one floating-point dtype."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise ValueError(f"{op}: operands must have one floating-point dtype, got {_differing('dtype', tensors)}")


def _differing(attribute: str, tensors: Mapping[str, Weight]) -> str:
    """Return a text with name and attribute of the first tensor, then of the tensors whose attribute is different."""
    first, *others = ((name, getattr(tensor, attribute)) for name, tensor in tensors.items())
    return first_three(f"{name} {value}" for name, value in (first, *(x for x in others if x[1] != first[1])))


def check_dtype(op: str, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise ValueError unless the tensor has one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        rule = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{op}: {name} must be {rule}, got {tensor.dtype}")


def result_dtype(op: str, a: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a product: `out_dtype`, else the dtype of `out`, else of `a`, or bfloat16 if `a` is float8.

    Raises:
        ValueError: operands of `a`'s dtype cannot give the chosen dtype, or `out` and `out_dtype` disagree.
    """
    if a.dtype.itemsize == 1:
        check_dtype(op, "a", a, FLOAT8)
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"{op}: out_dtype must be out's, got {out_dtype} and {out.dtype}")
    chosen = out_dtype or reference.result_dtype(a.dtype, out)
    allowed = {FLOAT8: (torch.bfloat16, torch.float16, torch.float32), torch.float64: (torch.float64,)}
    if chosen not in allowed.get(a.dtype, (a.dtype, torch.float32)):
        raise ValueError(f"{op}: operands of {a.dtype} do not give out_dtype {chosen}")
    return chosen


def check_no_gradient(op: str, reason: str, *inputs: Tensor | None) -> None:
    """Raise ValueError if gradients are enabled and an input requires one. `reason` says what forbids gradients."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        raise ValueError(f"{op}: with {reason} no input may require a gradient")


def check_float8(op: str, cc: int) -> None:
    """Raise NotImplementedError unless a GPU of compute capability `cc` multiplies float8."""
    if cc < FLOAT8_CC:
        raise NotImplementedError(
            f"{op}: float8 operands need a GPU of compute capability {FLOAT8_CC / 10}, this one has {cc / 10}; "
            f"implementation='reference' upcasts them"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements share memory because an axis is expanded."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
