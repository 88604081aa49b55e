"""Noise that lets a router explore, in training mode only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_kernels import RouterSpec, scored_routing


@dataclass(frozen=True)
class RouterNoise:
    """What a router adds to its view in training mode. It draws from PyTorch's generator of the device.

    A recomputed forward draws the same numbers where activation checkpointing preserves the state of the generator, as
    it does unless told otherwise. In evaluation there is none.

    Args:
        input_jitter: the router, and it alone, sees each number of the tokens times an own uniform one from
            [1 - input_jitter, 1 + input_jitter). It changes choice, weights, logits and losses, and gradients flow
            through the product. Source: https://arxiv.org/abs/2101.03961.
        gumbel: logits plus this multiple of independent standard Gumbel numbers decide who is chosen. With 1 and
            softmax scores that draws experts without replacement by their probabilities. Weights, losses and gradients
            are those of the logits without noise; a replayed choice stays. Source: https://arxiv.org/abs/1903.06059.

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
        """The tokens as the router sees them, in their dtype. The factors are float32 or longer."""
        if not self.input_jitter:
            return tokens
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        factors = 1 + self.input_jitter * (2 * torch.rand(tokens.shape, dtype=dtype, device=tokens.device) - 1)
        return (tokens * factors).to(tokens.dtype)

    def choose(
        self,
        logits: Tensor,  # [T, E] as scored
        top_k: int,
        spec: RouterSpec,
        selection_bias: Tensor | None,  # [E]
        implementation: str | None,
    ) -> Tensor:  # [T, K] int32
        """The choice that the router makes of the noisy logits."""
        # The logarithm of an exponential number is that of a Gumbel number, negated.
        noise = -torch.empty_like(logits).exponential_().log()
        noisy = logits.detach() + self.gumbel * noise
        shaped = replace(spec, logit_multiplier=1.0, logit_softcap=None)
        return scored_routing(
            noisy, top_k, shaped, selection_bias=selection_bias, implementation=implementation
        ).topk_experts

    def check(self, owner: str, spec: RouterSpec, assigned: bool) -> None:
        """Raises ValueError unless a router of this kind has a choice of its own for the Gumbel noise to act on."""
        if self.gumbel and (assigned or spec.sparsemixer_jitter is not None):
            raise ValueError(
                f"{owner}: Gumbel noise acts on a top-k choice, not on an assignment or a SparseMixer, "
                f"got gumbel={self.gumbel}"
            )
