"""The gradient of the tokens through the routing weights: from the experts' op, or by autograd alone."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_kernels import Activation, RouterSpec, linear_routing, reference, sort_by_expert
from moe_kernels.experts.fused import compute_experts
from moe_kernels.experts.fused_op import ExpertOperands, fused_experts_op
from moe_kernels.experts.router_gradient import launch_combine_with_router
from moe_kernels.experts.rows import Rows
from moe_kernels.experts.steps import Experts
from moe_kernels.routing import softmax
from moe_kernels.testing import CASES, Case, check_accuracy, make_inputs
from moe_kernels.types import ExpertWeights
from moe_layers import BalanceLosses, RouterNoise, RoutingReplay, TopKRouter, save_routing
from moe_layers.balance.routing_statistics import RoutingObserver
from moe_layers.experts.router_gradient import can_fuse_router_gradient

from ..dtypes import DTYPES
from ..gpu import waiting_is_an_error
from ..layers import moe_layer
from ..tiers import default_tier


def experts_op(tokens, weights, permutation, w_up, w_down, *, b_up=None, b_down=None, **options):
    return compute_experts(tokens, weights, permutation, ExpertWeights(w_up, w_down, b_up, b_down), **options)


triton_experts = partial(experts_op, implementation="triton")


def draw(case, dtype, device, seed=0, *, biases=False):
    """Return (tokens, w_router, w_up, w_down[, b_up, b_down]), with a router gradient as large as the experts'."""
    inputs = make_inputs(case, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed)
    w_router = torch.randn(case.num_experts, case.d_model, device=device, generator=generator) * case.d_model**-0.5
    drawn = [torch.randn(len(w), w.shape[1], device=device, generator=generator) for w in (inputs.w_up, inputs.w_down)]
    return inputs.tokens, w_router.to(dtype), inputs.w_up, inputs.w_down, *(b.to(dtype) for b in drawn if biases)


def whole(tokens, w_router, w_up, w_down, *biases, experts, op, passes_on):
    """Compute router and experts for a given choice, because another dtype may choose other experts."""
    logits = (tokens.detach() if passes_on else tokens).float() @ w_router.float().T
    if tokens.dtype == torch.float64:
        logits = tokens @ w_router.T
    weights = logits.gather(1, experts.long()).softmax(1)
    permutation = reference.sort_by_expert(experts, len(w_up))
    given = dict(zip(("b_up", "b_down"), biases, strict=False)) | ({"w_router": w_router} if passes_on else {})
    return op(tokens, weights, permutation, w_up, w_down, **given)


def choice(case, dtype, device, seed=0):
    tokens, w_router, *_ = draw(case, dtype, device, seed)
    return reference.linear_routing(tokens, w_router, case.top_k).topk_experts


@pytest.mark.parametrize("op", [triton_experts, reference.fused_experts])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", default_tier([*CASES, "aligned"], {"ordinary", "odd_sizes"}))
@pytest.mark.parametrize("biases", default_tier([False, True], [True]))
def test_the_op_gives_tokens_the_gradient_of_both_parts(biases, case, dtype, op, device):
    aligned = Case(300, 512, 256, 6, 3) if device == "cuda" else Case(60, 128, 64, 6, 3)  # interpreted
    case = CASES.get(case, aligned)
    experts = choice(case, dtype, device)
    check_accuracy(
        partial(whole, experts=experts, op=op, passes_on=True),
        partial(whole, experts=experts, op=reference.fused_experts, passes_on=False),
        partial(draw, case, dtype, device, biases=biases),
        ("out", "dtokens", "dw_router", "dw_up", "dw_down", *["db_up", "db_down"] * biases),
    )


def test_worked_by_hand(device):
    # Two experts: d/dx of w * a(x) + (1 - w) * b(x) by finite differences, for one token of one number.
    w_up, w_down = torch.tensor([[[2.0], [3.0]], [[1.0], [1.0]]]), torch.tensor([[[1.0]], [[10.0]]])
    w_router, experts = torch.tensor([[0.5], [-0.25]]), torch.tensor([[0, 1]], dtype=torch.int32)
    operands = [t.double() for t in (w_router, w_up, w_down)]
    run = partial(whole, experts=experts, op=reference.fused_experts, passes_on=False)
    high, low = (run(torch.tensor([[1 + step]], dtype=torch.float64), *operands).item() for step in (1e-4, -1e-4))
    tokens = torch.ones(1, 1, device=device, requires_grad=True)
    operands = [t.to(device) for t in (w_router, w_up, w_down)]
    whole(tokens, *operands, experts=experts.to(device), op=triton_experts, passes_on=True).sum().backward()
    assert tokens.grad.item() == pytest.approx((high - low) / 2e-4, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_router": torch.zeros(4, 64)}, r"w_router must be \[E, D\] with E=8, D=64, got \[4, 64\]"),
        ({"w_router": torch.zeros(8, 64).half()}, "w_router"),
        ({"weight_on_input": True}, "weight_on_input=True"),
        ({"batch_invariant": True}, "batch_invariant=True"),
        ({"permutation": sort_by_expert(torch.zeros(72, 2).int(), 8, max_rows=100)}, "100 rows of 144 slots"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_errors(changes, message):
    tokens, w_router, w_up, w_down = draw(CASES["ordinary"], torch.float32, "cpu")
    operands = {"permutation": reference.sort_by_expert(choice(CASES["ordinary"], torch.float32, "cpu"), 8)}
    operands |= {"w_router": w_router, **changes}
    with pytest.raises(ValueError, match=message):
        experts_op(tokens, torch.zeros(72, 2), w_up=w_up, w_down=w_down, **operands)


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
    """The router has a one in its expert's column, so every token's gradient is that of its logits."""
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
    """The tokens get no gradient through a product with the gradient of all logits."""
    layer, x, needs = make_layer(device), make_x(device), []
    gradients = softmax.router_gradients
    monkeypatch.setattr(softmax, "router_gradients", lambda *args: needs.append(args[3]) or gradients(*args))
    layer(x).sum().backward()
    assert needs == [(False, True)] and x.grad is not None


@pytest.mark.gpu
def test_never_waits(device):
    case = Case(4096, 512, 512, 8, 2)
    experts = choice(case, torch.bfloat16, device)
    tokens, w_router, *weights = (leaf.requires_grad_() for leaf in draw(case, torch.bfloat16, device))
    topk_weights = torch.full(experts.shape, 0.5, device=device)
    permutation = sort_by_expert(experts, case.num_experts)
    with waiting_is_an_error():
        triton_experts(tokens, topk_weights, permutation, *weights, w_router=w_router).sum().backward()


def make_layer(device, **options):
    torch.manual_seed(0)
    options = {"d_model": 32, "d_ff": 24, "num_experts": 6, "top_k": 2, "implementation": "triton", **options}
    return moe_layer(init_std=0.2, device=device, **options)


def make_x(device):
    x = torch.randn(3, 7, 32, device=device, generator=torch.Generator(device).manual_seed(1))
    return x.requires_grad_()


def tokens_of_the_router(monkeypatch):
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
        self.logits = logits


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


def biased_and_frozen(layer):
    biased(layer)
    frozen(layer)


def other_forward(part):
    def change(layer):
        module = getattr(layer, part)
        module.forward = lambda *args, **given: type(module).forward(module, *args, **given)

    return change


def frozen(layer):
    layer.router.weight.requires_grad_(False)


# Layer options, changes to the layer, call options, and whether the experts compute the router's gradient.
SITUATIONS = {
    "plain": ({}, None, {}, True),
    "shared": ({"shared_d_ff": 16}, None, {}, True),
    "biases": ({"bias": True, "activation": "gpt_oss"}, biased, {}, True),
    "observed": ({}, observed, {}, True),
    "frozen": ({}, frozen, {}, True),
    "biases_and_frozen": ({"bias": True}, biased_and_frozen, {}, True),
    "other_observer": ({}, noted, {}, False),
    "router_forward": ({}, other_forward("router"), {}, False),
    "experts_forward": ({}, other_forward("experts"), {}, False),
    "recompute": ({"recompute": "up"}, None, {}, True),
    "reference": ({"implementation": "reference"}, None, {}, False),
    "probabilities": ({"router": RouterSpec.softmax(normalize=False)}, None, {}, False),
    "losses": ({"balance_losses": BalanceLosses(switch=0.1, z=0.1)}, None, {}, False),
    "capacity": ({"capacity": 2}, None, {}, False),
    "zero_experts": ({"num_zero_experts": 2}, None, {}, False),
    "latent": ({"latent_dim": 16}, None, {}, False),
    "noise": ({"noise": RouterNoise(input_jitter=0.1)}, None, {}, False),
    "batch_invariant": ({"batch_invariant": True}, None, {}, False),
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


QUICK = {"plain", "biases", "losses", "experts_hook", "returned"}


def gradients(layer, x, given):
    out = layer(x, **given)
    out = out[0] if isinstance(out, tuple) else out
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return out, torch.autograd.grad(out.sin().sum(), wanted)


@pytest.mark.parametrize("name", default_tier(SITUATIONS, QUICK))
def test_layers_pass_it_on_only_where_that_is_all(name, device, monkeypatch):
    options, change, given, passes_on = SITUATIONS[name]
    layer, x = make_layer(device, **options), make_x(device)
    if change is not None:
        change(layer)
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    seen = tokens_of_the_router(monkeypatch)
    torch.manual_seed(2)
    out, actual = gradients(layer, x, given)
    assert seen[0].requires_grad != passes_on
    monkeypatch.setattr("moe_layers.feed_forward.can_fuse_router_gradient", lambda *_: False)
    torch.manual_seed(2)
    expected_out, expected = gradients(layer, x, given)
    assert seen[1].requires_grad and torch.equal(out, expected_out)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nothing_is_passed_on_without_a_gradient(device):
    layer, x = make_layer(device), make_x(device).view(21, 32)
    assert can_fuse_router_gradient(layer, x)
    assert not can_fuse_router_gradient(layer, x.detach())
    with torch.no_grad():
        assert not can_fuse_router_gradient(layer, x)


def test_hooks_on_all_modules_count(device):
    layer, x = make_layer(device), make_x(device).view(21, 32)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not can_fuse_router_gradient(layer, x)
    finally:
        handle.remove()
    assert can_fuse_router_gradient(layer, x)


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
    (expected,) = torch.autograd.grad(layer(x).sin().sum(), x)
    with RoutingReplay().capture(layer):
        out = checkpoint(layer, x, use_reentrant=False, **context)
    (dx,) = torch.autograd.grad(out.sin().sum(), x)
    assert torch.equal(dx, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, tracing a Function
def test_compiles_without_graph_break(device):
    layer, x = make_layer(device), make_x(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = [x, *layer.parameters()]
    actual, expected = (torch.autograd.grad(run(x).sin().sum(), wanted) for run in (compiled, layer))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_opcheck(device):
    case = Case(6, 8, 4, 3, 2)
    tokens, w_router, w_up, w_down = (leaf.requires_grad_() for leaf in draw(case, torch.float32, device))
    routed = linear_routing(tokens.detach(), w_router.detach(), 2)
    permutation = reference.sort_by_expert(routed.topk_experts, 3)
    experts = Experts.of(ExpertWeights(w_up, w_down), Activation("swiglu"))
    rows, weights = Rows.of(permutation, reserved_sms=0), routed.topk_weights.requires_grad_()
    operands = ExpertOperands(tokens, weights, experts, w_router.detach(), rows, False)
    torch.library.opcheck(fused_experts_op.overload, fused_experts_op.schema_arguments(operands))
