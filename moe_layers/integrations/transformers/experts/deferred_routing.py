"""Lets the op of the experts also compute the router of a transformers block.

A router of transformers runs about ten PyTorch operations, and more in backward. With few tokens, the host needs longer
for these operations than the GPU. `enable` therefore replaces the forward of some routers (`routers/deferral.py`) by
one that returns a `DeferredRouting` in place of weights and experts. The block passes this object to its experts, whose
op routes and computes in one list of launches. Logits are rounded to the dtype of the tokens, as in transformers, so
the choice is the same. The weights stay float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels.routing.linear_op import LinearRouter

FORM = "_moe_layers_router_form"  # router's attribute that holds its RouterForm, set by `enable`


class Owner:
    """Refers to the block of a router. A copy of the router alone, which PEFT's `modules_to_save` makes, has none."""

    def __init__(self, block: nn.Module | None):
        self.block = block

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner(memo.get(id(self.block)))


class RouterForm(NamedTuple):
    """A router that the experts' op can compute."""

    operands: LinearRouter  # without the router's parameters
    settings: dict[str, Any]  # values of the router's attributes, which other code may change later
    implementation: str | None  # of the experts: "triton", or None to choose by device
    owner: Owner


class DeferredRouting:
    """The routing of `tokens` [T, D], to be computed by the experts' op."""

    def __init__(self, router: nn.Module, tokens: Tensor):
        self.router = router
        self.tokens = tokens

    def parameters(self) -> tuple[Tensor, Tensor | None]:  # [E, D], [E]
        return self.router.weight, self.router._parameters.get("bias")  # pyright: ignore[reportReturnType]  # a parameter

    def operands(self, w_router: Tensor, logit_bias: Tensor | None) -> LinearRouter:
        return getattr(self.router, FORM).operands._replace(w_router=w_router, logit_bias=logit_bias)

    def is_of(self, tokens: Tensor) -> bool:
        """Return whether these tokens were routed. In compiled code, rely on `passes_on` (`routers/deferral.py`)."""
        return torch.compiler.is_dynamo_compiling() or tokens is self.tokens

    def now(self) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] and experts [T, K], computed by the router's class."""
        _, topk_weights, topk_experts = type(self.router).forward(self.router, self.tokens)
        return topk_weights, topk_experts
