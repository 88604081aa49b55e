"""Adapters of sharded experts: the gradients, steps and merged weights of one process."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import distribute_tensor

from moe_layers import LoRA

from ..processes import make_test
from .expert_parallel_cases import (
    Model,
    assert_close,
    assert_close_numbers,
    data,
    draw,
    draw_adapters,
    expert_mesh,
    full,
    own_data,
    shard_by_fsdp,
    shard_experts,
    summed,
    train_step,
)

SETTINGS = [LoRA(3, 6), LoRA(3, 6, shared_outer=True)]


def adapted(device, settings=SETTINGS[0]):
    """Return a model whose adapters are float32, beside float64 weights on a CPU."""
    model = Model(device)
    for layer in model.layers:
        layer["moe"].add_lora(settings)
    draw_adapters(model)
    return model


def adapted_after_sharding(device, mesh, dispatcher, settings):
    """Return the same model, whose adapters were added to sharded experts."""
    one, model = adapted(device, settings), Model(device)  # in this order, so that both draw from the same state
    for layer in model.layers:
        shard_experts(layer["moe"], mesh, dispatcher)
        layer["moe"].add_lora(settings)
    for (name, parameter), whole in zip(model.named_parameters(), one.parameters(), strict=True):
        if name.endswith("_b"):  # `a` was drawn alike
            part = distribute_tensor(whole.detach(), mesh["ep"], parameter.placements, src_data_rank=None)
            parameter.to_local().data.copy_(part.to_local())
    return model


def steps_equal_one_process(device):
    """Take two steps with experts over all ranks or under FSDP2 alone. Adapters are added before or after sharding."""
    for experts_over, dispatcher, before, settings in (
        (1, "alltoall", True, SETTINGS[1]),
        (None, "alltoall", True, SETTINGS[0]),
        (None, "alltoall", True, SETTINGS[1]),
        (None, "allgather", False, SETTINGS[0]),
        (None, "allgather", False, SETTINGS[1]),
    ):
        one, mesh = adapted(device, settings), expert_mesh(device, experts_over)
        if before:
            many = adapted(device, settings)
            for layer in many.layers:
                shard_experts(layer["moe"], mesh, dispatcher)
        else:
            many = adapted_after_sharding(device, mesh, dispatcher, settings)
        shard_by_fsdp(many, mesh["efsdp"])
        optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.01) for m in (one, many)]
        for step in range(2):
            norm, expected = train_step(one, optimizers[0], *data(device, step))
            actual_norm, actual = train_step(many, optimizers[1], *own_data(device, step))
            torch.testing.assert_close(actual_norm.double(), norm.double())
            assert actual.keys() == expected.keys() and len(actual) == 2 + 2 * 4
            for name, gradient in expected.items():
                torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        for (name, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(full(a), b, rtol=0, atol=1e-4, msg=name)
        with pytest.raises(ValueError, match=r"merge_lora: must be called before fully_shard, got w_up sharded over"):
            many.layers[0]["moe"].merge_lora()


def merging_equals_one_process(device):
    """Compare gradients without FSDP2, merge adapters into sharded experts, and undo the merge."""
    for settings in SETTINGS:
        mesh = expert_mesh(device)
        one = adapted(device, settings).layers[0]["moe"]
        many = shard_experts(copy.deepcopy(one), mesh)
        base = [full(parameter).clone() for parameter in (many.experts.w_up, many.experts.w_down)]
        x = draw(device, 12)  # equal on all ranks, so that the mean over them is one rank's gradient
        for module in (one, many):
            module(x).square().sum().backward()
        for (name, expected), parameter in zip(one.named_parameters(), many.parameters(), strict=True):
            if expected.grad is not None:
                assert_close_numbers(full(parameter.grad), expected.grad, rtol=1e-5, atol=1e-6, msg=name)
        x = draw(device, 12, seed=distributed.get_rank())
        for module in (one, many):
            module.merge_lora(keep_base=True)
        merged = [full(parameter).clone() for parameter in (many.experts.w_up, many.experts.w_down)]
        assert torch.equal(merged[0], one.experts.w_up) and torch.equal(merged[1], one.experts.w_down)
        assert_close(many(x), one(x))
        many.unmerge_lora()
        assert all(map(torch.equal, base, (full(many.experts.w_up), full(many.experts.w_down))))
        one.unmerge_lora()
        assert_close_numbers(many(x), one(x), rtol=1e-5, atol=1e-6)


def shared_factors_are_equal(device):
    """Ranks with other random states start with the first rank's factors, and all need the factors' gradients."""
    layer = shard_experts(Model(device).layers[0]["moe"], expert_mesh(device))
    torch.manual_seed(distributed.get_rank())
    layer.add_lora(SETTINGS[1])
    shared = [factor for factor in layer.experts.lora.parameters() if factor.placements[0].is_replicate()]
    for factor in shared:
        assert_close(summed(factor.to_local()) / distributed.get_world_size(), factor.to_local().detach())
    if device.type == "cpu":  # on a GPU the error ends the process
        shared[0].requires_grad_(bool(distributed.get_rank()))
        with pytest.raises(ValueError, match=r"need the same gradients, .* shared adapter factors"):
            layer(draw(device, 4))


test_two_processes = make_test([steps_equal_one_process, merging_equals_one_process, shared_factors_are_equal], 2)
