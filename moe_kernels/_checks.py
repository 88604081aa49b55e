"""Checks of arguments. They read shapes, dtypes and devices only, never values on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(op: str, **operands: tuple[Tensor, str]) -> dict[str, int]:
    """Match each tensor with its pattern of size names, and return the sizes.

    `check_shapes("combine", rows=(rows, "R D"), weights=(weights, "T K"))` returns {"R": .., "D": .., ...}. A name
    keeps the size it was first met with; a number in a pattern stands for itself.

    Raises:
        ValueError: names the operand, its pattern and what it got.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in operands.items():
        letters = pattern.split()
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor [{', '.join(letters)}], got {type(tensor).__name__}")
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if letter in sizes)
        if tensor.dim() != len(letters) or not _sizes_fit(tensor, letters, sizes):
            raise ValueError(
                f"{op}: {name} must be [{', '.join(letters)}]{f' with {known}' if known else ''}, "
                f"got {list(tensor.shape)}"
            )
    return sizes


def _sizes_fit(tensor: Tensor, letters: list[str], sizes: dict[str, int]) -> bool:
    """Whether each axis has its letter's size; letters met for the first time are entered into `sizes`."""
    for letter, size in zip(letters, tensor.shape, strict=True):
        if size != (int(letter) if letter.isdigit() else sizes.setdefault(letter, size)):
            return False
    return True


def check_same_device(op: str, **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are on one device."""
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got {devices}")


def check_same_dtype(op: str, **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors have one floating-point dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1 or not next(iter(dtypes.values())).is_floating_point:
        raise ValueError(f"{op}: operands must have one floating-point dtype, got {dtypes}")


def check_dtype(op: str, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raises ValueError unless the tensor has one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        rule = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{op}: {name} must be {rule}, got {tensor.dtype}")


def check_top_k(op: str, top_k: int, num_experts: int) -> None:
    """Raises ValueError unless 1 <= top_k <= num_experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{op}: top_k must be in [1, num_experts={num_experts}], got {top_k}")
