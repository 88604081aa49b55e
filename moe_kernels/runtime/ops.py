"""Registered ops: turns a function that launches kernels into an op of PyTorch's dispatcher."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from .packing import PackedSignature, places_of
from .pytorch import has_saved_tensors_hooks


def on_device_of(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the tensor's GPU as the current device, because Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return function(*args, **kwargs)
    with torch.cuda.device(tensor.device):
        return function(*args, **kwargs)


_requires_grad = attrgetter("requires_grad")


def _inspect(values: Sequence[Any]) -> tuple[tuple[Tensor, ...], bool]:
    """Return the tensors, and whether the dispatcher would only call the function with these values.

    Modes see calls, and a profiler sees an op's name only through the dispatcher. Values that are not plain, or that
    are not in the tensors' memory, need it. All tensors are on one device.
    """
    _, read, are_plain = places_of(values)
    tensors = read(values)
    profiles = torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    if profiles or not are_plain or torch._C._len_torch_dispatch_stack() or not tensors or tensors[0].is_meta:
        return tensors, False
    return tensors, not any(map(Tensor.is_neg, tensors))


class Op:
    """An op of PyTorch's dispatcher that mutates none of its tensors and takes no lists of tensors.

    Replaces `torch.library.custom_op`, whose autograd takes four times as long per call. Parameters and results of the
    function, its fake and `setup_context` may be NamedTuples of tensors and other values: the schema has their fields.
    """

    def __init__(self, name: str, function: Callable[..., Any], signature: PackedSignature):
        self._name = name
        self._signature = signature
        self._implementation = function
        function = signature.on_leaves(function) if signature.has_packed else function

        @functools.wraps(function)
        def on_its_device(*leaves: Any) -> Any:
            return on_device_of(places_of(leaves).read(leaves)[0], function, *leaves)

        self._backward: Callable[..., Any] | None = None
        self._setup_context: Callable[..., None] | None = None
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, torch._disable_dynamo(on_its_device), "CompositeExplicitAutograd")  # pyright: ignore[reportPrivateImportUsage]  # private API
        self.overload = getattr(torch.ops.moe_kernels, name).default
        self._function = type(
            name,
            (torch.autograd.Function,),
            {"forward": staticmethod(self._forward), "backward": staticmethod(self._backwards)},
        )
        # Calls `apply` of the C++ base class, because `Function.apply` spends time looking for functorch transforms.
        self._apply = super(torch.autograd.Function, self._function).apply  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
        _LIBRARY.impl(name, self._autograd, "Autograd")

    def __call__(self, *args: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if not compiling and _thread.in_unseen_backward:
            return self._implementation(*args)
        flat = self._signature.flatten(*args) if self._signature.has_packed else args
        if compiling or torch._C._are_functorch_transforms_active() or has_torch_function(flat):
            return self._result(self.overload(*flat))
        if forward_ad._current_level >= 0:
            check_tangents(f"moe_kernels::{self._name}", flat)
        tensors, is_unseen = _inspect(flat)
        # No other dispatch key applies here, so calling what `_autograd` would call saves one pass of the dispatcher.
        if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
            return self._result(self._apply(*flat, (args, tensors[0], is_unseen)))
        with torch._C._AutoDispatchBelowAutograd():
            if is_unseen:
                return on_device_of(tensors[0], self._implementation, *args)
            return self._result(self.overload(*flat))

    def _result(self, results: Any) -> Any:
        return results if self._signature.result is None else self._signature.result._make(results)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register (as a decorator) the function that returns the results' shapes, dtypes and devices."""
        flat = self._signature.on_leaves(function) if self._signature.has_packed else function
        torch.library.register_fake(f"moe_kernels::{self._name}", flat, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register `setup_context(ctx, inputs, output)` for forward, `backward(ctx, *gradients)` for the gradients.

        `inputs` lacks trailing inputs that have their default values, unless some are packed.
        """
        self._backward, self._setup_context = backward, setup_context

    def needed(self, ctx: Any) -> dict[str, bool]:
        """Return whether each input needs a gradient, by its name in the schema."""
        return dict(zip(self._signature.types, ctx.needs_input_grad[:-1], strict=True))  # the last input is no leaf

    def gradients(self, **named: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the result of `backward`: the gradients of the named inputs, None for the others."""
        return tuple(map(named.get, self._signature.types))

    def _autograd(self, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            check_tangents(f"moe_kernels::{self._name}", inputs)
        tensors, is_unseen = _inspect(inputs)
        if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
            check_transforms(f"moe_kernels::{self._name}", inputs)
            args = self._signature.pack(*inputs) if self._signature.has_packed else inputs
            return self._function.apply(*inputs, (args, tensors[0], is_unseen))
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*inputs)

    def _forward(self, ctx: Any, *inputs: Any) -> Any:
        *flat, (args, first, is_unseen) = inputs
        with torch._C._AutoDispatchBelowAutograd():
            if is_unseen:
                output = on_device_of(first, self._implementation, *args)
            else:
                output = self._result(self.overload(*flat))
        # Hooks on saved tensors may run any code in backward, and return any tensors.
        ctx.is_unseen = is_unseen and not has_saved_tensors_hooks()
        if self._setup_context is not None:
            self._setup_context(ctx, args, output)
        return output

    def _backwards(self, ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the gradients. If nothing must see the ops in it, the first one's checks serve all."""
        if self._backward is None:
            raise NotImplementedError(f"moe_kernels::{self._name} has no gradient")
        if ctx.is_unseen and not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            tensors, is_unseen = _inspect(gradients)
            if is_unseen and not has_torch_function(gradients):
                return *self._unseen_backward(tensors[0], ctx, gradients), None
        return *self._backward(ctx, *gradients), None

    def _unseen_backward(self, first: Tensor, ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
        assert self._backward is not None
        _thread.in_unseen_backward = True
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return on_device_of(first, self._backward, ctx, *gradients)
        finally:
            _thread.in_unseen_backward = False


class _Thread(threading.local):
    in_unseen_backward = False


_thread = _Thread()


def check_tangents(op: str, values: Sequence[Any]) -> None:
    """Raise NotImplementedError if a value has a forward-mode AD tangent, which the op would lose."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(f"{op} has no forward-mode gradient; implementation='reference' has")


def check_transforms(op: str, values: Sequence[Any]) -> None:
    """Raise NotImplementedError if torch.func differentiates a value: `autograd.Function`'s own error is less clear."""
    if torch._C._are_functorch_transforms_active():
        for value in values:
            if isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value):  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
                raise NotImplementedError(f"{op} has no gradient for torch.func; implementation='reference' has")


_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")


def registered_op(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that writes only to `mutates` as an op. It runs on the GPU of its first tensor."""

    def register(function: Callable[..., Any]) -> Any:
        signature = PackedSignature(function)
        if signature.has_packed:
            return Op(name, function, signature)
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        if not (mutates or "Tensor[" in schema):
            return Op(name, function, signature)

        @functools.wraps(function)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args[0] is not None else args[1]
            first = first[0] if isinstance(first, (list, tuple)) else first
            return on_device_of(first, function, *args, **kwargs)

        return torch.library.custom_op(f"moe_kernels::{name}", on_its_device, mutates_args=mutates)

    return register
