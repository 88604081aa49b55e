"""The router: a linear map to one logit per expert, and the choice of the top-k."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moe_kernels import IMPLEMENTATIONS, Routing, linear_routing

from ._checks import check_choice, check_positive
from ._precision import call_with_autocast_rules


class TopKRouter(nn.Module):
    """Chooses `top_k` experts per token and weighs them by softmax. Logits and weights are float32.

    Args:
        normalize: the weights of a token sum to one (softmax over the chosen experts, as in Mixtral and Qwen3);
            otherwise they are probabilities under the softmax over all experts (as in OLMoE).
        implementation: "triton", "reference", or None to choose by device.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("TopKRouter", d_model=d_model, num_experts=num_experts, top_k=top_k)
        check_choice("TopKRouter", "implementation", implementation, (*IMPLEMENTATIONS, None))
        if top_k > num_experts:
            raise ValueError(f"TopKRouter: top_k must be at most num_experts={num_experts}, got {top_k}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.implementation = implementation
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Routing:
        route = partial(linear_routing, top_k=self.top_k, normalize=self.normalize, implementation=self.implementation)
        return call_with_autocast_rules(route, tokens, self.weight)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, normalize={self.normalize}"
