"""A checkpointed region that saves its routing chooses its experts once, whatever the recomputed logits."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, save_routing

from ..layers import make_x, moe_layer
from ..tiers import default_tier

saving = partial(checkpoint, use_reentrant=False, context_fn=save_routing)
ROUTERS = {
    "plain": RouterSpec.softmax(),
    "deepseek_v3": RouterSpec.deepseek_v3(2, 1),
    "softcap": RouterSpec.softmax(logit_softcap=2.0),
}


def make_layer(device, implementation, **options):
    torch.manual_seed(0)
    options = {"init_std": 0.3, "implementation": implementation, **options}
    return moe_layer(16, 8, 6, 2, device=device, **options)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", default_tier(ROUTERS, ["deepseek_v3"]))
def test_recomputation_reuses_the_choice(name, implementation, device):
    """With two micro-batches in flight, the logits change strongly between forward and backward."""
    layer = make_layer(device, implementation, router=ROUTERS[name])
    batches = [make_x(device, seed=seed).requires_grad_() for seed in range(2)]
    chosen = []
    layer.router.register_forward_hook(lambda router, inputs, routed: chosen.append(routed.topk_experts.clone()))
    outputs = [saving(lambda x: layer(x).sin(), x) for x in batches]
    first, second = chosen
    assert not torch.equal(first, second)
    # Change the logits much more than the rounding of another kernel does.
    layer.router.weight.data.add_(torch.randn_like(layer.router.weight))
    for output in outputs:
        output.sum().backward()
    assert torch.equal(chosen[2], first) and torch.equal(chosen[3], second)
    with torch.no_grad():
        layer(batches[0])
    assert not torch.equal(chosen[4], first)  # the choice for the changed logits


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_saving_changes_nothing(implementation, device):
    """With two micro-batches in flight and every loss, gradients and counts are bitwise equal."""
    losses = BalanceLosses(switch=0.5, sequence=0.25, global_batch=0.75, importance=0.3, z=0.125)
    layer = make_layer(device, implementation, balance_losses=losses, router=RouterSpec.ernie(), capacity=3)

    def run(region):
        layer.zero_grad()
        layer.router.expert_counts.zero_()
        batches = [make_x(device, seed=seed).requires_grad_() for seed in range(2)]
        outputs = [region(lambda x: layer(x).sin(), x) for x in batches]
        for output in outputs:
            output.sum().backward()
        grads = [parameter.grad.clone() for parameter in layer.parameters()]
        return [layer.router.expert_counts.clone(), *(x.grad for x in batches), *grads]

    assert all(map(torch.equal, run(saving), run(lambda region, x: region(x))))


def test_counts_of_a_global_batch_are_those_of_the_forward(device):
    """Counts accumulated before the recomputation do not change the loss."""
    layer = make_layer(device, "reference", balance_losses=BalanceLosses(global_batch=0.75))

    def run(region):
        layer.zero_grad()
        layer.router.accumulated_counts = None
        y = region(lambda x: layer(x).sin(), make_x(device).requires_grad_())
        layer.router.accumulated_counts = torch.tensor([1000, 0, 0, 0, 0, 0], device=device)
        y.sum().backward()
        return layer.router.weight.grad.clone()

    assert torch.equal(run(saving), run(lambda region, x: region(x)))


def test_compiled_region(device):
    layer = make_layer(device, "triton", router=RouterSpec.ernie())
    x = make_x(device)

    def region(x):
        return saving(lambda x: layer(x).sin(), x)

    region(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    counts = layer.router.expert_counts.clone()
    layer.zero_grad()
    layer.router.expert_counts.zero_()
    torch.compile(region, backend="aot_eager")(x).sum().backward()
    assert torch.equal(layer.router.expert_counts, counts)
    torch.testing.assert_close([parameter.grad for parameter in layer.parameters()], expected)
