"""Replaces the forwards of single modules. Other libraries may wrap these forwards, as accelerate's hooks do.

`restore_forward` removes only this package's forward. A wrapper around this package's forward remains, and then calls
the forward of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

_FORWARD = "_moe_layers_forward"  # module attribute that holds the function that computes the forward
_REPLICATE = "_replicate_for_data_parallel"  # method by which nn.DataParallel copies a module to another GPU


def replace_forward(module: nn.Module, forward: Callable[..., object]) -> None:
    """Let `forward(module, ...)` replace the module's forward. Another library's wrapper around an earlier
    replacement remains, and calls the new one. Any other forward that another library has set stays in use."""
    vars(module)[_FORWARD] = forward
    if "forward" not in vars(module):
        module.forward = _Forward(module).run
        vars(module)[_REPLICATE] = _Forward(module).replicate


def restore_forward(module: nn.Module) -> None:
    vars(module).pop(_FORWARD, None)
    vars(module).pop(_REPLICATE, None)
    if has_only_own_forward(module):
        del module.forward


def is_replaced(module: nn.Module) -> bool:
    return _FORWARD in vars(module)


def has_other_forward(module: nn.Module) -> bool:
    """Return whether another library replaced the module's forward without wrapping this package's forward."""
    forward = vars(module).get("forward")
    while forward is not None and not _is_run(forward):
        forward = getattr(forward, "__wrapped__", None)
    return forward is None and "forward" in vars(module)


def has_only_own_forward(module: nn.Module) -> bool:
    """Return whether this package replaced the module's forward, and no other library wrapped the replacement."""
    # PyTorch 2.11 compiles this form of the check correctly, but not the form in `_is_run`.
    return isinstance(module.forward, MethodType) and isinstance(module.forward.__self__, _Forward)


def _is_run(forward: Any) -> bool:
    return isinstance(getattr(forward, "__self__", None), _Forward)


class _Forward:
    """Runs the function that `replace_forward` set.

    Modules hold the method `run`, not a partial function. torch.compile compares methods by their code, and partial
    functions by identity. With partial functions, torch.compile would compile each module separately.
    """

    def __init__(self, module: nn.Module):
        self._module = module

    def run(self, *args: Any, **kwargs: Any) -> object:
        module = self if isinstance(self, nn.Module) else self._module  # accelerate binds this function to the module
        return getattr(module, _FORWARD, type(module).forward)(module, *args, **kwargs)

    def replicate(self) -> nn.Module:
        """Return a replica for nn.DataParallel, with the forward of the class: `run` would read this module's weights,
        which are on another GPU."""
        replica = type(self._module)._replicate_for_data_parallel(self._module)
        for name in (_FORWARD, _REPLICATE, "forward"):
            del vars(replica)[name]
        return replica
