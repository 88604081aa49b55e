"""Finds the experts modules of a transformers model that this package can compute."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ....checks import first_three
from .expert_classes import ATTENTION, REFUSED, swap_of
from .experts_forward import ExpertsSpec, check_weights, experts_forward, interface_spec
from .parametrized import check_stored
from .replaced_forwards import has_other_forward

_NAMED_EXPERTS = re.compile(r"Experts|(Moe|MoE|MoeBlock|MoEBlock|SparseMLP)$")  # class names of routed experts


@dataclass(frozen=True)
class Found:
    """An experts module that this package can compute. `forwards` maps modules to replacement forwards, and is empty if
    the experts' configuration selects this package's forward."""

    name: str
    experts: nn.Module
    spec: ExpertsSpec
    forwards: dict[nn.Module, Callable[..., object]]

    @property
    def kind(self) -> str:
        return type_before_parametrizations(self.experts).__name__

    @property
    def path(self) -> str:
        return "replaced forward" if self.forwards else "experts interface"


def find_experts(model: nn.Module, implementation: str | None, selectable: set[int]) -> list[Found]:
    """Return all experts of a model, in the order of its modules. Raise ValueError if the model has no experts, or
    unsupported ones.

    Args:
        selectable: ids of the configurations in which `enable` may set the experts implementation.
    """
    found = [
        part
        for name, module in model.named_modules()
        if (part := _found(model, name, module, implementation, selectable)) is not None
    ]
    if unknown := sorted(set(_unknown(model, {part.experts for part in found}))):
        raise ValueError(f"enable: moe_layers must support all experts, got unsupported {first_three(unknown)}")
    if not found:
        raise ValueError(f"enable: the model must have MoE blocks of transformers, got {type(model).__name__}")
    for part in found:
        spec, experts = part.spec, part.experts
        check_stored(part.name, experts, spec.readable, transposed=spec.transposed)
        with torch.no_grad():  # otherwise `weights` refuses quantised weights that are not frozen
            # Check parameters without reshaping, because DeepSpeed's ZeRO-3 empties them between forwards.
            check_weights(part.name, spec.weights(experts))
    return found


def _found(model: nn.Module, name: str, module: Any, implementation: str | None, selectable: set[int]) -> Found | None:
    if has_interface(module):
        make_spec = interface_spec
        forwards: dict[nn.Module, Callable[..., object]] = {}
        if id(module.config) not in selectable:
            forwards[module] = experts_forward
    else:
        swap = swap_of(module)
        if swap is None or Version(transformers.__version__) < Version(swap.oldest):
            return None
        make_spec, forwards = swap.spec, {module: swap.forward}
        if swap.caller_forward is not None:
            blocks = (block for block in model.modules() if type(block).__name__ == swap.caller)
            callers = [block for block in blocks if module in block.modules()]  # wrappers may be around the experts
            if not callers:
                return None
            forwards |= dict.fromkeys(callers, swap.caller_forward)
    for replaced in filter(has_other_forward, forwards):
        raise ValueError(
            f"enable: the forward of {type(replaced).__name__} must be its class's own, got a replaced one"
        )
    return Found(name, module, make_spec(module, implementation), forwards)


def has_interface(module: nn.Module) -> bool:
    """Return whether the forward of the module's class calls the experts interface."""
    forward = type(module).forward
    while inspect.isfunction(forward):
        if "experts_interface" in forward.__code__.co_freevars:
            return inspect.getclosurevars(forward).nonlocals["experts_interface"] is ALL_EXPERTS_FUNCTIONS
        forward = getattr(forward, "__wrapped__", None)
    return False


def _unknown(model: nn.Module, known: set[nn.Module]) -> Iterator[str]:
    """Yield the class of each unsupported module that looks like routed experts, with the reason if one is known. Skip
    modules inside supported experts or inside `ATTENTION` modules, and modules that contain supported experts."""
    attention = {module for module in model.modules() if type(module).__name__ in ATTENTION}
    inside = {inner for block in known | attention for inner in block.modules()}
    for module in model.modules():
        kind = type_before_parametrizations(module).__name__
        looks_alike = _NAMED_EXPERTS.search(kind) and "SharedExpert" not in kind
        if looks_alike and module not in inside and known.isdisjoint(module.modules()):
            yield f"{kind} ({REFUSED[kind]})" if kind in REFUSED else kind
