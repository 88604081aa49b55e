"""Runs the MoE blocks of Hugging Face transformers' models with this package's experts.

Importing this package registers `experts_implementation="moe_layers"` with transformers. `enable` checks a model, sets
this implementation, and also replaces the forwards of blocks without an experts interface:

    from moe_layers.integrations.transformers import disable, enable

    print(enable(model))
    ...
    disable(model)

The model keeps its modules, parameters and names; only the computation of the experts and of softmax routers changes
(`experts/deferred_routing.py`). The op of the experts also computes PEFT's adapters of the experts' weights
(`target_parameters` of LoraConfig), even if the adapters are added after `enable`. This package needs transformers 5.7
or later, and reads adapters of peft 0.18 or later.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_kernels.experts.fused import PRECISIONS, check_fp8_sizes
from moe_kernels.runtime.dispatch import IMPLEMENTATIONS
from moe_kernels.runtime.pytorch import called_while_traced
from moe_kernels.types import QuantizedWeight

from ...checks import check_choice, check_kind, first_three
from .experts.discovery import Found, find_experts
from .experts.experts_forward import ATTRIBUTE, ENABLED, FORMS, NAME, SHARING, TOLD
from .experts.peft_adapters import (
    Place,
    find_places,
    replace_forwards,
    report_wrappers,
    warn_of_missed_targets,
)
from .experts.replaced_forwards import replace_forward, restore_forward
from .routers.attached import release_routers
from .routers.deferral import FORM, deferrable_router, router_forward

__all__ = ["EnableReport", "disable", "enable"]

OLDEST = "5.7"
STATE = "_moe_layers_state"  # attribute of an enabled model that holds the model's _State

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(f"moe_layers: transformers must be {OLDEST} or later, got {transformers.__version__}")


def transformers_has(module: str, name: str) -> bool:
    """Return whether the installed transformers has a module `transformers.<module>` with a member `name`."""
    path = f"transformers.{module}"
    return find_spec(path) is not None and hasattr(importlib.import_module(path), name)


@dataclass(frozen=True)
class EnableReport:
    """Summary of the blocks that `enable` changed.

    Attributes:
        blocks: number of MoE blocks.
        kinds: (class, activation, path) -> number of blocks. A path is "experts interface" or "replaced forward".
        adapted: names of the parameters whose PEFT adapters (LoRA) the experts' op computes.
        quantized: format -> number of bytes of the experts' weights that stay quantised in this format.
        adapted_by_wrapper: name of a parameter or an experts module -> reason why PEFT's wrapper computes the adapters.
        fused_routers: number of routers computed by the experts' op, if kernels run and nothing else reads the routing.
    """

    blocks: int
    kinds: dict[tuple[str, str, str], int]
    adapted: tuple[str, ...] = ()
    adapted_by_wrapper: dict[str, str] = field(default_factory=dict)
    quantized: dict[str, int] = field(default_factory=dict)
    fused_routers: int = 0

    def __str__(self) -> str:
        kinds = (f"{count} {name} ({activation}, {path})" for (name, activation, path), count in self.kinds.items())
        text = f"moe_layers computes the experts of {self.blocks} blocks: {', '.join(kinds)}"
        for format, num_bytes in self.quantized.items():
            text += f"; {num_bytes:,} bytes of weights stay {format}"
        if self.adapted:
            text += f"; with them PEFT's adapters of {len(self.adapted)} parameters"
        left = [f"{name} ({reason})" for name, reason in self.adapted_by_wrapper.items()]
        if left:
            text += f"; their wrappers compute the adapters of {first_three(left)}"
        return text


@dataclass(eq=False)
class _State:
    """The changes that `enable` made to a model, for `disable` to undo. Each enabled model has one instance."""

    configs: list[tuple[Any, str | None]]  # (configuration, its previous experts implementation)
    experts: list[nn.Module]
    replaced: list[nn.Module]  # modules whose forward was replaced
    places: list[Place]
    hooks: list[RemovableHandle]  # the hook `_check_targets` on the innermost model that contains the experts
    models: list[nn.Module]  # all transformers models in the enabled model; each may have `peft_config`
    adapters: dict[str, Any] = field(default_factory=dict)  # name -> PEFT's configuration, see `warn_of_missed_targets`

    def __post_init__(self) -> None:
        _STATES.add(self)

    def __setstate__(self, values: dict[str, object]) -> None:
        """Add the state of a copied or unpickled model to `_STATES`."""
        vars(self).update(values)
        _STATES.add(self)


_STATES: WeakSet[_State] = WeakSet()  # one per enabled model


def enable(model: nn.Module, *, implementation: str | None = None, precision: str | None = None) -> EnableReport:
    """Compute the experts of all MoE blocks of a model with `moe_kernels`.

    The function checks everything before it changes anything. If the function is interrupted, the model is not enabled.
    An enabled model may be enabled again, with another implementation. The op of the experts also computes softmax
    routers, unless other code may read the routing.

    The function sets `experts_implementation="moe_layers"` in the model's configuration. Every other model with the
    same configuration object then also computes its experts with `moe_kernels`. If `model` is only a part of a model,
    such as a layer, `enable` replaces the experts' forwards instead. `enable` also replaces the forwards if another
    enabled model has the same configuration.

    Args:
        model: any module that holds MoE blocks of transformers.
        implementation: "triton", "reference", or None (default) to choose by device.
        precision: "fp8" multiplies e4m3 operands in the experts, see `fused_experts`. None (default) multiplies
            operands in the dtype of the model.

    Raises:
        ValueError: the model has no MoE block, or an unsupported MoE block, which the message names. Other causes: a
            part of the model, or a larger model around `model`, is already enabled; `shard_experts` sharded the model;
            the kernels cannot read the quantised weights. With "fp8": weights are quantised or partitioned by
            DeepSpeed's ZeRO-3, weights have sizes that are not multiples of 16, or experts have a norm.
        NotImplementedError: weights are in a format that is not supported, such as bitsandbytes' fp4.
    """
    check_choice("enable", "implementation", implementation, (*IMPLEMENTATIONS, None))
    check_kind("enable", "model", model, nn.Module)
    check_choice("enable", "precision", precision, PRECISIONS)
    found = find_experts(model, implementation, _selectable(model))
    if precision is not None:
        found = [_in_precision(part, precision) for part in found]
    configs = _configs_of(found)
    if (earlier := _state_of(model)) is not None:
        _check_whole("enable", earlier)
        _restore(model, earlier)
    _check_free(found)
    forwards = {module: forward for part in found for module, forward in part.forwards.items()}
    modules = dict(model.named_modules())
    routers = dict(pair for part in found if (pair := deferrable_router(modules, part)) is not None)
    forwards |= dict.fromkeys(routers, router_forward)
    places = find_places(model, [part.experts for part in found])
    models: list[nn.Module] = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    around = [module for module in models if found[0].experts in set(module.modules())]
    state = _State(
        [(config, config._experts_implementation_internal) for config in configs],
        [part.experts for part in found],
        list(forwards),
        places,
        [module.register_forward_pre_hook(_check_targets) for module in around[-1:]],
        models,
    )
    setattr(_innermost(model), STATE, state)
    try:
        for part in found:
            setattr(part.experts, ATTRIBUTE, part.spec)
            setattr(part.experts, ENABLED, part.name.replace(".base_layer", ""))
        for router, form in routers.items():
            setattr(router, FORM, form)
        for module, forward in forwards.items():
            replace_forward(module, forward)
        for place in places:
            replace_forwards(place)
        for config in configs:
            # Set the private attribute, because the public setters also change configurations of parts without experts.
            config._experts_implementation_internal = NAME
        warn_of_missed_targets(state.models, state.experts, state.adapters)
    except BaseException:  # includes KeyboardInterrupt (Ctrl-C)
        _restore(model, state)
        raise
    return _report(found, places, len(routers))


@called_while_traced
def _check_new_targets(model: nn.Module) -> None:
    for state in list(_STATES):
        if model in state.models:
            warn_of_missed_targets(state.models, state.experts, state.adapters)


def _check_targets(model: nn.Module, *_: object) -> None:
    """Warn of adapters that were added after `enable` and whose target weights PEFT did not find. This hook is on
    whole models instead of blocks, because torch.compile compiles blocks with different hooks separately."""
    _check_new_targets(model)


@torch.no_grad()
def _in_precision(part: Found, precision: str) -> Found:
    """Return the experts with `precision` in their spec. Raise ValueError if the experts do not support `precision`."""
    if any(hasattr(parameter, "ds_id") for parameter in part.experts.parameters()):
        raise ValueError(
            f"enable: precision={precision!r} needs whole weights, got {part.name} of DeepSpeed's ZeRO-3; call enable "
            "before deepspeed.initialize"
        )
    w_down = part.spec.w_down(part.experts)
    got = f"stored {w_down.format}" if isinstance(w_down, QuantizedWeight) else "a norm" if part.spec.normed else None
    if got is not None:
        raise ValueError(f"enable: precision={precision!r} needs plain weights and no norm, got {got} in {part.name}")
    check_fp8_sizes("enable", *w_down.shape[1:])
    return replace(part, spec=replace(part.spec, precision=precision))


def _configs_of(found: list[Found]) -> list[Any]:
    """Return the distinct configurations of those experts that are called through the experts interface."""
    through_interface = [part.experts for part in found if not part.forwards]
    return list({id(experts.config): experts.config for experts in through_interface}.values())


def _check_free(found: list[Found]) -> None:
    """Raise ValueError if a part of the model, or a larger model around it, is already enabled."""
    enabled = {experts for state in _STATES for experts in state.experts}
    if any(part.experts in enabled for part in found):
        raise ValueError("enable: no part of the model may be enabled, or enabled again, without the whole")


def _selectable(model: nn.Module) -> set[int]:
    """Return the ids of configurations that belong to whole models in `model`, and to no other enabled model."""
    own = _state_of(model)
    taken = {id(config) for state in _STATES if state is not own for config, _ in state.configs}
    whole = (module for module in model.modules() if isinstance(module, transformers.PreTrainedModel))
    return {id(module.config) for module in whole} - taken


def disable(model: nn.Module) -> None:
    """Undo `enable` and restore the model's previous state. Also end the routers' statistics, losses and counts.

    Other code's later changes remain: wrappers and hooks on replaced forwards, and another `experts_implementation`.

    Raises:
        ValueError: the model is not enabled, or `shard_experts` sharded its experts.
    """
    state = _state_of(model)
    if state is None:
        raise ValueError(f"disable: the model must have been given to enable, got {type(model).__name__}")
    _check_whole("disable", state)
    release_routers(model)
    _restore(model, state)


def _check_whole(op: str, state: _State) -> None:
    if any(SHARING in vars(experts) for experts in state.experts):
        raise ValueError(
            f"{op}: the experts must be whole, got experts that ranks share; save_sharded writes them, and "
            "from_pretrained loads a whole model"
        )


def _restore(model: nn.Module, state: _State) -> None:
    _STATES.discard(state)
    for config, implementation in state.configs:
        if config._experts_implementation_internal == NAME:  # keep a value that other code set after `enable`
            config._experts_implementation_internal = implementation
    for module in state.replaced:
        restore_forward(module)
        vars(module).pop(FORM, None)
    for hook in state.hooks:
        hook.remove()
    for wrapper in (wrapper for place in state.places for wrapper in place.wrappers()):
        restore_forward(wrapper)
    for experts in state.experts:
        for attribute in (ATTRIBUTE, ENABLED, FORMS, TOLD):
            vars(experts).pop(attribute, None)
    # Search for the module that holds the state, because wrappers of torch.compile or peft also expose the state.
    holder = next(module for module in model.modules() if vars(module).get(STATE) is state)
    delattr(holder, STATE)


def _innermost(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrappers. The inner model remains when PEFT unloads adapters."""
    return next(module for module in model.modules() if not type(module).__module__.startswith("peft."))


def _state_of(model: nn.Module) -> _State | None:
    return getattr(_innermost(model), STATE, None)


def _report(found: list[Found], places: list[Place], fused_routers: int) -> EnableReport:
    kinds = Counter((part.kind, str(part.spec.activation), part.path) for part in found)
    computed, left = report_wrappers(places)
    return EnableReport(len(found), dict(kinds), tuple(computed), left, _stored_bytes(found), fused_routers)


@torch.no_grad()
def _stored_bytes(found: list[Found]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for part in found:
        for weight in part.spec.weights(part.experts):
            if isinstance(weight, QuantizedWeight):
                sizes[str(weight.format)] += weight.num_bytes
    return dict(sizes)
