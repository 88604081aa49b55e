"""Megatron-Core's MoE with these experts: outputs, gradients and checkpoints are those of its own `SequentialMLP`."""

import importlib
import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..markdown import blocks_of
from ..processes import ROOT, gloo_group, make_test, on_cpu

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("default::pytest.PytestWarning")]
SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 8, "moe_ffn_hidden_size": 8}
TOKENS = torch.tensor([3, 0, 5, 2])


@contextmanager
def groups(folder):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    with gloo_group(folder):
        parallel_state.initialize_model_parallel()
        try:
            yield ProcessGroupCollection.use_mpu_process_groups()
        finally:
            parallel_state.destroy_model_parallel()


def make_config(**changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    usual = {"num_moe_experts": 4, "gated_linear_unit": True, "activation_func": functional.silu}
    usual |= {"moe_router_topk": 2, "add_bias_linear": False, "use_cpu_initialization": True}
    changes = {"bias_activation_fusion": False, "gradient_accumulation_fusion": False, **changes}
    fused = changes.pop("gradient_accumulation_fusion")
    config = TransformerConfig(**SIZES, **{**usual, **changes})
    config.gradient_accumulation_fusion = fused  # Megatron's own kernel for this fusion needs a GPU
    return config


def linears():
    """Return the classes of the linear modules in Megatron's own experts."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def pair(folder_groups, **changes):
    """Return Megatron's own experts, and these with the same weights."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from moe_layers.integrations.megatron import GroupedExperts

    torch.manual_seed(0)
    plain = make_config(**{**changes, "gradient_accumulation_fusion": False})
    own = SequentialMLP(4, plain, linears(), folder_groups)
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = GroupedExperts(4, make_config(**changes), None, folder_groups)
    copy_weights(own, ours)
    return own, ours


@torch.no_grad()
def copy_weights(own, ours):
    for name, linear in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
        for number, expert in enumerate(own.local_experts):
            getattr(ours, name)[number].copy_(getattr(expert, linear).weight)


def step(experts, run=None):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(int(TOKENS.sum()), SIZES["hidden_size"], generator=generator).requires_grad_()
    probs = torch.rand(len(rows), generator=generator).requires_grad_()
    out, bias = (experts if run is None else run)(rows, TOKENS, probs)
    assert bias is None
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), rows.grad, probs.grad


def gradients(own, linear):
    weights = [getattr(expert, linear).weight for expert in own.local_experts]
    return torch.stack([torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights])


def give_main_grad(ours):
    for weight in ours.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False


def assert_same_gradients(own, ours, name):
    """Compare Megatron's gradients with ours, which are in the attribute `name` of the weights."""
    for weight, linear in ((ours.weight1, "linear_fc1"), (ours.weight2, "linear_fc2")):
        assert name == "grad" or weight.grad_added_to_main_grad
        torch.testing.assert_close(getattr(weight, name), gradients(own, linear), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_func": functional.gelu},
        {"activation_func": functional.gelu, "gated_linear_unit": False},
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_megatron(settings, tmp_path):
    with groups(tmp_path) as made:
        own, ours = pair(made, **settings)
        torch.testing.assert_close(step(ours), step(own), rtol=1e-5, atol=1e-5)
        assert_same_gradients(own, ours, "grad")


def test_a_whole_layer_by_its_spec(tmp_path, monkeypatch):
    """The lines of the guide put these experts into Megatron's layer."""
    from megatron.core.transformer.spec_utils import build_module

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # the router moves its weight there
    utilities = "megatron.core.transformer.moe.moe_utils"
    monkeypatch.setattr(f"{utilities}.te_general_gemm", None, raising=False)  # missing without transformer_engine
    page = ROOT / "docs" / "guides" / "frameworks.md"
    names = {}
    exec(next(block.text for block in blocks_of(page) if block.needs == "megatron"), names)
    with groups(tmp_path) as made:
        config = make_config(num_moe_experts=8, moe_token_dispatcher_type="allgather")
        torch.manual_seed(0)
        layer = build_module(names["spec"].submodules.mlp, config=config, pg_collection=made)
        assert type(layer.experts) is names["GroupedExperts"]
        out, bias = layer(torch.randn(6, 2, SIZES["hidden_size"]))
        assert out.shape == (6, 2, SIZES["hidden_size"]) and bias is None
        out.sum().backward()
        assert layer.experts.weight1.grad.any() and layer.router.weight.grad.any()


def as_list(tensor, as_numpy=False, record_stream=False):
    return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


# Megatron moves its routers to the current device, and copies numbers of tokens from there on a stream.
@mock.patch.multiple(
    "torch.cuda", current_device=lambda: "cpu", Stream=mock.MagicMock(), current_stream=mock.MagicMock()
)
@mock.patch("torch.cuda.stream", nullcontext)
@mock.patch("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu", as_list)
@mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True)  # from transformer_engine
def expert_parallel(device):
    """Two ranks hold two experts each, and weights' gradients go to `main_grad`."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from moe_layers.integrations.megatron import GroupedExperts

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    made = ProcessGroupCollection.use_mpu_process_groups()
    own_spec = ModuleSpec(module=SequentialMLP, submodules=linears())
    for dispatcher in ("allgather", "alltoall"):
        settings = {"moe_token_dispatcher_type": dispatcher, "expert_model_parallel_size": 2}
        layers = []
        for experts, fused in ((own_spec, False), (GroupedExperts, True)):
            torch.manual_seed(0)
            config = make_config(gradient_accumulation_fusion=fused, **settings)
            layers.append(MoELayer(config, MoESubmodules(experts=experts), pg_collection=made))
        own, ours = layers
        ours.router.load_state_dict(own.router.state_dict())
        copy_weights(own.experts, ours.experts)
        assert compare_shards(own.experts, ours.experts) == 6
        assert all(weight.shape[0] == 2 and not weight.allreduce for weight in ours.experts.parameters())
        give_main_grad(ours.experts)
        generator = torch.Generator().manual_seed(distributed.get_rank())
        tokens = torch.randn(6, 2, SIZES["hidden_size"], generator=generator)
        outs = []
        for layer in layers:
            for _ in range(2):
                out, bias = layer(tokens)
                assert bias is None
                out.square().sum().backward()
            outs.append((out.detach(), layer.router.weight.grad))
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
        assert_same_gradients(own.experts, ours.experts, "main_grad")
    parallel_state.destroy_model_parallel()


test_two_processes = on_cpu("Megatron's groups are those of gloo")(make_test([expert_parallel], 2))


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_accumulate_in_main_grad(delayed, tmp_path):
    """Two backward passes add up, in float32. The gradients that Megatron's hooks see are not added again."""
    with groups(tmp_path) as made:
        own, ours = pair(made, gradient_accumulation_fusion=True)
        ours._delays = delayed
        called = []
        ours.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
        give_main_grad(ours)
        for _ in range(2):
            step(own)
            step(ours)
            if delayed:
                assert not any(weight.grad_added_to_main_grad for weight in ours.parameters()) or called
                ours.backward_dw()
        assert len(called) == 2 * delayed
        assert_same_gradients(own, ours, "main_grad")


@pytest.mark.parametrize("delayed", [False, True])
def test_checkpointed_experts_add_once(delayed, tmp_path):
    """The hooks of saved tensors hold parameters without their attributes."""
    with groups(tmp_path) as made:
        own, ours = pair(made, gradient_accumulation_fusion=True)
        ours._delays = delayed
        give_main_grad(ours)
        step(own)
        step(ours, lambda *rows: checkpoint(ours, *rows, use_reentrant=False))
        ours.backward_dw()
        assert_same_gradients(own, ours, "main_grad")


def test_delayed_gradients_without_main_grad(tmp_path):
    with groups(tmp_path) as made:
        own, ours = pair(made)
        ours._delays = True
        step(own)
        step(ours)
        assert ours.weight1.grad is None
        ours.backward_dw()
        torch.testing.assert_close(ours.weight1.grad, gradients(own, "linear_fc1"), rtol=1e-5, atol=1e-5)


def compare_shards(own, ours):
    """Compare the shards of both experts. Return the number of shards of this rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import nested_values

    found = []
    for experts in (own, ours):
        state = experts.sharded_state_dict("decoder.layers.0.mlp.experts.", ((0, 1, 2),))
        apply_factories(state)
        shards = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
        found.append({(s.key, s.global_offset): s for s in shards})
    assert found[0].keys() == found[1].keys()
    for key, expected in found[0].items():
        actual = found[1][key]
        assert actual.global_shape == expected.global_shape and actual.prepend_axis_num == expected.prepend_axis_num
        assert actual.axis_fragmentations == expected.axis_fragmentations
        assert actual.replica_id == expected.replica_id and torch.equal(actual.data, expected.data)
    return len(found[0])


@pytest.mark.parametrize("gated", [True, False])
def test_sharded_state_dicts_are_those_of_megatron(gated, tmp_path):
    """Each shard has the key, global shape, offset and values of one of Megatron's."""
    with groups(tmp_path) as made:
        own, ours = pair(made, gated_linear_unit=gated, activation_func=functional.silu)
        assert compare_shards(own, ours) == (12 if gated else 8)
        state = ours.sharded_state_dict("experts.")
        for weight, factory in zip(ours.parameters(), state.values(), strict=True):
            parts = [shard.data for shard in factory.build()]
            assert torch.equal(factory.merge_fn(parts), weight)


def test_bad_input(tmp_path):
    from moe_layers.integrations.megatron import GroupedExperts

    with groups(tmp_path) as made:
        for change, message in (
            ({"add_bias_linear": True}, "must be without these settings, got {'add_bias_linear': True}"),
            ({"activation_func": torch.tanh}, "the activation must be known here, got tanh"),
            ({"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}, "got silu .*value=7.0 .*offset=1.0"),
        ):
            config = make_config()
            for name, value in change.items():
                setattr(config, name, value)
            with pytest.raises(ValueError, match=message):
                GroupedExperts(4, config, None, made)
        ours = GroupedExperts(4, make_config(), None, made)
        with pytest.raises(ValueError, match="singleton_local_shards must be off"):
            ours.sharded_state_dict(metadata={"singleton_local_shards": True})


def test_another_version_is_refused_by_name(monkeypatch):
    name = "moe_layers.integrations.megatron"
    monkeypatch.setattr("moe_layers.integrations.versions.version", lambda package: "0.9")
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"moe_layers: megatron-core must be 0\.16, .*got 0\.9; use its own experts"):
        importlib.import_module(name)
