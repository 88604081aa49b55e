"""Registers functions that launch kernels as ops of PyTorch's dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from .launch import launching
from .packing import PackedSignature, Places, places_of
from .pytorch import disable_dynamo, has_saved_tensors_hooks
from .replay import Form, Replayed

_below_autograd = torch._C._AutoDispatchBelowAutograd
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
_profiler_enabled = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs


def on_device_of(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the tensor's GPU as the current device, because Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return function(*args, **kwargs)
    with torch.cuda.device(tensor.device):
        return function(*args, **kwargs)


class Call(NamedTuple):
    """One call of an op, as passed to the op's autograd node."""

    args: tuple[Any, ...]  # arguments of the function
    leaves: tuple[Any, ...]  # the arguments, with NamedTuples replaced by their fields: see `PackedSignature`
    places: Places  # positions of the tensors among the leaves
    tensors: tuple[Tensor, ...]
    others: tuple[Any, ...]  # the leaves that are neither tensors nor None
    form: Form | None  # the form whose record is replayed; None: no record is known
    is_unseen: bool  # whether the function may be called without the dispatcher


def may_replay(tensors: Sequence[Tensor]) -> bool:
    """Return whether forward-mode AD, profilers and `__torch_function__` overrides are all inactive. Otherwise no call
    may be replayed, because `Form` does not compare these states."""
    return not (forward_ad._current_level >= 0 or _profiler_enabled() or has_torch_function(tensors))


def is_unseen(tensors: Sequence[Tensor]) -> bool:
    """Return whether an op's function may be called without the dispatcher.

    Modes and profilers see only calls through the dispatcher. Meta tensors and negated views also need the dispatcher,
    because their memory does not hold their values. All tensors are on one device, so the first tensor shows whether
    they are meta tensors."""
    return not (
        not may_replay(tensors)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or tensors[0].is_meta
        or any([tensor.is_neg() for tensor in tensors])
    )


def run_as_one(replayed: Replayed, key: Any, tensors: list[Tensor], function: Callable[[list[Tensor]], Any]) -> Any:
    """Return the result of a function that calls ops. Replay the launches of all these ops as one list if gradients are
    disabled, the tensors are plain, and no mode or profiler observes the ops."""
    if torch.is_grad_enabled() or not places_of(*map(type, tensors)).are_plain or not is_unseen(tensors):
        return function(tensors)
    with _below_autograd():
        return replayed.run(key, tensors, function)


class Op:
    """An op of PyTorch's dispatcher that takes no lists of tensors. The op mutates only `main_grad` (see
    `experts/gradient_ops.py`) and counters of tile tables, which the op leaves at 0.

    This class replaces `torch.library.custom_op`, whose autograd takes four times as long per call. Parameters and
    results of the function, of its fake and of `setup_context` may be NamedTuples of tensors and other values. A field
    of a result may be None: see `PackedSignature`. Repeated calls with operands of the same form are replayed: see
    `Replayed`.
    """

    def __init__(self, name: str, function: Callable[..., Any], signature: PackedSignature):
        self.name = name
        self._signature = signature
        self._function = function
        self._replayed = Replayed(name)
        self._backward: Callable[..., Any] | None = None
        self._setup_context: Callable[..., None] | None = None
        _LIBRARY.define(name + signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
        # `disable_dynamo` takes no bound method.
        self._below = disable_dynamo(lambda *arguments: self._below_autograd(*arguments))
        _LIBRARY.impl(name, self._below, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.moe_kernels, name).default
        self._node = type(
            name,
            (torch.autograd.Function,),
            {"forward": staticmethod(self._forward), "backward": staticmethod(self._backwards)},
        )
        # Use `apply` of the C++ base class, because `Function.apply` spends time looking for functorch transforms.
        self._apply = super(torch.autograd.Function, self._node).apply  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
        _LIBRARY.impl(name, self._above_autograd, "Autograd")

    def __call__(self, *args: Any) -> Any:
        signature = self._signature
        leaves = signature.flatten(*args)
        if torch.compiler.is_dynamo_compiling():
            return signature.name_results(self.overload(*signature.to_schema(leaves)))
        if launching.is_in_function:
            return self._function(*args)
        places = places_of(*map(type, leaves))
        tensors = places.read(leaves)
        others = places.read_others(leaves)
        if places.are_plain and may_replay(tensors):
            with _below_autograd():
                form = self._replayed.find((places.number, others), tensors)
                if form is not None and not (form.requires_grad and torch.is_grad_enabled()):
                    return form.replay([*tensors])
            if form is not None:
                return self._differentiable(Call(args, leaves, places, tensors, others, form, True))
        if torch._C._are_functorch_transforms_active() or has_torch_function(tensors):
            return signature.name_results(self.overload(*signature.to_schema(leaves)))
        if forward_ad._current_level >= 0:
            check_tangents(f"moe_kernels::{self.name}", tensors)
        # No dispatch key above autograd applies here. Call autograd directly, to avoid a pass through the dispatcher.
        call = Call(args, leaves, places, tensors, others, None, places.are_plain and is_unseen(tensors))
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
            return self._differentiable(call)
        with _below_autograd():
            return self._compute(call)

    def _differentiable(self, call: Call) -> Any:
        signature = self._signature
        results = self._apply(*(call.tensors if signature.has_packed else call.leaves), call)
        return signature.name_results(results)

    def _compute(self, call: Call) -> Any:
        if call.form is not None:
            return call.form.replay([*call.tensors])
        if call.is_unseen:
            return self._run(call.places, call.others, call.tensors, call.args)
        signature = self._signature
        return signature.name_results(self.overload(*signature.to_schema(call.leaves)))

    def _run(self, places: Places, others: Any, tensors: Sequence[Tensor], args: tuple[Any, ...]) -> Any:
        return self._replayed.run((places.number, others), [*tensors], lambda _: self._function(*args))

    def schema_arguments(self, *args: Any) -> tuple[Any, ...]:
        """Convert the function's arguments to the arguments of `overload`."""
        return self._signature.to_schema(self._signature.flatten(*args))

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register (as a decorator) the function that returns the results' shapes, dtypes and devices."""
        signature = self._signature

        def fake(*arguments: Any) -> Any:
            return function(*signature.pack(*signature.from_schema(*arguments)))

        torch.library.register_fake(f"moe_kernels::{self.name}", fake, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register `backward(ctx, *gradients)`, and `setup_context(ctx, inputs, output)`, which the forward pass calls.

        `backward` returns a tuple with a gradient or None for each parameter. With packed parameters, such as
        NamedTuples, `inputs` is a `Call`, and `backward` returns a dictionary from leaf name to gradient. `backward`
        calls this op's `needed(ctx)` for the names of the leaves that need a gradient.
        """
        self._backward, self._setup_context = backward, setup_context

    def needed(self, ctx: Any) -> set[str]:
        """Return the names of the leaves that need a gradient. The op must have packed parameters."""
        return {name for name, need in zip(ctx.names, ctx.needs_input_grad, strict=False) if need}

    def saved(self, ctx: Any, tensors: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], Sequence[Tensor | None]]:
        """Return the op's arguments and the saved results, from `tensors`, which `take_saved_tensors` returned."""
        num_tensors = len(ctx.places.places)
        leaves = ctx.places.join(tensors[:num_tensors], ctx.others)
        return self._signature.pack(*leaves), tensors[num_tensors:]

    def _below_autograd(self, *arguments: Any) -> Any:
        signature = self._signature
        if signature.has_packed:
            tensors, others = arguments  # others: all other leaves as a string
            return self._replayed.run(
                others, [*tensors], lambda _: self._function(*signature.pack(*signature.from_schema(tensors, others)))
            )
        places = places_of(*map(type, arguments))
        return self._run(places, places.read_others(arguments), places.read(arguments), arguments)

    def _above_autograd(self, *arguments: Any) -> Any:
        signature = self._signature
        tensors = arguments[0] if signature.has_packed else places_of(*map(type, arguments)).read(arguments)
        are_plain = places_of(*map(type, tensors)).are_plain  # False for tracers' tensors, whose sizes may be symbols
        # Compiled code calls this method without `__call__`, so look for a record here.
        if signature.has_packed and are_plain and not torch.is_grad_enabled() and may_replay(tensors):
            with _below_autograd():
                form = self._replayed.find(arguments[1], tensors)
                if form is not None:
                    return form.replay([*tensors])
        if forward_ad._current_level >= 0:
            check_tangents(f"moe_kernels::{self.name}", tensors)
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
            check_transforms(f"moe_kernels::{self.name}", tensors)
            leaves = signature.from_schema(*arguments)
            places = places_of(*map(type, leaves))
            tensors = places.read(leaves)
            call = Call(signature.pack(*leaves), leaves, places, tensors, places.read_others(leaves), None, False)
            return self._node.apply(*(tensors if signature.has_packed else leaves), call)
        with _below_autograd():
            # Call the dispatcher's next function directly: another pass of the dispatcher takes longer than a replay.
            if are_plain and is_unseen(tensors):
                return self._below(*arguments)
            return self.overload(*arguments)

    def _forward(self, ctx: Any, *inputs: Any) -> Any:
        call: Call = inputs[-1]
        with _below_autograd():
            output = self._compute(call)
        if self._signature.has_packed:
            ctx.names = [self._signature.names[place] for place in call.places.places]
        if self._setup_context is not None:
            self._setup_context(ctx, call if self._signature.has_packed else call.args, output)
        return output

    def _backwards(self, ctx: Any, *gradients: Tensor | None) -> Any:
        if self._backward is None:
            raise NotImplementedError(f"moe_kernels::{self.name} has no gradient")
        check_gradients(f"moe_kernels::{self.name}", gradients)
        result = self._backward(ctx, *gradients)
        if self._signature.has_packed:
            return *map(result.get, ctx.names), None
        return *result, None


def save_for_backward(ctx: Any, call: Call, results: Sequence[Tensor | None] = ()) -> None:
    """Save the operands and the results of a call with packed parameters for the backward pass. Autograd saves the
    tensors, and `ctx` keeps the other operands."""
    saved = *call.tensors, *results
    ctx.save_for_backward(*saved)
    ctx.places, ctx.others = call.places, call.others
    ctx.strides = None  # strides of the saved tensors, only if hooks may change them
    if has_saved_tensors_hooks():
        ctx.strides = [None if tensor is None else tensor.stride() for tensor in saved]


def take_saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that an autograd node saved, and release autograd's references unless the graph is retained.
    A tensor's memory is then freed when the caller drops the tensor, instead of after the backward pass. Call this
    function once per backward pass."""
    tensors = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()
    return tensors if ctx.strides is None else tuple(map(_with_strides, tensors, ctx.strides))


def _with_strides(tensor: Tensor | None, strides: tuple[int, ...] | None) -> Tensor | None:
    """Return the tensor, or a copy with these strides if its strides differ. Saved-tensor hooks may change strides, but
    ops read saved tensors through pointers and rely on the strides."""
    if tensor is None or strides is None or tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def check_tangents(op: str, values: Sequence[Any]) -> None:
    """Raise NotImplementedError if a value has a forward-mode AD tangent, which the op would lose."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(f"{op} has no forward-mode gradient{_other_implementation(op)}")


def check_transforms(op: str, values: Sequence[Any]) -> None:
    """Raise NotImplementedError if torch.func differentiates a value. PyTorch's own error is less clear."""
    if torch._C._are_functorch_transforms_active():
        for value in values:
            if isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value):  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
                raise NotImplementedError(f"{op} has no gradient for torch.func{_other_implementation(op)}")


def _other_implementation(op: str) -> str:
    return "" if "reference" in op else "; implementation='reference' has"


def check_gradients(op: str, gradients: Sequence[Tensor | None]) -> None:
    """Raise NotImplementedError if `torch.autograd.grad(is_grads_batched=True)` passes several gradients as one."""
    if any([gradient is not None and _is_batched(gradient) for gradient in gradients]):
        raise NotImplementedError(
            f"{op} takes one gradient at a time; omit is_grads_batched or vectorize, or use implementation='reference'"
        )


_LIBRARY = torch.library.Library("moe_kernels", "FRAGMENT")


def registered_op(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an op. The function may write only to the parameters named in
    `mutates`, and to counters of a tile table, which it must leave at 0. The op runs on the GPU of its first tensor."""

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
