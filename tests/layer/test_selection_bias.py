"""Counts of the router, and the update of its selection bias."""

import copy

import pytest
import torch

from moe_layers import update_selection_bias

from .test_balancing import ALL, BIASED, make_layer, make_x


def test_bias_update_by_hand(device):
    layer = make_layer(device, router=BIASED)
    router = layer.router
    router.expert_counts.copy_(torch.tensor([3, 0, 4, 2, 1], device=device))  # mean 2
    update_selection_bias(torch.nn.ModuleList([layer, torch.nn.Linear(2, 2)]), rate=0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, -0.5, 0.0, 0.5]
    assert not router.expert_counts.any()
    update_selection_bias(layer, rate=0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, -0.5, 0.0, 0.5]  # nothing was counted


def test_bias_update_is_exact_where_float32_is_not(device):
    """The mean is 2 ** 24 + 2 / 5, where float32 cannot represent fractions."""
    layer = make_layer(device, router=BIASED)
    layer.router.expert_counts.copy_(torch.tensor([2**24] * 3 + [2**24 + 1] * 2, device=device))
    update_selection_bias(layer, rate=1.0)
    assert layer.router.selection_bias.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0]


def test_the_bias_may_change_between_forward_and_backward(device):
    """DistributedDataParallel copies buffers in each forward, and an update may precede the last backward."""
    layer = make_layer(device, router=BIASED, implementation="triton")
    out = layer(make_x(device))
    update_selection_bias(layer)
    out.sum().backward()
    assert layer.router.weight.grad.any()


@pytest.mark.parametrize("losses", [None, ALL], ids=["no losses", "all losses"])
def test_what_is_counted(losses, device):
    layer = make_layer(device, router=BIASED, balance_losses=losses, capacity=2)
    x = make_x(device)
    chosen = layer(x, return_routing=True)[1].choices_per_expert
    assert layer.router.expert_counts.tolist() == chosen.tolist()
    layer(x)
    with torch.no_grad():
        layer(x)
    assert layer.router.expert_counts.tolist() == (3 * chosen).tolist()
    layer.eval()
    layer(x)
    assert layer.router.expert_counts.tolist() == (3 * chosen).tolist()


def test_counts_and_conversions(device):
    layer = make_layer(device, router=BIASED)
    layer(make_x(device))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.router.expert_counts, layer.router.expert_counts)
    assert layer.to(torch.float16).router.expert_counts.dtype == torch.int64
    assert "router.expert_counts" not in layer.state_dict()
    empty = make_layer("meta", router=BIASED, implementation=None).to_empty(device=device)
    assert empty.router.expert_counts.tolist() == [0] * 5


def test_bad_updates():
    with pytest.raises(ValueError, match=r"update_selection_bias: needs a router with a selection bias, .* got none"):
        update_selection_bias(make_layer("cpu"))
    with pytest.raises(ValueError, match="needs a router with a selection bias"):
        update_selection_bias(torch.nn.Linear(2, 2))
    for rate in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="rate must be finite and not negative"):
            update_selection_bias(make_layer("cpu", router=BIASED), rate=rate)
