"""The steps of the experts on chunks of tokens: together they equal `fused_experts` and its backward on all tokens."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

from moe_kernels import fused_experts, reference, sort_by_expert
from moe_kernels.experts.chunked import ExpertsInParts
from moe_kernels.experts.steps import Adapters
from moe_kernels.specs import as_activation
from moe_kernels.testing import assert_accurate
from moe_kernels.types import ExpertAdapters, ExpertWeights

from ...dtypes import DTYPES
from ...tiers import default_tier

NUM_EXPERTS, TOP_K = 6, 3


def draw(device, dtype, num_tokens, activation, bias):
    """Return tokens, routing weights, experts, the experts' weights, and the gradient of the output."""
    d_model, d_ff = 24, 20
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


def in_parts(tokens, topk_weights, chosen, weights, dout, lengths, activation, adapters=None):
    """Return the output, then gradients of tokens, of routing weights, and of the adapters or else the weights."""
    parts = [permutation_of(part) for part in chosen.split(lengths)]
    whole = permutation_of(chosen) if len(lengths) > 1 else parts[0]
    experts = ExpertsInParts(weights, as_activation("test", activation), parts, whole, adapters=adapters)
    split = list(zip(*(tensor.split(lengths) for tensor in (tokens, topk_weights, dout)), strict=True))
    made = [experts.activate(n, x) for n, (x, _, _) in enumerate(split)]
    halves = [
        torch.cat([experts.outputs(n, made[n].activated, w, columns) for n, (_, w, _) in enumerate(split)])
        for columns in (slice(tokens.shape[1] // 2), slice(tokens.shape[1] // 2, None))
    ]
    dweights = [experts.backward_part(n, d, w, made[n].preactivation) for n, (_, w, d) in enumerate(split)]
    needed = [adapters is None and weight is not None for weight in weights] + [adapters is not None] * 4
    gradients = experts.gradients(tokens, dout, topk_weights, needed)
    assert [gradient is not None for gradient in gradients] == needed
    results = [torch.cat(halves, 1), experts.tokens_gradient(), torch.cat(dweights), *gradients]
    return [result for result in results if result is not None]


def all_at_once(tokens, topk_weights, chosen, weights, dout, activation, adapters=None):
    """Return the results of `in_parts` by autograd of the reference."""
    trained = tokens, topk_weights, *(weights if adapters is None else adapters[:4])
    tokens, topk_weights, *leaves = (None if t is None else t.detach().requires_grad_() for t in trained)
    if adapters is None:
        weights = ExpertWeights(*leaves)
    else:
        adapters = ExpertAdapters(*leaves, adapters.scale)
    options = {"activation": as_activation("test", activation), "adapters": adapters}
    options |= {"b_up": weights.b_up, "b_down": weights.b_down}
    permutation = reference.sort_by_expert(chosen, NUM_EXPERTS)
    out = reference.fused_experts(tokens, topk_weights, permutation, weights.w_up, weights.w_down, **options)
    leaves = [leaf for leaf in (tokens, topk_weights, *leaves) if leaf is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_as_all_at_once(actual, *operands):
    """Check results of `in_parts` by the error budget. The operands are those of `all_at_once`."""
    exact = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, operands)
    for a, b, e in zip(actual, all_at_once(*operands), all_at_once(*exact), strict=True):
        assert_accurate(actual=a, baseline=b, exact=e)


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
    assert_as_all_at_once(in_parts(*operands, lengths, activation), *operands, activation)


@pytest.mark.parametrize("lengths", [[37], [20, 17]], ids=str)
def test_adapters(lengths, device):
    operands = draw(device, DTYPES[-1], sum(lengths), "swiglu", False)
    padded, plain = draw_adapters(operands[3])
    *results, dup_a, dup_b, ddown_a, ddown_b = in_parts(*operands, lengths, "swiglu", padded)
    unpadded = dup_a[:, :3], 0.5 * dup_b[..., :3], ddown_a[:, :3], 0.5 * ddown_b[..., :3]  # the scale is in b
    assert_as_all_at_once([*results, *unpadded], *operands, "swiglu", plain)


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
