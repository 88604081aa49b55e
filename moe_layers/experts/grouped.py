"""The experts: the parameters of E feed-forwards, and one call into `moe_kernels`.

Weights are [E, out, in], like nn.Linear with an expert axis in front. `w_up` [E, 2F, D] holds the gate rows, then the
up rows of each expert, or with a plain activation [E, F, D] the up rows alone; `w_down` is [E, D, F]. Biases are `b_up`
[E, 2F] or [E, F], and `b_down` [E, D].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_kernels import IMPLEMENTATIONS, RECOMPUTE, Activation, ExpertWeights, Permutation, as_activation, fused_experts

from ..checks import check_choice, check_positive
from ..precision import call_with_autocast_rules

Computation = Callable[[Tensor, Tensor, ExpertWeights], Tensor]  # of tokens [T, D], topk_weights [T, K] and weights


class GroupedExperts(nn.Module):
    """`num_experts` feed-forwards `w_down @ activation(w_up @ token)`, computed for all tokens together.

    Args:
        activation: "swiglu" or another name or `Activation`. A gated one makes the experts gated.
        bias: both projections have one.
        weight_on_input: the routing weight multiplies the token before the expert, not its output.
        recompute: "up" keeps no pre-activations for backward, at the price of one more GEMM there; None keeps them.
        batch_invariant: the other tokens change no bit of a token's output, nor of its gradient.
        init_std: standard deviation of the weights at first.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a size is not positive, or a name is unknown.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        weight_on_input: bool = False,
        recompute: str | None = None,
        batch_invariant: bool = False,
        init_std: float = 0.02,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("GroupedExperts", d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        check_choice("GroupedExperts", "implementation", implementation, (*IMPLEMENTATIONS, None))
        check_choice("GroupedExperts", "recompute", recompute, RECOMPUTE)
        self.num_experts = num_experts
        # Of a parameter, with its name, that several processes share.
        self.local_share: Callable[[str, Tensor], Tensor] | None = None
        self.reserved_sms = 0  # see `fused_experts`
        self.activation = as_activation("GroupedExperts", activation)
        self.weight_on_input = weight_on_input
        self.recompute = recompute
        self.batch_invariant = batch_invariant
        self.init_std = init_std
        self.implementation = implementation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        d_up = (1 + self.activation.gated) * d_ff
        self.w_up = parameter(d_up, d_model)
        self.w_down = parameter(d_model, d_ff)
        self.b_up = parameter(d_up) if bias else None
        self.b_down = parameter(d_model) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the weights from a normal distribution, by default with `init_std`; biases become zero."""
        std = self.init_std if std is None else std
        for weight in (self.w_up, self.w_down):
            nn.init.normal_(weight, std=std)
        if self.b_up is not None:
            nn.init.zeros_(self.b_up)
            nn.init.zeros_(self.b_down)

    def keep(self, experts: range) -> None:
        """Drop the parameters of all experts but these."""
        for name, parameter in list(self.named_parameters()):
            kept = parameter.detach()[experts.start : experts.stop].clone()
            setattr(self, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
        self.num_experts = len(experts)

    def forward(
        self,
        tokens: Tensor,  # [T, D]
        topk_weights: Tensor,  # [T, K] float32
        permutation: Permutation | Computation,
        w_router: Tensor | None = None,  # [E, D]; see `fused_experts`
    ) -> Tensor:  # [T, D]
        """`permutation` is that of the slots, or what computes them in its own way."""
        if topk_weights.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"GroupedExperts: topk_weights must be float32 or float64, got {topk_weights.dtype}; if fully_shard "
                "made them so, its MixedPrecisionPolicy needs cast_forward_inputs=False"
            )

        def experts(tokens: Tensor, w_up: Tensor, w_down: Tensor, *others: Tensor) -> Tensor:
            if not isinstance(permutation, Permutation):
                return permutation(tokens, topk_weights, ExpertWeights(w_up, w_down, *others))
            return fused_experts(
                tokens,
                topk_weights,
                permutation,
                w_up,
                w_down,
                **dict(zip(optional, others, strict=True)),
                activation=self.activation,
                weight_on_input=self.weight_on_input,
                recompute=self.recompute,
                reserved_sms=self.reserved_sms,
                batch_invariant=self.batch_invariant,
                implementation=self.implementation,
            )

        optional = {} if self.b_up is None else {"b_up": self.b_up, "b_down": self.b_down}
        weights = self.w_up, self.w_down, *optional.values()
        if self.local_share is not None:
            weights = map(self.local_share, ("w_up", "w_down", *optional), weights)
        if w_router is not None:
            optional["w_router"] = w_router
            weights = *weights, w_router
        return call_with_autocast_rules(experts, tokens, *weights)

    def extra_repr(self) -> str:
        num_experts, d_model, d_ff = self.w_down.shape
        sizes = f"num_experts={num_experts}, d_model={d_model}, d_ff={d_ff}, activation={self.activation}"
        return f"{sizes}, bias={self.b_up is not None}, weight_on_input={self.weight_on_input}"
