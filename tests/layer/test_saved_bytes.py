"""`saved_bytes` equals the memory that autograd actually saves."""

import pytest
import torch

from moe_kernels import RouterSpec
from moe_layers import (
    BalanceLosses,
    CapacityFactor,
    ExpertChoice,
    MoEFeedForward,
    TokenRounding,
    carry_expert_counts,
    observe,
    set_aux_loss_scale,
)
from moe_layers.memory import saved_bytes

from ..dtypes import DTYPES
from ..layers import moe_layer
from ..tiers import default_tier
from ..unit.saved import saved_tensors

LAYERS = {
    "plain": {},
    "recompute": {"recompute": "up"},
    "shared": {"shared_d_ff": 24, "shared_gate": True},
    "bias": {"bias": True, "activation": "gpt_oss"},
    "groups": {"router": RouterSpec.deepseek_v3(2, 1)},
    "losses": {"balance_losses": BalanceLosses(switch=0.1, z=0.1)},
    "latent": {"latent_dim": 16},
    "expert_choice": {"assignment": ExpertChoice()},
    "token_rounding": {"assignment": TokenRounding(8)},
    "capacity": {"capacity": CapacityFactor(0.5)},
    "batch_invariant": {"batch_invariant": True, "shared_d_ff": 24, "shared_gate": True, "latent_dim": 16},
}


def seen_bytes(layer, x):
    """Return the bytes of all storages that autograd saves, without the input, the parameters and the buffers."""
    with saved_tensors() as saved:
        layer(x)
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, saved)}
    for tensor in (x, *layer.parameters(), *layer.buffers()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("name", default_tier(LAYERS, ["plain", "recompute", "shared", "groups"]))
def test_saved_bytes_are_those_that_autograd_keeps(name, device):
    layer = moe_layer(32, 48, 8, 2, **LAYERS[name], implementation="triton", device=device, dtype=DTYPES[-1])
    x = torch.randn(40, 32, device=device).to(DTYPES[-1]).requires_grad_()
    assert saved_bytes(layer, 40) == layer.saved_bytes(40) == seen_bytes(layer, x) > 0


def test_saved_bytes_of_something_else():
    layer = MoEFeedForward(8, 8, 2, 1)
    for other in (torch.nn.Sequential(layer), layer.experts):
        with pytest.raises(
            ValueError, match=f"saved_bytes: layer must be a MoEFeedForward, got {type(other).__name__}; "
        ):
            saved_bytes(other, 4)
        with pytest.raises(ValueError, match="saved_bytes: layer must be a MoEFeedForward"):
            MoEFeedForward.saved_bytes(other, 4)


def test_a_frozen_layer_saves_for_the_gradient_of_its_input(device):
    layer = MoEFeedForward(32, 48, 8, 2, implementation="triton", device=device).requires_grad_(False)
    x = torch.randn(10, 32, device=device).requires_grad_()
    assert layer.saved_bytes(10) == seen_bytes(layer, x) > 0


def test_neither_what_balances_nor_what_observes_counts(device):
    losses = BalanceLosses(switch=0.1, global_batch=0.1)
    layer = MoEFeedForward(32, 48, 8, 2, balance_losses=losses, implementation="triton", device=device)
    x = torch.randn(10, 32, device=device).requires_grad_()
    expected = layer.saved_bytes(10)
    assert expected == seen_bytes(layer, x)
    set_aux_loss_scale(layer, torch.tensor(0.5, device=device))
    (observer,) = observe(layer).values()
    layer(x).sum().backward()
    carry_expert_counts(layer)
    before = observer.read(), layer.router.expert_counts.clone()
    assert layer.saved_bytes(10) == expected
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert layer.saved_bytes(10) == expected
    assert str(observer.read()) == str(before[0]) and torch.equal(layer.router.expert_counts, before[1])
    assert layer.aux_loss_scale.item() == 0.5


@pytest.mark.gpu
def test_at_real_size():
    """Recomputation leaves less than 270 MiB."""
    layer = MoEFeedForward(4096, 1024, 128, 8, dtype=torch.bfloat16, device="cuda", recompute="up")
    x = torch.randn(32768, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    assert layer.saved_bytes(32768) == seen_bytes(layer, x) < 270 * 2**20 - x.nbytes


def test_the_reference_keeps_what_depends_on_the_routing():
    with pytest.raises(NotImplementedError, match="depends on the routing"):
        MoEFeedForward(8, 8, 2, 1, implementation="reference").saved_bytes(4)
