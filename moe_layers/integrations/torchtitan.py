"""Overrides for torchtitan that compute its Mixture-of-Experts layers with `moe_kernels`.

    --override.imports moe_layers.integrations.torchtitan.moe

The override `moe` sorts the router's choice and calls one op. The op gathers tokens, computes experts and combines
their outputs, without saving gathered tokens. With expert parallelism, torchtitan's dispatcher sends the tokens to the
ranks of their experts, where `FusedExperts` computes the outputs. The override `grouped_experts` replaces only the
experts. torchtitan's own sharding, dispatchers, routers and checkpoints remain in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override  # pyright: ignore[reportMissingImports]  # optional
from torchtitan.models.common.moe import (  # pyright: ignore[reportMissingImports]
    GroupedExperts,
    MoE,
    RoutedExperts,
)
from torchtitan.models.common.token_dispatcher import (  # pyright: ignore[reportMissingImports]
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)

from moe_kernels import Activation, apply_activation, fused_experts, grouped_gemm, sort_by_expert

from .versions import check_version

__all__ = ["FusedExperts", "FusedRoutedExperts", "grouped_experts", "moe"]

check_version("torchtitan", "0.3", "use its own torchtitan.overrides.fused_swiglu.fused_grouped_experts")
_ACTIVATION = Activation("swiglu", interleaved=True)


class FusedExperts(GroupedExperts):
    """Holds experts in two parameters: `w13` [E, F, 2, D] for gate and up, and `w2_EDF` [E, D, F].

    The experts compute in the dtype of the tokens. In state dicts, torchtitan's `w1_EFD` and `w3_EFD` replace `w13`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        del self.w1_EFD, self.w3_EFD
        self.w13 = nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, 2, config.dim))
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return this rank's `w_up` [E, 2F, D], with alternating gate and up rows, and `w_down` [E, D, F]."""
        w13, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13, self.w2_EDF))
        return w13.to(dtype).flatten(1, 2), w2.to(dtype)

    def forward(
        self,
        x_RD: Tensor,  # [R, D], sorted by expert
        num_tokens_per_expert_E: Tensor,  # [E]
    ) -> Tensor:  # [R, D]
        w_up, w_down = self.weights(x_RD.dtype)
        offsets = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        hidden = grouped_gemm(x_RD, w_up.transpose(1, 2), offsets)
        return grouped_gemm(apply_activation(hidden, activation=_ACTIVATION), w_down.transpose(1, 2), offsets)


class FusedRoutedExperts(RoutedExperts):
    """Computes the experts by one op if all rows stay on this rank. Otherwise torchtitan's forward sends the rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    @property
    def is_local(self) -> bool:
        """Return whether all rows stay on this rank: the dispatcher is local, or all-to-all without an expert mesh."""
        dispatcher = self.token_dispatcher
        local = type(dispatcher) is AllToAllTokenDispatcher and dispatcher.ep_mesh is None
        return local or type(dispatcher) is LocalTokenDispatcher

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:  # [B, L, D]
        if not self.is_local:
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        tokens, weights = x_BLD.flatten(0, 1), topk_scores_BLK.flatten(0, 1).float()
        w_up, w_down = self.inner_experts.weights(tokens.dtype)
        permutation = sort_by_expert(topk_expert_ids_BLK.flatten(0, 1), len(w_up))
        return fused_experts(tokens, weights, permutation, w_up, w_down, activation=_ACTIVATION).view(x_BLD.shape)


@override(target=GroupedExperts.Config, description="Experts by moe_kernels.")
def grouped_experts(cfg: Any) -> Any:
    """Replace the experts' configuration by that of `FusedExperts`.

    Raises:
        ValueError: the experts are not torchtitan's own SwiGLU experts.
    """
    if type(cfg) is not GroupedExperts.Config:
        raise ValueError(f"grouped_experts: experts must be GroupedExperts, got {type(cfg).__qualname__}")
    return _experts(cfg)


@override(target=MoE.Config, description="Mixture of Experts by moe_kernels.")
def moe(cfg: Any) -> Any:
    """Replace the routed experts in a layer's configuration by `FusedRoutedExperts`.

    Raises:
        ValueError: the routed experts are not torchtitan's own SwiGLU experts.
    """
    routed = cfg.routed_experts
    if type(routed) is not RoutedExperts.Config or type(routed.inner_experts) is not GroupedExperts.Config:
        kinds = type(routed).__qualname__, type(routed.inner_experts).__qualname__
        raise ValueError(f"moe: routed experts must be RoutedExperts with GroupedExperts, got {kinds}")
    inner = _experts(routed.inner_experts)
    return replace(cfg, routed_experts=derive(routed, FusedRoutedExperts.Config, inner_experts=inner))


def _experts(cfg: Any) -> Any:
    """Return `FusedExperts`' configuration. `w13` is initialised as `w1_EFD` and `w3_EFD`, and sharded as `w1_EFD`."""
    initial = dict(cfg.param_init or {})
    if "w1_EFD" in initial and "w3_EFD" in initial:
        gate, up = initial.pop("w1_EFD"), initial.pop("w3_EFD")

        def initialise(w13: Tensor) -> None:
            gate(w13[:, :, 0])
            up(w13[:, :, 1])

        initial["w13"] = initialise
    fused = derive(cfg, FusedExperts.Config, param_init=initial or None)
    if (sharding := cfg.sharding_config) is not None:
        states = dict(sharding.state_shardings)
        states["w13"] = states.pop("w1_EFD")
        del states["w3_EFD"]
        fused.sharding_config = replace(sharding, state_shardings=states)
    return fused


def _split(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    w13 = state_dict.pop(f"{prefix}w13")
    for half, name in enumerate(("w1_EFD", "w3_EFD")):
        state_dict[f"{prefix}{name}"] = w13[:, :, half].contiguous()


def _join(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    names = [f"{prefix}w1_EFD", f"{prefix}w3_EFD"]
    if all(name in state_dict for name in names):
        state_dict[f"{prefix}w13"] = torch.stack([state_dict.pop(name) for name in names], dim=2)
