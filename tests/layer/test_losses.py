"""Each loss against its definition, and its documented invariances."""

import math
from functools import partial

import pytest
import torch

from moe_layers import (
    LayerRouting,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)

from .balance_cases import (
    LOSSES,
    SIZES,
    balanced_logits,
    balanced_value,
    by_definition,
    count,
    random_logits,
    routing_of,
)

SPLIT_INVARIANT = ["sequence", "sequence_sqrt_softplus", "global", "z"]


def with_gradient(loss, logits, **facts):
    logits = logits.detach().clone().requires_grad_()
    value = loss(routing_of(logits, **facts))
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_definition(name, sizes):
    num_tokens, num_experts, top_k, num_sequences = sizes
    facts = {"top_k": top_k, "sequence_lengths": num_tokens // num_sequences}
    logits = random_logits(num_tokens, num_experts)
    if name == "global" and num_experts == 1:
        pytest.skip("one expert of the other counts has none")
    value, gradient = with_gradient(LOSSES[name], logits, **facts)
    logits = logits.requires_grad_()
    expected = by_definition(name, routing_of(logits, **facts))
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_close_as_its_dtype(name):
    logits = random_logits(240, 12)
    exact, exact_gradient = with_gradient(LOSSES[name], logits, sequence_lengths=24)
    value, gradient = with_gradient(LOSSES[name], logits.float(), sequence_lengths=24)
    assert value.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-7)


def test_sequences_by_hand():
    # Two of three tokens choose expert 0 with probability 3/4, so that their sequence has 2 * (1 * 3/4 + 0 * 1/4).
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 1.0]]).log()
    routing = routing_of(logits, 1, sequence_lengths=torch.tensor([2, 1]))
    torch.testing.assert_close(sequence_load_balancing_loss(routing), torch.tensor((2 * 1.5 + 1.0) / 3))


def test_sequences_count_the_highest_scores_by_hand():
    """A selection bias made both tokens choose expert 1. Expert 0 has the highest score of both, 3/4.

    The third token is padding and chose none.
    """
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0]]).log()
    mask = torch.tensor([True, True, False])
    chosen = torch.tensor([[1], [1], [-1]], dtype=torch.int32)
    routing = LayerRouting(chosen, torch.ones(3, 1), logits, count(chosen, 2), token_mask=mask, sequence_lengths=3)
    by_scores, by_choices = 2 * (1 * 3 / 4 + 0 * 1 / 4), 2 * (0 * 3 / 4 + 1 * 1 / 4)
    torch.testing.assert_close(sequence_load_balancing_loss(routing), torch.tensor(by_scores))
    torch.testing.assert_close(sequence_load_balancing_loss(routing, count="choices"), torch.tensor(by_choices))


def test_sequences_count_as_many_scores_as_were_chosen():
    """The first token chose three experts, the second one chose one. By scores, expert 0 has two of the four slots."""
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0], [5.0, 1.0, 1.0, 1.0]]).log()
    chosen = torch.tensor([[3, 2, 1], [-1, 3, -1]], dtype=torch.int32)
    routing = LayerRouting(chosen, torch.ones(2, 3), logits, count(chosen, 4), sequence_lengths=2)
    shares, mean = torch.tensor([2.0, 1, 1, 0]) / 4, logits.softmax(-1).mean(0)
    torch.testing.assert_close(sequence_load_balancing_loss(routing), 4 * (shares * mean).sum())


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("name", LOSSES)
def test_documented_value_at_perfect_balance(name, top_k):
    logits = torch.zeros(12, 6, dtype=torch.float64) if name == "z" else balanced_logits(6, 12)
    routing = routing_of(logits, top_k, sequence_lengths=6)
    if name == "global":
        value = global_load_balancing_loss(routing, torch.full((6,), 12345))
    else:
        value = LOSSES[name](routing)
    expected = torch.tensor(balanced_value(name, 6), dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_ties_are_finite_and_follow_the_choice(name):
    """With equal logits, the first experts are chosen, and the probabilities are even."""
    value, gradient = with_gradient(LOSSES[name], torch.zeros(8, 5, dtype=torch.float64), sequence_lengths=4)
    assert gradient.isfinite().all()
    # Even probabilities give 1 for any shares; importance is 1/2 for each of two experts out of five.
    expected = {"importance": 5 / 2 - 1, "z": balanced_value("z", 5)}.get(name, 1.0)
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [None, 100])
@pytest.mark.parametrize("padding", [0.0, 50.0, torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_nothing(name, padding, num_tokens):
    """Three sequences of 5, 3 and 7 tokens, padded to 7, one of them on the left."""
    lengths = torch.tensor([5, 3, 7])
    logits = random_logits(15)
    if name == "importance" and not math.isfinite(padding):
        pytest.skip("the softmax behind the routing weights, not the loss, brings NaN into the gradient")
    loss = partial(LOSSES[name], num_tokens=num_tokens)
    value, gradient = with_gradient(loss, logits, sequence_lengths=lengths)
    position = torch.arange(7)
    token_mask = torch.stack([position < 5, position >= 4, position < 7]).flatten()
    padded = torch.full((21, 6), padding, dtype=torch.float64)
    padded[token_mask] = logits
    padded_value, padded_gradient = with_gradient(loss, padded, sequence_lengths=7, token_mask=token_mask)
    torch.testing.assert_close(padded_value, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded_gradient[token_mask], gradient, rtol=1e-10, atol=1e-12)
    assert not padded_gradient[~token_mask].any()


@pytest.mark.parametrize("name", SPLIT_INVARIANT)
def test_splitting_between_sequences_changes_nothing(name):
    """Given the total number of tokens, losses and gradients of unequal parts add up to those of the whole."""
    lengths, logits = torch.tensor([5, 3, 7, 9]), random_logits()
    value, gradient = with_gradient(LOSSES[name], logits, sequence_lengths=lengths)
    for num_tokens in (24, torch.tensor(24), torch.tensor([24.0])):
        loss = partial(LOSSES[name], num_tokens=num_tokens)
        parts = [
            with_gradient(loss, logits[:8], sequence_lengths=lengths[:2]),
            with_gradient(loss, logits[8:], sequence_lengths=lengths[2:]),
        ]
        torch.testing.assert_close(sum(part[0] for part in parts), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["switch", "switch_sigmoid", "importance"])
def test_splitting_matters_where_it_is_documented(name):
    """Two calls with opposite preferences are each unbalanced, but balanced together."""
    logits = torch.cat([balanced_logits(6, 6)[:3], balanced_logits(6, 6)[3:]])
    whole = LOSSES[name](routing_of(logits, 1))
    parts = [LOSSES[name](routing_of(part, 1), num_tokens=6) for part in logits.split(3)]
    torch.testing.assert_close(whole.item(), balanced_value(name, 6))
    assert sum(parts) > whole + 0.1
    # A call's share of `num_tokens` is a factor.
    torch.testing.assert_close(parts[0], LOSSES[name](routing_of(logits[:3], 1)) / 2)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens(name):
    for sequence_lengths in (6, torch.tensor([0, 0])):
        value, gradient = with_gradient(LOSSES[name], random_logits(0), sequence_lengths=sequence_lengths)
        assert value == 0 and gradient.shape == (0, 6)
    nothing_but_padding = torch.zeros(6, dtype=torch.bool)
    value, gradient = with_gradient(LOSSES[name], random_logits(6), sequence_lengths=6, token_mask=nothing_but_padding)
    assert value == 0 and not gradient.any()


def test_sequences_of_no_tokens_and_tokens_of_no_sequence():
    logits = random_logits()
    lengths = torch.tensor([5, 0, 3, 7], dtype=torch.int32)
    value, gradient = with_gradient(sequence_load_balancing_loss, logits, sequence_lengths=lengths)
    expected, expected_gradient = with_gradient(
        sequence_load_balancing_loss, logits[:15], sequence_lengths=torch.tensor([5, 3, 7])
    )
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[:15], expected_gradient, rtol=1e-12, atol=1e-15)
    assert not gradient[15:].any()


@pytest.mark.parametrize("name", ["switch", "sequence", "importance"])
def test_slots_beyond_the_capacity_count_as_chosen(name):
    """An expert at its capacity is not balanced."""
    routing = routing_of(random_logits(), sequence_lengths=6)
    dropped = routing.topk_experts.clone()
    dropped[::2] = -1
    limited = routing._replace(
        topk_experts=dropped,
        tokens_per_expert=count(dropped, 6),
        chosen_experts=routing.topk_experts,
        chosen_per_expert=routing.tokens_per_expert,
    )
    assert torch.equal(LOSSES[name](limited), LOSSES[name](routing))


@pytest.mark.parametrize("name", ["switch_sigmoid", "sequence_sqrt_softplus"])
def test_probabilities_survive_scores_that_vanish(name):
    """The float32 scores of -200 are 0, but cause no NaN."""
    logits = torch.full((4, 3), -200.0)
    value, gradient = with_gradient(LOSSES[name], logits, sequence_lengths=2)
    assert value == 0 and not gradient.any()


ROUTING = routing_of(random_logits())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_balancing_loss(ROUTING, score="tanh"), r"load_balancing_loss: score must be one of .*'tanh'"),
        (
            lambda: sequence_load_balancing_loss(ROUTING, count="bias"),
            r"count must be one of \('scores', 'choices'\), got 'bias'",
        ),
        (lambda: load_balancing_loss(ROUTING, num_tokens=-1), "num_tokens must not be negative, got -1"),
        (lambda: router_z_loss(ROUTING, num_tokens=True), "num_tokens must not be negative, got True"),
        (lambda: importance_loss(ROUTING, num_tokens=torch.ones(2)), r"num_tokens must be a scalar, got \[2\]"),
        (lambda: sequence_load_balancing_loss(ROUTING), "must have sequence_lengths, got None"),
        (
            lambda: sequence_load_balancing_loss(ROUTING._replace(sequence_lengths=7)),
            "must form sequences of sequence_lengths=7, got 24 tokens",
        ),
        (
            lambda: sequence_load_balancing_loss(ROUTING._replace(sequence_lengths=torch.ones(3))),
            r"sequence_lengths must be \[N\] int32 or int64 on cpu with N > 0, got \[3\] torch.float32",
        ),
        (
            lambda: sequence_load_balancing_loss(ROUTING._replace(sequence_lengths=torch.ones(0).int())),
            r"with N > 0, got \[0\]",
        ),
        (
            lambda: global_load_balancing_loss(ROUTING, torch.ones(5).int()),
            r"expert_counts must be \[E=6\] integers, got \[5\] torch.int32",
        ),
        (lambda: global_load_balancing_loss(ROUTING, torch.ones(6)), r"integers, got \[6\] torch.float32"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
