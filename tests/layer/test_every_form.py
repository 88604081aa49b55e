"""Every form of the layer: it compiles, takes one token or none, and never waits for the GPU."""

import pytest
import torch

from moe_layers import BalanceLosses, CapacityFactor, RouterNoise

from ..gpu import assert_never_waits
from ..tiers import default_tier
from . import test_assignment, test_expert_choice
from .assignment_cases import make_layer, make_x
from .test_layer_options import OPTIONS

FORMS = {
    **OPTIONS,
    "capacity_by_position": {"capacity": CapacityFactor(0.5, "position")},
    "capacity_by_weight": {"capacity": CapacityFactor(0.5, "weight")},
    **{name: {"assignment": chosen} for name, chosen in test_expert_choice.ASSIGNMENTS.items()},
    **{
        name: {"assignment": chosen, "noise": RouterNoise(input_jitter=0.1)}
        for name, chosen in test_assignment.ASSIGNMENTS.items()
    },
}
assert len(FORMS) == len(OPTIONS) + 2 + len(test_expert_choice.ASSIGNMENTS) + len(test_assignment.ASSIGNMENTS)
COMPILED = {"bias", "zero_experts", "latent", "capacity", "capacity_by_position", "capacity_by_weight"}
COMPILED |= {"choice", "nearest", *test_assignment.ASSIGNMENTS}


@pytest.mark.parametrize(
    "name", default_tier(sorted(COMPILED), {"zero_experts", "capacity_by_weight", "choice", "pairs"})
)
def test_compiles_without_graph_break(name, device):
    options = {"implementation": "triton", "balance_losses": BalanceLosses(switch=0.01), **FORMS[name]}
    layer = make_layer(device, dtype=torch.float32, **options | {"noise": None})
    x, mask = make_x(device, (1, 9, 32), torch.float32), torch.ones(1, 9, dtype=torch.bool, device=device)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, token_mask=mask)
    assert torch.equal(y, layer(x, token_mask=mask))
    y.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 32), (0, 5, 32)])
@pytest.mark.parametrize("name", FORMS)
def test_one_token_and_none(name, shape, device):
    layer = make_layer(device, implementation="reference" if device == "cpu" else None, **FORMS[name])
    x = make_x(device, shape).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape and y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_never_waits_for_the_gpu(name, device):
    layer = make_layer(device, dtype=torch.bfloat16, **FORMS[name])
    x = make_x(device, dtype=torch.bfloat16).requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool, device=device)
    assert_never_waits(lambda: layer(x, token_mask=mask, return_routing=True)[0].sum().backward())
