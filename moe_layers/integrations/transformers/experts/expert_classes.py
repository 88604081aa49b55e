"""Defines replacement forwards, by class name, for experts of transformers whose class has no experts interface.

The modules keep their positions and parameters, and still call one another. Hooks, LoRA and sharding of the modules
still apply. Modules of transformers are annotated as `Any`, because each class has different attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from moe_kernels import Activation, ExpertAdapters
from moe_kernels.types import Weight

from .activation import recognise_gated
from .experts_forward import ExpertsSpec, LowRank, experts_forward
from .float8_experts import float8_spec


@dataclass(frozen=True)
class _FlatSpec(ExpertsSpec):
    """DBRX: `mlp.w1` (gate), `v1` (up) and `w2` (down, transposed) are [E * F, D]."""

    copies: ClassVar[bool] = True  # `w_up` concatenates the gate and up tensors
    adaptable: ClassVar[tuple[str, ...]] = ()
    readable: ClassVar[tuple[str, ...]] = ()
    d_ff: int = field(kw_only=True)

    def up_parameters(self, experts: Any) -> tuple[Weight, ...]:
        return experts.mlp.w1, experts.mlp.v1

    def w_up(self, *parameters: Any) -> Weight:
        return torch.cat([part.unflatten(0, (-1, self.d_ff)) for part in parameters], 1)

    def stored_down(self, experts: Any) -> Weight:
        return experts.mlp.w2

    def w_down(self, experts: Any) -> Weight:
        return experts.mlp.w2.unflatten(0, (-1, self.d_ff)).transpose(1, 2)


@dataclass(frozen=True)
class _FirstSpec(ExpertsSpec):
    """LongCat: the up-projection holds the experts' matrices, then unused matrices for the zero experts."""

    readable: ClassVar[tuple[str, ...]] = ()
    num_experts: int = 0

    def w_up(self, *parameters: Any) -> Weight:
        (stored,) = parameters
        return stored[: self.num_experts]

    def adapters(self, changes: Mapping[str, LowRank]) -> ExpertAdapters:
        of_all = super().adapters(changes)
        up_a, up_b = (None if factor is None else factor[: self.num_experts] for factor in (of_all.up_a, of_all.up_b))
        return ExpertAdapters(up_a, up_b, of_all.down_a, of_all.down_b)


@dataclass(frozen=True)
class _LinearsSpec(ExpertsSpec):
    """JetMoE: the block holds the weights as `input_linear.weight` and `output_linear.weight`."""

    adaptable: ClassVar[tuple[str, ...]] = ()

    def tensors(self, experts: nn.Module) -> dict[str, Tensor]:
        return {f"{name}.weight": getattr(experts, name).weight for name in ("input_linear", "output_linear")}

    def up_parameters(self, experts: Any) -> tuple[Weight, ...]:
        return (_weight_of(experts, "input_linear"),)

    def stored_down(self, experts: Any) -> Weight:
        return _weight_of(experts, "output_linear")


def _weight_of(experts: Any, name: str) -> Weight:
    holder = getattr(experts, name)
    if type(holder).__name__ != "JetMoeParallelExperts":  # refuse wrappers, because their changes would be lost
        raise ValueError(
            f"moe_layers: {name} of {type(experts).__name__} must be JetMoeParallelExperts, got {type(holder).__name__}"
        )
    return holder.weight


def _dbrx_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    out = experts_forward(self, hidden_states.reshape(-1, self.hidden_size), top_k_index, top_k_weights)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts. Ids >= `num_routed_experts` are zero experts, which return the token."""
    routed = experts_forward(self, hidden_states, top_k_index, top_k_weights)
    identity = torch.where(top_k_index >= self.num_routed_experts, top_k_weights, 0.0).sum(-1, keepdim=True)  # [T, 1]
    return routed + (identity * self.identity_expert(hidden_states)).to(routed.dtype)


def _jetmoe_forward(self: Any, layer_input: Tensor) -> Tensor:
    """Run the block. The block's router returns the slots sorted by expert."""
    tokens = layer_input.reshape(-1, self.input_size)
    slots, _, gates, num_rows, _ = self.router(tokens)  # slots and gates [T * K]
    experts = torch.arange(len(num_rows), device=slots.device)
    experts = experts.repeat_interleave(torch.tensor(num_rows, device=slots.device), output_size=len(slots))
    shape = len(tokens), self.router.top_k
    chosen = torch.empty_like(slots).scatter(0, slots, experts).view(shape)
    weights = torch.empty_like(gates).scatter(0, slots, gates).view(shape)
    return experts_forward(self, tokens, chosen, weights).view(layer_input.shape) + self.bias


def _llama4_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Run the block. The router gives score zero to experts that it did not choose."""
    tokens = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(tokens)  # [T, E] each
    chosen = logits.topk(self.top_k, dim=1).indices
    routed = self.experts(tokens, chosen, scores.gather(1, chosen))
    return self.shared_expert(tokens) + routed, logits


@dataclass(frozen=True)
class Swap:
    """Replacement forwards for one class of experts."""

    forward: Callable[..., object]  # replaces the forward of the experts
    spec: Callable[[nn.Module, str | None], ExpertsSpec]  # (experts module, implementation) -> its ExpertsSpec
    caller: str = ""  # class of the block around the experts, if the block's forward must also be replaced
    caller_forward: Callable[..., object] | None = None  # replaces the forward of that block
    oldest: str = "0"  # oldest supported version of transformers; "0": every version


def _swiglu_like(experts: Any, act_fn: Callable[[Tensor], Tensor]) -> Activation:
    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act_fn(gate) * up

    return recognise_gated(experts, apply_gate, interleaved=False)


def _dbrx(experts: Any, implementation: str | None) -> ExpertsSpec:
    activation = _swiglu_like(experts, experts.mlp.activation_fn)
    return _FlatSpec(activation, implementation, d_ff=experts.mlp.ffn_hidden_size)


def _longcat(experts: Any, implementation: str | None) -> ExpertsSpec:
    activation = _swiglu_like(experts, experts.act_fn)
    return _FirstSpec(activation, implementation, num_experts=experts.num_routed_experts)


def _llama4(experts: Any, implementation: str | None) -> ExpertsSpec:
    activation = _swiglu_like(experts, experts.act_fn)
    return ExpertsSpec(activation, implementation, transposed=True, weight_on_input=True)


def _jetmoe(experts: Any, implementation: str | None) -> ExpertsSpec:
    return _LinearsSpec(_swiglu_like(experts, experts.activation), implementation)


def _step3p7(experts: Any, implementation: str | None) -> ExpertsSpec:
    return ExpertsSpec(recognise_gated(experts, experts._apply_gate, interleaved=False), implementation)


SWAPS = {
    "FP8Experts": Swap(experts_forward, float8_spec),
    # Before transformers 5.17, DBRX's experts multiplied by transposed matrices. JetMoE before 5.23 is not tested.
    "DbrxExperts": Swap(_dbrx_forward, _dbrx, oldest="5.17"),
    "LongcatFlashExperts": Swap(_longcat_forward, _longcat),
    "Llama4TextExperts": Swap(experts_forward, _llama4, "Llama4TextMoe", _llama4_forward),
    "Step3p7Experts": Swap(experts_forward, _step3p7),
    "JetMoeMoE": Swap(_jetmoe_forward, _jetmoe, oldest="5.23"),
}


def swap_of(module: nn.Module) -> Swap | None:
    """Return the replacement forwards if `module` has one of the transformers classes in `SWAPS`, else None."""
    own_class = type_before_parametrizations(module)
    return SWAPS.get(own_class.__name__) if own_class.__module__.startswith("transformers.") else None


# Experts of these classes project the queries of attention. The model's own code computes these experts.
ATTENTION = ("JetMoeMoA",)

_MODULES_WITH_DROPOUT = "each expert is a module of its own, with dropout between its matrices"
# Class of unsupported experts or blocks -> the reason.
REFUSED = {
    "DogeCDMoE": "its experts are pairs of vectors, found by product keys",
    "Mxfp4GptOssExperts": "they hold MXFP4 in the order of transformers' own kernels; load the model with keep_mxfp4 "
    "of moe_layers.integrations.transformers.experts.mxfp4, or with Mxfp4Config(dequantize=True)",
    "NllbMoeExperts": "transformers reads the router's mask as expert ids, so only experts 0 and 1 run",
    "NllbMoeSparseMLP": "transformers reads the router's mask as expert ids, so only experts 0 and 1 run",
    "SwitchTransformersExperts": _MODULES_WITH_DROPOUT,
    "SwitchTransformersSparseMLP": _MODULES_WITH_DROPOUT,
    "VitPoseNaiveMoe": "its experts are single matrices, chosen by data set",
}
