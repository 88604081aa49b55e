"""Initial values of a layer, however its memory was allocated."""

import math

import pytest
import torch

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, carry_expert_counts, update_selection_bias

from ..layers import moe_layer

OPTIONS = {
    "router": RouterSpec.deepseek_v3(),
    "latent_dim": 32,
    "shared_d_ff": 48,
    "shared_gate": True,
    "bias": True,
    "init_std": 0.3,
}


def make_layer(device, **options):
    return moe_layer(64, 48, 8, 2, device=device, **OPTIONS | options)


def assert_fresh(layer, std=0.3):
    for name, parameter in layer.named_parameters():
        if "b_" in name:
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=6 / math.sqrt(parameter.numel())), name
    assert not layer.router.selection_bias.any() and not layer.router.expert_counts.any()


def spoil(layer):
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(7)


def test_a_reset_draws_as_at_first(device):
    assert_fresh(make_layer(device, init_std=None), std=0.02)  # the default
    layer = make_layer(device)
    assert_fresh(layer)
    for arguments, std in (((), 0.3), ((0.1,), 0.1)):
        spoil(layer)
        layer.reset_parameters(*arguments)
        assert_fresh(layer, std)


def test_each_part_resets_itself(device):
    """Loops over the modules of a model reset every part, including the layer's own parameters."""
    layer = make_layer(device, latent_dim=None)
    spoil(layer)
    for module in layer.modules():
        if module is not layer and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_fresh(layer)


def test_memory_that_was_not_there(device):
    layer = make_layer("meta").to_empty(device=device)
    layer.reset_parameters()
    assert_fresh(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_assigned_state_dict(dtype, device):
    """Buffers missing in the state dict are made on the parameters' device; balancing works, with a float32 bias."""
    source = make_layer(device).to(dtype)
    layer = make_layer("meta", balance_losses=BalanceLosses(global_batch=0.1))
    state = {name: tensor.to(dtype, copy=True) for name, tensor in source.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.router.selection_bias.dtype == torch.float32
    assert not layer.router.expert_counts.any()
    x = torch.randn(20, 64, device=device).to(dtype)
    for model in (source, layer):
        model(x).sum().backward()
        update_selection_bias(model, rate=0.5)
    assert layer.router.selection_bias.any()
    assert torch.equal(layer.router.selection_bias, source.router.selection_bias)


def test_memory_that_is_given_by_name(device):
    """A loader may allocate parameters and buffers by name, without knowing the counts."""
    layer, source = make_layer("meta"), make_layer(device)
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(layer.get_submodule(owner), last, tensor)
    x = torch.randn(20, 64, device=device)
    assert torch.equal(layer(x), source(x))
    assert torch.equal(layer.router.expert_counts, source.router.expert_counts)


def test_counts_follow_what_moved_without_them(device):
    """Counts follow when `fully_shard` moves parameters and buffers; the meta device stands for another GPU."""
    layer = make_layer(device)
    for owner in layer.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(name, buffer.to("meta"))
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, torch.nn.Parameter(parameter.to("meta")))
    carry_expert_counts(layer)
    assert layer.router.accumulated_counts.is_meta
    update_selection_bias(layer)
    assert layer.router.expert_counts.is_meta


def test_counts_elsewhere_are_an_error(device):
    layer = make_layer(device)
    layer.router.expert_counts = layer.router.expert_counts.to("meta")
    with pytest.raises(ValueError, match=r"expert_counts must be on the device of its selection_bias, got meta and"):
        update_selection_bias(layer)
