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

    def copy(self) -> Tensor:
        if tuple(parameter._version for parameter in self.parameters) != self.versions:
            raise RuntimeError("a parameter that backward needs was changed in place after forward")
        return self.build(*(parameter.detach() for parameter in self.parameters)).to(self.dtype)


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

    def pack(saved: Tensor) -> Tensor | _Rebuilt:
        return rebuilt if (saved.data_ptr(), saved.shape, saved.stride()) == place else saved

    def unpack(saved: Tensor | _Rebuilt) -> Tensor:
        return saved.copy() if isinstance(saved, _Rebuilt) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
