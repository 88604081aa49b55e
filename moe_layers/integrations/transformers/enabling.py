"""Hugging Face transformers: our experts in the MoE blocks of a model, in one call.

    from moe_layers.integrations.transformers import disable, enable

    print(enable(model))
    ...
    disable(model)

The model keeps its modules, parameters, names and routers; only what computes the experts changes. Needs transformers
5.7 or later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import transformers
from packaging.version import Version
from torch import nn

from moe_kernels import IMPLEMENTATIONS

from ...checks import check_choice, check_kind
from .discovery import Found, find_experts
from .experts_forward import ATTRIBUTE, NAME

__all__ = ["EnableReport", "disable", "enable"]

OLDEST = "5.7"
_STATE = "_moe_layers_state"  # of an enabled model

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(f"moe_layers: transformers must be {OLDEST} or later, got {transformers.__version__}")


@dataclass(frozen=True)
class EnableReport:
    """What `enable` dispatched.

    Attributes:
        blocks: how many MoE blocks.
        kinds: how many of each (class, activation, path); a path is "experts interface" or "replaced forward".
    """

    blocks: int
    kinds: dict[tuple[str, str, str], int]

    def __str__(self) -> str:
        kinds = (f"{count} {name} ({activation}, {path})" for (name, activation, path), count in self.kinds.items())
        return f"moe_layers computes the experts of {self.blocks} blocks: {', '.join(kinds)}"


@dataclass(eq=False)
class _State:
    """What `disable` puts back. Each belongs to one enabled model."""

    configs: list[tuple[object, str | None]]  # each with its experts implementation
    experts: list[nn.Module]
    replaced: list[nn.Module]  # the modules whose forward is ours

    def __post_init__(self) -> None:
        _STATES.add(self)

    def __setstate__(self, values: dict[str, object]) -> None:
        """That of a copied or unpickled model."""
        vars(self).update(values)
        _STATES.add(self)


_STATES: WeakSet[_State] = WeakSet()  # of all models that are enabled now


def enable(model: nn.Module, *, implementation: str | None = None) -> EnableReport:
    """Compute the experts of all MoE blocks of a model with `moe_kernels`.

    Checks everything before it changes anything. An enabled model may be enabled again, with another implementation.

    The choice of an experts implementation belongs to the model's configuration. Another model that was built from the
    same object, or from a copy that was made while this one was enabled, raises when it is called. One with a copy can
    be enabled too; its `disable` leaves "eager", because the copy does not tell what was there before.

    Args:
        model: any module that holds MoE blocks of transformers.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: there is no MoE block; or one that we cannot compute, which is named; or a part of the model, or
            another one with its configuration, is enabled.
    """
    check_choice("enable", "implementation", implementation, (*IMPLEMENTATIONS, None))
    check_kind("enable", "model", model, nn.Module)
    found = find_experts(model, implementation)
    through_interface = [part.experts for part in found if not part.forwards]
    configs = {id(experts.config): experts.config for experts in through_interface}.values()
    if hasattr(model, _STATE):
        disable(model)
    if any(hasattr(part.experts, ATTRIBUTE) for part in found):
        raise ValueError("enable: no part of the model may be enabled, or enabled again, without the whole")
    if any(config is taken for config in configs for state in _STATES for taken, _ in state.configs):
        raise ValueError("enable: each model must have a configuration object of its own, got that of an enabled one")
    forwards = {module: forward for part in found for module, forward in part.forwards.items()}
    state = _State(
        [(config, _implementation_of(config)) for config in configs],
        [part.experts for part in found],
        list(forwards),
    )
    for part in found:
        setattr(part.experts, ATTRIBUTE, part.spec)
    for module, forward in forwards.items():
        module.forward = partial(forward, module)
    for config in configs:
        # The public setters go on to the configurations of parts without experts.
        config._experts_implementation_internal = NAME
    setattr(model, _STATE, state)
    return _report(found)


def disable(model: nn.Module) -> None:
    """Undo `enable`: the model is what it was before.

    Raises:
        ValueError: the model is not enabled.
    """
    state = getattr(model, _STATE, None)
    if state is None:
        raise ValueError(f"disable: the model must have been given to enable, got {type(model).__name__}")
    for config, implementation in state.configs:
        config._experts_implementation_internal = implementation
    for module in state.replaced:
        del module.forward
    for experts in state.experts:
        delattr(experts, ATTRIBUTE)
    _STATES.discard(state)
    # A wrapper, such as that of torch.compile or peft, shows the state of the model in it as its own.
    holder = next(module for module in model.modules() if vars(module).get(_STATE) is state)
    delattr(holder, _STATE)


def _implementation_of(config: object) -> str | None:
    """Of the experts, not being ours: a copy of an enabled configuration names ours and forgot what was before."""
    implementation = config._experts_implementation_internal
    return "eager" if implementation == NAME else implementation


def _report(found: list[Found]) -> EnableReport:
    kinds = Counter((type(part.experts).__name__, str(part.spec.activation), part.path) for part in found)
    return EnableReport(len(found), dict(kinds))
