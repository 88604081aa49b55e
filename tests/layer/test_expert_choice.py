"""Expert choice and token rounding: assignments by definition, gradients, and non-causality."""

import math
from fractions import Fraction

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import (
    BalanceLosses,
    ExpertChoice,
    MoEFeedForward,
    RoutingReplay,
    TokenRounding,
    observe,
    save_routing,
    sequence_load_balancing_loss,
)
from moe_layers.memory import saved_bytes

from ..tiers import default_tier, slow
from .assignment_cases import SIZES, check_equals_dense, count_rows, make_layer, make_x

ROUTERS = {
    "normalized": RouterSpec(),
    "probabilities": RouterSpec(normalize=False),
    "sigmoid": RouterSpec.deepseek_v3(scale=2.5),
    "norm": RouterSpec.dbrx(2.0),
    "on_input": RouterSpec.llama4(),
    "per_expert": RouterSpec.gemma4(1e-6),
}
ASSIGNMENTS = {
    "choice": ExpertChoice(),
    "choice_more": ExpertChoice(1.5),
    "nearest": TokenRounding(4),
    "down": TokenRounding(4, "down"),
    "up": TokenRounding(4, "up"),
}


def chosen_by_definition(assignment, scores, top_k, mask):
    """Return [T, E] slots, one expert at a time, from lists of scores."""
    num_tokens, num_experts = len(scores), len(scores[0])
    slots = [[-1] * num_experts for _ in range(num_tokens)]
    real = [t for t in range(num_tokens) if mask[t]]
    top = {t: sorted(range(num_experts), key=lambda e: -scores[t][e])[:top_k] for t in real}
    for e in range(num_experts):
        by_score = sorted(real, key=lambda t: -scores[t][e])
        if isinstance(assignment, ExpertChoice):
            number = math.ceil(Fraction(str(assignment.factor)) * num_tokens * top_k / num_experts)
        else:
            own, multiple = [t for t in by_score if e in top[t]], assignment.multiple
            by_score = own + [t for t in by_score if e not in top[t]]
            tiles = Fraction(len(own), multiple)
            rounded = {"nearest": math.floor(tiles + Fraction(1, 2)), "down": math.floor(tiles), "up": math.ceil(tiles)}
            number = min(rounded[assignment.rounding], len(real) // multiple) * multiple
        for t in by_score[:number]:
            slots[t][e] = e
    return slots


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [*SIZES, (7, 3)])
@pytest.mark.parametrize(
    "assignment",
    default_tier([*ASSIGNMENTS.values(), ExpertChoice(0.3), TokenRounding(3)], list(ASSIGNMENTS.values())[::2]),
    ids=str,
)
def test_takes_whom_the_definition_takes(assignment, num_experts, top_k, ties, masked, device):
    layer = make_layer(device, num_experts, top_k, assignment=assignment)
    if ties:
        torch.nn.init.zeros_(layer.router.weight)
    mask = torch.ones(21, dtype=torch.bool, device=device)
    if masked:
        mask[[0, 3, 4, 11]] = False
    _, routing = layer(make_x(device, (21, 32)), return_routing=True, token_mask=mask)
    expected = chosen_by_definition(assignment, routing.logits.softmax(1).tolist(), top_k, mask.tolist())
    assert routing.topk_experts.tolist() == expected
    assert routing.tokens_per_expert.tolist() == [sum(e in row for row in expected) for e in range(num_experts)]
    if isinstance(assignment, TokenRounding):
        assert not (routing.tokens_per_expert % assignment.multiple).any()


@pytest.mark.parametrize("router", default_tier(ROUTERS, ["normalized", "on_input"]))
@pytest.mark.parametrize("assignment", [ExpertChoice(0.4), TokenRounding(8)], ids=str)
def test_equals_the_dense_formula(assignment, router, device):
    routing = check_equals_dense(device, assignment=assignment, router=ROUTERS[router])
    numbers = (routing.topk_experts >= 0).sum(1)
    assert numbers.min() < 2 and numbers.max() > numbers.min()
    assert numbers.min() == 0 or isinstance(assignment, TokenRounding)


@pytest.mark.parametrize("router", ["normalized", "probabilities", "sigmoid", "norm"])
@pytest.mark.parametrize("assignment", [ExpertChoice(0.5), TokenRounding(2, "down")], ids=str)
def test_gradcheck(assignment, router, device):
    """Some tokens have no experts, so the norm of their weights is zero."""
    options = {"assignment": assignment, "router": ROUTERS[router], "implementation": "reference"}
    layer, x = make_layer(device, 5, 1, d_model=8, **options), make_x(device, (7, 8)).requires_grad_()
    _, routing = layer(x, return_routing=True)
    numbers = (routing.topk_experts >= 0).sum(1)
    assert numbers.min() == 0 and numbers.max() > 0
    assert gradcheck(layer, (x,))


@pytest.mark.parametrize("router", ["normalized", "probabilities", "sigmoid", "norm"])
def test_weights_follow_the_rule_of_the_router(router, device):
    spec = ROUTERS[router]
    layer = make_layer(device, assignment=ExpertChoice(), router=spec)
    _, routing = layer(make_x(device), return_routing=True)
    for logits, experts, weights in zip(routing.logits, routing.topk_experts, routing.topk_weights, strict=True):
        scores = torch.sigmoid(logits) if spec.score == "sigmoid" else logits.softmax(0)
        scores = torch.where(experts >= 0, scores, 0.0)
        if spec.normalize and scores.any():
            scores = scores / torch.linalg.vector_norm(scores, spec.norm_power)
        torch.testing.assert_close(weights, spec.scale * scores)


@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 32), (3, 32)])
def test_few_tokens_and_none(name, shape, device):
    layer = make_layer(device, 3, 1, assignment=ASSIGNMENTS[name])
    x = make_x(device, shape).requires_grad_()
    y, routing = layer(x, return_routing=True)
    y.sum().backward()
    assert x.grad.shape == shape and x.grad.isfinite().all()
    if name.startswith("choice") and x.numel():
        assert (routing.tokens_per_expert >= 1).all()
    else:
        assert not routing.tokens_per_expert.any() and not y.any()


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_padding_changes_nothing_but_the_count(name, device):
    """The contents of padding do not matter, including NaN."""
    layer = make_layer(device, assignment=ASSIGNMENTS[name])
    x, mask = make_x(device, (1, 21, 32)), torch.ones(1, 21, dtype=torch.bool, device=device)
    mask[0, 15:] = False
    y = layer(x, token_mask=mask)
    x[0, 15:] = torch.nan
    again = layer(x, token_mask=mask)
    assert torch.equal(y[0, :15], again[0, :15]) and not again[0, 15:].any()
    if name not in ("choice", "choice_more"):
        torch.testing.assert_close(layer(x[:, :15]), y[:, :15])


@pytest.mark.parametrize("name", ["choice", "nearest"])
def test_nan_in_a_token_stays_there(name, device):
    layer = make_layer(device, assignment=ASSIGNMENTS[name])
    x = make_x(device, (21, 32))
    x[4] = torch.nan
    y, routing = layer(x, return_routing=True)
    others = torch.arange(21, device=device) != 4
    assert (routing.topk_experts[4] >= 0).any() and y[4].isnan().all() and y[others].isfinite().all()


@slow
def test_rows_are_what_experts_take(device, monkeypatch):
    rows = count_rows(monkeypatch)
    x = make_x(device, (21, 32), torch.float32)
    bounds = {ExpertChoice(): 6 * 7, TokenRounding(4): 42 + 6 * 2, TokenRounding(2, "down"): 42}
    for assignment, expected in bounds.items():
        rows.clear()
        make_layer(device, dtype=torch.float32, assignment=assignment, implementation="triton")(x).sum().backward()
        assert set(rows) == {expected}


@pytest.mark.parametrize("name", ["choice", "nearest"])
def test_zero_experts_and_shares(name, device):
    """Zero experts also take tokens, and layers with some of the experts add up to the whole."""
    options = {"assignment": ASSIGNMENTS[name], "num_zero_experts": 2}
    x = make_x(device)
    whole, rest, first = (make_layer(device, 4, 2, **options) for _ in range(3))
    y, routing = whole(x, return_routing=True)
    assert routing.tokens_per_expert[4:].all()
    weights = torch.where(routing.topk_experts >= 4, routing.topk_weights, 0.0).sum(1).view(3, 7, 1)
    first.keep_local_experts(range(1))
    rest.keep_local_experts(range(1, 4))
    torch.testing.assert_close(first(x) + rest(x) - weights * x, y)


@pytest.mark.parametrize("name", ["choice", "nearest"])
def test_is_recorded_and_replayed(name, device):
    layer, x = make_layer(device, assignment=ASSIGNMENTS[name]), make_x(device)
    record = RoutingReplay()
    with record.capture(layer):
        y = layer(x)
    with torch.no_grad():
        layer.router.weight.add_(torch.randn_like(layer.router.weight), alpha=0.5)
    with record.replay(layer):
        _, routing = layer(x, return_routing=True)
    assert torch.equal(routing.topk_experts, record.choices["router"][0])
    assert not torch.equal(layer(x, return_routing=True)[1].topk_experts, routing.topk_experts)
    assert not torch.equal(layer(x, topk_experts=routing.topk_experts), y)  # given ids get other weights
    with pytest.raises(ValueError, match=r"topk_experts must be \[21, 6\], got \[21, 2\]"):
        layer(x, topk_experts=routing.topk_experts[:, :2])


@pytest.mark.parametrize("name", ["choice", "nearest"])
def test_losses_and_counts_of_any_number_of_experts(name, device):
    """A token counts once, with or without experts, and with or without recomputation."""
    losses = BalanceLosses(switch=0.1, sequence=0.1, importance=0.1, z=0.1)
    layer = make_layer(device, assignment=ASSIGNMENTS[name], balance_losses=losses)
    x = make_x(device).requires_grad_()
    observer = observe(layer)[""]
    y, routing = layer(x, return_routing=True)
    assert (routing.topk_experts[:, 0] < 0).any() and observer.read().num_tokens == 21
    sequence = sequence_load_balancing_loss(routing)
    torch.testing.assert_close(sequence, sequence_load_balancing_loss(routing, num_tokens=21))
    leaves = [x, *layer.parameters()]
    kept = torch.autograd.grad(y.square().sum(), leaves)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=save_routing)
    for first, second in zip(kept, torch.autograd.grad(y.square().sum(), leaves), strict=True):
        assert first.isfinite().all() and torch.equal(first, second)


def test_expert_choice_keeps_no_more_rows_than_top_k(device):
    """Beyond the rows of top-k routing, expert choice saves tensors [T, E]: weights and scores in floating point, int64
    indices, two masks and int32 rows."""
    sizes = {"d_model": 128, "d_ff": 512, "num_experts": 16, "top_k": 2, "device": device, "implementation": "triton"}
    plain = saved_bytes(MoEFeedForward(**sizes), 1024)
    assert saved_bytes(MoEFeedForward(**sizes, assignment=ExpertChoice()), 1024) < plain + 1024 * 16 * 32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertChoice(0), "ExpertChoice: factor must be a positive number, got 0"),
        (lambda: TokenRounding(0), "TokenRounding: multiple must be a positive integer, got 0"),
        (lambda: TokenRounding(rounding="half"), "TokenRounding: rounding must be one of .*, got 'half'"),
        (lambda: make_layer("cpu", assignment=ExpertChoice(), capacity=3), "there is no capacity with ExpertChoice"),
        (
            lambda: make_layer("cpu", assignment=TokenRounding(), router=RouterSpec.deepseek_v3(2, 1)),
            "MoEFeedForward: TokenRounding needs a router without groups that is no SparseMixer, got .*num_groups=2",
        ),
        (
            lambda: make_layer("cpu", assignment=ExpertChoice(), router=RouterSpec.phimoe(0.1)),
            "ExpertChoice needs a router without groups that is no SparseMixer",
        ),
    ],
)
def test_bad_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()
