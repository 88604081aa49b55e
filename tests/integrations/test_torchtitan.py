"""torchtitan's debug models train with these overrides as with torchtitan's own experts, in float32.

Optimizer (AdamW), schedule of learning rates, clipping and load balancing are those of torchtitan's debug runs. Its own
experts always compute in bfloat16, and its attention needs a GPU. The tests make `Tensor.bfloat16` the identity for its
own experts, and put a plain causal attention into both models.
"""

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.nn import functional

from ..markdown import blocks_of
from ..processes import ROOT, make_test
from .models import assert_close_gradients
from .sharded_models import whole

pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")
TARGET = "moe_layers.integrations.torchtitan"


def attention(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False, **_):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
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
    config.layers = config.layers[:2]
    blocks = [layer.moe for layer in config.layers if layer.moe is not None]
    assert blocks
    for moe in blocks:
        router, dispatcher, experts = moe.router, moe.routed_experts.token_dispatcher, moe.routed_experts.inner_experts
        moe.num_experts = router.num_experts = router.gate.out_features = 4
        dispatcher.num_experts = experts.num_experts = 4
        experts.hidden_dim = 16
        router.top_k = dispatcher.top_k = 2
    return config


def override(config, *imports):
    """Apply overrides. Return a line about each replaced part."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    return apply_overrides(OverrideConfig(imports=list(imports)), config)


def make_model(name, target=None, shard=lambda config: None, device="cpu"):
    config = make_config(name)
    shard(config)
    if target is not None:
        lines = override(config, f"{TARGET}.{target}")
        assert len(lines) == sum(layer.moe is not None for layer in config.layers)
    torch.manual_seed(0)
    model = config.build().to(device)
    model.init_states(buffer_device=torch.device(device))
    return model


def train(model):
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw, register_moe_load_balancing_hook

    # The settings are those of `config_registry.py` of both models, which imports packages that may be missing.
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
    import spmd_types as spmd
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    from moe_layers.integrations import torchtitan as door

    config = make_config("qwen3").layers[0].moe
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=True, expert_param_layout=layout)
    routed = door.moe(config).routed_experts
    states = config.routed_experts.inner_experts.sharding_config.state_shardings
    assert routed.sharding_config is config.routed_experts.sharding_config
    found = routed.inner_experts.sharding_config.state_shardings
    assert found == {"w13": states["w1_EFD"], "w2_EDF": states["w2_EDF"]}


def test_another_dispatcher_keeps_its_steps():
    """torchtitan's dispatcher around these experts, as with expert parallelism, gives the same."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    layer = make_model("qwen3", "moe").layers["0"].moe
    routed = layer.routed_experts
    x = torch.randn(2, 5, 256)
    expected = layer(x)
    routed.token_dispatcher.__class__ = type("Other", (LocalTokenDispatcher,), {})
    assert not routed.is_local
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


def make_parallel(target, device, dims, parallelism):
    """Return a model that torchtitan itself has sharded."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    def shard(config):
        set_qwen3_sharding_config(config, enable_sp=True, enable_ep=dims.ep > 1)

    model = parallelize_qwen3(
        make_model("qwen3", target, shard, device),
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    return model


def step_on_ranks(model, dims, device):
    """Return the logits and the gradients of all ranks, those of `w13` under torchtitan's names."""
    tokens = torch.randint(0, 2048, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    if dims.dp_shard > 1:
        tokens = tokens[distributed.get_rank()].unsqueeze(0)
    logits = whole(model(tokens, torch.arange(8, device=device).expand(len(tokens), -1)))
    logits.square().sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = whole(parameter.grad)
        if name.endswith("w13"):
            for half, other in enumerate(("w1_EFD", "w3_EFD")):
                gradients[name.replace("w13", other)] = gradient[:, :, half]
        else:
            gradients[name] = gradient
    return logits.detach(), gradients


@mock.patch("torchtitan.models.common.attention.FlexAttention.forward", attention)
@mock.patch.multiple(torch, _grouped_mm=grouped_mm)
@mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor)
def compare_parallel(device, tensor_parallel, expert_parallel):
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend

    parallelism = ParallelismConfig(
        tensor_parallel_degree=tensor_parallel,
        expert_parallel_degree=expert_parallel,
        spmd_backend="partial_dtensor",  # the others need a newer PyTorch
    )
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, 2)
    with mock.patch.object(parallel_dims, "device_type", device.type):
        dims.build_mesh()
    own = make_parallel(None, device, dims, parallelism)
    state = ModelWrapper(own).state_dict()
    expected = step_on_ranks(own, dims, device)
    for target in ("moe", "grouped_experts"):
        ours = make_parallel(target, device, dims, parallelism)
        held = ModelWrapper(ours)
        assert held.state_dict().keys() == state.keys()
        held.load_state_dict(state)
        for name, tensor in held.state_dict().items():
            assert getattr(tensor, "placements", None) == getattr(state[name], "placements", None), name
            assert torch.equal(whole(tensor), whole(state[name])), name
        if target == "moe":
            assert ours.layers["0"].moe.routed_experts.is_local == (expert_parallel == 1)
        logits, gradients = step_on_ranks(ours, dims, device)
        torch.testing.assert_close(logits, expected[0], rtol=1e-5, atol=1e-5)
        assert_close_gradients(gradients, expected[1], 1e-5, smallest=1e-7)


def fsdp(device):
    compare_parallel(device, 1, 1)


def fsdp_and_expert_parallel(device):
    compare_parallel(device, 1, 2)


def tensor_parallel(device):
    compare_parallel(device, 2, 1)


def tensor_and_expert_parallel(device):
    compare_parallel(device, 2, 2)


test_two_processes = make_test([fsdp, fsdp_and_expert_parallel, tensor_parallel, tensor_and_expert_parallel], 2)


def test_the_command_of_the_guide():
    from torchtitan.config.override import parse_cli_imports

    blocks = blocks_of(ROOT / "docs" / "guides" / "frameworks.md")
    words = next(block.text for block in blocks if "--override.imports" in block.text).split()
    config = make_config("qwen3")
    override(config, *parse_cli_imports(words[words.index("--override.imports") + 1 :]))
    assert all(type(layer.moe.routed_experts).__qualname__ == "FusedRoutedExperts.Config" for layer in config.layers)


@pytest.mark.parametrize("target", ["moe", "grouped_experts"])
def test_other_experts_are_refused(target):
    """Such experts are refused although other layers hold the usual experts."""
    from torchtitan.config.override import derive
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    config = make_config("qwen3")
    routed = config.layers[1].moe.routed_experts
    routed.inner_experts = derive(routed.inner_experts, GptOssGroupedExperts.Config)
    with pytest.raises(ValueError, match=rf"{target}: .* must be .*GroupedExperts, got .*GptOssGroupedExperts\.Config"):
        override(config, f"{TARGET}.{target}")


@pytest.mark.parametrize("first", ["moe", "grouped_experts"])
def test_another_override_of_the_experts_is_refused(first):
    """torchtitan refuses the second override, and names both."""
    with pytest.raises(ValueError, match=rf"(?s)integrations.torchtitan.{first}.*fused_swiglu|fused_swiglu.*{first}"):
        override(make_config("qwen3"), f"{TARGET}.{first}", "torchtitan.overrides.fused_swiglu.fused_grouped_experts")


def test_another_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("moe_layers.integrations.versions.version", lambda package: "0.4.0")
    monkeypatch.delitem(sys.modules, TARGET, raising=False)
    with pytest.raises(ImportError, match=r"moe_layers: torchtitan must be 0\.3, .*got 0\.4\.0; use its own"):
        importlib.import_module(TARGET)
