"""The Mixture-of-Experts feed-forward layer."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels import Routing

from ._checks import check_positive
from .checkpoint import load_safetensors, save_safetensors
from .dispatcher import LocalDispatcher
from .experts import GroupedExperts
from .losses import attach_loss, load_balancing_loss, router_z_loss
from .router import TopKRouter
from .shared_expert import SharedExpert


class LayerRouting(NamedTuple):
    """What the router decided in one forward of a layer; T counts the tokens over all leading axes."""

    topk_experts: Tensor  # [T, K] int32
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E] float32
    tokens_per_expert: Tensor  # [E] int32


class MoEFeedForward(nn.Module):
    """A feed-forward whose tokens each pass `top_k` of `num_experts` gated experts.

        y = sum over the chosen experts of weight * w_down @ activation(w_up @ x)   [+ shared expert]

    Input and output are [..., d_model] in the dtype of the parameters; under autocast they follow autocast's rules for
    matrix products (computed and returned in its dtype). Router logits, routing weights and all sums are float32. The
    forward and backward are deterministic and never wait for the GPU.

    All weights start from a normal distribution of mean 0 and standard deviation `init_std` (0.02, as transformer
    language models commonly do); `reset_parameters` draws them again.

    Args:
        d_ff: hidden size of one expert.
        activation: "swiglu".
        normalize: the routing weights of a token sum to one; otherwise they are probabilities over all experts.
        shared_d_ff: hidden size of a shared expert that every token passes; None for none.
        load_balancing_coefficient: adds this multiple of `load_balancing_loss` to the gradient in every forward.
        z_loss_coefficient: likewise of `router_z_loss`. Both are scaled by `set_aux_loss_scale`.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a size is not positive, top_k > num_experts, or a name is unknown.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        normalize: bool = True,
        shared_d_ff: int | None = None,
        load_balancing_coefficient: float = 0.0,
        z_loss_coefficient: float = 0.0,
        init_std: float = 0.02,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("MoEFeedForward", d_model=d_model, d_ff=d_ff, num_experts=num_experts, top_k=top_k)
        if load_balancing_coefficient < 0 or z_loss_coefficient < 0 or init_std < 0:
            raise ValueError(
                "MoEFeedForward: load_balancing_coefficient, z_loss_coefficient and init_std must not be negative, "
                f"got {load_balancing_coefficient}, {z_loss_coefficient} and {init_std}"
            )
        factory = {"implementation": implementation, "device": device, "dtype": dtype}
        self.d_model = d_model
        self.load_balancing_coefficient = load_balancing_coefficient
        self.z_loss_coefficient = z_loss_coefficient
        self.aux_loss_scale: Tensor | None = None
        self.router = TopKRouter(d_model, num_experts, top_k, normalize=normalize, **factory)
        self.dispatcher = LocalDispatcher()
        self.experts = GroupedExperts(d_model, d_ff, num_experts, activation=activation, **factory)
        self.shared_expert = None
        if shared_d_ff is not None:
            self.shared_expert = SharedExpert(d_model, shared_d_ff, activation=activation, **factory)
        self.reset_parameters(init_std)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw every weight from a normal distribution of mean 0 and standard deviation `std`."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(
        self,
        x: Tensor,  # [..., D]
        *,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, LayerRouting]:  # [..., D]
        """Send each token through its experts.

        Args:
            return_routing: return (y, LayerRouting); gradients flow through its weights and logits.

        Raises:
            ValueError: the last axis is not d_model, or dtype or device differ from the parameters'.
        """
        if x.dim() < 1 or x.shape[-1] != self.d_model:
            raise ValueError(f"MoEFeedForward: x must be [..., d_model={self.d_model}], got {list(x.shape)}")
        tokens = x.reshape(-1, self.d_model)  # [T, D]
        routed = self.router(tokens)
        out, offsets = self.dispatcher(tokens, routed, self.experts)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        if not return_routing and not self._has_auxiliary_loss():
            return out.view(x.shape)
        routing = _layer_routing(routed, offsets)
        if self._has_auxiliary_loss():
            out = attach_loss(out, self._auxiliary_loss(routing), self.aux_loss_scale)
        out = out.view(x.shape)
        return (out, routing) if return_routing else out

    def set_aux_loss_scale(self, scale: Tensor | None) -> None:
        """Multiply the gradients of the auxiliary losses by `scale`, a scalar on the layer's device (None: 1).

        Under loss scaling pass the loss scale, under gradient accumulation 1 / number of accumulated calls. The tensor
        is kept, not copied: changing it in place takes effect.

        Raises:
            ValueError: not a scalar, or on another device than the parameters.
        """
        if scale is not None:
            device = self.router.weight.device
            if scale.numel() != 1 or scale.device != device:
                raise ValueError(
                    f"set_aux_loss_scale: scale must be a scalar tensor on {device}, "
                    f"got {list(scale.shape)} on {scale.device}"
                )
            scale = scale.view(())
        self.aux_loss_scale = scale

    def save_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters to one safetensors file, under their names in the state dict."""
        save_safetensors(self, path)

    def load_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Read what `save_safetensors` wrote, converting to the dtype and device of the parameters.

        Raises:
            ValueError: lists missing, unexpected and wrongly shaped tensors; the layer is then unchanged.
        """
        load_safetensors(self, path)

    def _has_auxiliary_loss(self) -> bool:
        coefficients = (self.load_balancing_coefficient, self.z_loss_coefficient)
        return any(coefficients) and torch.is_grad_enabled()

    def _auxiliary_loss(self, routing: LayerRouting) -> Tensor:
        loss = routing.logits.new_zeros(())
        if self.load_balancing_coefficient:
            loss = loss + self.load_balancing_coefficient * load_balancing_loss(routing)
        if self.z_loss_coefficient:
            loss = loss + self.z_loss_coefficient * router_z_loss(routing)
        return loss


def set_aux_loss_scale(model: nn.Module, scale: Tensor | None) -> None:
    """`MoEFeedForward.set_aux_loss_scale` on every such layer of a model."""
    for module in model.modules():
        if isinstance(module, MoEFeedForward):
            module.set_aux_loss_scale(scale)


def _layer_routing(routed: Routing, offsets: Tensor) -> LayerRouting:
    tokens_per_expert = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return LayerRouting(routed.topk_experts, routed.topk_weights, routed.logits, tokens_per_expert)
