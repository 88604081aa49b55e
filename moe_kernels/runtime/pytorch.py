"""Names for PyTorch's private API. Comments name public equivalents. Only `runtime` uses `torch._C` directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# The public `torch.compiler.disable` also hides a function from Dynamo, but imports the compiler.
disable_dynamo = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  # private API


def called_while_traced(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a function of one argument, so that Dynamo calls it while tracing. The graph contains no part of the call.

    Dynamo calls a metaclass's `__instancecheck__` on the object itself, while tracing. The public function
    `torch.compiler.assume_constant_result` refuses modules in PyTorch 2.11, and compiles once per module in 2.13.
    """

    class Check(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            function(instance)
            return True

    class Called(metaclass=Check):
        pass

    def call(instance: Any) -> None:
        isinstance(instance, Called)

    return call


# `TensorGuards(*tensors, ...).check(*others)` compares shapes, strides, dtypes, devices, types, `requires_grad` and
# dispatch keys. Modes, autocast and transforms change dispatch keys. Comparisons in Python take ten times as long.
TensorGuards = torch._C._dynamo.guards.TensorGuards  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs

# Device type -> function that makes an uninitialised tensor from tuples of sizes and strides, and a dtype. GPU tensors
# are on the current device. `torch.empty_strided` takes twice as long. Modes do not see these functions.
EMPTY_STRIDED: dict[str, Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]] = {
    "cuda": torch._C._dynamo.guards._empty_strided_cuda,  # pyright: ignore[reportAttributeAccessIssue]
    "cpu": torch._C._dynamo.guards._empty_strided_cpu,  # pyright: ignore[reportAttributeAccessIssue]
}


@contextmanager
def unseen_by_tracers() -> Iterator[None]:
    """Return a context in which new tensors hold values even while `torch.compile` or `torch.export` traces. Modes that
    record ops, such as the mode of selective checkpointing, do not see the ops inside."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


# Returns the state of a running `torch.jit.trace`, else None. Every op calls this function. The public
# `torch.jit.is_tracing` takes twice as long.
jit_tracing_state = torch._C._get_tracing_state

functorch_is_active = torch._C._are_functorch_transforms_active


def num_differentiations() -> int:
    """Return how many of the active transforms of torch.func differentiate, as `grad` and `jvp` do."""
    kinds = torch._C._functorch.TransformType  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    stack = torch._C._functorch.get_interpreter_stack() or ()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(interpreter.key() in (kinds.Grad, kinds.Jvp) for interpreter in stack)


# Returns the number of active dispatch modes. A dispatch mode sees every op.
num_dispatch_modes = torch._C._len_torch_dispatch_stack

# Hides ops from all dispatch modes, as a registered op hides the ops inside it. PyTorch's `no_dispatch` does the same
# as this context and takes 1 us longer.
unseen_by_modes = torch._C._DisableTorchDispatch

# Hides ops from autocast on all devices. `torch.autocast(device_type, enabled=False)` takes several times as long.
unseen_by_autocast = torch._C._DisableAutocast

any_autocast_is_enabled = torch._C._is_any_autocast_enabled

# `fp32_precision("cuda", "matmul")` returns `torch.backends.cuda.matmul.fp32_precision` in a quarter of the time. Every
# launch reads this setting. `torch.get_float32_matmul_precision` raises if this setting has been changed to "tf32".
fp32_precision = torch._C._get_fp32_precision_getter


def default_store() -> Any:
    """Return the store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass. A forward pass inside it recomputes a checkpointed region."""
    return torch._C._current_graph_task_id() != -1


# Returns whether the backward pass that this thread runs will execute a given autograd node. Raises RuntimeError for
# the node of a leaf whose gradient `torch.autograd.grad` returns.
will_run = torch._C._will_engine_execute_node


def has_saved_tensors_hooks() -> bool:
    """Return whether `torch.autograd.graph.saved_tensors_hooks` are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail on the device unless the condition holds. The host does not wait; PyTorch raises at a later call. A message
    of 255 bytes or more is cut, because PyTorch refuses such lengths."""
    encoded = message.encode()
    message = message if len(encoded) < 255 else encoded[:251].decode(errors="ignore") + "..."
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]  # private API
