"""Checks of arguments. They read shapes, dtypes and devices only, never values on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import reference
from .dispatch import FLOAT8, FLOAT8_CC

Facts = TypeVar("Facts")

_MOST_FORMS = 4096  # of calls that passed a check; then all are forgotten
_NEW: Any = object()


def once_per_form(check: Callable[..., Facts]) -> Callable[..., Facts]:
    """`check`, but calls like one that passed get what that one got.

    It must read no more of its tensors than dtype, shape and device, and return nothing that can be changed.
    """
    passed: dict[tuple[Any, ...], Facts] = {}

    @functools.wraps(check)
    def check_new_forms(*operands: Any) -> Facts:
        form = None if torch.compiler.is_compiling() else _form(operands)
        if form is None:
            return check(*operands)
        facts = passed.get(form, _NEW)
        if facts is _NEW:
            facts = check(*operands)
            if len(passed) >= _MOST_FORMS:
                passed.clear()
            passed[form] = facts
        return facts

    return check_new_forms


_VALUES = {type(None), bool, int, float, str, torch.dtype}


def _form(operands: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a check can read; None if there is more than tensors and plain values, which could be or do anything."""
    form = []
    for operand in operands:
        kind = type(operand)
        if kind is Tensor or kind is Parameter:
            form += (operand.dtype, operand.shape, operand.device)
        elif kind in _VALUES:
            form.append(operand)
        else:
            return None
    return tuple(form)


def check_shapes(
    op: str, known_sizes: dict[str, int] | None = None, /, **operands: tuple[Tensor, str]
) -> dict[str, int]:
    """Match each tensor with its pattern of size names, and return the sizes.

    `check_shapes("combine", rows=(rows, "R D"), weights=(weights, "T K"))` returns {"R": .., "D": .., ...}. A name
    keeps the size it was first met with, or has in `known_sizes`.

    Raises:
        ValueError: names the operand, its pattern and what it got.
    """
    sizes = dict(known_sizes or {})
    for name, (tensor, pattern) in operands.items():
        letters = pattern.split()
        if not isinstance(tensor, Tensor):
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
    """Whether each axis has its letter's size; letters met for the first time are entered into `sizes`."""
    return all([size == sizes.setdefault(letter, size) for letter, size in zip(letters, shape, strict=True)])


def check_same_device(op: str, **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are on one device."""
    device = next(iter(tensors.values())).device
    if any([tensor.device != device for tensor in tensors.values()]):
        devices = {name: str(tensor.device) for name, tensor in tensors.items()}
        raise ValueError(f"{op}: all tensors must be on one device, got {devices}")


def check_same_dtype(op: str, **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors have one floating-point dtype."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
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


def result_dtype(op: str, a: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a product of operands like `a`: the one asked for, else `out`'s, else theirs.

    Raises:
        ValueError: such operands do not give this dtype, or `out` and `out_dtype` disagree.
    """
    if a.dtype.itemsize == 1:
        check_dtype(op, "a", a, FLOAT8)
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"{op}: out_dtype must be out's, got {out_dtype} and {out.dtype}")
    chosen = out_dtype or (reference.result_dtype(a.dtype) if out is None else out.dtype)
    allowed = {FLOAT8: (torch.bfloat16, torch.float16, torch.float32), torch.float64: (torch.float64,)}
    if chosen not in allowed.get(a.dtype, (a.dtype, torch.float32)):
        raise ValueError(f"{op}: operands of {a.dtype} do not give out_dtype {chosen}")
    return chosen


def check_no_gradient(op: str, reason: str, *inputs: Tensor | None) -> None:
    """Raises ValueError if an input requires a gradient."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        raise ValueError(f"{op}: with {reason} no input may require a gradient")


def check_float8(op: str, cc: int) -> None:
    """Raises NotImplementedError unless a GPU of compute capability `cc` multiplies float8."""
    if cc < FLOAT8_CC:
        raise NotImplementedError(
            f"{op}: float8 operands need a GPU of compute capability {FLOAT8_CC / 10}, this one has {cc / 10}; "
            f"implementation='reference' upcasts them"
        )
