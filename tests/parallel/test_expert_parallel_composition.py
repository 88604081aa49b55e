"""Expert parallelism combined with HSDP, DDP, accumulated gradients and sequence parallelism."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInputOutput, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from moe_layers import ExpertParallel, clip_grad_norm_

from ..processes import make_test
from ..tiers import slow
from .expert_parallel_cases import (
    D_MODEL,
    OVERLAPPED,
    Model,
    assert_close,
    assert_gradients,
    data,
    draw,
    expert_mesh,
    float_dtype,
    full,
    make_layer,
    own_data,
    shard_by_fsdp,
    shard_experts,
    sharded,
    sharded_layer,
    summed,
)

BOTH = ("allgather", "alltoall")


def one_process(device):
    """Return the model with its gradients for the tokens of all ranks."""
    one = Model(device)
    x, target = data(device, 0)
    (one(x) - target).square().mean().backward()
    return one


def hybrid_sharding(device):
    """Experts and all other parameters are replicated over one dimension and sharded over another."""
    one = one_process(device)
    dense = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "efsdp", "ep"))
        model = Model(device)
        parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})
        shard_by_fsdp(model, mesh["replicate", "efsdp"], dense)
        x, target = own_data(device, 0)
        (model(x) - target).square().mean().backward()
        assert_gradients(model, one)
        clipped = copy.deepcopy(one)
        for a, b in zip(clipped.parameters(), one.parameters(), strict=True):
            a.grad = b.grad.clone()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        assert_close(norm, nn.utils.clip_grad_norm_(clipped.parameters(), 0.05))
        assert_gradients(model, clipped)


def accumulated_gradients(device):
    """Of two backward passes, only the second communicates between the replicas."""
    one = one_process(device)
    for dispatcher in BOTH:
        model = sharded(device, 2, {"dispatcher": dispatcher})
        halves = zip(*(tensor.chunk(2) for tensor in own_data(device, 0)), strict=True)
        for is_last, (x, target) in zip((False, True), halves, strict=True):
            model.set_requires_gradient_sync(is_last)
            ((model(x) - target).square().mean() / 2).backward()
        assert_gradients(model, one)


def replicated_by_ddp(device):
    """DDP replicates everything except the experts."""
    one = one_process(device)
    for dispatcher in BOTH:
        model = Model(device)
        parallelize_module(model, expert_mesh(device)["ep"], {"layers.*.moe": ExpertParallel(dispatcher)})
        experts = [name for name, _ in model.named_parameters() if ".experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        x, target = own_data(device, 0)
        replicated = DistributedDataParallel(model)
        (replicated(x) - target).square().mean().backward()
        assert_gradients(model, one)


def whole_state_dicts(device):
    """State dicts are gathered on the first rank, and sharded again over other numbers of ranks."""
    num_processes = distributed.get_world_size()
    first = sharded(device, 2)
    optimizer = torch.optim.AdamW(first.parameters())
    x, target = own_data(device, 0)
    (first(x) - target).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters, moments = get_state_dict(first, optimizer, options=options)
    if distributed.get_rank() == 0:
        one = Model(device)
        one.load_state_dict(parameters)
        assert len(moments["state"]) == len(parameters) == len(list(one.parameters()))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    second = sharded(device, num_processes if num_processes > 2 else 1)
    other = torch.optim.AdamW(second.parameters())
    set_model_state_dict(second, parameters, options=options)
    set_optimizer_state_dict(second, other, moments, options=options)
    for a, b in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(full(a), full(b))
        for name in ("exp_avg", "exp_avg_sq"):
            assert full(optimizer.state[b][name]).any()
            assert torch.equal(full(other.state[a][name]), full(optimizer.state[b][name]))


def a_float32_router_beside_shorter_experts(device):
    """FSDP2 takes parameters of one dtype per call, so the router is wrapped first."""
    one, mesh = make_layer(device).to(torch.bfloat16), expert_mesh(device, 1)["efsdp"]
    one.router.float()
    many = copy.deepcopy(one)
    for module in (many.router, many.experts, many):
        fully_shard(module, mesh=mesh)
    x = draw(device, 12, seed=distributed.get_rank()).to(torch.bfloat16)
    y, expected = many(x), one(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    gradient = many.router.weight.grad.full_tensor()
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, summed(one.router.weight.grad) / mesh.size(), rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.norm = nn.RMSNorm(D_MODEL, device=device, dtype=float_dtype(device))
        self.moe = make_layer(device)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def sequence_parallelism(device):
    """Each rank has a part of every sequence. Gradients of router and experts are sums over the parts."""
    mesh, one = expert_mesh(device)["ep"], Block(device)
    x, upstream = (draw(device, 24, seed=seed).view(2, 12, D_MODEL) for seed in (1, 2))
    (one(x) * upstream).sum().backward()
    for dispatcher in BOTH:
        many = Block(device)
        style = ExpertParallel(dispatcher, average_gradients=False)
        parallelize_module(many, mesh, {"norm": SequenceParallel(), "moe": style})
        inputs = {"input_layouts": Shard(1), "desired_input_layouts": Shard(1), "use_local_input": True}
        outputs = {"output_layouts": Shard(1), "desired_output_layouts": Shard(1), "use_local_output": False}
        parallelize_module(many.moe, mesh, PrepareModuleInputOutput(**inputs, **outputs))
        sequences = distribute_tensor(x, mesh, [Shard(1)])
        y = many(sequences)
        assert_close(full(y), one(x))
        (y * distribute_tensor(upstream, mesh, [Shard(1)])).sum().backward()
        for (name, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
            assert_close(summed(a.grad) if "router" in name else full(a.grad), b.grad)


def tokens_of_several_processes_are_refused(device):
    """The layer cannot decide which of the tokens a rank should route."""
    mesh = expert_mesh(device)["ep"]
    for layer in (make_layer(device), shard_experts(make_layer(device), expert_mesh(device))):
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(draw(device, 6), mesh, [placement])
            with pytest.raises(ValueError, match="x must be a plain tensor, got a DTensor"):
                layer(x)


def tokens_may_be_under_way(device):
    """Tokens and gradients may be collectives' results that nothing has waited for."""
    group = distributed.group.WORLD.group_name
    for style in (None, *({"dispatcher": dispatcher} for dispatcher in BOTH), OVERLAPPED):
        layer = sharded_layer(device, style, shared_d_ff=8) if style else make_layer(device, shared_d_ff=8)
        x = draw(device, 6, seed=distributed.get_rank()).to(layer.router.weight.dtype)
        results = []
        for wrap in (AsyncCollectiveTensor, torch.ops._c10d_functional.wait_tensor):
            tokens = wrap(torch.ops._c10d_functional.all_gather_into_tensor(x, distributed.get_world_size(), group))
            assert isinstance(tokens, AsyncCollectiveTensor) == (wrap is AsyncCollectiveTensor)
            tokens.requires_grad_()
            y = layer(tokens)
            y.backward(wrap(torch.ops._c10d_functional.all_reduce(y.detach(), "sum", group)))
            results.append([y, tokens.grad, *(full(parameter.grad) for parameter in layer.parameters())])
            layer.zero_grad()
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), style


SLOW = [accumulated_gradients, whole_state_dicts]
TWO = [
    *SLOW,
    replicated_by_ddp,
    a_float32_router_beside_shorter_experts,
    sequence_parallelism,
    tokens_of_several_processes_are_refused,
    tokens_may_be_under_way,
]

test_two_processes = make_test(TWO, 2)
test_four_processes = make_test([hybrid_sharding], 4)
test_four_processes_slowly = slow(make_test(SLOW, 4))
