"""The experts: the parameters of E gated feed-forwards, and one call into `moe_kernels`.

Weights are [E, out, in], like nn.Linear with an expert axis in front. `w_up` [E, 2F, D] holds the gate rows, then the
up rows of each expert; `w_down` is [E, D, F].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels import ACTIVATIONS, IMPLEMENTATIONS, Permutation, fused_experts

from ._checks import check_choice, check_positive
from ._precision import call_with_autocast_rules


class GroupedExperts(nn.Module):
    """`num_experts` feed-forwards `w_down @ activation(w_up @ token)`, computed for all tokens together.

    Args:
        activation: "swiglu".
        implementation: "triton", "reference", or None to choose by device.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        activation: str = "swiglu",
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("GroupedExperts", d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        check_choice("GroupedExperts", "activation", activation, tuple(ACTIVATIONS))
        check_choice("GroupedExperts", "implementation", implementation, (*IMPLEMENTATIONS, None))
        self.num_experts = num_experts
        self.activation = activation
        self.implementation = implementation
        self.w_up = nn.Parameter(torch.empty(num_experts, 2 * d_ff, d_model, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_model, d_ff, device=device, dtype=dtype))

    def forward(
        self,
        tokens: Tensor,  # [T, D]
        topk_weights: Tensor,  # [T, K] float32
        permutation: Permutation,
    ) -> Tensor:  # [T, D]
        def experts(tokens: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            return fused_experts(
                tokens,
                topk_weights,
                permutation,
                w_up,
                w_down,
                activation=self.activation,
                implementation=self.implementation,
            )

        return call_with_autocast_rules(experts, tokens, self.w_up, self.w_down)

    def extra_repr(self) -> str:
        num_experts, d_model, d_ff = self.w_down.shape
        return f"num_experts={num_experts}, d_model={d_model}, d_ff={d_ff}, activation={self.activation}"
