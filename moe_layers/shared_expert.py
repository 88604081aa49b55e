"""The shared expert: a gated feed-forward that every token passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels import ACTIVATIONS, IMPLEMENTATIONS, gated_activation

from ._checks import check_choice, check_positive
from ._precision import call_with_autocast_rules


class SharedExpert(nn.Module):
    """`w_down @ activation(w_up @ token)`, with `w_up` [2F, D] (gate rows, then up rows) and `w_down` [D, F]."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "swiglu",
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("SharedExpert", d_model=d_model, d_ff=d_ff)
        check_choice("SharedExpert", "activation", activation, tuple(ACTIVATIONS))
        check_choice("SharedExpert", "implementation", implementation, (*IMPLEMENTATIONS, None))
        self.activation = activation
        self.implementation = implementation
        self.w_up = nn.Parameter(torch.empty(2 * d_ff, d_model, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(d_model, d_ff, device=device, dtype=dtype))

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        def expert(tokens: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            preactivation = functional.linear(tokens, w_up)  # [T, 2F]
            activated = gated_activation(preactivation, self.activation, implementation=self.implementation)
            return functional.linear(activated, w_down)

        return call_with_autocast_rules(expert, tokens, self.w_up, self.w_down)

    def extra_repr(self) -> str:
        d_model, d_ff = self.w_down.shape
        return f"d_model={d_model}, d_ff={d_ff}, activation={self.activation}"
