"""Layer options beyond Mixtral: plain experts, gates, zero experts, latent projections, capacity."""

from functools import partial

import pytest
import torch

from moe_kernels import Activation, RouterSpec
from moe_layers import BalanceLosses

from ..tiers import default_tier
from . import assignment_cases
from .assignment_cases import check_equals_dense

OPTIONS = {
    "gated": {"shared_d_ff": 20, "router": RouterSpec.softmax(normalize=False)},
    "plain": {"activation": "relu_squared", "shared_d_ff": 20},
    "bias": {"bias": True, "activation": Activation("gpt_oss", limit=0.5)},
    "shared_gate": {"shared_d_ff": 20, "shared_gate": True, "shared_activation": "geglu"},
    "zero_experts": {"num_zero_experts": 3, "router": RouterSpec.ernie(normalize=False, scale=2.0)},
    "latent": {"latent_dim": 12, "activation": "relu_squared", "shared_d_ff": 20},
    "capacity": {"capacity": 2},
    "weight_on_input": {"router": RouterSpec.llama4()},
    "groups": {"router": RouterSpec.deepseek_v3(3, 2, scale=2.5)},
}

make_x = partial(assignment_cases.make_x, dtype=torch.float32)


def make_layer(name, device, **options):
    return assignment_cases.make_layer(device, dtype=torch.float32, **OPTIONS[name], **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_dense_formula(name, device):
    check_equals_dense(device, **OPTIONS[name])


@pytest.mark.parametrize("name", default_tier(OPTIONS, {"plain", "capacity"}))
def test_the_output_may_change_in_place(name, device):
    """The output is no view and is not saved for backward, like that of nn.Linear."""
    layer = make_layer(name, device, balance_losses=BalanceLosses(switch=0.1))
    for shape in ((3, 7, 32), (21, 32)):
        x, gradients = make_x(device, shape).requires_grad_(), []
        for in_place in (False, True):
            y = layer(x)
            assert not y._is_view()
            y = y.add_(x) if in_place else y + x
            gradients.append(torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]))
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_autocast_follows_pytorch(name, device):
    layer = make_layer(name, device)
    x = make_x(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    expected = layer(x)
    assert (y.float() - expected).norm() < 0.02 * expected.norm()
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_state_dict_has_plain_names():
    def names(name):
        return {key: list(tensor.shape) for key, tensor in make_layer(name, "cpu").state_dict().items()}

    assert names("bias")["experts.b_up"] == [6, 48] and names("bias")["experts.b_down"] == [6, 32]
    assert names("plain")["experts.w_up"] == [6, 24, 32] and names("plain")["shared_expert.w_up"] == [20, 32]
    assert names("shared_gate")["shared_expert.w_gate"] == [1, 32]
    assert names("zero_experts")["router.weight"] == [9, 32] and names("zero_experts")["experts.w_up"][0] == 6
    latent = names("latent")
    assert latent["w_latent_in"] == [12, 32] and latent["w_latent_out"] == [32, 12]
    assert latent["experts.w_up"] == [6, 24, 12] and latent["shared_expert.w_up"] == [20, 32]
