"""Rebuilds copies of parameters in backward, so that autograd does not save the copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_kernels.runtime.pytorch import has_saved_tensors_hooks


def rebuilt_in_backward(
    copy: Tensor, parameters: tuple[Any, ...], build: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Return a context in which autograd saves `parameters` instead of `copy`. Backward then computes the copy as
    `build(*parameters).to(copy.dtype)`.

    The context does nothing if gradients are disabled, or for inference tensors, which have no version. Under
    `torch.compile` the context does nothing, because the compiler recomputes copies on its own. With other saved-tensor
    hooks (activation checkpointing, offloading) the context does nothing, because autograd calls only the newest hooks.
    """
    if torch.compiler.is_compiling() or has_saved_tensors_hooks() or not torch.is_grad_enabled():
        return nullcontext()
    if any(parameter.is_inference() for parameter in parameters):
        return nullcontext()
    versions = tuple(parameter._version for parameter in parameters)
    dtype, place = copy.dtype, (copy.data_ptr(), copy.shape, copy.stride())  # a closure over `copy` would keep it alive

    def rebuilt() -> Tensor:
        if tuple(parameter._version for parameter in parameters) != versions:
            raise RuntimeError("a parameter that backward needs was changed in place after forward")
        return build(*(parameter.detach() for parameter in parameters)).to(dtype)

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        is_copy = (saved.data_ptr(), saved.shape, saved.stride()) == place
        return rebuilt if is_copy else partial(_unchanged, saved, saved._version)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda read: read())


def _unchanged(saved: Tensor, version: int) -> Tensor:
    """Return a saved tensor. Check its version, because autograd does not check tensors that hooks pack."""
    if saved._version != version:
        raise RuntimeError(f"a tensor {list(saved.shape)} that backward needs was changed in place after forward")
    return saved
