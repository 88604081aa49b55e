"""Finds the routers of a model: this package's routers, and other libraries' routers that an integration attached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .router import TopKRouter


class ReplayedChoice(NamedTuple):
    """The choice that a router replays."""

    experts: Tensor  # [T, K] int64
    is_own: Tensor | None  # [T, 1] bool: True for tokens that keep the router's own choice; None if no token does


class AttachedRouter(Protocol):
    """A router of another library whose routing this package reads and changes. Members without a comment have the
    meaning of the members of the same name in `MoEFeedForward` or `TopKRouter`."""

    name: str  # name of the router in its model
    num_experts: int
    num_zero_experts: int
    block: nn.Module  # the module that holds the router and its experts
    observer: Any
    balance_losses: Any  # a BalanceLosses; typed as Any, because this folder must not import BalanceLosses
    aux_loss: Tensor | None
    aux_loss_scale: Tensor | None
    expert_counts: Tensor
    accumulated_counts: Tensor | None

    @property
    def training(self) -> bool: ...

    @property
    def implementation(self) -> str | None: ...  # the experts' implementation; None before `enable`

    @property
    def num_slots(self) -> int | None: ...  # number of experts per token; None if unknown before a forward

    @property
    def weight(self) -> Tensor: ...

    @property
    def selection_bias(self) -> Tensor | None: ...  # [E]; updates change it in place

    def take_counts_to(self, device: torch.device) -> None: ...

    def require_counts(self, op: str) -> None: ...  # raises ValueError unless chosen experts are counted

    def expert_settings(self, op: str) -> tuple[str | None, Tensor]: ...  # the experts' implementation, and their w_up

    # Within the context, each forward of the router passes the chosen experts, [T, K] int32, to `add`.
    def captures(self, add: Callable[[Tensor], None]) -> AbstractContextManager[None]: ...

    # Within the context, `choose(T, K)` replaces the router's choice in each forward.
    def replays(self, choose: Callable[[int, int], ReplayedChoice]) -> AbstractContextManager[None]: ...


_FINDERS: list[Callable[[nn.Module], Mapping[str, AttachedRouter]]] = []


def register_finder(find: Callable[[nn.Module], Mapping[str, AttachedRouter]]) -> None:
    """Register a function that finds another library's routers in a model, and returns them by layer name. An
    integration registers its function when imported, because this folder must not import integrations."""
    _FINDERS.append(find)


def attached_routers(model: nn.Module) -> dict[str, AttachedRouter]:
    """Return the model's routers that other libraries define, by layer name."""
    return {name: router for find in _FINDERS for name, router in find(model).items()}


def check_found(op: str, found: Collection[object]) -> None:
    """Raise ValueError if a model has no MoE layer."""
    if not found:
        raise ValueError(f"{op}: the model must have a MoEFeedForward or MoE blocks of transformers, got none")


def model_routers(model: nn.Module) -> dict[str, TopKRouter | AttachedRouter]:
    """Return all routers of a model: each `TopKRouter` by module name, and each attached router by layer name."""
    own = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    return own | attached_routers(model)
