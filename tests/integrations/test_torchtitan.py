"""torchtitan's debug models with these overrides train as with its own experts, in float32.

Optimizer (AdamW), schedule of learning rates, clipping and load balancing are those of torchtitan's debug runs. Its own
experts always compute in bfloat16, and its attention needs a GPU. The tests make `Tensor.bfloat16` the identity for its
own experts, and put a plain causal attention into both models.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from ..processes import make_test

pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")
TARGET = "moe_layers.integrations.torchtitan"


def attention(self, q, k, v, *, attention_masks=None, scale=None, enable_gqa=False, **_):  # [B, L, N, H]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


@pytest.fixture(autouse=True)
def plain_attention(monkeypatch):
    from torchtitan.models.common.attention import FlexAttention

    monkeypatch.setattr(FlexAttention, "forward", attention)


def make_config(name):
    """Return a debug model's configuration with two layers and fewer, smaller experts."""
    package = importlib.import_module(f"torchtitan.models.{name}")
    make = package._debugmodel_moe if name == "qwen3" else package._debugmodel
    config = make(attn_backend="flex", moe_comm_backend="standard")
    layers = config.layers[:2]
    assert any(layer.moe is not None for layer in layers)
    for layer in layers:
        if layer.moe is not None:
            layer.moe.num_experts = layer.moe.router.num_experts = layer.moe.router.gate.out_features = 4
            layer.moe.routed_experts.token_dispatcher.num_experts = 4
            layer.moe.routed_experts.inner_experts.num_experts = 4
            layer.moe.routed_experts.inner_experts.hidden_dim = 16
            layer.moe.router.top_k = layer.moe.routed_experts.token_dispatcher.top_k = 2
    config.layers = layers
    return config


def make_model(name, target=None):
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = make_config(name)
    if target is not None:
        lines = apply_overrides(OverrideConfig(imports=[f"{TARGET}.{target}"]), config)
        assert len(lines) == sum(layer.moe is not None for layer in config.layers)
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def train(model):
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        default_adamw,
        register_moe_load_balancing_hook,
    )

    # As `config_registry.py` of both models, which imports more packages than there are.
    optimizers = default_adamw(lr=8e-4).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0)
    schedulers = schedule.build(optimizers=optimizers, training_steps=10)
    one_rank = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False)
    register_moe_load_balancing_hook(optimizers, [model], one_rank)
    tokens = torch.randint(0, 2048, (2, 7), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(5):
        positions = torch.arange(6).expand(2, -1)
        logits = model(tokens[:, :-1], positions)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizers.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("target", ["moe", "grouped_experts"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_five_steps_are_those_of_torchtitan(name, target, monkeypatch):
    own, ours = make_model(name), make_model(name, target)
    for layer in ours.layers.values():
        if target == "moe" and getattr(layer, "moe", None) is not None:
            assert layer.moe.routed_experts.is_local
    assert own.state_dict().keys() == ours.state_dict().keys()
    ours.load_state_dict(own.state_dict())
    state = ours.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in own.state_dict().items())
    losses = train(ours)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
        patch.setattr(torch, "_grouped_mm", grouped_mm)
        expected = train(own)
    assert max(abs(a - e) for a, e in zip(losses, expected, strict=True)) < 1e-6
    assert losses[-1] < losses[0] - 0.01
    for layer, other in zip(ours.layers.values(), own.layers.values(), strict=True):
        if getattr(layer, "moe", None) is not None:  # load balancing
            assert layer.moe.expert_bias_E.any() and torch.equal(layer.moe.expert_bias_E, other.moe.expert_bias_E)


def grouped_mm(a, b, offs):
    """`torch._grouped_mm` without its requirements on sizes."""
    ends = offs.tolist()
    return torch.cat([a[start:end] @ b[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))])


def test_initialisation_is_that_of_torchtitan():
    own, ours = make_model("qwen3"), make_model("qwen3", "moe")
    for name, tensor in own.state_dict().items():
        other = ours.state_dict()[name]
        if "w2_EDF" in name or "w1_EFD" in name or "w3_EFD" in name:
            assert abs(other.std() / tensor.std() - 1) < 0.1, name


def test_shardings_of_gate_and_up_become_one():
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    from moe_layers.integrations import torchtitan as door

    config = make_config("qwen3").layers[0].moe
    import spmd_types as spmd

    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=True, expert_param_layout=layout)
    routed = door.moe(config).routed_experts
    states = config.routed_experts.inner_experts.sharding_config.state_shardings
    assert routed.sharding_config is config.routed_experts.sharding_config
    found = routed.inner_experts.sharding_config.state_shardings
    assert found == {"w13": states["w1_EFD"], "w2_EDF": states["w2_EDF"]}


def test_another_dispatcher_keeps_its_steps():
    """As with expert parallelism: torchtitan's dispatcher around these experts gives the same."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    layer = make_model("qwen3", "moe").layers["0"].moe
    routed = layer.routed_experts
    x = torch.randn(2, 5, 256)
    expected = layer(x)
    routed.token_dispatcher.__class__ = type("Other", (LocalTokenDispatcher,), {})
    assert not routed.is_local
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


def expert_parallel(device):
    """torchtitan's all-to-all brings the rows of both ranks; each computes half of the experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    from moe_layers.integrations.torchtitan import moe

    set_spmd_backend("default")
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("ep",))
    config = make_config("qwen3").layers[0].moe
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = moe(config).build().to(device)
        layer.init_states(buffer_device=device)
        layers.append(layer)
    one, many = layers
    routed, rank = many.routed_experts, mesh.get_local_rank()
    for name, weight in list(routed.inner_experts.named_parameters()):
        setattr(routed.inner_experts, name, torch.nn.Parameter(weight.detach().chunk(2)[rank].clone()))
    routed.token_dispatcher.wire_meshes(ep_mesh=mesh["ep"])
    assert one.routed_experts.is_local and not routed.is_local
    x = torch.randn(2, 2, 6, 256, generator=torch.Generator().manual_seed(1)).to(device)
    out = many(x[rank])
    torch.testing.assert_close(out, one(x[rank]), rtol=1e-5, atol=1e-6)
    one.zero_grad()
    (one(x[0]).sum() + one(x[1]).sum()).backward()
    out.sum().backward()
    for name, weight in routed.inner_experts.named_parameters():
        expected = one.routed_experts.inner_experts.get_parameter(name).grad.chunk(2)[rank]
        torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-5)


test_two_processes = make_test([expert_parallel], 2)


def test_other_experts_and_versions_are_refused(monkeypatch):
    from moe_layers.integrations import torchtitan as door

    config = make_config("qwen3").layers[0].moe
    with pytest.raises(ValueError, match=r"must be RoutedExperts with GroupedExperts, got .*FusedExperts"):
        door.moe(door.moe(config))
    monkeypatch.setattr("moe_layers.integrations.versions.version", lambda package: "0.4.0")
    monkeypatch.delitem(sys.modules, TARGET)
    with pytest.raises(ImportError, match=r"moe_layers: torchtitan must be 0\.3, .*got 0\.4\.0; use its own"):
        importlib.import_module(TARGET)
