"""Hazards: the order of collectives, reads of data in flight, ranks without tokens, dead ranks, different limits on
different ranks, and parameters that are no longer sharded."""

import os
from datetime import timedelta
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing import get_context
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_layers import (
    CapacityFactor,
    CustomAssignment,
    ExpertChoice,
    ExpertParallel,
    MoEFeedForward,
    TokenExpertPairs,
    clip_grad_norm_,
    save_routing,
)
from moe_layers.parallel.collectives import Ranks

from ..processes import gloo_group, make_test, on_cpu
from ..tiers import slow
from .expert_parallel_cases import (
    D_MODEL,
    KERNELS,
    LENGTHS,
    NUM_EXPERTS,
    OVERLAPPED,
    STYLES,
    CollectiveCounter,
    assert_all_close,
    assert_close,
    draw,
    expert_mesh,
    full,
    layer_options,
    lengths_of,
    make_layer,
    mesh_of_all_ranks,
    own,
    shard_experts,
    sharded_layer,
    summed_gradients,
)


def lengths_for(style):
    """Return the numbers of tokens that a style supports."""
    return LENGTHS if style["dispatcher"] == "alltoall" and "max_rows_factor" not in style else ("even", "none")


def copies_by_itself(style, device):
    """Return whether tokens are sent without collectives."""
    return style is OVERLAPPED and device.type == "cuda"


def collectives_start_in_one_order(device):
    """All ranks start collectives in one order, with unequal or no tokens, and for two layers with one recomputed."""
    for style in (*STYLES, OVERLAPPED):
        first, second = (sharded_layer(device, style, shared_d_ff=8) for _ in "ab")
        for name in lengths_for(style):
            x = own(draw(device, sum(lengths_of(name))), lengths_of(name))
            x = x.to(first.router.weight.dtype).requires_grad_()
            started = CollectiveCounter()
            with started:
                y = first(x) + checkpoint(second, x, use_reentrant=False, context_fn=save_routing)
                y.square().sum().backward()
            everyones = [None] * distributed.get_world_size()
            distributed.all_gather_object(everyones, list(zip(started.names, map(str, started.dtypes), strict=True)))
            assert len(everyones[0]) > (5 if copies_by_itself(style, device) else 10)
            assert all(names == everyones[0] for names in everyones), (style, name)


class UnderWay(TorchDispatchMode):
    """Raises an error if anything but `wait_tensor` reads the result of an unfinished collective."""

    def __init__(self):
        super().__init__()
        self.storages, self.num_waits = {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        keys = [tensor.untyped_storage()._cdata for tensor in given]
        if op.name() == "_c10d_functional::wait_tensor":
            self.num_waits += self.storages.pop(keys[0], None) is not None
        elif not op.is_view:
            assert not set(keys) & set(self.storages), f"{op} reads what is under way"
        result = op(*args, **(kwargs or {}))
        if op.namespace == "_c10d_functional" and "wait" not in op.name():
            self.storages[result.untyped_storage()._cdata] = result  # kept, so that no other tensor reuses its address
        return result


def nothing_reads_what_is_under_way(device):
    """No result is read early, and everything sent is waited for."""
    for style in (*STYLES, OVERLAPPED):
        layer = sharded_layer(device, style, shared_d_ff=8)
        x = draw(device, 7).to(layer.router.weight.dtype).requires_grad_()
        with UnderWay() as seen:
            layer(x).square().sum().backward()
        fewest = 1 if copies_by_itself(style, device) else 4 if style is OVERLAPPED else 6
        assert not seen.storages and seen.num_waits > fewest, style
    tensor = torch.ops._c10d_functional.all_gather_into_tensor
    with UnderWay(), pytest.raises(AssertionError, match="reads what is under way"):
        tensor(x.detach(), distributed.get_world_size(), distributed.group.WORLD.group_name).add(1)


def processes_without_tokens(device):
    """Ranks without tokens take part in forward, backward, FSDP2 and clipping. Gradients of their routers are zero."""
    for style in (*STYLES, OVERLAPPED):
        options = layer_options(style)
        for name in lengths_for(style):
            lengths = lengths_of(name)
            one, mesh = make_layer(device, **options), expert_mesh(device)
            x = draw(device, sum(lengths)).to(one.router.weight.dtype)
            many, replicated = (
                shard_experts(make_layer(device, **options), mesh, average_gradients=False, **style) for _ in "ab"
            )
            one(x).square().sum().backward()
            y = many(own(x, lengths))
            assert y.requires_grad
            y.square().sum().backward()
            assert_all_close(summed_gradients(many), [parameter.grad for parameter in one.parameters()])
            if not lengths[distributed.get_rank()]:
                assert not many.router.weight.grad.any()
            fully_shard(replicated.experts, mesh=mesh["efsdp"])
            fully_shard(replicated, mesh=mesh_of_all_ranks(device))
            replicated(own(x, lengths)).square().sum().backward()
            assert clip_grad_norm_(replicated.parameters(), 1.0).isfinite()


def plain_parameters_afterwards(device):
    """An unsharded state dict cannot replace the sharded parameters."""
    one, layer = make_layer(device), shard_experts(make_layer(device, seed=1), expert_mesh(device))
    x = draw(device, 4)
    layer.load_state_dict(one.state_dict(), assign=True)
    with CollectiveCounter(), pytest.raises(ValueError, match=r"w_up must be a DTensor, got Parameter \[8, 16, 16\]"):
        layer(x)
    layer = shard_experts(make_layer(device, seed=1), expert_mesh(device))
    set_model_state_dict(layer, one.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_close(layer(x), one(x))


@on_cpu("on a GPU the error ends the process")
def bounds_of_unequal_numbers_of_slots(device):
    """Limits are relative to each rank's own slots. Exceeding one rank's limit is an error on every rank."""
    mesh, rank, x = expert_mesh(device), distributed.get_rank(), draw(device, 12).float()

    def route(logits, num_pairs):
        pair = torch.arange(num_pairs[rank])
        return TokenExpertPairs(pair % len(logits), (pair % NUM_EXPERTS).int(), torch.ones(num_pairs[rank]))

    for style in ({"dispatcher": "allgather"}, {"dispatcher": "allgather", "chunks": 2}, OVERLAPPED):
        for num_pairs, fits in (((24, 48), True), ((4, 44), False)):
            assignment = CustomAssignment(partial(route, num_pairs=num_pairs))
            one, many = (make_layer(device, assignment=assignment, **KERNELS) for _ in "ab")
            shard_experts(many, mesh, **style, max_rows_factor=2.0)
            if fits:
                assert_close(many(x), one(x))
                continue
            message = "max_rows_factor=2.0 .* its own slots, here"
            with CollectiveCounter() as sent, pytest.raises(ValueError, match=message):
                many(x)
            assert sent.names == ["all_gather_into_tensor"]


@on_cpu("on a GPU the error ends the process")
def bounds_of_other_sequences(device):
    """For equally many tokens, a capacity keeps 24 slots on one rank and 36 on the other."""
    x = draw(device, 12).view((12, 1, D_MODEL) if distributed.get_rank() else (1, 12, D_MODEL))
    one = make_layer(device, capacity=CapacityFactor(0.5))
    for max_rows_factor in (1.5, 2.0):
        many = make_layer(device, capacity=CapacityFactor(0.5))
        shard_experts(many, expert_mesh(device), "allgather", max_rows_factor=max_rows_factor)
        if max_rows_factor == 2.0:
            assert_close(many(x), one(x))
        else:
            with pytest.raises(ValueError, match=r"max_rows_factor=1.5 .* its own slots, here (36|54), got"):
                many(x)


def early_slots_within_the_bound(device):
    """With P as the factor, all slots of a capacity, of a list of pairs or of expert choice may lie in one chunk."""
    mesh, x = expert_mesh(device), draw(device, 12)
    num_ranks = distributed.get_world_size()

    def route(logits):  # the first token's slots, all for experts of the first rank
        experts = (torch.arange(6, device=device) % (NUM_EXPERTS // num_ranks)).int()
        return TokenExpertPairs(torch.zeros_like(experts), experts, logits[:1, experts.long()].sum(0).sigmoid())

    few = torch.arange(3, dtype=torch.int32, device=device).expand(12, 3)
    kinds = (
        ({"assignment": CustomAssignment(route)}, {}),
        ({"capacity": CapacityFactor(0.5)}, {"topk_experts": few}),
        ({"assignment": ExpertChoice()}, {}),
    )
    for (options, given), dispatcher, chunks in product(kinds, ("alltoall", "allgather", "overlapped"), (1, 2, 6)):
        one, many = make_layer(device, **options), make_layer(device, **options)
        shard_experts(many, mesh, dispatcher, chunks=chunks, max_rows_factor=float(num_ranks))
        for layer in (one, many):
            nn.init.zeros_(layer.router.weight)  # ties: each expert chooses the first tokens
        assert_close(many(x, **given), one(x, **given))
        assert len(many(x[:0], **{name: tensor[:0] for name, tensor in given.items()})) == 0


@on_cpu("on a GPU the error ends the process")
def unequal_gradients(device):
    """Every rank gets an error before tokens are sent. Backward would wait for another rank's gradient forever."""
    mesh, rank = expert_mesh(device), distributed.get_rank()

    def needs_input(layer, x):
        layer(x.requires_grad_(bool(rank)))

    def needs_router(layer, x):
        layer.router.requires_grad_(bool(rank))
        layer(x)

    def needs_experts(layer, x):
        layer.router.requires_grad_(False)
        layer.experts.requires_grad_(bool(rank))
        layer(x)

    def needs_none(layer, x):
        with torch.set_grad_enabled(bool(rank)):
            layer(x)

    for style, case in product((*STYLES, OVERLAPPED), (needs_input, needs_router, needs_experts, needs_none)):
        layer = shard_experts(make_layer(device), mesh, **style)
        with CollectiveCounter() as sent, pytest.raises(ValueError, match="need the same gradients, got"):
            case(layer, draw(device, 6))
        assert len(sent.names) == 1, (style, case)


def experts_frozen_on_one_rank(device):
    """Backward communicates no gradients of experts, so one rank may freeze its experts."""
    one, many = make_layer(device), shard_experts(make_layer(device), expert_mesh(device), average_gradients=False)
    many.experts.requires_grad_(bool(distributed.get_rank()))
    x = draw(device, 6)
    for layer in (one, many):
        layer(x).square().sum().backward()
    assert_close(many.router.weight.grad, one.router.weight.grad)


def padded_all_gather(device):
    """Ranks of any length gather padding up to the longest one. It has no effect, and unequal ranks are an error."""
    mesh, rank = expert_mesh(device), distributed.get_rank()
    for chunks, name in product((1, 2), LENGTHS):
        lengths = lengths_of(name)
        one, many = make_layer(device), make_layer(device)
        style = ExpertParallel("allgather", average_gradients=False, chunks=chunks)
        parallelize_module(many, mesh["ep"], style)
        ranks = Ranks.of(mesh["ep"].get_group())
        many.dispatcher = style.make_dispatcher("allgather", ranks, any_lengths=True, name="experts of a model")
        x = draw(device, sum(lengths))
        expected, out = one(x), many(own(x, lengths))
        assert_close(out, own(expected, lengths))
        for y in (expected, out):
            y.square().sum().backward()
        assert_all_close(summed_gradients(many), [parameter.grad for parameter in one.parameters()])
    with CollectiveCounter() as sent, pytest.raises(ValueError, match=r"experts of a model: .* same gradients, got"):
        many(draw(device, 2 + rank).requires_grad_(bool(rank)))
    assert len(sent.names) == 1


CASES = [
    padded_all_gather,
    collectives_start_in_one_order,
    nothing_reads_what_is_under_way,
    plain_parameters_afterwards,
    bounds_of_other_sequences,
    early_slots_within_the_bound,
    unequal_gradients,
    experts_frozen_on_one_rank,
]
SLOW = [processes_without_tokens, bounds_of_unequal_numbers_of_slots]  # every dispatcher, in the interpreter

test_two_processes = make_test(CASES, 2)
test_two_processes_slowly = slow(make_test(SLOW, 2))


def test_a_layer_is_loaded_to_the_device_of_its_mesh(tmp_path):
    """Experts are moved to the device of the mesh in any case, so the rest of the layer must follow."""
    with gloo_group(tmp_path):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        make_layer(torch.device("cpu"), shared_d_ff=8).save_checkpoint(tmp_path / "layer")
        with mock.patch.object(DeviceMesh, "device_type", "meta"):
            layer = MoEFeedForward.from_checkpoint(tmp_path / "layer", mesh=mesh)
        assert {full(parameter).device.type for parameter in layer.parameters()} == {"meta"}
        layer = MoEFeedForward.from_checkpoint(tmp_path / "layer", mesh=mesh)
        assert {full(parameter).device.type for parameter in layer.parameters()} == {"cpu"}


def run_until_one_dies(rank, folder, dispatcher, when):
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with gloo_group(folder, rank, 2, timeout=timedelta(seconds=20)):
        layer = shard_experts(make_layer(device), expert_mesh(device), dispatcher)
        x = draw(device, 5)
        layer(x).sum().backward()
        if when == "forward" and rank == 1:
            os._exit(7)
        try:
            y = layer(x)
            if rank == 1:
                os._exit(7)
            y.sum().backward()
        except RuntimeError:
            os._exit(3)
        os._exit(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL's watchdog ends the process, and says so in its log")
@pytest.mark.parametrize(
    ("dispatcher", "when"), [("alltoall", "backward"), pytest.param("allgather", "forward", marks=slow)]
)
def test_a_process_that_dies_is_an_error_for_the_other(dispatcher, when, tmp_path):
    """The error occurs at once, not after the timeout."""
    context = get_context("forkserver")
    arguments = [(rank, tmp_path, dispatcher, when) for rank in range(2)]
    processes = [context.Process(target=run_until_one_dies, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=18)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [3, 7]
