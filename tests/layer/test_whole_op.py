"""Router, sort and experts as one op, compared with the same parts one by one."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from moe_kernels import Activation, RouterSpec, reference, sort_by_expert
from moe_kernels.experts.fused import compute_routed
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.experts.operands import ExpertOperands
from moe_kernels.experts.router_gradient import launch_combine_with_router
from moe_kernels.experts.steps import Experts
from moe_kernels.routing import linear_op
from moe_kernels.routing.routers import linear_router
from moe_kernels.runtime.replay import CALLS_BEFORE_RECORD
from moe_kernels.testing import CASES, Case, check_accuracy, make_inputs
from moe_kernels.types import ExpertWeights
from moe_layers import BalanceLosses, LoRA, RouterNoise, RoutingReplay, TopKRouter, save_routing
from moe_layers.balance.routing_statistics import RoutingObserver
from moe_layers.experts.whole_op import runs_as_one_op

from ..dtypes import DTYPES
from ..gpu import waiting_is_an_error
from ..tiers import default_tier
from . import test_feed_forward

PLAIN = RouterSpec()
make_layer = partial(test_feed_forward.make_layer, implementation="triton")


def one_op(tokens, w_router, w_up, w_down, *biases, top_k, spec=PLAIN):
    router = linear_router(spec, top_k, w_router)
    return compute_routed(tokens, router, ExpertWeights(w_up, w_down, *biases)).out


def composed(tokens, w_router, w_up, w_down, *biases, top_k):
    routed = reference.linear_routing(tokens, w_router, top_k)
    permutation = reference.sort_by_expert(routed.topk_experts, len(w_up))
    given = dict(zip(("b_up", "b_down"), biases, strict=False))
    return reference.fused_experts(tokens, routed.topk_weights, permutation, w_up, w_down, **given)


def draw(case, dtype, device, seed=0, *, biases=False):
    """Return (tokens, w_router, w_up, w_down[, b_up, b_down]), with a router gradient as large as the experts'."""
    inputs = make_inputs(case, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed)
    w_router = torch.randn(case.num_experts, case.d_model, device=device, generator=generator) * case.d_model**-0.5
    drawn = [torch.randn(len(w), w.shape[1], device=device, generator=generator) for w in (inputs.w_up, inputs.w_down)]
    return inputs.tokens, w_router.to(dtype), inputs.w_up, inputs.w_down, *(b.to(dtype) for b in drawn if biases)


@pytest.mark.parametrize(
    ("case", "dtype"),
    default_tier(product([*CASES, "aligned"], DTYPES), [("ordinary", DTYPES[-1]), ("odd_sizes", torch.float32)]),
    ids=str,
)
@pytest.mark.parametrize("biases", default_tier([False, True], [True]))
def test_tokens_get_the_gradient_through_experts_and_router(biases, case, dtype, device):
    aligned = Case(300, 512, 256, 6, 3) if device == "cuda" else Case(60, 128, 64, 6, 3)  # interpreted
    case = CASES.get(case, aligned)
    check_accuracy(
        partial(one_op, top_k=case.top_k),
        partial(composed, top_k=case.top_k),
        partial(draw, case, dtype, device, biases=biases),
        ("out", "dtokens", "dw_router", "dw_up", "dw_down", *["db_up", "db_down"] * biases),
    )


def test_errors(device):
    tokens, w_router, w_up, w_down = draw(CASES["ordinary"], torch.float32, device)
    with pytest.raises(ValueError, match=r"linear_routing: w_router must be \[E, D\] with D=64, got \[8, 63\]"):
        one_op(tokens, w_router[:, 1:], w_up, w_down, top_k=2)
    with pytest.raises(ValueError, match="fused_experts: w_down must be"):
        one_op(tokens, w_router, w_up, w_down[1:], top_k=2)
    many = [weight[:1].expand(1025, -1, -1) for weight in (w_up, w_down)]
    with pytest.raises(NotImplementedError, match="at most 1024 experts, got 1025"):
        one_op(tokens, w_router[:1].expand(1025, -1), *many, top_k=2)


def test_dropped_slots_and_nan_rows_add_nothing(device):
    generator = torch.Generator().manual_seed(0)
    weights, dweights = torch.rand(2, 5, 3, generator=generator).to(device)
    rows, w_router = torch.randn(14, 40, generator=generator).to(device), torch.randn(4, 40, generator=generator)
    slot_to_row = torch.arange(15).int().view(5, 3) - 1  # the first slot has no row
    bounds = torch.tensor([0, 3, 3, 9, 14, 14]).int()  # four experts, the second without rows
    row_to_expert = torch.tensor([0, 2, 3]).repeat_interleave(torch.tensor([3, 6, 5]))
    rows[13] = torch.nan
    out = launch_combine_with_router(
        rows, weights, dweights, slot_to_row.to(device), bounds.to(device), w_router.to(device)
    )
    dlogits = (weights * (dweights - (weights * dweights).sum(1, keepdim=True))).flatten()[1:]
    expected = rows + dlogits[:, None] * w_router[row_to_expert].to(device)
    expected = torch.cat([expected.new_zeros(1, 40), expected]).view(5, 3, 40).sum(1)
    assert out[4].isnan().all()
    torch.testing.assert_close(out[:4], expected[:4])


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 6), (37, 3), (512, 10), (4, 0)])
def test_the_expert_of_each_slot_is_found(num_experts, top_k, device):
    """The router's weight is the identity, so each token's gradient is that of its logits."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(33, num_experts, generator=generator).topk(top_k, 1).indices.int().to(device)
    weights, dweights = torch.rand(2, 33, top_k, generator=generator).to(device)
    permutation = sort_by_expert(chosen, num_experts, implementation="triton")
    bounds, slot_to_row = permutation.tile_table.bounds, permutation.slot_to_row
    rows, w_router = torch.zeros(33 * top_k, num_experts, device=device), torch.eye(num_experts, device=device)
    out = launch_combine_with_router(rows, weights, dweights, slot_to_row, bounds, w_router)
    dlogits = weights * (dweights - (weights * dweights).sum(1, keepdim=True))
    torch.testing.assert_close(out, torch.zeros_like(out).scatter(1, chosen.long(), dlogits))


def test_the_router_needs_no_pass_of_its_own(device, monkeypatch):
    """The tokens' gradient through the router takes no product with the gradient of all logits."""
    layer, x, needs = make_layer(device), make_x(device), []
    gradients = linear_op.router_gradients
    monkeypatch.setattr(linear_op, "router_gradients", lambda *args: needs.append(args[4]) or gradients(*args))
    layer(x).sum().backward()
    assert needs == [(False, True)] and x.grad is not None


@pytest.mark.gpu
def test_never_waits(device):
    operands = [leaf.requires_grad_() for leaf in draw(Case(4096, 512, 512, 8, 2), torch.bfloat16, device)]
    with waiting_is_an_error():
        for _ in range(CALLS_BEFORE_RECORD + 2):  # launched, recorded, replayed
            one_op(*operands, top_k=2).sum().backward()


def make_x(device):
    return test_feed_forward.make_x(device).requires_grad_()


def calls_of_the_router(monkeypatch):
    """Record the router's input without a hook, which would change the data flow."""
    seen, forward = [], TopKRouter.forward
    monkeypatch.setattr(
        TopKRouter, "forward", lambda self, tokens, **k: seen.append(tokens) or forward(self, tokens, **k)
    )
    return seen


class OtherRouter(TopKRouter):
    pass


class Noted:
    """An observer that does nothing."""

    def add(self, logits, choices, **others):
        pass


def hooked(part, register):
    def change(layer):
        getattr(getattr(layer, part), register)(lambda *_: None)

    return change


def with_other_router(layer):
    weight = layer.router.weight
    layer.router = OtherRouter(32, 6, 2, implementation="triton", device=weight.device)
    layer.router.weight = weight


def observed(layer):
    layer.observer = RoutingObserver(layer.router, layer.num_experts)


def noted(layer):
    layer.observer = Noted()


def biased(layer):
    for bias in (layer.experts.b_up, layer.experts.b_down):
        nn.init.normal_(bias)


def adapted(layer, dropout):
    layer.add_lora(LoRA(rank=2, alpha=4, dropout=dropout))
    for parameter in layer.experts.lora.parameters():
        nn.init.normal_(parameter, std=0.2)


def other_forward(part):
    def change(layer):
        module = getattr(layer, part)
        module.forward = lambda *args, **given: type(module).forward(module, *args, **given)

    return change


def frozen(layer):
    layer.router.weight.requires_grad_(False)


# Layer options, changes to the layer, call options, and whether one op computes router and experts.
SITUATIONS = {
    "plain": ({}, None, {}, True),
    "shared": ({"shared_d_ff": 16}, None, {}, True),
    "biases": ({"bias": True, "activation": "gpt_oss"}, biased, {}, True),
    "observed": ({}, observed, {}, False),
    "frozen": ({}, frozen, {}, True),
    "biases_and_frozen": ({"bias": True}, lambda layer: (biased(layer), frozen(layer)), {}, True),
    "other_observer": ({}, noted, {}, False),
    "router_forward": ({}, other_forward("router"), {}, False),
    "experts_forward": ({}, other_forward("experts"), {}, False),
    "recompute": ({"recompute": "up"}, None, {}, True),
    "reference": ({"implementation": "reference"}, None, {}, False),
    "probabilities": ({"router": RouterSpec.softmax(normalize=False)}, None, {}, True),
    "losses": ({"balance_losses": BalanceLosses(switch=0.1, z=0.1)}, None, {}, False),
    "capacity": ({"capacity": 2}, None, {}, False),
    "zero_experts": ({"num_zero_experts": 2}, None, {}, False),
    "latent": ({"latent_dim": 16}, None, {}, False),
    "noise": ({"noise": RouterNoise(input_jitter=0.1)}, None, {}, False),
    "batch_invariant": ({"batch_invariant": True}, None, {}, True),
    "sigmoid": ({"router": RouterSpec.deepseek_v3(2, 1)}, nn.Module.eval, {}, True),
    "counted": ({"router": RouterSpec.deepseek_v3(2, 1)}, None, {}, True),
    "bias_of_logits": ({"router": RouterSpec(logit_bias=True)}, None, {}, True),
    "weight_on_input": ({"router": RouterSpec.llama4(), "top_k": 1}, None, {}, True),
    "lora": ({}, partial(adapted, dropout=0.0), {}, True),
    "dropout": ({}, partial(adapted, dropout=0.5), {}, False),
    "other_router": ({}, with_other_router, {}, False),
    "router_hook": ({}, hooked("router", "register_forward_hook"), {}, False),
    "router_pre_hook": ({}, hooked("router", "register_forward_pre_hook"), {}, False),
    "router_backward_hook": ({}, hooked("router", "register_full_backward_hook"), {}, False),
    "experts_hook": ({}, hooked("experts", "register_forward_hook"), {}, False),
    "experts_pre_hook": ({}, hooked("experts", "register_forward_pre_hook"), {}, False),
    "kept_experts": ({}, lambda layer: layer.keep_local_experts(range(2, 5)), {}, False),
    "returned": ({}, None, {"return_routing": True}, False),
    "mask": ({}, None, {"token_mask": torch.ones(3, 7, dtype=torch.bool)}, False),
    "given": ({}, None, {"topk_experts": torch.tensor([[0, 3]] * 21, dtype=torch.int32)}, False),
}
QUICK = {"plain", "biases", "losses", "counted", "returned"}


def gradients(layer, x, given):
    out = layer(x, **given)
    out = out[0] if isinstance(out, tuple) else out
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return out, torch.autograd.grad(out.sin().sum(), wanted)


@pytest.mark.parametrize("name", default_tier(SITUATIONS, QUICK))
def test_one_op_runs_only_where_nothing_reads_the_routing(name, device, monkeypatch):
    options, change, given, is_one_op = SITUATIONS[name]
    layer, x = make_layer(device, **options), make_x(device)
    if change is not None:
        change(layer)
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    calls = calls_of_the_router(monkeypatch)
    torch.manual_seed(2)
    out, actual = gradients(layer, x, given)
    assert len(calls) == (0 if is_one_op else 1)
    counts = layer.router.expert_counts.clone()
    monkeypatch.setattr("moe_layers.feed_forward.runs_as_one_op", lambda *_: False)
    torch.manual_seed(2)
    expected_out, expected = gradients(layer, x, given)
    assert torch.equal(out, expected_out)
    assert torch.equal(2 * counts, layer.router.expert_counts) and (counts.any() == (name == "counted"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"bias": True, "router": RouterSpec(logit_bias=True)}, {"latent_dim": 16}])
def test_plain_tensors_may_stand_for_parameters(options, device):
    """FSDP puts plain tensors into modules for the time of a forward."""
    layer, x = make_layer(device, **options), make_x(device)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    expected = layer(x)
    for name, parameter in list(layer.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        delattr(layer.get_submodule(owner), leaf)
        setattr(layer.get_submodule(owner), leaf, parameter.detach().clone())
    assert not list(layer.parameters()) and torch.equal(layer(x), expected)


def test_hooks_on_all_modules_count(device):
    layer, x = make_layer(device), make_x(device).view(21, 32)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not runs_as_one_op(layer, x)
    finally:
        handle.remove()
    assert runs_as_one_op(layer, x)


def test_a_loss_that_a_hook_adds_reaches_the_tokens(device):
    layer, x = make_layer(device), make_x(device)
    losses = []
    layer.router.register_forward_hook(lambda module, inputs, routed: losses.append(routed.logits.square().sum()))
    (dx,) = torch.autograd.grad(layer(x).sum() + losses[0], x)
    (without,) = torch.autograd.grad(layer(x).sum(), x)
    logits = x.detach().view(21, 32) @ layer.router.weight.detach().T
    of_the_loss = (2 * logits @ layer.router.weight.detach()).view_as(x)
    torch.testing.assert_close(dx - without, of_the_loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", [{}, {"context_fn": save_routing}], ids=len)
def test_a_captured_forward_may_be_recomputed_outside(context, device):
    layer, x = make_layer(device), make_x(device)
    (expected,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False, **context).sin().sum(), x)
    with RoutingReplay().capture(layer):
        out = checkpoint(layer, x, use_reentrant=False, **context)
    (dx,) = torch.autograd.grad(out.sin().sum(), x)
    assert torch.equal(dx, expected)


def test_compiles_to_few_ops_without_graph_break(device, monkeypatch):
    """The router stays an op of its own, because `save_routing` keeps its results."""
    ops = []

    def noted(graph, _):
        targets = (str(node.target) for node in graph.graph.nodes)
        ops.append([target.split(".")[1] for target in targets if target.startswith("moe_")])
        return make_boxed_func(graph.forward)

    layer, x = make_layer(device), make_x(device)
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=noted, bw_compiler=noted))
    wanted = [x, *layer.parameters()]
    actual = torch.autograd.grad(compiled(x).sin().sum(), wanted)
    gradients = [f"experts_{part}_gradients" for part in ("hidden", "down", "up")]
    assert ops == [["linear_routing", "fused_experts"], [*gradients, "linear_routing_gradients"]]
    # Compiled code does not fuse the router's gradient.
    monkeypatch.setattr("moe_layers.feed_forward.runs_as_one_op", lambda *_: False)
    expected = torch.autograd.grad(layer(x).sin().sum(), wanted)
    assert all(map(torch.equal, actual, expected))


def test_opcheck(device):
    operands = [leaf.requires_grad_() for leaf in draw(Case(6, 8, 4, 3, 2), torch.float32, device)]
    tokens, w_router, w_up, w_down = operands
    experts = Experts.of(ExpertWeights(w_up, w_down), Activation("swiglu"))
    for spec in (PLAIN, RouterSpec.softmax(normalize=False)):
        given = ExpertOperands(tokens, experts, router=linear_router(spec, 2, w_router))
        torch.library.opcheck(fused_experts_op.overload, fused_experts_op.schema_arguments(given))


def test_a_router_of_other_experts_is_refused(device):
    w_router, w_up, w_down = (torch.randn(*shape, device=device) for shape in ((5, 8), (4, 8, 8), (4, 8, 4)))
    router = linear_router(RouterSpec(), 2, w_router)
    with pytest.raises(ValueError, match="w_router must have E=4 rows, got 5"):
        compute_routed(torch.randn(3, 8, device=device), router, ExpertWeights(w_up, w_down))
