"""Layers with `precision="fp8"` whose experts ranks share, or whose weights FSDP2 gathers."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from moe_layers import ExpertParallel
from moe_layers.parallel.collectives import Ranks

from ..processes import make_test
from ..tiers import slow
from .expert_parallel_cases import D_MODEL, KERNELS, draw, expert_mesh, full, make_layer, shard_experts

SIZES = {"d_ff": 16, "precision": "fp8"}


def fp8_layer(device, **options):
    return make_layer(device, **{**KERNELS, **SIZES, **options})


def train(layer, device):
    """Take three steps. Return the output of each, and the parameters and gradients after the last."""
    x = draw(device, 12).float()
    optimizer = torch.optim.SGD(layer.parameters(), 0.3, foreach=False)  # foreach takes no DTensors beside tensors
    outs = []
    for _ in range(3):
        optimizer.zero_grad()
        out = layer(x)
        out.square().mean().backward()
        optimizer.step()
        outs.append(full(out.detach()))
    return outs, {name: (full(p.detach()), full(p.grad)) for name, p in layer.named_parameters()}


def assert_near(actual, expected, limit):
    assert (actual - expected).norm() <= limit * expected.norm() + 1e-12


def compare(actual, expected, limit):
    for a, e in zip(actual[0], expected[0], strict=True):
        assert_near(a, e, limit)
    for name, tensors in expected[1].items():
        for a, e in zip(actual[1][name], tensors, strict=True):
            assert_near(a, e, limit)


def experts_of_several_ranks(device):
    """Forward sends what one process multiplies. The gradient of w_up reads the tokens as they were sent."""
    one = train(fp8_layer(device), device)
    for dispatcher, options in (("allgather", {}), ("alltoall", {"chunks": 2})):
        many = shard_experts(fp8_layer(device), expert_mesh(device), dispatcher, **options)
        actual = train(many, device)
        assert_near(actual[0][0], one[0][0], 1e-5)
        compare(actual, one, 0.1)
        assert len(many.experts.kept_forms._kept) == 2


def tokens_are_sent_in_eight_bits(device):
    tensors = []

    class Recorded(Ranks):
        def all_gather(self, tensor):
            tensors.append(tensor)
            return super().all_gather(tensor)

        def all_to_all(self, tensor, received, sent):
            tensors.append(tensor)
            return super().all_to_all(tensor, received, sent)

    for dispatcher in ("allgather", "alltoall"):
        for precision in ("fp8", None):
            layer = fp8_layer(device, precision=precision)
            layer = shard_experts(layer, expert_mesh(device), dispatcher)
            layer.dispatcher.ranks = Recorded(**vars(layer.dispatcher.ranks))
            tensors.clear()
            layer(draw(device, 12).float())
            num_bytes = 4 * D_MODEL if precision is None else D_MODEL + 8
            assert num_bytes in {t.shape[1] * t.element_size() for t in tensors if t.dtype == torch.float32}


def weights_that_fsdp_gathers(device):
    """Storage and version counter of gathered weights stay the same from step to step, so no form of them is kept."""
    one = train(fp8_layer(device), device)
    for part, options in (
        ("experts", {"reshard_after_forward": True}),
        ("experts", {"reshard_after_forward": False}),
        ("", {}),  # the layer, which manages its experts
    ):
        layer = fp8_layer(device)
        fully_shard(layer.get_submodule(part), mesh=expert_mesh(device, 1)["efsdp"], **options)
        compare(train(layer, device), one, 1e-5)
        assert not layer.experts.kept_forms._kept


def experts_of_several_ranks_that_fsdp_gathers(device):
    one = train(fp8_layer(device), device)
    mesh = expert_mesh(device, distributed.get_world_size())
    layer = shard_experts(fp8_layer(device), mesh, "alltoall")
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    compare(train(layer, device), one, 0.1)


def the_overlapped_dispatcher_refuses(device):
    with pytest.raises(NotImplementedError, match="the overlapped dispatcher has no precision='fp8'"):
        shard_experts(fp8_layer(device), expert_mesh(device), "overlapped")
    layer = shard_experts(fp8_layer(device, precision=None), expert_mesh(device), "overlapped")
    layer.experts.precision = "fp8"
    with pytest.raises(NotImplementedError, match="use 'allgather' or 'alltoall'"):
        layer(draw(device, 12).float())
    assert ExpertParallel().dispatcher == "auto"


TWO = [experts_of_several_ranks, tokens_are_sent_in_eight_bits, the_overlapped_dispatcher_refuses]
test_two_processes = make_test(TWO, 2)
test_two_processes_slowly = slow(make_test([weights_that_fsdp_gathers, experts_of_several_ranks_that_fsdp_gathers], 2))
