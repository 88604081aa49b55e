"""`iter_weights` of transformers models that FSDP2, `shard_experts` or transformers' own expert parallelism shards."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_layers.serving import iter_weights

from ..processes import make_test
from ..tiers import slow

transformers = pytest.importorskip("transformers", minversion="5.23", reason="tested with transformers 5.23")
pytestmark = slow  # each process imports transformers

from moe_layers.integrations.transformers import enable, shard_experts  # noqa: E402

from ..integrations.models import QWEN3_MOE, assert_same_bits  # noqa: E402
from ..integrations.sharded_models import saved  # noqa: E402


def make_model(device):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**QWEN3_MOE)).to(device)


def fsdp2(device):
    expected = dict(iter_weights(make_model(device), "vllm"))
    model = make_model(device)
    for layer in model.model.layers:
        fully_shard(layer)
    assert_same_bits(dict(iter_weights(fully_shard(model), "vllm")), expected)


def fsdp2_with_adapters(device):
    """Adapters are added to gathered parameters, not to this rank's parameters."""
    from ..integrations.peft_models import adapt, lora

    expected = dict(iter_weights(adapt(make_model(device), lora()), "vllm"))
    model = adapt(make_model(device), lora())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        assert_same_bits(dict(iter_weights(model, "vllm")), expected)


def shared_experts(device):
    expected = dict(iter_weights(make_model(device), "vllm"))
    model = make_model(device)
    enable(model)
    shard_experts(model, init_device_mesh(device.type, (2,)))
    assert len(model.model.layers[0].mlp.experts.down_proj.to_local()) < QWEN3_MOE["num_experts"]
    assert_same_bits(dict(iter_weights(model, "vllm")), expected)


def float8(device):
    """gloo's collectives do not support float8."""
    from ..integrations.test_quantized_models import pair

    whole, shared, wrapped = (pair()[0].to(device) for _ in range(3))
    enable(shared, implementation="reference")
    shard_experts(shared, init_device_mesh(device.type, (2,)))
    fully_shard(wrapped)
    for model in (shared, wrapped):
        for kept in (False, True):
            found, expected = (dict(iter_weights(each, keep_quantized=kept)) for each in (model, whole))
            assert_same_bits({n: t.float() for n, t in found.items()}, {n: t.float() for n, t in expected.items()})


def expert_parallel(device):
    from transformers.distributed import DistributedConfig

    own = make_model(device)
    folder, auto = saved(own), transformers.AutoModelForCausalLM
    for sizes in ({"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}):
        model = auto.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
        assert_same_bits(dict(iter_weights(model, "sglang")), dict(iter_weights(own, "sglang")))


test_two_processes = make_test([fsdp2, fsdp2_with_adapters, shared_experts, float8, expert_parallel], 2)
