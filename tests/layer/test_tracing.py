"""Tracing a layer that runs the reference on a CPU reads no data, as on a GPU."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, CapacityFactor, ExpertChoice

from ..layers import moe_layer

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
@pytest.mark.parametrize(("mode", "device"), [(nullcontext, "meta"), (FakeTensorMode, "cpu")], ids=["meta", "fake"])
def test_tensors_without_data(mode, device, options):
    with mode():
        layer = make_layer(options, device=device)
        y, *gradients = results(layer, layer, torch.empty(3, 5, 8, device=device))
    assert y.device.type == device and y.shape == (3, 5, 8)
    assert [g.shape for g in gradients[1:]] == [parameter.shape for parameter in layer.parameters()]


@pytest.mark.parametrize("grad", [True, False])
@forms
def test_export_for_any_number_of_tokens(options, grad):
    layer = make_layer(options).eval()
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(layer, (torch.randn(3, 5, 8),), dynamic_shapes=sizes)
    x = torch.randn(2, 11, 8)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_compiled_model_is_one_graph(dtype):
    """Count the graphs, because without fullgraph a graph break is no error."""
    model = nn.Sequential(*(make_layer(FORMS[name]) for name in ("plain", "losses", "bias"))).to(dtype)
    counter = CompileCounter()
    torch.compile(model, backend=counter)(torch.randn(3, 5, 8, dtype=dtype))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor.*")  # advice on performance
@pytest.mark.parametrize(
    ("name", "shape", "backend"),
    [
        *((name, (3, 5, 8), "aot_eager") for name in FORMS),
        ("plain", (5, 8), "aot_eager"),
        ("plain", (3, 5, 8), "inductor"),
    ],
)
def test_compiled_gradients_are_those_without_the_compiler(name, shape, backend):
    layer, x = make_layer(FORMS[name]), torch.randn(shape)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(results(layer, compiled, x), results(layer, layer, x))
