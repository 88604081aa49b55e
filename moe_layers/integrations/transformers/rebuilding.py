"""Copies of parameters that backward makes again instead of keeping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Rebuilt:
    """What stands for a copy of parameters among the saved tensors."""

    parameters: tuple[Tensor, ...]
    versions: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[..., Tensor]

    def copy(self) -> Tensor:
        if tuple(parameter._version for parameter in self.parameters) != self.versions:
            raise RuntimeError("a parameter that backward needs was changed in place after forward")
        return self.build(*(parameter.detach() for parameter in self.parameters)).to(self.dtype)


def rebuilt_in_backward(
    copy: Tensor, parameters: tuple[Tensor, ...], build: Callable[..., Tensor]
) -> AbstractContextManager[None]:
    """A context in which autograd keeps `parameters` in place of `copy`.

    It does nothing under `torch.compile`, which sees for itself that a copy can be made again, and where hooks of
    others (activation checkpointing, offloading) already decide what is kept: of several, autograd asks the last alone.

    Args:
        build: makes the values of `copy` from the parameters; a cast to the dtype of `copy` follows.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return nullcontext()
    versions = tuple(parameter._version for parameter in parameters)
    rebuilt = _Rebuilt(parameters, versions, copy.dtype, build)
    place = (copy.data_ptr(), copy.shape, copy.stride())

    def pack(saved: Tensor) -> Tensor | _Rebuilt:
        return rebuilt if (saved.data_ptr(), saved.shape, saved.stride()) == place else saved

    def unpack(saved: Tensor | _Rebuilt) -> Tensor:
        return saved.copy() if isinstance(saved, _Rebuilt) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
