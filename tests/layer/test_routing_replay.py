"""Choices captured in one run and replayed in another."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec, reference, routing_weights
from moe_kernels.routing import routers
from moe_layers import (
    BalanceLosses,
    MoEFeedForward,
    RoundRobinAssignment,
    RoutingReplay,
    TopKRouter,
    observe,
    save_routing,
)

from ..layers import make_x, moe_layer
from ..tiers import default_tier
from ..unit.routing.test_router_presets import SPECS, draw

BIASED = RouterSpec.ernie(normalize=False)
ROUTERS = {"plain": {}, "biased": {"router": BIASED}, "normed": {"router": RouterSpec.gemma4(1e-6)}}


class Model(torch.nn.Module):
    """Two residual layers, in checkpointed regions set by `checkpoint`."""

    def __init__(self, device, seed=0, dtype=torch.float32, implementation="reference", **options):
        super().__init__()
        torch.manual_seed(seed)
        factory = {"init_std": 0.3, "implementation": implementation, "device": device, "dtype": dtype}
        self.layers = torch.nn.ModuleList(moe_layer(16, 8, 5, 2, **factory, **options) for _ in range(2))
        self.checkpoint = lambda layer, x: layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.checkpoint(lambda x, layer=layer: layer(x).sin(), x)
        return x


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def capture(model, *batches):
    record = RoutingReplay()
    with record.capture(model), torch.no_grad():
        for x in batches:
            model(x)
    return record


@pytest.mark.parametrize("name", SPECS)
def test_weights_of_its_own_choice_are_the_routers(name):
    spec = SPECS[name]
    top_k = 2 if name == "sparsemixer" else 5
    logits, bias = draw(spec, dtype=torch.float64)
    leaf = logits.requires_grad_()
    routed = reference.topk_routing(leaf, top_k, spec, bias)
    weights = routing_weights(routed.logits, routed.topk_experts, spec)
    torch.testing.assert_close(weights, routed.topk_weights, rtol=1e-12, atol=1e-14)
    dweights = torch.randn_like(weights)
    actual, expected = (
        torch.autograd.grad(w, leaf, dweights, retain_graph=True) for w in (weights, routed.topk_weights)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_weights_of_any_choice(name):
    """Compare with loops over the scores of all experts, and run gradcheck."""
    spec = SPECS[name]
    if name == "sparsemixer":
        pytest.skip("by hand below")
    logits = draw(spec, 6, 12, dtype=torch.float64)[0]
    experts = torch.rand(6, 12, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :3].int()
    exponentials = logits.exp()
    scores = {
        "softmax": exponentials / exponentials.sum(1, keepdim=True),
        "sigmoid": exponentials / (1 + exponentials),
        "sqrt_softplus": (1 + exponentials).log().sqrt(),
    }[spec.score]
    for t in range(6):
        chosen = [scores[t, e].item() for e in experts[t]]
        norm = sum(s**spec.norm_power for s in chosen) ** (1 / spec.norm_power) + spec.norm_epsilon
        norm = max(norm, spec.norm_minimum) if spec.normalize else 1.0
        expected = [spec.scale * s / norm for s in chosen]
        assert routing_weights(logits, experts, spec)[t].tolist() == pytest.approx(expected, rel=1e-12)
    torch.autograd.gradcheck(lambda logits: routing_weights(logits, experts, spec), logits.requires_grad_())


def test_sparsemixer_weights_by_hand():
    """The first choice is not the highest logit. The threshold is relative to it, and all higher logits pass."""
    logits = torch.tensor([[4.0, 3.8, 2.0]], dtype=torch.float64)
    weights = routing_weights(logits, torch.tensor([[1, 0]]).int(), RouterSpec.phimoe(0.1))
    first = 1 / (1 + torch.exp(torch.tensor(0.2, dtype=torch.float64)))
    torch.testing.assert_close(weights, torch.stack([first, torch.ones_like(first)])[None])


def test_gradients_reach_the_scores_that_share_a_softmax():
    """Unnormalised weights are shares of all experts, so logits of unchosen experts also change them."""
    logits, experts = draw(BIASED, 4, 5, dtype=torch.float64)[0].requires_grad_(), torch.tensor([[0, 3]] * 4).int()
    (gradient,) = torch.autograd.grad(routing_weights(logits, experts, BIASED).sum(), logits)
    assert (gradient != 0).all()
    (gradient,) = torch.autograd.grad(routing_weights(logits, experts, RouterSpec()).square().sum(), logits)
    assert (gradient[:, [0, 3]] != 0).all() and not gradient[:, [1, 2, 4]].any()


def test_weights_of_a_choice_that_no_router_would_make():
    """The probabilities are zero in float32, but the normalised weights are not."""
    logits = torch.tensor([[0.0, 0.0, -200.0, -201.0]])
    weights = routing_weights(logits, torch.tensor([[2, 3]]).int(), RouterSpec())
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]).sub(200).softmax(1))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", default_tier(ROUTERS, {"biased"}))
def test_replaying_ones_own_choice_changes_nothing(name, implementation, device):
    model = Model(device, implementation=implementation, **ROUTERS[name])
    x = make_x(device)
    expected_y = model(x)
    expected_y.sum().backward()
    expected = gradients(model)
    record = capture(model, x)
    assert [len(forwards) for forwards in record.choices.values()] == [1, 1]
    model.zero_grad()
    with record.replay(model):
        y = model(x)
        y.sum().backward()
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(x), expected_y)  # nothing remains of the replay


@pytest.mark.parametrize("name", ROUTERS)
def test_another_model_takes_the_choices_with_its_own_scores(name, device):
    """Compare in float64 with the same layers written as loops over tokens."""
    record = capture(Model(device, **ROUTERS[name]), make_x(device)).to("cpu")
    model = Model(device, seed=5, dtype=torch.float64, **ROUTERS[name])
    x = make_x(device, dtype=torch.float64)
    with record.replay(model):
        y = model(x)
    y.square().sum().backward()
    actual = gradients(model)
    model.zero_grad()

    def by_hand(layer, tokens, choice):
        router, out = layer.router, []
        for token, experts in zip(tokens, choice.tolist(), strict=True):
            seen = token
            if router.input_scale is not None:
                seen = token / (token.square().mean() + 1e-6).sqrt() * router.input_scale / 4
            probabilities = (router.weight @ seen).softmax(0)
            weights = torch.stack([probabilities[e] for e in experts])
            if router.spec.normalize:
                weights = weights / weights.sum()
            if router.per_expert_scale is not None:
                weights = weights * torch.stack([router.per_expert_scale[e] for e in experts])
            total = 0
            for weight, e in zip(weights, experts, strict=True):
                gate, up = (layer.experts.w_up[e] @ token).chunk(2)
                total = total + weight * (layer.experts.w_down[e] @ (torch.nn.functional.silu(gate) * up))
            out.append(total)
        return torch.stack(out)

    tokens = x.view(-1, 16)
    own = model.layers[0](x, return_routing=True)[1].topk_experts
    assert not torch.equal(own.cpu(), record.choices["layers.0.router"][0])
    for i, layer in enumerate(model.layers):
        tokens = tokens + by_hand(layer, tokens, record.choices[f"layers.{i}.router"][0]).sin()
    torch.testing.assert_close(y.view(-1, 16), tokens, rtol=1e-10, atol=1e-10)
    tokens.square().sum().backward()
    torch.testing.assert_close(actual, gradients(model), rtol=1e-9, atol=1e-9)


def test_choice_as_an_argument(device):
    """The argument replays a choice in one layer. Padding and capacity limit it like the router's own choice."""
    layer = Model(device, capacity=2).layers[0]
    x = make_x(device)
    token_mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    token_mask[0, 2] = False
    y, routing = layer(x, token_mask=token_mask, return_routing=True)
    own = layer.router(x.view(-1, 16)).topk_experts
    same_y, same = layer(x, token_mask=token_mask, return_routing=True, topk_experts=own)
    torch.testing.assert_close(same_y, y)
    assert torch.equal(same.topk_experts, routing.topk_experts) and torch.equal(same.choices, routing.choices)
    assert torch.equal(layer(x, topk_experts=(own + 1) % 5, return_routing=True)[1].choices, (own + 1) % 5)


@pytest.mark.parametrize("name", SPECS)
def test_slots_of_no_expert_weigh_nothing(name):
    """Slots of -1, or of an id beyond the experts, have weight zero. Other slots are weighted as if they were alone."""
    spec = SPECS[name]
    logits = draw(spec, 4, 12, dtype=torch.float64)[0].requires_grad_()
    experts = torch.tensor([[4, 7], [-1, 5], [-1, -1], [3, -1]], dtype=torch.int32)
    weights = routing_weights(logits, experts, spec)
    assert torch.equal(weights, reference.routing_weights(logits, experts.where(experts >= 0, 12), spec))
    assert torch.equal(weights[0], routing_weights(logits[:1], experts[:1], spec)[0])
    assert not weights[experts < 0].any()
    if name != "sparsemixer":  # a SparseMixer always chooses two
        torch.testing.assert_close(weights[1:2, 1:], routing_weights(logits[1:2], experts[1:2, 1:], spec))
    else:
        torch.testing.assert_close(weights[1, 1], routing_weights(logits[1:2], experts[1:2].flip(1), spec)[0, 0])
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert gradient.isfinite().all() and not gradient[2].any()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_choice_that_a_masked_layer_returned(name, implementation, device):
    layer = Model(device, implementation=implementation, **ROUTERS[name]).layers[0]
    x, token_mask = make_x(device), torch.ones(3, 4, dtype=torch.bool, device=device)
    token_mask[0, 2] = token_mask[2] = False
    y, routing = layer(x, token_mask=token_mask, return_routing=True)
    assert (routing.choices < 0).any()
    again = layer(x, token_mask=token_mask, topk_experts=routing.choices)
    torch.testing.assert_close(again, y)
    assert torch.equal(layer(x, topk_experts=routing.choices), again)


def test_several_forwards_and_no_tokens(device):
    batches = [make_x(device, shape, seed) for seed, shape in enumerate([(2, 3, 16), (0, 16), (5, 16)])]
    sampler, model = Model(device), Model(device, seed=5)
    record = capture(sampler, *batches)
    again = RoutingReplay()
    with record.replay(model), again.capture(model):
        for x in batches:
            model(x)
    for name, forwards in record.choices.items():
        assert [len(choice) for choice in forwards] == [6, 0, 5]
        assert all(map(torch.equal, again.choices[name], forwards))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_not_captured(use_reentrant, device):
    model, x = Model(device), make_x(device)
    expected = capture(model, x).choices
    model.checkpoint = lambda layer, x: checkpoint(layer, x, use_reentrant=use_reentrant)
    record = RoutingReplay()
    with record.capture(model):
        model(x.requires_grad_()).sum().backward()
    assert {name: len(forwards) for name, forwards in record.choices.items()} == dict.fromkeys(expected, 1)
    assert all(torch.equal(record.choices[name][0], expected[name][0]) for name in expected)


@pytest.mark.parametrize(
    ("implementation", "order"),
    default_tier([("triton", (0, 1)), ("reference", (0, 1)), ("reference", (1, 0))], lambda case: case[0] != "triton"),
)
def test_replay_of_two_micro_batches_in_flight(implementation, order, device):
    """After both forwards, each backward's recomputation uses the choice of its own forward."""
    batches = [make_x(device, seed=seed) for seed in range(2)]
    record = capture(Model(device), *batches)
    losses = BalanceLosses(switch=0.1, sequence=0.1, global_batch=0.1, importance=0.1, z=0.1)
    model = Model(device, seed=5, implementation=implementation, balance_losses=losses, router=BIASED)

    def run():
        model.zero_grad()
        with record.replay(model):
            outputs = [model(x) for x in batches]
            for i in order:
                outputs[i].sum().backward()
        return gradients(model)

    expected = run()
    model.checkpoint = partial(checkpoint, use_reentrant=False, context_fn=save_routing)
    assert all(map(torch.equal, run(), expected))


def test_checkpointing_without_saved_routing_is_refused(device):
    model, x = Model(device), make_x(device)
    record = capture(model, x)
    model.checkpoint = partial(checkpoint, use_reentrant=False)
    with (
        pytest.raises(ValueError, match="a checkpointed region must have context_fn=save_routing"),
        record.replay(model),
    ):
        model(x).sum().backward()


@pytest.mark.parametrize("context", [{}, {"context_fn": save_routing}])
def test_backward_behind_the_replay_is_an_error(context, device):
    """The recomputation would make a choice of its own. PyTorch detects the difference and raises an error."""
    model, x = Model(device), make_x(device)
    record = capture(Model(device, seed=5), x)
    model.checkpoint = partial(checkpoint, use_reentrant=False, **context)
    with record.replay(model):
        y = model(x)
    with pytest.raises((RuntimeError, torch.utils.checkpoint.CheckpointError)):
        y.sum().backward()


def test_bad_records(device):
    model, x = Model(device), make_x(device)
    record = capture(model, x)
    with pytest.raises(ValueError, match=r"choices of a must be \[T, K\] int32, got \[3\] torch.int32"):
        RoutingReplay({"a": [torch.ones(3).int()]})
    with pytest.raises(ValueError, match=r"got \[3, 2\] torch.int64"):
        RoutingReplay({"a": [torch.ones(3, 2).long()]})
    with pytest.raises(ValueError, match=r"got none of \['router'\] and unexpected \['layers.0.router', 'layers.1"):
        record.replay(model.layers[0]).__enter__()
    with pytest.raises(
        ValueError, match="replay: the model must have a TopKRouter or MoE blocks of transformers, got none"
    ):
        record.replay(torch.nn.Linear(2, 2)).__enter__()
    with pytest.raises(ValueError, match="some router of the model must run, got none"), record.capture(model):
        pass
    with pytest.raises(ValueError, match=r"layers.0.router must run 1 times, .* got 0"), record.replay(model):
        pass
    with pytest.raises(ValueError, match=r"layers.0.router must run 1 times, .* got one more"), record.replay(model):
        model(x)
        model(x)
    with pytest.raises(ValueError, match=r"choice 0 of .* must be \[8, 2\], got \[12, 2\]"), record.replay(model):
        model(x[:2])
    assert torch.equal(capture(model, x).choices["layers.0.router"][0], record.choices["layers.0.router"][0])


LOSSES = BalanceLosses(switch=1.0, sequence=1.0, importance=1.0, count="choices")
GIVEN = {
    **ROUTERS,
    "losses": {"balance_losses": LOSSES},
    "capacity": {"capacity": 1},
    "zero experts": {"num_zero_experts": 3},
    "sparsemixer": {"router": RouterSpec.phimoe(0.1)},
    "round robin": {"assignment": RoundRobinAssignment()},
}


@pytest.mark.parametrize("form", GIVEN)
def test_ids_that_cannot_be_read_reach_no_expert(form, device, monkeypatch):
    """On a GPU, ids beyond the experts equal -1, in the layer, its losses, its counts and its statistics."""
    monkeypatch.setattr(routers, "can_be_read", lambda tensor: False)
    layer, x = moe_layer(16, 8, 5, 2, device=device, **GIVEN[form]), make_x(device, (2, 4, 16))
    given = torch.tensor([[0, 8], [99, 1], [-1, 2], [9, 2**31 - 1]] * 2, dtype=torch.int32, device=device)
    results = []
    for choice in (given, given.where(given < 8, -1)):
        observer = observe(layer)[""]
        leaf = x.clone().requires_grad_()
        y, routing = layer(leaf, topk_experts=choice, return_routing=True)
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        results.append([y, dx, *routing[:4], observer.read().tokens_per_expert])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_an_assignments_ids_are_checked_on_a_cpu():
    class Beyond(RoundRobinAssignment):
        def __call__(self, routed, spec, token_mask):
            return super().__call__(routed, spec, token_mask)._replace(topk_experts=routed.topk_experts + 5)

    layer = MoEFeedForward(8, 4, 5, 2, assignment=Beyond())
    with pytest.raises(ValueError, match="Beyond: topk_experts must be below the 5 experts"):
        layer(torch.zeros(3, 8))


def test_bad_choices():
    router, tokens = TopKRouter(8, 5, 2), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"TopKRouter: topk_experts must be \[3, 2\], got \[3, 1\]"):
        router(tokens, torch.zeros(3, 1).int())
    with pytest.raises(ValueError, match=r"topk_experts must be torch.int32, got torch.int64"):
        router(tokens, torch.zeros(3, 2).long())
    with pytest.raises(ValueError, match=r"logits must be \[T, E\]"):
        routing_weights(torch.zeros(3), torch.zeros(3, 2).int(), RouterSpec())
    with pytest.raises(ValueError, match=r"logits must be torch.float32 or torch.float64"):
        routing_weights(torch.zeros(3, 5).half(), torch.zeros(3, 2).int(), RouterSpec())
    rule = r": topk_experts must be below the 5 experts, or -1 for no expert, got 9"
    for op in (MoEFeedForward(8, 4, 5, 2), router):
        with pytest.raises(ValueError, match=f"TopKRouter{rule}"):
            op(tokens, topk_experts=torch.tensor([[0, 1], [5, 9], [2, -1]], dtype=torch.int32))
    with pytest.raises(ValueError, match=f"routing_weights{rule}"):
        routing_weights(torch.zeros(1, 5), torch.tensor([[9, 0]], dtype=torch.int32), RouterSpec())
    with pytest.raises(ValueError, match="chooses top_k=2 experts, got 3"):
        routing_weights(torch.zeros(3, 5), torch.zeros(3, 3).int(), RouterSpec.phimoe(0.1))


def test_rollouts_of_all_tokens(device):
    """A layer cannot fall back to its own choice, so no token may lack experts."""
    model, x = Model(device), make_x(device, (10, 16))
    arrays = [torch.rand(n, 2, 5).argsort(2)[..., :2] for n in (4, 6)]
    record = RoutingReplay.from_rollouts(model, arrays)
    own = RoutingReplay()
    with record.replay(model), own.capture(model):
        model(x)
    for layer, (choice,) in enumerate(own.choices.values()):
        assert torch.equal(choice.cpu(), torch.cat(arrays)[:, layer].int())
    with pytest.raises(
        ValueError, match=r"layers.0.router must have experts for every token, .* got none for 2 tokens"
    ):
        RoutingReplay.from_rollouts(model, arrays, lengths=[5, 7])
