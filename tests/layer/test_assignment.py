"""Assignments that ignore other tokens: round robin, by a function, from pairs; and noise."""

import copy

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import (
    BalanceLosses,
    CapacityFactor,
    CustomAssignment,
    ExpertChoice,
    MoEFeedForward,
    RoundRobinAssignment,
    RouterNoise,
    RoutingReplay,
    TokenExpertPairs,
    importance_loss,
    load_balancing_loss,
    save_routing,
    sequence_load_balancing_loss,
)
from moe_layers.routing.assignment import slots_of_pairs

from ..tiers import default_tier
from .assignment_cases import SIZES, check_equals_dense, count_rows, dense, make_layer, make_x


def above_mean(logits):
    """Return a pair for each logit above its token's mean, then pairs without a token, so that sizes are static."""
    num_tokens, num_experts = logits.shape
    tokens = torch.arange(num_tokens, device=logits.device)[:, None].expand(logits.shape)
    experts = torch.arange(num_experts, device=logits.device, dtype=torch.int32).expand(logits.shape)
    taken = logits > logits.mean(1, keepdim=True)
    tokens = torch.where(taken, tokens, -1)
    order = tokens.flatten().argsort(descending=True, stable=True)  # not in token order
    return TokenExpertPairs(*(t.flatten()[order] for t in (tokens, experts, logits.sigmoid())))


def first_two(logits):
    """Assign experts 0 and 2; odd tokens get only expert 2."""
    odd = torch.arange(len(logits), device=logits.device) % 2 == 1
    first = torch.where(odd, -1, 0).int()
    return torch.stack([first, torch.full_like(first, 2)], 1), logits[:, :2].sigmoid()


ASSIGNMENTS = {"forced": RoundRobinAssignment(), "slots": first_two, "pairs": above_mean}


@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("options", [{}, {"router": RouterSpec.llama4(), "bias": True}], ids=["", "on_input"])
def test_equals_the_dense_formula(name, options, device):
    check_equals_dense(device, assignment=ASSIGNMENTS[name], **options)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_gradcheck(name, device):
    layer = make_layer(device, 3, 1, d_model=8, assignment=ASSIGNMENTS[name], implementation="reference")
    x = make_x(device, (4, 8)).requires_grad_()
    assert gradcheck(layer, (x,))


@pytest.mark.parametrize(("num_experts", "top_k"), [*SIZES, (7, 3)])
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
def test_forced_balance_is_even(num_tokens, num_experts, top_k, device):
    layer = make_layer(device, num_experts, top_k, assignment=RoundRobinAssignment())
    mask = torch.ones(num_tokens, dtype=torch.bool, device=device)
    mask[2:5] = False
    y, routing = layer(make_x(device, (num_tokens, 32)), return_routing=True, token_mask=mask)
    assert y.shape == (num_tokens, 32)
    assert routing.tokens_per_expert.sum() == mask.sum() * top_k
    assert routing.tokens_per_expert.max() - routing.tokens_per_expert.min() <= 1
    assert all(len(set(experts)) == top_k for experts in routing.topk_experts[mask].tolist())


def test_forced_balance_has_the_weights_of_the_router(device):
    layer = make_layer(device, assignment=RoundRobinAssignment(), router=RouterSpec.deepseek_v3(3, 2, scale=2.0))
    _, routing = layer(make_x(device), return_routing=True)
    scores = routing.logits.sigmoid().gather(1, routing.topk_experts.long())
    torch.testing.assert_close(routing.topk_weights, 2 * scores / scores.sum(1, keepdim=True))


def test_pairs_worked_by_hand(device):
    # Token 2 appears four times, twice more than allowed. Token 3, expert -1 and token -1 do not exist.
    tokens = torch.tensor([2, 0, 2, 3, 1, 2, -1, 2], device=device)
    experts = torch.tensor([1, 0, 1, 0, -1, 4, 0, 3], device=device, dtype=torch.int32)
    weights = torch.arange(1.0, 9.0, device=device, requires_grad=True)
    slots, slot_weights = slots_of_pairs(TokenExpertPairs(tokens, experts, weights), 3, 2)
    assert slots.tolist() == [[0, -1], [-1, -1], [1, 1]]
    assert slot_weights.tolist() == [[2, 0], [0, 0], [1, 3]]
    slot_weights.sum().backward()
    assert weights.grad.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_pairs_of_no_expert_take_no_place(device):
    pairs = TokenExpertPairs(
        torch.tensor([0, 0, 1, 1], device=device),
        torch.tensor([6, 1, -1, 2], device=device, dtype=torch.int32),  # experts are 0 to 5
        torch.ones(4, device=device, dtype=torch.float64),
    )
    assignment = CustomAssignment(lambda logits: pairs, max_experts_per_token=1)
    routing = make_layer(device, 6, 2, assignment=assignment)(make_x(device, (2, 32)), return_routing=True)[1]
    assert routing.topk_experts.tolist() == [[1], [2]]


def test_losses_count_what_comes_twice_twice(device):
    """An expert in two slots of a token gets the sum of their weights, in losses and in the output."""
    x = make_x(device, (5, 32))
    twice = torch.tensor([[1, 1, 0], [2, 3, 2], [0, 4, 5], [5, 5, 1], [3, 2, 2]], device=device, dtype=torch.int32)
    weights = torch.linspace(0.2, 1.6, 15, device=device, dtype=torch.float64).view(5, 3).requires_grad_()
    routing = make_layer(device, 6, 2, assignment=lambda logits: (twice, weights))(x, return_routing=True)[1]
    importance = torch.zeros(6, device=device, dtype=torch.float64).index_add(0, twice.flatten(), weights.flatten())
    expected = importance.var(correction=0) / importance.mean() ** 2
    loss = importance_loss(routing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, weights, retain_graph=True) for each in (loss, expected)))
    of_one_sequence = routing._replace(sequence_lengths=torch.tensor([5], device=device))
    of_choices = sequence_load_balancing_loss(of_one_sequence, count="choices")
    torch.testing.assert_close(of_choices, load_balancing_loss(routing))


def test_every_pair_adds_its_term(device):
    """Each pair adds its term once, duplicates included, in any order."""
    pairs = TokenExpertPairs(
        torch.tensor([4, 0, 4, 2, 4, 2, 0], device=device),
        torch.tensor([5, 1, 0, 3, 5, 2, 1], device=device, dtype=torch.int32),
        torch.linspace(0.3, 1.7, 7, device=device, dtype=torch.float64),
    )
    x = make_x(device, (6, 32))
    y = make_layer(device, assignment=lambda logits: pairs)(x)
    alone = make_layer(device, 6, 1, assignment=lambda logits: one)
    total = torch.zeros_like(x)
    for pair in range(7):
        one = TokenExpertPairs(*(tensor[pair : pair + 1] for tensor in pairs))
        total += alone(x)
    torch.testing.assert_close(y, total)
    assert not y[[1, 3, 5]].any()


@pytest.mark.parametrize("num_pairs", [0, 5])
def test_rows_are_pairs(num_pairs, device, monkeypatch):
    rows = count_rows(monkeypatch)

    def route(logits):
        tokens = torch.arange(num_pairs, device=device)
        return TokenExpertPairs(tokens, tokens.int() % 6, logits[:num_pairs, 0])

    layer = make_layer(device, dtype=torch.float32, assignment=route, implementation="triton")
    y = layer(make_x(device, (9, 32), torch.float32).requires_grad_())
    y.sum().backward()
    assert set(rows) == {max(num_pairs, 1)}
    assert y[:num_pairs].any(1).all() and not y[num_pairs:].any()


def test_ids_that_do_not_exist_reach_no_expert_and_no_loss(device):
    def route(logits):
        experts = torch.tensor([[0, 6], [-7, 1], [99, -1]], dtype=torch.int32, device=device)
        weights = logits[:, :2].sigmoid()
        return experts, torch.where((experts >= 0) & (experts < 6), weights, torch.nan)

    losses = BalanceLosses(switch=1.0, sequence=1.0, importance=1.0, z=1.0)
    layer = make_layer(device, assignment=route, balance_losses=losses, router=RouterSpec.gemma4(1e-6))
    x = make_x(device, (1, 3, 32)).requires_grad_()
    y, routing = layer(x, return_routing=True)
    assert routing.topk_experts.tolist() == [[0, -1], [-1, 1], [-1, -1]]
    y.sum().backward()
    assert y.isfinite().all() and not y[0, 2].any()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *layer.parameters()))


def test_capacity_acts_on_an_assignment(device):
    layer = make_layer(device, assignment=RoundRobinAssignment(), capacity=CapacityFactor(0.5))
    _, routing = layer(make_x(device, (1, 24, 32)), return_routing=True)
    assert routing.tokens_per_expert.tolist() == [4] * 6 and routing.choices_per_expert.tolist() == [8] * 6
    assert (routing.topk_experts[:12] >= 0).all() and (routing.topk_experts[12:] < 0).all()


def test_forced_balance_is_recorded_and_replayed(device):
    layer, x = make_layer(device, assignment=RoundRobinAssignment()), make_x(device)
    record = RoutingReplay()
    with record.capture(layer):
        y = layer(x)
    plain = make_layer(device)
    with record.replay(plain):
        assert torch.equal(plain(x), y)
    with record.replay(layer):
        assert torch.equal(layer(x), y)
    custom = make_layer(device, assignment=first_two)
    with pytest.raises(ValueError, match="must not be replayed"):
        custom(x, topk_experts=record.choices["router"][0])


def test_noise_acts_in_training_only(device):
    noise = RouterNoise(input_jitter=0.3, gumbel=1.0)
    noisy, plain, x = make_layer(device, noise=noise), make_layer(device), make_x(device)
    assert not torch.equal(noisy(x), noisy(x))
    assert torch.equal(noisy.eval()(x), plain(x))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_jitter_is_seen_by_the_router_alone(implementation, device):
    noise = RouterNoise(input_jitter=0.25)
    layer = make_layer(device, dtype=torch.float32, noise=noise, implementation=implementation)
    x = make_x(device, (50, 32), torch.float32).requires_grad_()
    torch.manual_seed(3)
    y, routing = layer(x, return_routing=True)
    torch.manual_seed(3)
    factors = 1 + 0.25 * (2 * torch.rand(50, 32, device=device) - 1)
    assert 0.75 <= factors.min() < 0.76 and 1.24 < factors.max() < 1.25
    plain = make_layer(device, dtype=torch.float32, implementation=implementation)
    jittered = (x * factors).to(x.dtype)
    torch.testing.assert_close(routing.logits, jittered @ plain.router.weight.T)
    torch.testing.assert_close(y, dense(layer, x, routing))
    tokens = x.detach().requires_grad_()
    routed = plain.router(tokens * factors)
    (dx,) = torch.autograd.grad(routing.logits.square().sum(), x)
    (expected_dx,) = torch.autograd.grad(routed.logits.square().sum(), tokens)
    torch.testing.assert_close(dx, expected_dx)
    assert torch.equal(routing.topk_experts, routed.topk_experts)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("spec", default_tier([None, RouterSpec.ernie(logit_softcap=5.0)], [None]), ids=str)
def test_gumbel_noise_draws_by_probability(spec, implementation, device):
    """A token's first expert is drawn with its probability, and the weights are those without noise."""
    layer = make_layer(
        device, 5, 2, torch.float32, noise=RouterNoise(gumbel=1.0), router=spec, implementation=implementation
    )
    x = make_x(device, (1, 32), torch.float32).expand(4000, 32)
    routed = layer.router(x)
    scores = routed.logits[0].softmax(0)
    shares = torch.stack([(routed.topk_experts[:, 0] == e).double().mean() for e in range(5)])
    if spec is None:
        # Five standard deviations of a frequency in 4000 draws.
        assert ((shares - scores).abs() < 5 * (scores * (1 - scores) / 4000).sqrt()).all()
    chosen = scores.expand(4000, 5).gather(1, routed.topk_experts.long())
    torch.testing.assert_close(routed.topk_weights, chosen / chosen.sum(1, keepdim=True))
    assert torch.equal(routed.logits, layer.eval().router(x).logits)
    assert (routed.topk_experts[:, 0] != routed.topk_experts[:, 1]).all()


@pytest.mark.parametrize("context", [None, save_routing])
def test_recomputation_draws_the_same_noise(context, device):
    layer = make_layer(device, noise=RouterNoise(input_jitter=0.2, gumbel=1.0))
    x = make_x(device).requires_grad_()
    options = {} if context is None else {"context_fn": context}

    def gradients(call):
        torch.manual_seed(5)
        y = call(x)
        torch.manual_seed(6)
        return torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    kept = gradients(layer)
    again = gradients(lambda x: checkpoint(layer, x, use_reentrant=False, **options))
    torch.testing.assert_close(kept, again, rtol=0, atol=0)


def test_layers_with_assignments_are_copied(device):
    layer = make_layer(device, assignment=first_two, noise=RouterNoise(0.1))
    x = make_x(device)
    assert torch.equal(copy.deepcopy(layer).eval()(x), layer.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assignment": "hash"}, "CustomAssignment: route must be a callable that is no nn.Module, got str"),
        ({"assignment": ExpertChoice}, "assignment must be an object or a function, got the class ExpertChoice"),
        ({"assignment": torch.nn.Linear(3, 3)}, "route must be a callable that is no nn.Module, got Linear"),
        (
            {"assignment": RoundRobinAssignment(), "noise": RouterNoise(gumbel=1.0)},
            r"Gumbel noise acts on a top-k choice, .* got gumbel=1\.0",
        ),
        ({"router": RouterSpec.phimoe(0.1), "noise": RouterNoise(gumbel=1.0)}, "not on an assignment or a Sparse"),
    ],
)
def test_bad_construction(options, message):
    with pytest.raises(ValueError, match=message):
        MoEFeedForward(8, 4, 3, 2, **options)


@pytest.mark.parametrize(
    "numbers", [{"input_jitter": -0.1}, {"input_jitter": 1.0}, {"gumbel": -1.0}, {"gumbel": torch.inf}]
)
def test_bad_noise(numbers):
    with pytest.raises(ValueError, match=f"RouterNoise: {next(iter(numbers))} must be"):
        RouterNoise(**numbers)


def test_bad_number_of_pairs():
    with pytest.raises(ValueError, match="max_experts_per_token must be a positive integer, got 0"):
        CustomAssignment(above_mean, max_experts_per_token=0)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (None, "route must return two tensors or TokenExpertPairs, got NoneType"),
        ((torch.zeros(2, 1).int(), torch.ones(2, 1)), "experts and weights"),
        ((torch.zeros(3, 1).int(), torch.ones(3, 2)), "experts and weights"),
        ((torch.zeros(3, 0).int(), torch.ones(3, 0)), "K' > 0"),
        ((torch.zeros(3, 1).long(), torch.ones(3, 1)), "experts must be int32 .* got torch.int64"),
        ((torch.zeros(3, 1).int(), torch.ones(3, 1).half()), "weights float32 or float64, got .* torch.float16"),
        ((torch.zeros(3, 1).int(), torch.ones(3, 1, device="meta")), "tensors on cpu, got cpu and meta"),
    ],
)
def test_bad_slots(slots, message):
    layer = MoEFeedForward(8, 4, 3, 2, assignment=lambda logits: slots)
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(3, 8))


@pytest.mark.parametrize(
    ("tokens", "experts", "message"),
    [
        (torch.zeros(3).int(), torch.zeros(2).int(), r"must be \[P\], got \[\[3\], \[2\], \[2\]\]"),
        (torch.zeros(2).float(), torch.zeros(2).int(), "tokens must be int32 or int64, got torch.float32"),
        (torch.zeros(2).int(), torch.zeros(2).long(), "experts must be int32"),
    ],
)
def test_bad_pairs(tokens, experts, message):
    with pytest.raises(ValueError, match=message):
        slots_of_pairs(TokenExpertPairs(tokens, experts, torch.ones(2)), 3, 2)
