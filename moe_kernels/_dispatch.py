"""Which implementation of an op runs. One rule for every op; nothing falls back silently."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from ._triton import HAS_TRITON, INTERPRET

IMPLEMENTATIONS = ("triton", "reference")

# The dtypes that the Triton kernels compute in. The interpreter adds bfloat16 numbers as if they were integers.
KERNEL_DTYPES = (torch.float32, torch.float16) if INTERPRET else (torch.float32, torch.float16, torch.bfloat16)

FLOAT8 = torch.float8_e4m3fn  # of the GEMM kernels alone
FLOAT8_CC = 89  # the first GPUs that multiply it


def kernel_obstacle(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str | None:
    """Why the Triton kernels cannot take this tensor, or None if they can. The GPU's age is not looked at: where it has
    no kernel, the selection says so.

    Args:
        dtypes: the floating-point dtypes that they compute in.
    """
    if not HAS_TRITON:
        return "Triton is not installed"
    if not (tensor.is_cuda or INTERPRET):
        return f"Triton kernels run on CUDA tensors, got a tensor on {tensor.device.type}"
    if tensor.is_floating_point() and tensor.dtype not in dtypes:
        return f"the Triton kernels {'in the interpreter ' if INTERPRET else ''}do not compute in {tensor.dtype}"
    return None


def choose(op: str, implementation: str | None, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str:
    """The implementation to run: the one that is named, or, for None, Triton wherever its kernels can run.

    Args:
        tensor: the operand whose device and dtype decide.
        dtypes: the floating-point dtypes that the op's kernels compute in.

    Raises:
        ValueError: `implementation` is not a known name.
        NotImplementedError: "triton" was asked for and its kernels cannot take this tensor.
    """
    if implementation is None:
        if tensor.is_cuda and not HAS_TRITON:
            _warn_without_triton()
        return "reference" if kernel_obstacle(tensor, dtypes) else "triton"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}")
    if implementation == "triton" and (obstacle := kernel_obstacle(tensor, dtypes)):
        raise NotImplementedError(f"{op}: implementation='triton' cannot run: {obstacle}")
    return implementation


@functools.cache
def _warn_without_triton() -> None:
    message = "moe_kernels: Triton is not installed, so CUDA tensors are computed by the slow reference; install triton"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def runs_kernels(implementation: str | None, tensor: Tensor) -> bool:
    """Whether the ops compute this tensor, with this `implementation`, by Triton kernels; where they raise, no."""
    return implementation in (None, "triton") and kernel_obstacle(tensor) is None


def on_device_of(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the tensor's GPU as the current one: Triton launches on the current one."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return function(*args, **kwargs)
    with torch.cuda.device(tensor.device):
        return function(*args, **kwargs)


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast for tensors on this one's device, which kernels do not know either: references run in this.

    Where there is none anyway, it costs nothing.
    """
    device_type = tensor.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # which raises for meta
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


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
