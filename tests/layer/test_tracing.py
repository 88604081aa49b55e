"""Tracers see a layer that runs the reference, as on a CPU, as they see one on a GPU: without reading data."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, CapacityFactor, ExpertChoice

from ..layers import moe_layer

# Raised by Dynamo when it traces an autograd Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

FORMS = {
    "plain": {},
    "losses": {
        "shared_d_ff": 6,
        "num_zero_experts": 2,
        "balance_losses": BalanceLosses(switch=0.1, z=0.1, sequence=0.1),
    },
    "bias": {"bias": True, "activation": "gpt_oss", "router": RouterSpec.deepseek_v3(2, 1), "capacity": 4},
    "llama4": {"router": RouterSpec.llama4(), "latent_dim": 3, "capacity": CapacityFactor(0.5)},
    "expert_choice": {"assignment": ExpertChoice()},
}
forms = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)


def make_layer(options, **factory):
    torch.manual_seed(0)
    return moe_layer(8, 6, 4, 2, **options, implementation="reference", init_std=0.5, **factory)


def results(layer, called, x):
    """Return the output, its gradient and those of the parameters."""
    x = x.clone().requires_grad_()
    y = called(x)
    return y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])


@forms
def test_meta_tensors(options):
    layer = make_layer(options, device="meta")
    y, *gradients = results(layer, layer, torch.empty(3, 5, 8, device="meta"))
    assert y.is_meta and y.shape == (3, 5, 8)
    assert [g.shape for g in gradients[1:]] == [parameter.shape for parameter in layer.parameters()]


@forms
def test_fake_tensors(options):
    with FakeTensorMode():
        layer = make_layer(options)
        y, *gradients = results(layer, layer, torch.empty(3, 5, 8))
    assert y.shape == (3, 5, 8) and len(gradients) == 1 + len(list(layer.parameters()))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_export_for_any_number_of_tokens(name, grad):
    layer = make_layer(FORMS[name]).eval()
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(layer, (torch.randn(3, 5, 8),), dynamic_shapes=sizes)
    x = torch.randn(2, 11, 8)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_compiled_model_is_one_graph(dtype):
    """Without fullgraph, a graph break would pass unnoticed."""
    torch._dynamo.reset()
    model = nn.Sequential(*(make_layer(FORMS[name]) for name in ("plain", "losses", "bias"))).to(dtype)
    counter = CompileCounter()
    torch.compile(model, backend=counter)(torch.randn(3, 5, 8, dtype=dtype))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor.*")  # advice on performance
@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in FORMS), ("plain", "inductor")])
def test_compiled_gradients_are_those_without_the_compiler(name, backend):
    torch._dynamo.reset()
    layer, x = make_layer(FORMS[name]), torch.randn(3, 5, 8)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(results(layer, compiled, x), results(layer, layer, x))


def test_tokens_without_a_batch_axis_compile():
    torch._dynamo.reset()
    layer, x = make_layer(FORMS["plain"]), torch.randn(5, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(layer, compiled, x), results(layer, layer, x))
