"""Registered ops: how a function that launches kernels becomes an op of PyTorch's dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from .dispatch import on_device_of


class Op:
    """An op of PyTorch's dispatcher that writes to none of its tensors, which are not in lists.

    As `torch.library.custom_op`, whose autograd takes four times as long per call.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self._name = name
        self._backward: Callable[..., Any] | None = None
        self._setup_context: Callable[..., None] | None = None
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.moe_kernels, name).default
        self._function = type(
            name,
            (torch.autograd.Function,),
            {"forward": staticmethod(self._forward), "backward": staticmethod(self._backwards)},
        )
        # `apply` as it is without functorch's transforms, which it looks for at some length.
        self._apply = super(torch.autograd.Function, self._function).apply
        _LIBRARY.impl(name, self._autograd, "Autograd")

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or has_torch_function(args):
            return self.overload(*args)
        if forward_ad._current_level >= 0:
            check_tangents(f"moe_kernels::{self._name}", args)
        # As nothing else is to see the call, the dispatcher would only come to `_autograd`: one turn through it less.
        if _needs_gradient(args):
            return self._apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Shapes, dtypes and devices of the results; as a decorator."""
        return torch.library.register_fake(f"moe_kernels::{self._name}", function, lib=_LIBRARY)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """`setup_context(ctx, inputs, output)` after forward, `backward(ctx, *gradients)` for the inputs' gradients.

        Trailing inputs that have their default values are missing from `inputs`.
        """
        self._backward, self._setup_context = backward, setup_context

    def _autograd(self, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            check_tangents(f"moe_kernels::{self._name}", inputs)
        if _needs_gradient(inputs):
            check_transforms(f"moe_kernels::{self._name}", inputs)
            return self._function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*inputs)

    def _forward(self, ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = self.overload(*inputs)
        if self._setup_context is not None:
            self._setup_context(ctx, inputs, output)
        return output

    def _backwards(self, ctx: Any, *gradients: Tensor | None) -> Any:
        if self._backward is None:
            raise NotImplementedError(f"moe_kernels::{self._name} has no gradient")
        return self._backward(ctx, *gradients)


def check_tangents(op: str, values: tuple[Any, ...]) -> None:
    """Raises NotImplementedError if one has a tangent of forward-mode AD, which would be lost."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(f"{op} has no forward-mode gradient; implementation='reference' has")


def check_transforms(op: str, values: tuple[Any, ...]) -> None:
    """Raises NotImplementedError if torch.func differentiates one, of which `autograd.Function` says less clearly."""
    if torch._C._are_functorch_transforms_active():
        for value in values:
            if isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value):
                raise NotImplementedError(f"{op} has no gradient for torch.func; implementation='reference' has")


def _needs_gradient(values: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")


def registered_op(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that writes only to `mutates` as an op, run on the GPU of its first tensor."""

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args[0] is not None else args[1]
            first = first[0] if isinstance(first, list) else first
            return on_device_of(first, function, *args, **kwargs)

        schema = torch.library.infer_schema(on_its_device, mutates_args=mutates)
        if mutates or "Tensor[" in schema:
            return torch.library.custom_op(f"moe_kernels::{name}", on_its_device, mutates_args=mutates)
        return Op(name, on_its_device)

    return register
