"""The shared expert: a feed-forward that every token passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels import IMPLEMENTATIONS, Activation, as_activation, gated_activation, plain_activation

from ._checks import check_choice, check_positive
from ._precision import call_with_autocast_rules


class SharedExpert(nn.Module):
    """`w_down @ activation(w_up @ token)`, with `w_up` [2F, D] (gate rows, then up rows) and `w_down` [D, F].

    With a plain activation `w_up` is [F, D].

    Args:
        gate: the output of a token is multiplied by sigmoid(w_gate @ token), with `w_gate` [1, D].
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a size is not positive, or a name is unknown.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str | Activation = "swiglu",
        gate: bool = False,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("SharedExpert", d_model=d_model, d_ff=d_ff)
        check_choice("SharedExpert", "implementation", implementation, (*IMPLEMENTATIONS, None))
        self.activation = as_activation("SharedExpert", activation)
        self.implementation = implementation
        d_up = (1 + self.activation.gated) * d_ff
        self.w_up = nn.Parameter(torch.empty(d_up, d_model, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(d_model, d_ff, device=device, dtype=dtype))
        self.w_gate = nn.Parameter(torch.empty(1, d_model, device=device, dtype=dtype)) if gate else None

    def reset_parameters(self, std: float) -> None:
        """Draw every weight from a normal distribution."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        activate = gated_activation if self.activation.gated else plain_activation

        def expert(tokens: Tensor, w_up: Tensor, w_down: Tensor, *w_gate: Tensor) -> Tensor:
            preactivation = functional.linear(tokens, w_up)  # [T, 2F] or [T, F]
            activated = activate(preactivation, self.activation, implementation=self.implementation)
            out = functional.linear(activated, w_down)
            return out * torch.sigmoid(functional.linear(tokens, *w_gate)) if w_gate else out

        weights = [self.w_up, self.w_down] if self.w_gate is None else [self.w_up, self.w_down, self.w_gate]
        return call_with_autocast_rules(expert, tokens, *weights)

    def extra_repr(self) -> str:
        d_model, d_ff = self.w_down.shape
        return f"d_model={d_model}, d_ff={d_ff}, activation={self.activation}, gate={self.w_gate is not None}"
