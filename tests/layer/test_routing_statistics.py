"""Statistics of routing, compared with loops over tokens."""

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import TopKRouter, observe, save_routing
from moe_layers.balance.routing_statistics import RoutingObserver

from ..gpu import assert_never_waits, waiting_is_an_error
from ..layers import make_x, moe_layer
from ..ops import CountedOps
from ..unit.routing.test_router_presets import SPECS
from .balance_cases import count

BIASED = RouterSpec.ernie()


def make_layer(device, **options):
    torch.manual_seed(0)
    implementation = "reference" if device == "cpu" else None
    options = {"num_experts": 6, "top_k": 2, "implementation": implementation, **options}
    layer = moe_layer(d_model=16, d_ff=8, init_std=0.3, device=device, **options)
    if layer.router.selection_bias is not None:
        torch.nn.init.normal_(layer.router.selection_bias, std=0.1)
    return layer


OPTIONS = {
    "plain": {},
    "biased": {"router": BIASED},
    "capacity": {"capacity": 2},
    "zero_experts": {"num_zero_experts": 2},
    "top_1": {"top_k": 1},
    "five": {"num_experts": 5, "top_k": 3},
}


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_loops_over_tokens(name, implementation, device):
    layer = make_layer(device, **OPTIONS[name], implementation=implementation)
    (observer,) = observe(layer).values()
    token_mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    token_mask[1, 2:] = False
    calls = [(make_x(device), {}), (make_x(device, seed=2), {"token_mask": token_mask}), (make_x(device, (0, 16)), {})]
    num_choices, bias = layer.router.num_experts, layer.router.selection_bias
    got, chosen = torch.zeros(num_choices, dtype=torch.int64), torch.zeros(num_choices, dtype=torch.int64)
    entropies, margins, violations, wasted = [], [], [], 0
    for x, facts in calls:
        _, routing = layer(x, return_routing=True, **facts)
        tokens = count(routing.topk_experts.cpu(), num_choices)
        wanted = count(routing.choices.cpu(), num_choices)
        got += tokens
        chosen += wanted
        wasted += sum(math.ceil(n / 128) * 128 - n for n in tokens[: layer.num_experts].tolist())
        mean = wanted.double().mean()
        violations.append(((wanted.max() - mean) / mean).item() if mean else 0.0)
        keys = routing.logits.double() if bias is None else routing.logits.softmax(-1).double() + bias
        for experts, logits, token_keys in zip(routing.choices.tolist(), routing.logits.double(), keys, strict=True):
            if experts[0] >= 0:
                p = logits.softmax(0)
                entropies.append(-(p * p.log()).sum().item())
                others = [key.item() for e, key in enumerate(token_keys) if e not in experts]
                margins.append(min(token_keys[e].item() for e in experts) - max(others))
    statistics = observer.read()
    assert statistics.num_calls == 3
    assert statistics.num_tokens == len(entropies) == 22 and statistics.num_padding_tokens == 2
    assert torch.equal(statistics.tokens_per_expert, got)
    assert torch.equal(statistics.dropped_per_expert, chosen - got)
    assert statistics.num_dropped == (chosen - got).sum() and (statistics.num_dropped > 0) == (name == "capacity")
    assert statistics.dead_experts == tuple(e for e in range(num_choices) if not got[e])
    assert statistics.entropy == pytest.approx(sum(entropies) / 22, rel=1e-6)
    assert statistics.margin == pytest.approx(sum(margins) / 22, rel=1e-5)
    assert statistics.smallest_margin == pytest.approx(min(margins), rel=1e-4) and min(margins) > 0
    assert statistics.max_violation == pytest.approx((chosen.max() / chosen.double().mean() - 1).item())
    assert statistics.max_call_violation == pytest.approx(sum(violations) / 3)
    assert statistics.wasted_rows == wasted


@pytest.mark.parametrize("name", [name for name in SPECS if name != "sparsemixer"])
def test_margin_of_every_router_is_of_its_own_choice(name, device):
    """Chosen experts have higher selection keys than the others, for keys of every kind."""
    router = TopKRouter(16, 12, 3, router=SPECS[name], implementation="reference", device=device)
    torch.manual_seed(0)
    router.reset_parameters(0.3)
    if router.selection_bias is not None:
        torch.nn.init.normal_(router.selection_bias, std=0.1)
    routed = router(make_x(device, (40, 16)))
    observer = RoutingObserver(router, 12)
    observer.add(routed.logits, routed.topk_experts)
    assert 0 < observer.read().smallest_margin < observer.read().margin < 10


def test_margin_of_a_choice_from_excluded_groups(device):
    """Experts 2 and 3 form an excluded group, with keys of -inf. One of them, or none, is chosen."""
    spec = RouterSpec(score="sigmoid", num_groups=2, topk_groups=1)
    router = TopKRouter(16, 4, 2, router=spec, device=device)
    logits = torch.tensor([[3.0, 2.0, -1.0, -2.0]], device=device)
    for experts, expected in (([0, 1, 2], 0.0), ([0, 2, -1], -math.inf), ([0, 1, -1], math.inf)):
        choice = torch.tensor([experts], dtype=torch.int32, device=device)
        observer = RoutingObserver(router, 4)
        observer.add(logits, choice)
        assert observer.read().smallest_margin == observer.read().margin == expected


def test_ties_and_no_cut(device):
    layer = make_layer(device)
    (observer,) = observe(layer).values()
    layer(torch.zeros(5, 16, device=device))
    statistics = observer.read()
    assert statistics.margin == statistics.smallest_margin == 0
    assert statistics.entropy == pytest.approx(math.log(6))
    assert statistics.dead_experts == (2, 3, 4, 5) and statistics.max_violation == pytest.approx(2)
    every = make_layer(device, top_k=6)
    (observer,) = observe(every).values()
    every(make_x(device))
    assert observer.read().margin == observer.read().smallest_margin == math.inf
    assert observer.read().max_violation == 0


def test_reset_and_nothing_observed(device):
    layer = make_layer(device)
    (observer,) = observe(layer).values()
    nothing = observer.read()
    assert nothing.num_calls == nothing.num_tokens == nothing.wasted_rows == nothing.entropy == nothing.margin == 0
    assert nothing.smallest_margin == math.inf and nothing.dead_experts == ()
    layer(make_x(device))
    once = observer.read()
    before = once.tokens_per_expert.tolist()
    layer(make_x(device))
    assert observer.read().num_tokens == 2 * once.num_tokens == 24
    assert once.tokens_per_expert.tolist() == before and sum(before) == 24  # earlier results do not change
    observer.reset()
    layer(make_x(device))
    again = observer.read()
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(again, once, strict=True))
    layer.observer = None
    layer(make_x(device))
    assert observer.read().num_tokens == 12


@pytest.mark.parametrize("options", [{}, {"context_fn": save_routing}], ids=["plain", "saved routing"])
def test_changes_nothing_and_counts_once_under_checkpointing(options, device):
    plain, layer = make_layer(device, router=BIASED), make_layer(device, router=BIASED)
    (observer,) = observe(layer).values()
    x = make_x(device)
    outputs = [plain(x).sin(), checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False, **options)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.sum().backward()
    for a, b in zip(plain.parameters(), layer.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert observer.read().num_calls == 1 and observer.read().num_tokens == 12
    assert observer.read().max_violation == observer.read().max_call_violation
    layer.eval()
    with torch.no_grad():
        layer(x)
    assert observer.read().num_calls == 2


def test_compiles_without_graph_break(device):
    layer, eager = make_layer(device, router=BIASED), make_layer(device, router=BIASED)
    (observer,), (expected,) = observe(layer).values(), observe(eager).values()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        compiled(make_x(device, seed=seed)).sum().backward()
        eager(make_x(device, seed=seed))
    torch.testing.assert_close(observer.read(), expected.read(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"capacity": 2}], ids=["plain", "capacity"])
def test_statistics_are_one_op_on_selection_keys(options, device):
    counts = []
    for is_observed in (False, True):
        layer, x = make_layer(device, **options), make_x(device)
        if is_observed:
            observe(layer)
        with torch.no_grad(), CountedOps() as ops:
            layer(x)
        counts.append(ops.counts)
    assert counts[1] - counts[0] == {"aten::nan_to_num": 1, "moe_layers::add_forward": 1}


def test_a_layer_that_moved_is_observed_again():
    layer = make_layer("cpu")
    observe(layer)
    with pytest.raises(ValueError, match="RoutingObserver: the layer must be on cpu, as when it was observed, got tok"):
        layer.to("meta")(torch.empty(3, 16, device="meta"))


def test_names_and_copies(device):
    model = torch.nn.ModuleDict({"first": make_layer(device), "second": make_layer(device)})
    observers = observe(model)
    assert list(observers) == ["first", "second"]
    copied = copy.deepcopy(model)
    model["first"](make_x(device))
    assert observers["first"].read().num_calls == 1
    assert observers["second"].read().num_calls == copied["first"].observer.read().num_calls == 0
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="observe: the model must have a MoEFeedForward or MoE blocks of transformers"):
        observe(torch.nn.Linear(2, 2))


@pytest.mark.gpu
def test_never_waits_for_the_gpu(device):
    layer = make_layer(device, router=SPECS["deepseek_v3"], num_experts=12, capacity=2)
    (observer,) = observe(layer).values()
    x = make_x(device)
    assert_never_waits(lambda: (layer(x).sum().backward(), observer.reset()))
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        observer.read()
