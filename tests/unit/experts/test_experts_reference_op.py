"""The reference of the experts as one op: same results and gradients as the reference, and correct for tracers."""

import pytest
import torch

from moe_kernels import Activation, reference, reference_fp8
from moe_kernels.experts.reference_op import ReferenceOperands, reference_experts_op
from moe_kernels.experts.steps import Experts
from moe_kernels.specs import as_activation
from moe_kernels.types import ExpertWeights

OPTIONS = {
    "plain": {},
    "bias": {"bias": True, "kind": Activation("gpt_oss", interleaved=True)},
    "weight_on_input": {"weight_on_input": True},
    "by_token": {"batch_invariant": True},
    "dropped": {"dropped": True},
    "fp8": {"precision": "fp8", "dropped": True},
}


def draw(kind="swiglu", bias=False, weight_on_input=False, batch_invariant=False, dropped=False, precision=None):
    """Return the operands of 7 tokens, 2 of 3 experts each, in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    routed = reference.topk_routing(normal(7, 3).detach(), 2)
    chosen = routed.topk_experts
    chosen = torch.where(torch.arange(7)[:, None] == 2, -1, chosen) if dropped else chosen
    weights = ExpertWeights(
        normal(3, 8, 5), normal(3, 5, 4), normal(3, 8) if bias else None, normal(3, 5) if bias else None
    )
    experts = Experts.of(weights, as_activation("draw", kind), weight_on_input=weight_on_input)
    weights = routed.topk_weights.double().requires_grad_()
    return ReferenceOperands(
        normal(7, 5), weights, experts, reference.sort_by_expert(chosen, 3), batch_invariant, precision
    )


def leaves(operands):
    tensors = operands.tokens, operands.topk_weights, *operands.experts.weights
    return [tensor for tensor in tensors if tensor is not None]


def with_gradients(out, operands, frozen=()):
    needed = [tensor for number, tensor in enumerate(leaves(operands)) if number not in frozen]
    return out, *torch.autograd.grad(out.sin().sum(), needed)


def expected(operands):
    tokens, weights, experts, permutation, _, precision = operands
    w_up, w_down, b_up, b_down = experts.weights
    options = {"activation": experts.kind(), "weight_on_input": experts.weight_on_input}
    options |= {"b_up": b_up, "b_down": b_down}
    op = reference.fused_experts if precision is None else reference_fp8.fused_experts
    return op(tokens, weights, permutation, w_up, w_down, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results_and_gradients_are_those_of_the_reference(options):
    operands = draw(**options)
    actual = with_gradients(reference_experts_op(operands), operands)
    torch.testing.assert_close(actual, with_gradients(expected(operands), operands))


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_frozen_operands(frozen):
    operands = draw()
    leaves(operands)[frozen].requires_grad_(False)
    actual = with_gradients(reference_experts_op(operands), operands, {frozen})
    torch.testing.assert_close(actual, with_gradients(expected(operands), operands, {frozen}))


@pytest.mark.parametrize("options", [{}, OPTIONS["bias"], OPTIONS["fp8"]], ids=["plain", "bias", "fp8"])
def test_opcheck(options):
    operands = draw(**options)
    torch.library.opcheck(reference_experts_op.overload, reference_experts_op.schema_arguments(operands))
