"""A layer whose router reads a tensor of its own, as in Gemma 4."""

from dataclasses import replace

import pytest
import torch

from moe_kernels import RouterSpec
from moe_layers import MoEConfig, MoEFeedForward

from ..layers import make_x, moe_layer

CONFIG = MoEConfig(16, 12, 4, 2, separate_router_input=True, init_std=0.3)


def make_layers(device="cpu", config=CONFIG, **options):
    """Return a layer with a separate input of the router, and one without, with equal parameters."""
    torch.manual_seed(0)
    layer = MoEFeedForward.from_config(config, device=device, **options)
    plain = MoEFeedForward.from_config(replace(config, separate_router_input=False), device=device, **options)
    plain.load_state_dict(layer.state_dict())
    return layer, plain


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_equals_the_layer_whose_router_reads_x(implementation, device):
    """The router gets another copy of x. The gradients of the two copies add up to that of x."""
    layer, plain = make_layers(device, implementation=implementation)
    x, twin, again = (make_x(device).requires_grad_() for _ in range(3))
    y, expected = layer(x, router_input=twin), plain(again)
    torch.testing.assert_close(y, expected)
    dy = make_x(device, seed=2)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(x.grad + twin.grad, again.grad)
    assert twin.grad.abs().sum() > 0


def test_router_reads_its_input_alone(device):
    layer, plain = make_layers(device)
    x, router_input = make_x(device), make_x(device, seed=3)
    _, routing = layer(x, router_input=router_input, return_routing=True)
    _, expected = plain(router_input, return_routing=True)
    assert torch.equal(routing.topk_experts, expected.topk_experts)
    assert torch.equal(routing.topk_weights, expected.topk_weights)


def test_padding_of_the_routers_input_never_affects_results(device):
    layer, _ = make_layers(device)
    x, router_input = make_x(device), make_x(device, seed=3)
    mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    mask[0, 2:] = False
    router_input[~mask] = torch.nan
    y = layer(x, router_input=router_input, token_mask=mask)
    torch.testing.assert_close(y[mask], layer(x[mask], router_input=router_input[mask]))
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_compiles_without_graph_breaks():
    layer, _ = make_layers(implementation="reference")
    x, router_input = make_x("cpu"), make_x("cpu", seed=3)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, router_input=router_input), layer(x, router_input=router_input))


def test_saved_bytes(device):
    """Backward keeps the normalised input of Gemma 4's router. The two inputs of the layer are not counted."""
    config = replace(CONFIG, router=RouterSpec.gemma4(1e-6))
    layer, plain = make_layers(device, config, implementation="triton")
    assert layer.saved_bytes(8) == plain.saved_bytes(8) >= 4 * 8 * 16


@pytest.mark.parametrize(
    ("separate", "router_input", "message"),
    [
        (True, None, r"be given with config\.separate_router_input=True, got none"),
        (False, make_x("cpu"), r"not be given with config\.separate_router_input=False, got a tensor"),
        (True, make_x("cpu", (2, 4, 16)), r"be \[3, 4, 16\] on cpu, as x is, got \[2, 4, 16\]"),
        (True, 3, "be a Tensor"),
    ],
)
def test_refusals(separate, router_input, message):
    layer = make_layers()[0] if separate else moe_layer(16, 12, 4, 2)
    with pytest.raises(ValueError, match=f"router_input must {message}"):
        layer(make_x("cpu"), router_input=router_input)
