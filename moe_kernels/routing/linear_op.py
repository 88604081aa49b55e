"""The linear router as one op: logits, experts and weights, and their gradients. The op saves no [T, E] tensor.

`softmax.py` has the kernels of the plain softmax, and `scored.py` the kernels of all other routers in this op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.dispatch import without_autocast
from ..runtime.registered_ops import Call, registered_op
from .linear import halves_dtype, router_gradients, router_logits
from .scored import ScoreSettings, launch_forward, scored_backward_op
from .softmax import launch_topk, topk_backward_op
from .topk import empty_choice


class LinearRouter(NamedTuple):
    """The operands, except the tokens, and the settings of a linear router."""

    w_router: Tensor  # [E, D]
    logit_bias: Tensor | None  # [E]
    selection_bias: Tensor | None  # [E]
    top_k: int
    is_softmax: bool  # whether `RouterSpec.is_softmax_of_logits` is True and there is no `logit_bias`
    invariant_logits: bool  # whether the logits are batch-invariant
    settings: ScoreSettings
    rounds_logits: bool = False  # whether logits are rounded to the tokens' dtype; False: logits are float32

    def logits(self, tokens: Tensor) -> Tensor:  # [T, E]
        dtype = tokens.dtype if self.rounds_logits else torch.float32
        return router_logits(tokens, self.w_router, self.logit_bias, dtype, self.invariant_logits)

    @property
    def is_softmax_of_chosen(self) -> bool:
        """Return whether the weights are a softmax over the chosen experts' logits, and logits have no bias."""
        return self.is_softmax and self.settings.normalize and self.logit_bias is None


class RouterNeeds(NamedTuple):
    """Flags that say which gradients of a router are needed."""

    needs_tokens: bool
    needs_w_router: bool
    needs_logit_bias: bool

    @classmethod
    def of(cls, needed: set[str]) -> RouterNeeds:
        return cls("tokens" in needed, "w_router" in needed, "logit_bias" in needed)


class RouterGradients(NamedTuple):
    tokens: Tensor | None  # [T, D]
    w_router: Tensor | None  # [E, D]
    logit_bias: Tensor | None  # [E]


def launch_routing(
    tokens: Tensor,  # [T, D]
    router: LinearRouter,
    topk_weights: Tensor,  # [T, K] float32 contiguous, written here
    topk_experts: Tensor,  # [T, K] int32 contiguous, written here
) -> Tensor:  # [T, E]
    """Write `topk_weights` and `topk_experts`, and return the logits."""
    logits = router.logits(tokens)
    if router.is_softmax:
        launch_topk(logits, topk_weights, topk_experts, router.settings.normalize)
    else:
        launch_forward(logits, router.selection_bias, topk_weights, topk_experts, router.settings)
    return logits


@registered_op("linear_routing")
def linear_routing_op(tokens: Tensor, router: LinearRouter) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [T, K], experts [T, K] and logits [T, E]."""
    topk_weights, topk_experts = empty_choice(tokens, router.top_k)
    return topk_weights, topk_experts, launch_routing(tokens, router, topk_weights, topk_experts)


@linear_routing_op.register_fake
def _(tokens, router):
    dtype = tokens.dtype if router.rounds_logits else torch.float32
    logits = tokens.new_empty(tokens.shape[0], router.w_router.shape[0], dtype=dtype)
    return *empty_choice(tokens, router.top_k), logits


def _setup(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    tokens, router = call.args
    ctx.router = router._replace(w_router=None, logit_bias=None)  # `save_for_backward` below saves both tensors
    topk_weights, topk_experts, _ = output
    topk_weights = topk_weights if router.is_softmax else None  # other routers' gradients do not read the weights
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(tokens, router.w_router, router.logit_bias, topk_weights, topk_experts)


def _backward(ctx: Any, dweights: Tensor | None, _: Tensor | None, dlogits: Tensor | None) -> dict[str, Tensor | None]:
    if dweights is None and dlogits is None:
        return {}
    tokens, w_router, logit_bias, *choice = ctx.saved_tensors
    router = ctx.router._replace(w_router=w_router, logit_bias=logit_bias)
    needs = RouterNeeds.of(linear_routing_op.needed(ctx))
    return routing_gradients_op(tokens, router, *choice, dweights, dlogits, None, needs)._asdict()


linear_routing_op.register_autograd(_backward, setup_context=_setup)


@registered_op("linear_routing_gradients")
def routing_gradients_op(
    tokens: Tensor,  # [T, D]
    router: LinearRouter,
    topk_weights: Tensor | None,  # [T, K]; read only if `router.is_softmax`, else may be None
    topk_experts: Tensor,  # [T, K]
    dweights: Tensor | None,  # [T, K]
    dlogits: Tensor | None,  # [T, E]: upstream gradient of the returned logits
    dtokens: Tensor | None,  # [T, D]: added to the tokens' gradient
    needs: RouterNeeds,
) -> RouterGradients:
    """Return the gradients that `needs` asks for. Recompute the logits if `dweights` is given and
    `router.is_softmax_of_chosen` is False."""
    w_router, logit_bias, dlogit_bias = router.w_router, router.logit_bias, None
    with without_autocast(tokens):
        if dweights is not None:
            # dlogits becomes [T, E] float32 for float32 GEMMs, and [T, 2E] for 16-bit GEMMs: see `halves_dtype`.
            logits, split_dtype = None, halves_dtype(tokens, w_router)
            if not router.is_softmax_of_chosen:
                logits = router.logits(tokens)
            if router.is_softmax:
                choice, num_experts = (topk_weights, topk_experts), w_router.shape[0]
                dlogits = topk_backward_op(dweights, *choice, logits, dlogits, num_experts, split_dtype)
            else:
                dlogits = scored_backward_op(dweights, topk_experts, logits, dlogits, split_dtype, router.settings)
        assert dlogits is not None
        if needs.needs_logit_bias and logit_bias is not None:
            dlogit_bias = dlogits.sum(0, dtype=torch.float32).view(-1, len(w_router)).sum(0).to(logit_bias.dtype)
        wanted = needs.needs_tokens, needs.needs_w_router
        of_router = router_gradients(dlogits, tokens, w_router, dtokens, wanted, router.invariant_logits)
        return RouterGradients(*of_router, dlogit_bias)


@routing_gradients_op.register_fake
def _(tokens, router, topk_weights, topk_experts, dweights, dlogits, dtokens, needs):
    return RouterGradients(
        tokens.new_empty(tokens.shape) if needs.needs_tokens else None,
        router.w_router.new_empty(router.w_router.shape) if needs.needs_w_router else None,
        router.logit_bias.new_empty(router.logit_bias.shape) if needs.needs_logit_bias else None,
    )
