"""`iter_weights` of modules with layers of this package, on one rank and on two."""

from functools import partial

import pytest
import torch
from torch import nn

from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.quantization import quantize_experts_
from moe_layers.serving import iter_weights

from ..checkpoint.golden import Golden
from ..checkpoint.test_convert import read_model
from ..layers import moe_layer
from ..parallel.expert_parallel_cases import Model, expert_mesh, make_layer, shard_experts, sharded
from ..processes import make_test
from .engine_loaders import load

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def adapted(layer, seed=0):
    layer.add_lora(LoRA(2, 4))
    layer.add_lora(LoRA(3, 1, shared_outer=True), name="second")
    generator = torch.Generator().manual_seed(seed)
    for factor in layer.experts.lora.parameters():
        nn.init.normal_(factor.data, std=0.3, generator=generator)
    return layer


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "gpt_oss", "dbrx", "ernie4_5_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["huggingface", "vllm"])
def test_a_loaded_layer_has_the_names_of_its_checkpoint(case, layout):
    golden = Golden(case)
    layer = MoEFeedForward.from_checkpoint(golden.directory, golden.layer)
    block = {name: tensor for name, tensor in golden.tensors("model").items() if name.startswith(golden.prefix)}
    assert_same(dict(iter_weights(nn.ModuleDict({"layers": nn.ModuleList([layer])}), layout)), block)


def test_the_engine_gets_each_expert():
    golden = Golden("qwen3_moe")
    layer = MoEFeedForward.from_checkpoint(golden.directory, golden.layer)
    parameters, _ = load(iter_weights(layer, "sglang"), "qwen3_moe", layer.num_experts)
    at = f"{golden.prefix}experts."
    assert_same(parameters, {f"{at}w13_weight": layer.experts.w_up, f"{at}w2_weight": layer.experts.w_down})


def test_a_model_of_ours_keeps_its_names():
    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "moe": moe_layer(8, 4, 3, 2, shared_d_ff=4)})
    found = dict(iter_weights(model))
    assert torch.equal(found["moe.experts.2.up_proj.weight"], model["moe"].experts.w_up[2, 4:])
    assert torch.equal(found["moe.shared_expert.down_proj.weight"], model["moe"].shared_expert.w_down)
    assert {"norm.weight", "norm.bias", "moe.gate.weight"} < found.keys()
    with pytest.raises(ValueError, match="layout 'vllm' must be one that the architecture has, got model_type None"):
        list(iter_weights(model, "vllm"))


@pytest.mark.parametrize("format", [None, "int8"])
def test_adapters_are_added_and_stay(format):
    layer = moe_layer(8, 4, 3, 2)
    if format:
        quantize_experts_(layer, format)
    adapted(layer)
    found = dict(iter_weights(layer))
    names = list(layer.state_dict())
    layer.merge_lora()
    assert_same(found, dict(iter_weights(layer)))
    assert len(names) > len(layer.state_dict())


def test_stored_weights_are_those_of_save_checkpoint(tmp_path):
    layer = moe_layer(64, 32, 3, 2)
    quantize_experts_(layer, "mxfp4")
    layer.save_checkpoint(tmp_path / "out")
    expected = {n.replace("model.layers.0.mlp", "moe"): t for n, t in read_model(tmp_path / "out").items()}
    model = nn.ModuleDict({"moe": layer})
    assert_same(dict(iter_weights(model, keep_quantized=True)), expected)
    plain = dict(iter_weights(model))
    assert torch.equal(plain["moe.experts.1.down_proj.weight"], layer.experts.w_down.dequantize()[1])
    adapted(layer)
    with pytest.raises(ValueError, match="keep_quantized takes no adapters, got some in moe"):
        list(iter_weights(model, keep_quantized=True))


def test_missing_experts_are_refused():
    layer = moe_layer(8, 4, 4, 2)
    layer.keep_local_experts(range(2))
    with pytest.raises(
        ValueError, match="iter_weights: moe must hold all 4 experts, got 2; share them by ExpertParallel"
    ):
        list(iter_weights(nn.ModuleDict({"moe": layer})))


def shared_and_sharded_models_give_whole_tensors(device):
    expected = dict(iter_weights(Model(device)))
    for experts_over in (1, 2):
        assert_same(dict(iter_weights(sharded(device, experts_over))), expected)


def adapters_and_stored_weights_of_ranks(device):
    for format in (None, "int8"):
        one, other = (make_layer(device, dtype=torch.float32) for _ in range(2))
        for layer in (one, other):
            if format:
                quantize_experts_(layer, format)
            adapted(layer)
        many = shard_experts(other, expert_mesh(device))
        assert_same(dict(iter_weights(many)), dict(iter_weights(one)))


test_two_processes = make_test([shared_and_sharded_models_give_whole_tensors, adapters_and_stored_weights_of_ranks], 2)
