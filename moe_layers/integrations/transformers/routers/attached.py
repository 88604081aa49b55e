"""Finds the routers of a transformers model, and hooks them for this package's routing functions."""

from __future__ import annotations

import re

import transformers
from packaging.version import Version
from torch import nn

from ....routing.model_routers import register_finder
from ..experts.discovery import has_interface
from ..experts.expert_classes import swap_of
from .hooks import HookedRouter
from .model_forward import hook_models, unhook_models

_ROUTER = "_moe_layers_router"  # attribute of a router module that holds the module's `HookedRouter`
_NAMES = ("gate", "router")  # possible names of a router in its block
_KINDS = re.compile(r"(Router|Gate|Gating|ModulesToSaveWrapper)$")
# Class of unsupported router -> reason. Most of these routers do not return the choice and weights that experts get.
_BLOCK_CHOOSES = "its block chooses the experts"
_REFUSED = {
    "JetMoeTopKGating": "it returns slots in the order of the experts",
    "Llama4Router": _BLOCK_CHOOSES,
    "ModulesToSaveWrapper": "it runs a copy of the router per adapter; adapt the router by target_parameters instead",
    "ZayaRouter": "it sends skipped slots to expert 0",
}
if Version(transformers.__version__) < Version("5.19"):
    _REFUSED["LongcatFlashTopkRouter"] = "it returns no logits before transformers 5.19"


def hooked_routers(model: nn.Module) -> dict[str, HookedRouter]:
    """Return block name -> hooked router, for all experts modules. Hook routers that are not hooked yet. Raise
    ValueError if a block's router is not supported."""
    modules = dict(model.named_modules())
    experts = [name for name, module in modules.items() if has_interface(module) or swap_of(module) is not None]
    found = [_router_of(modules, name) for name in experts]
    routers = {}
    for block, name, held in found:
        router = modules[name]
        if _ROUTER not in vars(router):
            vars(router)[_ROUTER] = HookedRouter(name, router, modules[block], held)
        routers[block] = vars(router)[_ROUTER]
    if routers:
        hook_models(model)
    return routers


def release_routers(model: nn.Module) -> None:
    """Restore the forwards of all routers of a model, and remove the hooks of `hook_models`."""
    for module in model.modules():
        if _ROUTER in vars(module):
            vars(module).pop(_ROUTER).release()
    unhook_models(model)


def _router_of(modules: dict[str, nn.Module], name: str) -> tuple[str, str, nn.Module]:
    """Return (block's name, router's name, experts module) for the experts called `name`. Raise ValueError if the
    router is not supported."""
    found = router_in_block(modules, name)
    if found is None:
        raise ValueError(
            f"moe_layers: {name or type(modules[name]).__name__} must have a router in its block, named one of "
            f"{list(_NAMES)}, got none"
        )
    block, router = found
    kind = type(modules[router]).__name__
    # In DBRX, and in many models before transformers 5.17, the block chooses the experts, not the router.
    chosen_by_block = _BLOCK_CHOOSES if hasattr(modules[block], "route_tokens_to_experts") else None
    if reason := _REFUSED.get(kind, chosen_by_block):
        raise ValueError(f"moe_layers: the router of {name} must return its choice, got {kind}: {reason}")
    return block, router, modules[name]


def router_in_block(modules: dict[str, nn.Module], name: str) -> tuple[str, str] | None:
    """Return (block's name, router's name) for the experts called `name`, or None without a router. The block may be
    the experts module itself. Wrappers may be around the experts and around the router."""
    parts = name.split(".") if name else []
    for block in (".".join(parts[:length]) for length in range(len(parts), -1, -1)):
        for child in _NAMES:
            router = f"{block}.{child}" if block else child
            while f"{router}.base_layer" in modules:  # skip PEFT's wrappers
                router = f"{router}.base_layer"
            if _KINDS.search(type(modules.get(router)).__name__):
                return block, router
    return None


register_finder(hooked_routers)
