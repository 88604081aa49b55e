"""Lets the experts' op compute the routing of a transformers block.

A router of transformers runs about ten PyTorch operations, and more in backward. With few tokens, the host needs longer
for these operations than the GPU. `enable` therefore replaces the forward of some routers (`routers/deferral.py`) by
one that returns a `DeferredRouting` in place of weights and experts. The block passes this object to its experts, whose
op routes and computes in one list of launches. Logits are rounded to the dtype of the tokens, as in transformers. The
weights stay float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.routing.linear_op import LinearRouter


@dataclass(eq=False)
class DeferredRouting:
    """The routing of `tokens`, to be computed by the experts' op."""

    router: Any
    tokens: Tensor  # [T, D]
    settings: LinearRouter  # without the router's parameters

    def parameters(self) -> tuple[Tensor, Tensor | None]:  # [E, D], [E]
        return self.router.weight, self.router._parameters.get("bias")

    def operands(self, w_router: Tensor, logit_bias: Tensor | None) -> LinearRouter:
        return self.settings._replace(w_router=w_router, logit_bias=logit_bias)

    def is_of(self, tokens: Tensor) -> bool:
        """Return whether the router got this same tensor. Compiled code gets True, because `_passes_on` in
        `routers/deferral.py` has found in the block's source that router and experts get the same tensor."""
        return torch.compiler.is_dynamo_compiling() or tokens is self.tokens

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] and experts [T, K], computed by the router's class."""
        _, topk_weights, topk_experts = type(self.router).forward(self.router, self.tokens)
        return topk_weights, topk_experts
