import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, MoEFeedForward
from moe_layers.experts.dispatcher import LocalDispatcher

from .. import layers
from ..dtypes import DTYPES
from ..tiers import default_tier

make_x = partial(layers.make_x, shape=(3, 7, 32))


def make_layer(device, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"d_model": 32, "d_ff": 24, "num_experts": 6, "top_k": 2, "init_std": 0.2, **options}
    return layers.moe_layer(**options, device=device, dtype=dtype)


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32), (2, 2, 2, 32), (0, 32), (2, 0, 32)])
def test_any_leading_axes(shape, device):
    layer = make_layer(device, implementation="triton")
    x = make_x(device, shape=shape).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if x.numel():
        torch.testing.assert_close(y.view(-1, 32)[0], layer(x.view(-1, 32)[0]))


@pytest.mark.parametrize("num_zero_experts", [0, 3])
def test_returned_routing(num_zero_experts, device):
    """Zero experts are counted after the experts."""
    layer = make_layer(device, implementation="triton", num_zero_experts=num_zero_experts)
    x = make_x(device).requires_grad_()
    y, routing = layer(x, return_routing=True)
    assert torch.equal(y, layer(x))
    assert routing.topk_experts.shape == routing.topk_weights.shape == (21, 2)
    assert routing.logits.shape == (21, 6 + num_zero_experts)
    counts = torch.bincount(routing.topk_experts.flatten().cpu(), minlength=6 + num_zero_experts)
    assert routing.tokens_per_expert.tolist() == counts.tolist()
    torch.testing.assert_close(routing.topk_weights.sum(-1), torch.ones(21, device=device))
    (dx,) = torch.autograd.grad(routing.logits.sum() + routing.topk_weights.square().sum(), x)
    assert dx.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_nan_stays_in_its_token(implementation, device):
    layer = make_layer(device, implementation=implementation, shared_d_ff=16)
    x = make_x(device)
    clean = layer(x)
    broken = x.clone()
    broken[1, 2, 5] = torch.nan
    y, routing = layer(broken, return_routing=True)
    assert y[1, 2].isnan().all()
    others = torch.ones(3, 7, dtype=torch.bool, device=device)
    others[1, 2] = False
    # The broken token may get other experts, which moves rows within a tile. NumPy, in the interpreter, may then sum
    # in another order.
    torch.testing.assert_close(y[others], clean[others], **({"rtol": 0.0, "atol": 0.0} if y.is_cuda else {}))
    ids = routing.topk_experts[1 * 7 + 2].tolist()
    assert len(set(ids)) == 2 and all(0 <= e < 6 for e in ids)


PADDED = {
    "plain": {},
    "groups": {"router": RouterSpec.deepseek_v3()},
    "normed": {"router": RouterSpec.gemma4(1e-6)},
    "latent": {"latent_dim": 16},
    "zero_experts": {"num_zero_experts": 2},
}


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", default_tier(PADDED, {"plain", "latent"}))
def test_nan_in_padding_stays_there(name, implementation, device):
    layer, x = make_layer(device, implementation=implementation, **PADDED[name]), make_x(device)
    token_mask = torch.ones(3, 7, dtype=torch.bool, device=device)
    token_mask[1, 2:4] = False
    results = []
    for value in (0.0, torch.nan, torch.inf):
        broken = x.masked_fill(~token_mask[..., None], value).requires_grad_()
        y = layer(broken, token_mask=token_mask)
        results.append([y, *torch.autograd.grad(y[token_mask].sin().sum(), [broken, *layer.parameters()])])
        assert not y[~token_mask].any()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("router", [None, RouterSpec.deepseek_v3()], ids=str)
def test_a_router_may_stay_float32(router, implementation, device):
    """The router then decides as in a float32 layer: nothing it computes is rounded to the tokens' dtype."""
    layer = make_layer(device, DTYPES[-1], router=router, implementation=implementation)
    layer.router.to(torch.float32)
    torch.nn.init.normal_(layer.router.weight)
    x = make_x(device, dtype=DTYPES[-1]).requires_grad_()
    y, routing = layer(x, return_routing=True)
    exact = copy.deepcopy(layer).float()
    _, expected = exact(x.detach().float(), return_routing=True)
    assert torch.equal(routing.topk_experts, expected.topk_experts)
    torch.testing.assert_close(routing.topk_weights, expected.topk_weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(layer(x), y, rtol=0, atol=0)
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == layer.experts.w_up.grad.dtype == DTYPES[-1]
    assert layer.router.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("latent_dim", [None, 16])
def test_autocast_leaves_float64_alone(latent_dim, device):
    """Float64 stays float64, as for nn.Linear under autocast."""
    layer = make_layer(device, torch.float64, latent_dim=latent_dim, shared_d_ff=16, implementation="reference")
    x = make_x(device, dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16):
        assert functional.linear(x, layer.router.weight).dtype == torch.float64
        assert torch.equal(layer(x), layer(x.clone())) and layer(x).dtype == torch.float64
        under_autocast = layer(x)
    assert torch.equal(under_autocast, layer(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # from torch.func.jvp itself
def test_forward_mode_is_exact_or_an_error(device):
    """The reference has tangents; a kernel that would lose them raises an error."""
    layer, x = make_layer(device, torch.float64, implementation="reference"), make_x(device, dtype=torch.float64)
    step = 1e-6 * torch.ones_like(x)
    tangent = torch.func.jvp(layer, (x,), (step,))[1]
    torch.testing.assert_close(tangent, (layer(x + step) - layer(x - step)) / 2, rtol=1e-3, atol=1e-9)
    layer = layer.float()
    layer.router.implementation = layer.experts.implementation = "triton"
    for needs_gradient in (True, False):
        layer.requires_grad_(needs_gradient)
        with pytest.raises(NotImplementedError, match="fused_experts has no forward-mode gradient"):
            torch.func.jvp(layer, (x.float(),), (step.float(),))
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="fused_experts has no forward-mode gradient"):
                layer(forward_ad.make_dual(x.float(), step.float()))
            layer(x.float())  # x.float() has no tangent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance_losses": BalanceLosses(z=1.0)}, "balance_losses: only first-order gradients"),
        ({"precision": "fp8"}, "precision='fp8' has no gradients of gradients"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_gradients_of_gradients_that_would_be_wrong_are_errors(options, message):
    layer = layers.moe_layer(32, 16, 4, 2, implementation="reference", **options)
    x = make_x("cpu").requires_grad_()

    def gradient(x):
        return torch.func.grad(lambda x: layer(x).square().sum())(x).square().sum()

    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(dx, expected)
    torch.testing.assert_close(gradient(x), expected.square().sum())
    for second in (
        lambda: torch.autograd.grad(dx.square().sum(), x, retain_graph=True),
        lambda: torch.autograd.grad(dx.square().sum(), layer.router.weight, retain_graph=True),
        lambda: torch.autograd.backward(dx.square().sum(), retain_graph=True),
        lambda: torch.func.grad(gradient)(x),
    ):
        with pytest.raises(NotImplementedError, match=message):
            second()


def test_parts_can_be_replaced(device):
    """A custom dispatcher gets tokens, routing and the experts module, and its result becomes the output."""
    layer = make_layer(device, implementation="triton")

    class Doubling(LocalDispatcher):
        def combine(self, out, rows):
            return super().combine(2 * out, rows)

    x = make_x(device)
    expected = 2 * layer(x)
    layer.dispatcher = Doubling()
    assert torch.equal(layer(x), expected)
    called = []
    layer.experts.register_forward_hook(lambda *_: called.append(True))
    layer(x)
    assert called == [True]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_trains_after_inference_mode(implementation, device):
    """Tensors made in inference mode cannot be used in training, so none may be cached."""
    options = {"implementation": implementation, "shared_d_ff": 40, "balance_losses": BalanceLosses(switch=0.1)}
    used, plain = (make_layer(device, **options) for _ in range(2))
    x = make_x(device)
    with torch.inference_mode():
        y = used(x)
    for layer in (used, plain):
        out = layer(x)
        assert torch.equal(out, y)
        out.sin().sum().backward()
    for a, b in zip(used.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("options", [{"top_k": 9}, {"router": "sigmoid"}, {"capacity": 1.25}], ids=str)
def test_errors_of_the_constructor_name_the_layer(options):
    with pytest.raises(ValueError, match=f"^MoEFeedForward: {next(iter(options))} must be"):
        MoEFeedForward(**{"d_model": 32, "d_ff": 24, "num_experts": 6, "top_k": 2, **options})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 31), r"x must be \[\.\.\., d_model=32\], got \[3, 31\]"),
        (torch.zeros(()), r"x must be \[\.\.\., d_model=32\], got \[\]"),
        (
            torch.zeros(3, 32, dtype=torch.float16),
            r"^MoEFeedForward: x must have the parameters' dtype torch\.float32, got torch\.float16; "
            r"pass x\.to\(torch\.float32\), or call the layer under torch\.autocast\('cpu'\)$",
        ),
        (torch.zeros(3, 32, dtype=torch.int64), "^MoEFeedForward: x must have the parameters' dtype"),
        (torch.zeros(3, 32, device="meta"), r"^MoEFeedForward: x must be on cpu as .*, got meta; pass x\.to\('cpu'\)"),
        (None, "x must be a Tensor, got NoneType None"),
    ],
)
def test_bad_x(x, message):
    with pytest.raises(ValueError, match=message):
        make_layer("cpu")(x)


def test_a_hook_may_convert_the_tokens():
    """FSDP converts the tokens in front of experts with another dtype."""
    layer = make_layer("cpu", implementation="reference")
    layer.experts.register_forward_pre_hook(lambda module, args: (args[0]._replace(tokens=args[0].tokens.float()),))
    assert layer(torch.ones(3, 32, dtype=torch.float16)).dtype == torch.float32


@pytest.mark.parametrize(
    "facts", [{"token_mask": [[True] * 3]}, {"sequence_lengths": [1, 2]}, {"topk_experts": [[0, 1]] * 3}]
)
def test_facts_of_tokens_are_tensors(facts):
    (name,) = facts
    with pytest.raises(ValueError, match=f"{name} must be a Tensor, got list"):
        make_layer("cpu")(torch.zeros(3, 32), **facts)


def test_the_facts_of_a_router_are_fixed():
    """A router's parameters follow from its settings, which cannot change."""
    with pytest.raises(AttributeError, match="spec"):
        make_layer("cpu").router.spec = RouterSpec(scale=2.0)


def test_repr_and_copy(device):
    layer = make_layer(device, shared_d_ff=16)
    assert "num_experts=6, top_k=2" in repr(layer) and "d_ff=24" in repr(layer)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(make_x(device)), layer(make_x(device)))


@pytest.mark.parametrize("arguments", [{}, {"return_routing": True}], ids=str)
def test_another_module_as_the_router_is_refused(arguments):
    layer = layers.moe_layer(8, 4, 3, 2)
    layer.router = nn.Linear(8, 3)
    with pytest.raises(
        ValueError, match=r"MoEFeedForward: router must return a Routing, as TopKRouter does, got Tensor; "
    ):
        layer(torch.zeros(5, 8), **arguments)
