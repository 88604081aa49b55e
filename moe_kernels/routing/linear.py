"""The GEMMs of a linear router: its logits, and the gradients of tokens and weights.

Registered ops call them, because Inductor would compile a visible GEMM a second time for few tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.batch_invariance import invariant_product
from ..runtime.checks import check_same_device, check_same_dtype, check_shapes
from ..runtime.dispatch import kernel_obstacle, once_per_form
from ..runtime.triton import tl, triton
from .linear_kernels import launch_product, launch_weight_gradient


@once_per_form
def check_linear_router(tokens: Tensor, w_router: Tensor) -> None:
    """Raise ValueError unless shapes and devices fit. Both must have the same floating-point dtype, except that a
    float32 weight may meet 16-bit tokens."""
    check_shapes("linear_routing", tokens=(tokens, "T D"), w_router=(w_router, "E D"))
    if w_router.dtype != torch.float32 or tokens.dtype not in (torch.bfloat16, torch.float16):
        check_same_dtype("linear_routing", tokens=tokens, w_router=w_router)
    check_same_device("linear_routing", tokens=tokens, w_router=w_router)


def halves_dtype(tokens: Tensor, w_router: Tensor) -> torch.dtype | None:
    """Return the dtype of 16-bit GEMMs, or None if all GEMMs are float32.

    16-bit GEMMs take tokens and weight unchanged, and the gradient of the logits as two 16-bit numbers: [high | low].
    """
    runs = kernel_obstacle(tokens) is None
    return tokens.dtype if runs and w_router.dtype == tokens.dtype and tokens.dtype.itemsize == 2 else None


def router_logits(
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    logit_bias: Tensor | None,  # [E]
    batch_invariant: bool,
) -> Tensor:  # [T, E]
    """Return tokens @ w_router.T + logit_bias, accumulated and stored in float32."""
    if not batch_invariant and halves_dtype(tokens, w_router) is not None:
        return launch_product(tokens, w_router.t(), torch.float32, bias=logit_bias)
    if batch_invariant:
        logits = invariant_product(tokens.to(w_router.dtype), w_router.t(), torch.float32)
    else:
        logits = torch.mm(tokens.float(), w_router.float().t())
    return logits if logit_bias is None else logits.add_(logit_bias)


def router_gradients(
    dlogits: Tensor,  # [T, E] float32, or [T, 2E] split
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    dtokens: Tensor | None,  # [T, D]: a gradient to add to the tokens' gradient
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of tokens and weights, or None in place of one that is not needed."""
    is_split = dlogits.shape[1] != w_router.shape[0]
    of_tokens = dw_router = None
    if needs[0] and is_split and not batch_invariant:
        of_tokens = launch_product(dlogits, w_router, tokens.dtype, addend=dtokens)
    elif needs[0]:
        weights = torch.cat([w_router, w_router]) if is_split else w_router.float()
        product = invariant_product(dlogits, weights, dlogits.dtype) if batch_invariant else dlogits @ weights
        of_tokens = product.to(tokens.dtype)
        of_tokens = of_tokens if dtokens is None else of_tokens.add_(dtokens)
    if needs[1] and is_split:
        dw_router = launch_weight_gradient(dlogits, tokens, w_router.dtype)
    elif needs[1]:
        dw_router = (dlogits.t() @ tokens.float()).to(w_router.dtype)
    return of_tokens, dw_router


@triton.jit
def store_gradient(
    gradient,  # [BLOCK_T, E_P2] float32
    direct_ptr,  # [T, E], a gradient to add, or None
    direct_strides,
    dlogits_ptr,  # [T, E] contiguous; [T, 2E] if SPLIT
    t,  # [BLOCK_T, 1]
    expert,  # [1, E_P2]
    E,
    mask,
    SPLIT: tl.constexpr,
):
    """Write the gradient of the logits of BLOCK_T tokens, with SPLIT as [high | low]."""
    if direct_ptr is not None:
        gradient += tl.load(direct_ptr + t * direct_strides[0] + expert * direct_strides[1], mask=mask, other=0.0)
    if SPLIT:
        high = gradient.to(dlogits_ptr.dtype.element_ty)
        low = (gradient - high.to(tl.float32)).to(dlogits_ptr.dtype.element_ty)
        out = dlogits_ptr + t * (2 * E) + expert
        tl.store(out, high, mask=mask)
        tl.store(out + E, low, mask=mask)
    else:
        tl.store(dlogits_ptr + t * E + expert, gradient, mask=mask)
