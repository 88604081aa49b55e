"""Quantised experts that ranks share, under FSDP2, and in distributed checkpoints: the bytes of one process."""

from itertools import product

import pytest
import torch
from packaging.version import Version
from torch.distributed import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moe_kernels.types import WeightFormat
from moe_layers import LoRA
from moe_layers.experts.quantization import quantize_experts_
from moe_layers.experts.stored import QuantizedExperts, replace_weight

from ..processes import make_test, shared_folder
from .expert_parallel_cases import (
    assert_close,
    assert_close_numbers,
    draw,
    draw_adapters,
    expert_mesh,
    full,
    make_layer,
    shard_experts,
)

fsdp_of_integers = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="FSDP2 shards no integers before PyTorch 2.12"
)
FORMATS = [WeightFormat("fp8", (8, 16)), "int8", "nf4"]  # blocks of 128 would be larger than the matrices


def quantized(device, format):
    layer = make_layer(device, dtype=torch.float32)
    quantize_experts_(layer, format)
    layer.add_lora(LoRA(2, 4))
    draw_adapters(layer)
    return layer


@fsdp_of_integers
def scales_of_two_bytes(device):
    """Scales are bfloat16, as in Qwen3's published FP8 models. No collective takes integers of two bytes."""
    one, many = quantized(device, FORMATS[0]), quantized(device, FORMATS[0])
    for experts, name in product((one.experts, many.experts), ("w_up", "w_down")):
        weight = getattr(experts, name).weight()
        rounded = weight._replace(scales=weight.scales.bfloat16())
        replace_weight(experts, name, QuantizedExperts(rounded, torch.float32))
    mesh = expert_mesh(device)
    shard_experts(many, mesh)
    fully_shard(many.experts, mesh=mesh["efsdp"])
    x = draw(device, 12).float()
    assert_close(many(x), one(x))
    assert torch.equal(full(many.experts.w_up.scales), one.experts.w_up.scales)


@fsdp_of_integers
def steps_equal_one_process(device):
    for format in FORMATS:
        for dispatcher, with_fsdp in (("alltoall", False), ("allgather", True)):
            one, mesh = quantized(device, format), expert_mesh(device)
            many = shard_experts(quantized(device, format), mesh, dispatcher)
            if with_fsdp:
                fully_shard(many.experts, mesh=mesh["efsdp"])
            x = draw(device, 12).float()
            outs = [layer(x) for layer in (one, many)]
            assert_close(outs[1], outs[0])
            for out in outs:
                out.square().sum().backward()
            for (name, expected), parameter in zip(one.named_parameters(), many.parameters(), strict=True):
                assert (expected.grad is None) == (parameter.grad is None), name
                if expected.grad is not None:
                    assert_close_numbers(full(parameter.grad), expected.grad, rtol=1e-4, atol=1e-5, msg=name)
                if name.startswith("experts.w_"):
                    assert torch.equal(full(parameter), expected), name


@fsdp_of_integers
def fsdp_alone_gathers_stored_bytes(device):
    one = quantized(device, FORMATS[0])
    many = quantized(device, FORMATS[0])
    fully_shard(many.experts, mesh=expert_mesh(device, 1)["efsdp"])
    x = draw(device, 12).float()
    assert torch.equal(many(x), one(x))
    half = quantized(device, FORMATS[0])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    fully_shard(half.experts, mesh=expert_mesh(device, 1)["efsdp"], mp_policy=policy)
    for factor in one.experts.lora.parameters():
        factor.data = factor.data.bfloat16().float()
    assert torch.equal(half(x), one(x))  # the policy rounds adapters, and no stored number


def distributed_checkpoints_hold_the_bytes(device):
    folder, mesh = shared_folder(), expert_mesh(device)
    saved = shard_experts(quantized(device, FORMATS[0]), mesh)
    checkpoint.save(saved.state_dict(), checkpoint_id=folder)
    other = make_layer(device, seed=1, dtype=torch.float32)
    quantize_experts_(other, FORMATS[0])
    other.add_lora(LoRA(2, 4))
    shard_experts(other, mesh)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    x = draw(device, 12).float()
    assert torch.equal(other(x), saved(x))


test_two_processes = make_test(
    [
        steps_equal_one_process,
        scales_of_two_bytes,
        fsdp_alone_gathers_stored_bytes,
        distributed_checkpoints_hold_the_bytes,
    ],
    2,
)
