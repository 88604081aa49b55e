"""Router noise for exploration, in training mode only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_kernels import RouterSpec, topk_routing


@dataclass(frozen=True)
class RouterNoise:
    """Noise that a router adds in training mode only, drawn from PyTorch's generator of the device. A recomputation
    draws the same numbers if checkpointing preserves the generator's state, which is the default.

    Args:
        input_jitter: multiplies each element of the router's input by an independent uniform number from
            [1 - input_jitter, 1 + input_jitter). Jitter changes choice, weights, logits and losses. Gradients flow
            through the product. Default: 0. Source: https://arxiv.org/abs/2101.03961.
        gumbel: scale of independent standard Gumbel noise that is added to the logits before experts are chosen.
            With scale 1 and softmax scores, experts are drawn without replacement in proportion to their probabilities.
            Weights, losses and gradients use the logits without noise. Noise does not change a replayed choice.
            Default: 0. Source: https://arxiv.org/abs/1903.06059.

    Raises:
        ValueError: `input_jitter` is not in [0, 1), or `gumbel` is negative or not finite.
    """

    input_jitter: float = 0.0
    gumbel: float = 0.0

    def __post_init__(self):
        if not 0 <= self.input_jitter < 1:
            raise ValueError(f"RouterNoise: input_jitter must be in [0, 1), got {self.input_jitter}")
        if not (self.gumbel >= 0 and math.isfinite(self.gumbel)):
            raise ValueError(f"RouterNoise: gumbel must be finite and not negative, got {self.gumbel}")

    def jitter(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        """Return the tokens with jitter, in the tokens' dtype. The factors are float32, or float64 for float64 tokens.

        Shapes: tokens [T, D]; result [T, D].
        """
        if not self.input_jitter:
            return tokens
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        factors = 1 + self.input_jitter * (2 * torch.rand(tokens.shape, dtype=dtype, device=tokens.device) - 1)
        return (tokens * factors).to(tokens.dtype)

    def choose(
        self,
        logits: Tensor,  # [T, E], after the router's soft cap
        top_k: int,
        spec: RouterSpec,
        selection_bias: Tensor | None,  # [E]
        implementation: str | None,
    ) -> Tensor:  # [T, K] int32
        """Return the router's choice for the noisy logits.

        Shapes: logits [T, E], selection_bias [E]; result [T, K] int32.
        """
        # If a number has the exponential distribution, its negative logarithm has the Gumbel distribution.
        noise = -torch.empty_like(logits).exponential_().log()
        noisy = logits.detach() + self.gumbel * noise
        shaped = replace(spec, logit_softcap=None)
        return topk_routing(
            noisy, top_k, shaped, selection_bias=selection_bias, implementation=implementation
        ).topk_experts

    def check(self, owner: str, spec: RouterSpec, assigned: bool) -> None:
        """Raise ValueError if Gumbel noise is set but the router makes no top-k choice."""
        if self.gumbel and (assigned or spec.sparsemixer_jitter is not None):
            raise ValueError(
                f"{owner}: Gumbel noise acts on a top-k choice, not on an assignment or a SparseMixer, "
                f"got gumbel={self.gumbel}"
            )
