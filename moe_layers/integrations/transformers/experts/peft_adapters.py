"""Computes PEFT's LoRA of expert parameters inside the experts' op.

PEFT nests one `ParamWrapper` per adapted parameter around the experts. The first parameter's wrapper is innermost.
PEFT's forward adds the product of lora_A and lora_B to the parameter while the experts run. `_forward` in this file
passes both factors to the experts instead, which avoids a tensor of the parameter's size. `_forward` is set on each
wrapper, not on the class.

In PEFT 0.18 and later, lora_A is [E * r, in] and lora_B is [out, r * E]. Expert e has the rows e * r + i of lora_A and
the columns i * E + e of lora_B, for i below the rank r. `in` and `out` are the lengths of the parameter's second and
third axis. If PEFT swapped the axes, `in` is the length of the third axis and `out` that of the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ....checks import first_three
from .experts_forward import (
    ATTRIBUTE,
    DISPATCHED,
    ENABLED,
    NAME,
    SHARING,
    ExpertsSpec,
    LowRank,
    call_with_changes,
    changes_of,
)
from .parametrized import parameter_shape
from .replaced_forwards import has_other_forward, is_replaced, replace_forward

_CLASS = ("peft.tuners.lora.layer", "ParamWrapper.forward")  # module and name of the forward that is replaced
_SWAPS_SINCE = "0.19"  # first PEFT version that may swap a parameter's axes
_SWAPPED = "_did_swap_in_out_features"  # attribute of a wrapper that is True if PEFT swapped the parameter's axes


class Place(NamedTuple):
    """The attribute that holds an experts module or its outermost wrapper."""

    name: str  # name that the experts have in the model without wrappers
    holder: nn.Module
    child: str

    def wrappers(self) -> Iterator[Any]:
        """Yield the wrappers around the experts, outermost first."""
        module = self.holder._modules.get(self.child)
        while module is not None and (inner := module._modules.get("base_layer")) is not None:
            yield module
            module = inner


def find_places(model: nn.Module, experts: list[nn.Module]) -> list[Place]:
    """Return a `Place` for each attribute that holds one of the experts, in the order of the model's modules."""
    known, found = set(experts), []
    for path, holder in model.named_modules():
        if hasattr(holder, "base_layer"):
            continue
        for child, module in holder.named_children():
            place = Place(f"{path}.{child}".lstrip("."), holder, child)
            for wrapper in place.wrappers():
                module = wrapper.base_layer
            if module in known:
                found.append(place)
    return found


def report_wrappers(places: list[Place]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the parameters whose adapters the experts' op computes. Also return the other adapted
    parameters, each with the reason why PEFT computes its adapter."""
    computed, left = [], {}
    for place in places:
        for wrapper in place.wrappers():
            if not _is_param_wrapper(wrapper):
                left[place.name] = f"{type(wrapper).__name__} is not a ParamWrapper of PEFT's LoRA"
                continue
            name = f"{place.name}.{wrapper.parameter_name}"
            other = "another forward was put in its place" if has_other_forward(wrapper) else None
            if reason := other or _reason_against(wrapper):
                left[name] = reason
            else:
                computed.append(name)
    return computed, left


def replace_forwards(place: Place) -> None:
    """Let `_forward` replace the forward of each PEFT wrapper around experts."""
    for wrapper in place.wrappers():
        if _is_param_wrapper(wrapper):
            replace_forward(wrapper, _forward)


def adapt(module: Any) -> None:
    """Replace the forward of `module` if it is PEFT's wrapper around enabled or sharded experts. If the experts are
    sharded, also make the wrapper's `merge` raise. Otherwise warn if the kernels cannot compute the adapters."""
    if not (isinstance(module, nn.Module) and _is_param_wrapper(module)):
        return
    wrapper: Any = module
    experts, is_new = _held_by(wrapper), not is_replaced(wrapper)
    name, name_of_shares = vars(experts).get(ENABLED), _name_of_shares(experts)
    if name_of_shares is not None:
        replace_forward(wrapper, _forward)
        wrapper.merge = partial(_refuse_to_merge, name_of_shares, wrapper.parameter_name)
    elif name is not None and is_new:
        replace_forward(wrapper, _forward)
        if (reason := _reason_against(wrapper)) is not None:
            name = f"{name}.{wrapper.parameter_name}"
            warnings.warn(f"moe_layers: PEFT computes the adapter of {name}, because {reason}", stacklevel=2)


def _name_of_shares(experts: nn.Module) -> str | None:
    """Return the experts' name for errors if the experts are sharded over ranks, else None."""
    held: Any = vars(experts)
    return held[SHARING].name if SHARING in held else held.get(DISPATCHED)


def _refuse_to_merge(name: str, parameter: str, *args: object, **kwargs: object) -> NoReturn:
    raise ValueError(
        f"{name}: adapters must be merged into whole experts, got {parameter}, which ranks share; save the adapters by "
        "the PeftModel's save_pretrained, and merge them into a model that is not sharded"
    )


def warn_of_missed_targets(models: list[nn.Module], experts: list[nn.Module], known: dict[str, Any]) -> None:
    """Warn once per adapter if its `target_parameters` name experts' weights that PEFT did not find.

    PEFT finds a parametrised weight, such as a weight in 4 bits, only by the full name of the weight.

    Args:
        models: models that may have `peft_config`.
        known: adapter -> the PEFT configuration that was checked. This function adds new configurations.
    """
    for model in models:
        for adapter, config in vars(model).get("peft_config", {}).items():
            if known.get(adapter) is config:
                continue
            known[adapter] = config
            if missed := _missed_targets(model, experts, adapter, config):
                warnings.warn(
                    f"moe_layers: adapter {adapter!r} of PEFT does not train {first_three(missed)}: PEFT finds "
                    "parameters in 4 bits by full names alone; use full names in target_parameters, such as "
                    f"{missed[0]!r}",
                    stacklevel=2,
                )


def _missed_targets(model: nn.Module, experts: list[nn.Module], adapter: str, config: Any) -> list[str]:
    """Return the full names of parametrised weights that `target_parameters` names but that have no adapter."""
    modules: list[Any] = list(model.modules())
    wrappers = [module for module in modules if _is_param_wrapper(module) and adapter in module.lora_A]
    adapted = {(wrapper.get_base_layer(), wrapper.parameter_name) for wrapper in wrappers}
    suffixes = tuple(f".{target}" for target in getattr(config, "target_parameters", None) or ())
    weights = {
        f"{path}.{parameter}".replace(".base_layer", ""): (module, parameter)
        for path, module in model.named_modules()
        if module in set(experts)
        for parameter in getattr(module, "parametrizations", ())
    }
    return [name for name, weight in weights.items() if f".{name}".endswith(suffixes) and weight not in adapted]


def _is_param_wrapper(module: nn.Module) -> bool:
    """Return whether the module's class uses ParamWrapper's forward. Subclasses made by FSDP inherit this forward."""
    if "parameter_name" not in vars(module):  # reading `forward` of a TorchScript class would raise an error
        return False
    forward = type(module).forward
    return (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) == _CLASS


def _reason_against(wrapper: Any) -> str | None:
    """Return why PEFT must compute a wrapper's adapters at present, or None if the kernels can compute them."""
    experts = _held_by(wrapper)
    spec: ExpertsSpec | None = getattr(experts, ATTRIBUTE, None)
    if spec is not None and ATTRIBUTE not in vars(experts):
        return f"a {type(experts).__name__} is around its experts"
    # If the user has chosen another experts implementation, calls of the experts do not reach `experts_forward`.
    is_computed_here = is_replaced(experts) or DISPATCHED in vars(experts)
    if spec is None or not (is_computed_here or experts.config._experts_implementation == NAME):
        return "moe_layers does not compute its experts"
    if spec.normed:
        return "a norm follows its experts"
    if wrapper.parameter_name not in spec.adaptable:
        return "it is not a weight of the experts"
    if wrapper.merged:
        return "it is merged"
    return next(filter(None, (_reason_against_adapter(wrapper, adapter) for adapter in _active(wrapper))), None)


def _held_by(wrapper: nn.Module) -> Any:
    """Return the module inside all wrappers of PEFT and torch.compile: the experts, or another library's wrapper."""
    module = wrapper
    while (inner := module._modules.get("base_layer", module._modules.get("_orig_mod"))) is not None:
        module = inner
    return module


def _reason_against_adapter(wrapper: Any, adapter: str) -> str | None:
    dropout = wrapper.lora_dropout[adapter] if adapter in wrapper.lora_dropout else nn.Identity()
    if type(dropout) is not nn.Identity:
        return f"adapter {adapter!r} has dropout"
    if adapter in getattr(wrapper, "lora_variant", ()) or wrapper.use_dora.get(adapter, False):
        return f"adapter {adapter!r} is a variant of LoRA"
    for factor in (wrapper.lora_A[adapter], wrapper.lora_B[adapter]):
        if type(factor) is not nn.Linear or factor.bias is not None:
            return f"a factor of adapter {adapter!r} is not a Linear without bias"
    return _reason_against_layout(wrapper, adapter)


def _reason_against_layout(wrapper: Any, adapter: str) -> str | None:
    if not hasattr(wrapper, _SWAPPED):
        import peft

        if Version(peft.__version__) >= Version(_SWAPS_SINCE):
            return "this version of PEFT does not state the order of its axes"
    shape = tuple(parameter_shape(wrapper.get_base_layer(), wrapper.parameter_name))
    num_experts, rank = wrapper.num_experts, wrapper.r[adapter]
    if len(shape) != 3 or num_experts < 2:
        return f"its parameter must have 3 axes and several experts, got shape {list(shape)}"
    size_in, size_out = reversed(shape[1:]) if getattr(wrapper, _SWAPPED, False) else shape[1:]
    wanted = (num_experts * rank, size_in), (size_out, rank * num_experts)
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    if num_experts != shape[0] or (tuple(a.shape), tuple(b.shape)) != wanted:
        return f"the factors of adapter {adapter!r} must be {wanted}, got {tuple(a.shape)} and {tuple(b.shape)}"
    return None


def _active(wrapper: Any) -> list[str]:
    return [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]


def _forward(self: Any, *args: object, **kwargs: object) -> Tensor:
    """Run a ParamWrapper. The experts' op computes the adapters if possible, else PEFT's forward computes the adapters.
    Raise ValueError if the experts are sharded over ranks and the op cannot compute the adapters."""
    if self.disable_adapters or kwargs.get("adapter_names") is not None:
        return type(self).forward(self, *args, **kwargs)
    if (reason := _reason_against(self)) is not None:
        if (name := _name_of_shares(self.get_base_layer())) is not None:
            raise ValueError(
                f"{name}: experts that ranks share take adapters that the kernels compute alone, got PEFT's own "
                f"computation of {self.parameter_name}, because {reason}"
            )
        return type(self).forward(self, *args, **kwargs)
    changes = [_change(self, adapter) for adapter in _active(self)]
    if not changes:
        return self.base_layer(*args, **kwargs)
    experts = _held_by(self)
    outer = changes_of(experts)
    of_others = [outer[self.parameter_name]] if self.parameter_name in outer else []
    changed = {**outer, self.parameter_name: _sum([*of_others, *changes])}
    return call_with_changes(experts, changed, lambda: self.base_layer(*args, **kwargs))


def _change(wrapper: Any, adapter: str) -> LowRank:
    """Return an adapter's factors, with its scale multiplied into lora_B. If the scale is 1, both factors are views."""
    a = wrapper.lora_A[adapter].weight.unflatten(0, (wrapper.num_experts, -1))  # [E, r, in]
    b = wrapper.lora_B[adapter].weight.unflatten(1, (-1, wrapper.num_experts)).permute(2, 0, 1)  # [E, out, r]
    b = b if wrapper.scaling[adapter] == 1 else b * wrapper.scaling[adapter]
    return LowRank(b, a) if getattr(wrapper, _SWAPPED, False) else LowRank(a.transpose(1, 2), b.transpose(1, 2))


def _sum(changes: list[LowRank]) -> LowRank:
    """Return the sum of low-rank changes as one change. The factors are concatenated along r."""
    if len(changes) == 1:
        return changes[0]
    return LowRank(torch.cat([c.left for c in changes], 2), torch.cat([c.right for c in changes], 1))


# Adapt each wrapper when PEFT adds the wrapper to a module. Register the hook at import, because unpickling a block of
# an enabled model imports this file but calls none of its functions.
register_module_module_registration_hook(lambda holder, name, module: adapt(module))
