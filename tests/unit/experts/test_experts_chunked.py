"""The steps of the experts on chunks of tokens: together they equal `fused_experts` and its backward on all tokens."""

import pytest
import torch

from moe_kernels import fused_experts, reference, sort_by_expert
from moe_kernels.experts.chunked import ExpertsInParts
from moe_kernels.experts.steps import Adapters
from moe_kernels.specs import as_activation
from moe_kernels.testing import assert_accurate
from moe_kernels.types import ExpertAdapters, ExpertWeights

from ...dtypes import DTYPES
from ...tiers import default_tier

NUM_EXPERTS, TOP_K = 6, 3


def draw(device, dtype, num_tokens, activation, bias, d_model=24, d_ff=20):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    d_up = (1 + as_activation("test", activation).gated) * d_ff
    biases = (normal(NUM_EXPERTS, d_up), normal(NUM_EXPERTS, d_model)) if bias else (None, None)
    weights = ExpertWeights(0.3 * normal(NUM_EXPERTS, d_up, d_model), 0.3 * normal(NUM_EXPERTS, d_model, d_ff), *biases)
    # Ids from NUM_EXPERTS on are experts of other ranks.
    chosen = torch.rand(num_tokens, NUM_EXPERTS + 4, generator=generator).argsort(1)[:, :TOP_K]
    topk_weights = torch.rand(num_tokens, TOP_K, generator=generator).to(device)
    return normal(num_tokens, d_model), topk_weights, chosen.int().to(device), weights, normal(num_tokens, d_model)


def draw_adapters(weights):
    """Return factors as the kernels read them, and as the reference does."""
    generator = torch.Generator().manual_seed(5)
    (num_experts, d_up, d_model), d_ff = weights.w_up.shape, weights.w_down.shape[2]
    shapes = (3, d_model), (d_up, 3), (3, d_ff), (d_model, 3)
    factors = [0.3 * torch.randn(num_experts, *shape, generator=generator) for shape in shapes]
    adapters = ExpertAdapters(*(factor.to(weights.w_up) for factor in factors), 0.5)
    return Adapters.of(adapters, weights), adapters


def permutation_of(chosen):
    kept = int((chosen < NUM_EXPERTS).sum())
    return sort_by_expert(chosen, NUM_EXPERTS, max_rows=max(kept, 1), implementation="triton")


def in_parts(tokens, topk_weights, chosen, weights, dout, lengths, activation, reserved_sms=0):
    """Return the output, then gradients in the order of the operands."""
    parts = [permutation_of(part) for part in chosen.split(lengths)]
    whole = permutation_of(chosen) if len(lengths) > 1 else parts[0]
    experts = ExpertsInParts(weights, as_activation("test", activation), parts, whole, reserved_sms=reserved_sms)
    split = [tensor.split(lengths) for tensor in (tokens, topk_weights, dout)]
    forward = [experts.activate(n, part) for n, part in enumerate(split[0])]
    dweights = [
        experts.backward_part(n, d, w, made.preactivation)
        for n, ((_, w, d), made) in enumerate(zip(zip(*split, strict=True), forward, strict=True))
    ]
    needed = [weight is not None for weight in weights]
    gradients = experts.gradients(tokens, dout, topk_weights, needed + [False] * 4)[:4]
    assert [gradient is None for gradient in gradients] == [weight is None for weight in weights]
    halves = slice(tokens.shape[1] // 2), slice(tokens.shape[1] // 2, None)
    out = torch.cat(
        [
            torch.cat([experts.outputs(n, made.activated, w, columns) for columns in halves], 1)
            for n, (made, w) in enumerate(zip(forward, split[1], strict=True))
        ]
    )
    results = [out, experts.tokens_gradient(), torch.cat(dweights), *gradients]
    return [result for result in results if result is not None]


def all_at_once(run, tokens, topk_weights, chosen, weights, dout, activation):
    leaves = [tensor.detach().requires_grad_() for tensor in (tokens, topk_weights, *weights) if tensor is not None]
    biases = dict(zip(("b_up", "b_down"), leaves[4:], strict=bool(leaves[4:])))
    permutation = reference.sort_by_expert(chosen, NUM_EXPERTS)
    out = run(leaves[0], leaves[1], permutation, *leaves[2:4], activation=as_activation("test", activation), **biases)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("lengths", default_tier([[37], [20, 17], [1, 30, 6], [0, 37]], [[20, 17]]), ids=str)
@pytest.mark.parametrize(
    ("activation", "bias", "dtype"),
    default_tier(
        ((*form, dtype) for form in (("swiglu", False), ("gpt_oss", True), ("relu", False)) for dtype in DTYPES),
        lambda case: case[2] == (DTYPES[-1] if case[1] else torch.float32),
    ),
    ids=str,
)
def test_are_the_experts(lengths, activation, bias, device, dtype):
    operands = draw(device, dtype, sum(lengths), activation, bias)
    actual = in_parts(*operands, lengths, activation)
    baseline = all_at_once(reference.fused_experts, *operands, activation)
    tokens, topk_weights, chosen, weights, dout = operands
    exact = all_at_once(
        reference.fused_experts,
        tokens.double(),
        topk_weights.double(),
        chosen,
        ExpertWeights(*(weight if weight is None else weight.double() for weight in weights)),
        dout.double(),
        activation,
    )
    for a, b, e in zip(actual, baseline, exact, strict=True):
        assert_accurate(actual=a, baseline=b, exact=e)


@pytest.mark.parametrize("lengths", [[37], [20, 17]], ids=str)
def test_adapters(lengths, device):
    """Equal to all at once by the error budget: outputs, and gradients of tokens, weights, and factors."""
    dtype = DTYPES[-1]
    tokens, topk_weights, chosen, weights, dout = draw(device, dtype, sum(lengths), "swiglu", False)
    padded, plain = draw_adapters(weights)
    parts = [permutation_of(part) for part in chosen.split(lengths)]
    whole = permutation_of(chosen) if len(lengths) > 1 else parts[0]
    experts = ExpertsInParts(weights, as_activation("test", "swiglu"), parts, whole, adapters=padded)
    split = list(zip(*(tensor.split(lengths) for tensor in (tokens, topk_weights, dout)), strict=True))
    made = [experts.activate(n, x) for n, (x, _, _) in enumerate(split)]
    out = torch.cat([experts.outputs(n, made[n].activated, w, slice(None)) for n, (_, w, _) in enumerate(split)])
    dweights = [experts.backward_part(n, d, w, made[n].preactivation) for n, (_, w, d) in enumerate(split)]
    dup_a, dup_b, ddown_a, ddown_b = experts.gradients(tokens, dout, topk_weights, [False] * 4 + [True] * 4)[4:]
    unpadded = dup_a[:, :3], 0.5 * dup_b[..., :3], ddown_a[:, :3], 0.5 * ddown_b[..., :3]  # the scale is in b
    actual = [out, experts.tokens_gradient(), torch.cat(dweights), *unpadded]

    def all_at_once(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (tokens, *plain[:4])]
        w = topk_weights.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        base, permutation = [weight.to(dtype) for weight in weights[:2]], reference.sort_by_expert(chosen, NUM_EXPERTS)
        adapters = ExpertAdapters(*leaves[1:], 0.5)
        out = reference.fused_experts(leaves[0], w, permutation, *base, adapters=adapters)
        gradients = torch.autograd.grad(out, [leaves[0], w, *leaves[1:]], dout.to(out.dtype))
        return [out.detach(), *gradients]

    for a, b, e in zip(actual, all_at_once(dtype), all_at_once(torch.float64), strict=True):
        assert_accurate(actual=a, baseline=b, exact=e)


@pytest.mark.parametrize("dtype", default_tier(DTYPES, DTYPES[-1:]), ids=str)
def test_one_part_is_the_fused_op_bit_by_bit(device, dtype):
    operands = draw(device, dtype, 37, "swiglu", False)
    tokens, topk_weights, chosen, weights, dout = operands
    leaves = [tensor.detach().requires_grad_() for tensor in (tokens, topk_weights, *weights[:2])]
    out = fused_experts(leaves[0], leaves[1], permutation_of(chosen), *leaves[2:], implementation="triton")
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    torch.testing.assert_close(in_parts(*operands, [37], "swiglu"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", default_tier(DTYPES, DTYPES[:1]), ids=str)
def test_an_expert_without_rows_gets_zeros(device, dtype):
    tokens, topk_weights, chosen, weights, dout = draw(device, dtype, 12, "swiglu", False)
    chosen = torch.where(chosen == 2, NUM_EXPERTS, chosen)
    dw_up, dw_down = in_parts(tokens, topk_weights, chosen, weights, dout, [5, 7], "swiglu")[3:]
    for gradient in (dw_up, dw_down):
        assert not gradient[2].any()
        assert gradient[1].any()
