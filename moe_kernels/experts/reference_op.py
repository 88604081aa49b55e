"""The reference of `fused_experts` as one registered op, for tracers and quantised weights. In all other cases, the
reference runs without the op, and autograd differentiates the reference.

The reference cuts rows into groups, and the sizes of the groups are values of a tensor. Traced, fake and meta tensors
have no values. The op supports such tensors, because the shapes of its results do not depend on values. Quantised
weights use the op, because autograd would save the dequantised weights. The op's backward runs the reference again and
differentiates this run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference, reference_fp8
from ..gemm.batch_invariance import token_by_token, widened
from ..quantization.decode import decode_weight
from ..runtime.dispatch import without_autocast
from ..runtime.registered_ops import Call, registered_op, save_for_backward, take_saved_tensors
from ..types import ExpertAdapters, ExpertWeights, Permutation, QuantizedWeight
from .steps import Adapters, Experts


class ReferenceOperands(NamedTuple):
    """Operands of the reference op and of the op that computes its gradients."""

    tokens: Tensor  # [T, D]
    topk_weights: Tensor  # [T, K]
    experts: Experts
    permutation: Permutation
    batch_invariant: bool  # True: compute one token at a time, independent of other tokens
    precision: str | None  # "fp8" and "fp8_saved" round the operands of products to e4m3


class ReferenceGradients(NamedTuple):
    """The gradient of each operand; None for an operand that needs no gradient."""

    tokens: Tensor | None
    topk_weights: Tensor | None
    w_up: Tensor | None
    w_down: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    up_a: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None


_DIFFERENTIABLE = ReferenceGradients._fields


def run_reference(operands: ReferenceOperands) -> Tensor:  # [T, D]
    """Compute `fused_experts` by the reference. Quantised weights are dequantised to the dtype of the tokens."""
    tokens, topk_weights, experts, permutation, batch_invariant, precision = operands
    *stored, b_up, b_down = experts.weights
    w_up, w_down = (decode_weight(w, tokens.dtype) if isinstance(w, QuantizedWeight) else w for w in stored)
    options = {"activation": experts.kind(), "weight_on_input": experts.weight_on_input, "b_up": b_up, "b_down": b_down}
    if any(factor is not None for factor in experts.adapters):
        options["adapters"] = ExpertAdapters(*experts.adapters)
    run = reference.fused_experts
    if precision is not None:
        run = partial(reference_fp8.fused_experts, saves_fp8=precision == "fp8_saved")
    run = partial(_run_by_token, run) if batch_invariant else run
    with without_autocast(tokens):
        return run(tokens, topk_weights, permutation, w_up, w_down, **options)


def _run_by_token(
    op: Callable[..., Tensor],
    tokens: Tensor,
    topk_weights: Tensor,
    permutation: Permutation,
    w_up: Tensor,
    w_down: Tensor,
    **options: Any,
) -> Tensor:
    experts = torch.searchsorted(permutation.offsets, permutation.slot_to_row, right=True, out_int32=True)
    experts = torch.where(permutation.slot_to_row < 0, -1, experts)  # [T, K]
    adapters = options.get("adapters")
    shared = w_up, w_down, options["b_up"], options["b_down"], *([] if adapters is None else adapters[:4])
    # Widen the tensors that all tokens share, so that autograd sums their gradients over tokens in float32.
    is_summed = [tensor is not None and tensor.requires_grad and torch.is_grad_enabled() for tensor in shared]
    wide = [widened(tensor) if summed else tensor for tensor, summed in zip(shared, is_summed, strict=True)]

    def run(token: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor]:
        pairs = zip(wide, shared, strict=True)
        given = [tensor if copy is tensor else _Narrowed.apply(copy, tensor) for copy, tensor in pairs]
        up, down, b_up, b_down, *factors = given
        settings = options | {"b_up": b_up, "b_down": b_down}
        if adapters is not None:
            settings["adapters"] = ExpertAdapters(*factors, scale=adapters.scale)
        return (op(token, weights, reference.sort_by_expert(chosen, len(w_up)), up, down, **settings),)

    (out,) = token_by_token(run, tokens, topk_weights, experts)
    return out


class _Narrowed(torch.autograd.Function):
    """Returns `narrow` without a copy. The gradient goes to `wide`, a float32 copy of `narrow`."""

    @staticmethod
    def forward(wide: Tensor, narrow: Tensor) -> Tensor:
        return narrow.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.wide, ctx.narrow = (tensor.dtype for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.wide), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Tensor | None) -> Tensor:
        return tangent.to(ctx.narrow)


@registered_op("reference_experts")
def reference_experts_op(operands: ReferenceOperands) -> Tensor:  # [T, D]
    return run_reference(operands)


@reference_experts_op.register_fake
def _(operands):
    return operands.tokens.new_empty(operands.tokens.shape)


def _setup(ctx: Any, call: Call, output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    save_for_backward(ctx, call)


def _backward(ctx: Any, dout: Tensor | None) -> dict[str, Tensor | None]:
    if dout is None:
        return {}
    needed = reference_experts_op.needed(ctx)
    is_needed = tuple([name in needed for name in _DIFFERENTIABLE])
    (operands,), _ = reference_experts_op.saved(ctx, take_saved_tensors(ctx))
    return _gradients_op(dout, operands, is_needed)._asdict()


reference_experts_op.register_autograd(_backward, setup_context=_setup)


@registered_op("reference_experts_gradients")
def _gradients_op(dout: Tensor, operands: ReferenceOperands, needed: tuple[bool, ...]) -> ReferenceGradients:
    given = _differentiable(operands)
    names = [name for name, is_needed in zip(_DIFFERENTIABLE, needed, strict=True) if is_needed]

    def run(*tensors: Tensor) -> Tensor:
        tokens, topk_weights, *rest = (given | dict(zip(names, tensors, strict=True))).values()
        experts = operands.experts._replace(weights=ExpertWeights(*rest[:4]), adapters=Adapters(*rest[4:]))
        return run_reference(operands._replace(tokens=tokens, topk_weights=topk_weights, experts=experts))

    # Differentiate by torch.func, because autograd is off inside an op.
    differentiate = torch.func.vjp(run, *(given[name] for name in names))[1]
    # Make gradients contiguous, as declared by the fake function. Autograd's strides depend on the inputs.
    gradients = {name: g.contiguous() for name, g in zip(names, differentiate(dout), strict=True)}
    return ReferenceGradients(*map(gradients.get, _DIFFERENTIABLE))


@_gradients_op.register_fake
def _(dout, operands, needed):
    pairs = zip(_differentiable(operands).values(), needed, strict=True)
    return ReferenceGradients(*(t.new_empty(t.shape) if is_needed else None for t, is_needed in pairs))


def _differentiable(operands: ReferenceOperands) -> dict[str, Any]:  # operand name -> tensor or None
    tensors = operands.tokens, operands.topk_weights, *operands.experts.weights, *operands.experts.adapters
    return dict(zip(_DIFFERENTIABLE, tensors, strict=True))
