"""Low-rank adapters (LoRA) of the experts: settings, parameters, and the functions that the layer's methods call.

In each expert, a projection with weight w and active adapters n multiplies by

    w + sum over n of scale_n * b_n @ a_n          a_n [r, in], b_n [out, r]

The experts' op adds the low-rank products to the products with w. No tensor of the weights' size is allocated. The
state dict names the factors `experts.lora.<name>.up_a`, `up_b`, `down_a` and `down_b`.

Source: https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels import ExpertAdapters

from ...checks import check_kind, check_positive, first_three, is_dtensor
from ..stored import stored

TARGETS = ("up", "down")


@dataclass(frozen=True)
class LoRA:
    """Settings of one adapter.

    Args:
        rank: the rank r for each target and expert.
        alpha: the product of the factors is scaled by alpha / rank.
        targets: projections with an adapter: "up" (gate and up rows together), "down", or by default both.
        dropout: probability of zeroing an element of the adapter's input in training. Default: 0. With dropout,
            training computes the experts with several ops, which costs time and memory. Evaluation runs one op.
        rslora: scale by alpha / sqrt(rank) instead (https://arxiv.org/abs/2312.03732). Default: False.
        shared_outer: let all experts share `up_a`, which multiplies tokens, and `down_b`, which yields outputs.
            Default: False.

    Raises:
        ValueError: rank or alpha is not positive, a target is unknown or repeated, or dropout is outside [0, 1).
    """

    rank: int
    alpha: float
    targets: Sequence[str] = TARGETS
    dropout: float = 0.0
    rslora: bool = False
    shared_outer: bool = False

    def __post_init__(self):
        check_positive("LoRA", rank=self.rank)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LoRA: alpha must be positive and finite, got {self.alpha}")
        targets = self.targets
        known = not isinstance(targets, str) and all(target in TARGETS for target in targets)
        if not known or not 0 < len(set(targets)) == len(targets):
            raise ValueError(f"LoRA: targets must be a sequence of different names of {TARGETS}, got {targets!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA: dropout must be in [0, 1), got {self.dropout}")
        object.__setattr__(self, "targets", tuple(targets))

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class ExpertLoRA(nn.Module):
    """The factors of one adapter for the experts of a layer.

    `up_a` is [E, r, D], `up_b` [E, 2F or F, r], `down_a` [E, r, F] and `down_b` [E, D, r]. With `shared_outer`, the
    first axis of `up_a` and `down_b` has length 1. The factors of a projection that is not a target are None. Factors a
    are initialised like an nn.Linear's weight, and factors b with zeros. A new adapter therefore changes no output.
    """

    def __init__(
        self,
        settings: LoRA,
        d_model: int,
        d_up: int,  # 2F or F
        d_ff: int,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.settings = settings
        self.is_active = True

        def factor(projection: str, *shape: int) -> nn.Parameter | None:
            if projection not in settings.targets:
                return None
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        rank, num_outer = settings.rank, 1 if settings.shared_outer else num_experts
        self.up_a = factor("up", num_outer, rank, d_model)
        self.up_b = factor("up", num_experts, d_up, rank)
        self.down_a = factor("down", num_experts, rank, d_ff)
        self.down_b = factor("down", num_outer, d_model, rank)
        self.reset_parameters()

    def is_shared(self, factor: str) -> bool:
        """Return whether all experts share the factor of this name."""
        return self.settings.shared_outer and factor in ("up_a", "down_b")

    def reset_parameters(self) -> None:
        for a in (self.up_a, self.down_a):
            if a is not None:
                bound = a.shape[2] ** -0.5
                nn.init.uniform_(a, -bound, bound)
        for b in (self.up_b, self.down_b):
            if b is not None:
                nn.init.zeros_(b)

    def extra_repr(self) -> str:
        settings = self.settings
        shown = f"rank={settings.rank}, scale={settings.scale:g}, targets={settings.targets}"
        return f"{shown}, dropout={settings.dropout}, is_active={self.is_active}"


class ActiveAdapter(NamedTuple):
    factors: ExpertAdapters  # factors of the experts that this process holds
    dropout: float  # current probability of dropout; 0 in evaluation


def active_adapters(lora: Any, local_share: Callable[[str, Tensor], Tensor] | None) -> list[ActiveAdapter]:
    """Return the factors and the current dropout of each active adapter."""
    found = []
    for name, adapter in () if lora is None else lora.items():
        if adapter.is_active:
            dropout = adapter.settings.dropout if adapter.training else 0.0
            found.append(ActiveAdapter(factors_of(name, adapter, local_share), dropout))
    return found


def factors_of(name: str, adapter: ExpertLoRA, local_share: Callable[[str, Tensor], Tensor] | None) -> ExpertAdapters:
    factors = {key: getattr(adapter, key) for key in ("up_a", "up_b", "down_a", "down_b")}
    if local_share is not None:
        factors = {
            key: None if factor is None else local_share(f"lora.{name}.{key}", factor)
            for key, factor in factors.items()
        }
    return ExpertAdapters(**factors, scale=adapter.settings.scale)


def any_dropout(adapters: Sequence[ActiveAdapter]) -> bool:
    return any(adapter.dropout for adapter in adapters)


def joined(adapters: Sequence[ExpertAdapters]) -> ExpertAdapters | None:
    """Return one adapter that equals the sum of `adapters`: concatenate the factors a and scale * b along the rank."""
    if len(adapters) < 2:
        return adapters[0] if adapters else None
    up, down = ([pair for part in adapters if (pair := scaled_factors(part, target))] for target in TARGETS)
    return ExpertAdapters(*_concatenated(up), *_concatenated(down))


def scaled_factors(adapter: ExpertAdapters, projection: str) -> tuple[Tensor, Tensor] | None:
    """Return a and scale * b of a projection, or None if the adapter has no factors for the projection."""
    a, b = getattr(adapter, f"{projection}_a"), getattr(adapter, f"{projection}_b")
    return None if a is None else (a, b * adapter.scale)


def _concatenated(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
    if not pairs:
        return None, None
    sides = []
    for side, rank_axis in zip(zip(*pairs, strict=True), (1, 2), strict=True):
        num_experts = max(len(factor) for factor in side)
        sides.append(torch.cat([factor.expand(num_experts, -1, -1) for factor in side], rank_axis))
    return sides[0], sides[1]


def add_lora(layer: nn.Module, lora: LoRA, name: str = "default", dtype: torch.dtype | None = torch.float32) -> None:
    """Freeze the layer and add trainable low-rank adapters to its experts. The output stays bitwise equal.

    Router, experts, shared expert and latent projections are frozen, but not earlier adapters. The new adapter is
    active, and earlier adapters stay active or inactive. The layer still supports recomputation, autocast,
    `torch.compile`, activation checkpointing and `saved_bytes`. Expert parallelism may be applied before or after
    `add_lora`, and shards adapters like their experts. Call `add_lora` before `fully_shard`.

    Args:
        name: key of the adapter, in the state dict `experts.lora.<name>`. Default: "default".
        dtype: dtype of the factors. The default is float32 for any dtype of the layer, because an optimizer's steps
            are often too small to change 16-bit numbers. The experts' op rounds factors to the weights' dtype. With
            None, factors have the weights' dtype.

    Raises:
        ValueError: the name is taken or unusable, or `fully_shard` was applied.
    """
    check_kind("add_lora", "lora", lora, LoRA)
    experts: Any = layer.experts  # Any instead of `GroupedExperts`, to avoid a circular import
    check_before_fully_shard("add_lora", experts)
    held = nn.ModuleDict() if experts.lora is None else experts.lora
    taken = [*held, *(experts.unmerged.adapters if experts.unmerged else ())]  # plus names that `unmerge_lora` restores
    if not isinstance(name, str) or not name or "." in name or name in taken or hasattr(held, name):
        raise ValueError(f"add_lora: name must be new, without dots, and no attribute of a ModuleDict, got {name!r}")
    (_, d_up, d_model), d_ff = experts.w_up.shape, experts.w_down.shape[2]
    factory = {"device": experts.w_up.device, "dtype": experts.w_up.dtype if dtype is None else dtype}
    adapter = ExpertLoRA(lora, d_model, d_up, d_ff, len(experts.w_up), **factory)
    weight = stored(experts.w_up)
    if is_dtensor(weight):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # a slow import

        for key, factor in list(adapter.named_parameters()):
            # Each rank draws the factors of all experts, and keeps its part. The first rank broadcasts shared factors.
            placement, source = (Replicate(), 0) if adapter.is_shared(key) else (Shard(0), None)
            sharded = distribute_tensor(factor.detach(), weight.device_mesh, [placement], src_data_rank=source)
            setattr(adapter, key, nn.Parameter(sharded))
    adapters = set(held.parameters())
    for parameter in layer.parameters():
        if parameter not in adapters:
            parameter.requires_grad_(False)
    adapter.train(experts.training)
    held[name] = adapter
    experts.lora = held


def set_lora(layer: nn.Module, names: str | Sequence[str]) -> None:
    """Activate the adapters in `names` and deactivate all others. The experts add the sum of the active adapters.
    Inactive adapters get no gradient.

    Raises:
        ValueError: the layer has no adapter with one of the names.
    """
    experts: Any = layer.experts
    chosen = known_names("set_lora", experts, names)
    for name, adapter in (experts.lora or {}).items():
        adapter.is_active = name in chosen


def remove_lora(layer: nn.Module, names: str | Sequence[str] | None = None) -> None:
    """Remove adapters, by default all. The layer stays frozen.

    Raises:
        ValueError: the layer has no adapter with one of the names, or `fully_shard` was applied.
    """
    experts: Any = layer.experts
    check_before_fully_shard("remove_lora", experts)
    for name in known_names("remove_lora", experts, list(experts.lora or {}) if names is None else names):
        del experts.lora[name]
    if not experts.lora:
        del experts.lora  # deleted first, because an attribute that is set to None stays in the module's `_modules`
        experts.lora = None


def check_before_fully_shard(op: str, experts: Any) -> None:
    weight = stored(experts.w_up)
    if is_dtensor(weight) and (experts.local_share is None or weight.device_mesh.ndim > 1):
        raise ValueError(f"{op}: must be called before fully_shard, got w_up sharded over {weight.device_mesh}")


def known_names(op: str, experts: Any, names: str | Sequence[str]) -> list[str]:
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    known = list(experts.lora or {})
    if unknown := [name for name in names if name not in known]:
        known, unknown = (first_three(map(repr, names)) for names in (known, unknown))
        raise ValueError(f"{op}: names must be of adapters of the layer, [{known}], got [{unknown}]")
    return names
