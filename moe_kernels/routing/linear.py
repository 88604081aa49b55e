"""The products of a linear router: its logits, and what their gradient gives tokens and weights.

Each is one op for backward: of products that it sees, Inductor compiles some again where tokens are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.batch_invariance import invariant_product
from ..runtime.checks import check_same_dtype
from ..runtime.ops import registered_op


def check_router_dtypes(op: str, tokens: Tensor, w_router: Tensor) -> None:
    """Raises ValueError unless both have one floating-point dtype, or the weight is float32 beside shorter tokens."""
    if w_router.dtype != torch.float32 or tokens.dtype not in (torch.bfloat16, torch.float16):
        check_same_dtype(op, tokens=tokens, w_router=w_router)


def halves_dtype(tokens: Tensor, w_router: Tensor) -> torch.dtype | None:
    """That of 16-bit products, which tokens and weight go through as they are and the gradient of logits goes through
    in two halves; None where all products are float32."""
    return tokens.dtype if tokens.is_cuda and w_router.dtype == tokens.dtype != torch.float32 else None


def router_logits(
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    logit_bias: Tensor | None,  # [E]
    batch_invariant: bool,
) -> Tensor:  # [T, E]
    """tokens @ w_router.T + logit_bias, accumulated and kept in float32."""
    if batch_invariant:
        logits = invariant_product(tokens.to(w_router.dtype), w_router.t(), torch.float32)
    elif halves_dtype(tokens, w_router) is not None:
        logits = torch.mm(tokens, w_router.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(tokens.float(), w_router.float().t())
    return logits if logit_bias is None else logits.add_(logit_bias)


router_logits_op = registered_op("router_logits")(router_logits)


@router_logits_op.register_fake
def _(tokens, w_router, logit_bias, batch_invariant):
    return tokens.new_empty(tokens.shape[0], w_router.shape[0], dtype=torch.float32)


def router_gradients(
    dlogits: Tensor,  # [T, E] float32, or [T, 2E] split
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Of the tokens and of the weights; None where not needed."""
    gradients = _gradients_op(dlogits, tokens, w_router, *needs, batch_invariant)
    dtokens, dw_router = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
    return dtokens, dw_router


@registered_op("router_gradients")
def _gradients_op(
    dlogits: Tensor, tokens: Tensor, w_router: Tensor, needs_dtokens: bool, needs_dw_router: bool, batch_invariant: bool
) -> tuple[Tensor, Tensor]:  # [T, D], [E, D]; empty where not needed
    is_split = dlogits.shape[1] != len(w_router)
    dtokens = dw_router = None
    if needs_dtokens:
        weights = torch.cat([w_router, w_router]) if is_split else w_router.float()
        product = invariant_product(dlogits, weights, dlogits.dtype) if batch_invariant else dlogits @ weights
        dtokens = product.to(tokens.dtype)
    if needs_dw_router and is_split:
        high, low = torch.mm(dlogits.t(), tokens, out_dtype=torch.float32).chunk(2)
        dw_router = torch.add(high, low, out=w_router.new_empty(w_router.shape))  # rounded in the same launch
    elif needs_dw_router:
        dw_router = (dlogits.t() @ tokens.float()).to(w_router.dtype)
    return tuple(tokens.new_empty(0) if gradient is None else gradient for gradient in (dtokens, dw_router))


@_gradients_op.register_fake
def _(dlogits, tokens, w_router, needs_dtokens, needs_dw_router, batch_invariant):
    dtokens = tokens.new_empty(tokens.shape if needs_dtokens else 0)
    return dtokens, w_router.new_empty(w_router.shape if needs_dw_router else 0)
