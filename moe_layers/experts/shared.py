"""The shared expert: a feed-forward that processes every token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels import Activation, RouterSpec, apply_activation, fused_experts, linear_routing, sort_by_expert
from moe_kernels.specs import as_activation

from ..autocast import call_with_autocast_rules

_GATE = RouterSpec(score="sigmoid", normalize=False)  # routing weight = sigmoid(w_gate @ token)


class SharedExpert(nn.Module):
    """Computes `w_down @ activation(w_up @ token)`. `w_down` is [D, F]. `w_up` is [2F, D] (gate rows, then up rows), or
    [F, D] if the activation is not gated.

    Args:
        gate: multiply a token's output by sigmoid(w_gate @ token), with `w_gate` [1, D]. Default: False.
        init_std: initial standard deviation of the weights. Default: 0.02.
        implementation: "triton", "reference", or None (default) to choose by device.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str | Activation = "swiglu",
        gate: bool = False,
        init_std: float = 0.02,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = as_activation("SharedExpert", activation)
        self.batch_invariant = False
        self.init_std = init_std
        self.implementation = implementation
        d_up = (1 + self.activation.gated) * d_ff
        self.w_up = nn.Parameter(torch.empty(d_up, d_model, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(d_model, d_ff, device=device, dtype=dtype))
        self.w_gate = nn.Parameter(torch.empty(1, d_model, device=device, dtype=dtype)) if gate else None
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw every weight from a normal distribution, with standard deviation `init_std` by default."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=self.init_std if std is None else std)

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        weights = [self.w_up, self.w_down] if self.w_gate is None else [self.w_up, self.w_down, self.w_gate]
        expert = self._as_routed_expert if self.batch_invariant else self._expert
        return call_with_autocast_rules(expert, tokens, *weights)

    def _expert(self, tokens: Tensor, w_up: Tensor, w_down: Tensor, *w_gate: Tensor) -> Tensor:
        preactivation = functional.linear(tokens, w_up)  # [T, 2F] or [T, F]
        activated = apply_activation(preactivation, self.activation, implementation=self.implementation)
        out = functional.linear(activated, w_down)
        return out * torch.sigmoid(functional.linear(tokens, *w_gate)) if w_gate else out

    def _as_routed_expert(self, tokens: Tensor, w_up: Tensor, w_down: Tensor, *w_gate: Tensor) -> Tensor:
        """Compute with batch-invariant ops, as the only expert of a routed layer. The gate is the routing weight and is
        computed in float32."""
        options = {"batch_invariant": True, "implementation": self.implementation}
        if w_gate:
            weights = linear_routing(tokens, w_gate[0], 1, _GATE, **options).topk_weights
        else:
            weights = tokens.new_ones(tokens.shape[0], 1, dtype=torch.promote_types(tokens.dtype, torch.float32))
        first = torch.zeros(tokens.shape[0], 1, dtype=torch.int32, device=tokens.device)
        permutation = sort_by_expert(first, 1, implementation=self.implementation)
        matrices = w_up.unsqueeze(0), w_down.unsqueeze(0)
        return fused_experts(tokens, weights, permutation, *matrices, activation=self.activation, **options)

    def extra_repr(self) -> str:
        d_model, d_ff = self.w_down.shape
        return f"d_model={d_model}, d_ff={d_ff}, activation={self.activation}, gate={self.w_gate is not None}"
