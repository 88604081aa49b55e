"""Copies of parameters that backward rebuilds instead of saving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.runtime.pytorch import has_saved_tensors_hooks


@dataclass(frozen=True)
class _Rebuilt:
    """Stands for a copy of parameters among the saved tensors."""

    parameters: tuple[Tensor, ...]
    versions: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[..., Tensor]

    def tensor(self) -> Tensor:
        if tuple(parameter._version for parameter in self.parameters) != self.versions:
            raise RuntimeError("a parameter that backward needs was changed in place after forward")
        return self.build(*(parameter.detach() for parameter in self.parameters)).to(self.dtype)


@dataclass(frozen=True)
class _Saved:
    """Stands for another saved tensor. Autograd compares no versions of tensors that hooks pack."""

    saved: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.saved._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.saved.shape)} that backward needs was changed in place after forward"
            )
        return self.saved


def rebuilt_in_backward(
    copy: Tensor, parameters: tuple[Any, ...], build: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Return a context in which autograd saves `parameters` instead of `copy`.

    The context does nothing without gradients, and for inference tensors, which have no version. It does nothing under
    `torch.compile`, which recomputes copies on its own. It also does nothing if other hooks (activation checkpointing,
    offloading) are active, because autograd calls only the last of several hooks.

    Args:
        build: computes the values of `copy` from the parameters; a cast to the dtype of `copy` follows.
    """
    if torch.compiler.is_compiling() or has_saved_tensors_hooks() or not torch.is_grad_enabled():
        return nullcontext()
    if any(parameter.is_inference() for parameter in parameters):
        return nullcontext()
    versions = tuple(parameter._version for parameter in parameters)
    rebuilt = _Rebuilt(parameters, versions, copy.dtype, build)
    place = (copy.data_ptr(), copy.shape, copy.stride())

    def pack(saved: Tensor) -> _Saved | _Rebuilt:
        is_copy = (saved.data_ptr(), saved.shape, saved.stride()) == place
        return rebuilt if is_copy else _Saved(saved, saved._version)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor())
