"""Experts sharded over several ranks compute the same as on one rank: outputs, gradients, errors."""

import copy
from itertools import product
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from moe_kernels import RouterSpec
from moe_layers import ExpertParallel
from moe_layers.experts import grouped
from moe_layers.experts.dispatcher import LocalDispatcher
from moe_layers.routing.result import Slots

from ..processes import eight_gpus, gloo_group, make_test, on_cpu
from ..tiers import slow
from .expert_parallel_cases import (
    D_MODEL,
    KERNELS,
    LENGTHS,
    NUM_EXPERTS,
    STYLES,
    TOP_K,
    CollectiveCounter,
    assert_close,
    draw,
    expert_mesh,
    full,
    lengths_of,
    make_layer,
    own,
    shard_experts,
    sharded_layer,
    styles,
    summed,
)


def draw_slots(device, num_tokens, routing):
    """Return experts and weights of every token. An id of -1 reaches no expert, like padding."""
    generator = torch.Generator().manual_seed(2)
    experts = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    if routing == "one_expert":
        experts = torch.full_like(experts, NUM_EXPERTS - 1)
    elif routing == "one_process":
        experts = experts % (NUM_EXPERTS // 2)
    elif routing == "some_empty":
        experts = experts // 3 * 3
    elif routing == "some_dropped":
        experts[::2, 1:] = -1
        experts[::3] = -1
    elif routing == "all_dropped":
        experts = torch.full_like(experts, -1)
    weights = torch.rand(num_tokens, TOP_K, generator=generator, dtype=torch.float64)
    return experts.int().to(device), weights.to(device, draw(device, 1).dtype)


def run_dispatcher(layer, tokens, experts, weights, upstream):
    """Return (output, gradients of tokens and of weights), offsets, and gradients of the experts' parameters."""
    layer.zero_grad()
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    logits = tokens.new_zeros(len(tokens), NUM_EXPERTS)
    pending = layer.dispatcher.run(tokens, Slots(experts, weights, logits), layer.experts)
    out, offsets = pending.wait(), pending.offsets
    (out * upstream).sum().backward()
    gradients = [full(parameter.grad) for parameter in layer.experts.parameters()]
    return (out.detach(), tokens.grad, weights.grad), offsets, gradients


def compare_dispatchers(device, style, lengths, routing, bitwise=False, **options):
    lengths = lengths_of(lengths)
    num_tokens = sum(lengths)
    experts, weights = draw_slots(device, num_tokens, routing)
    one, many = (make_layer(device, bias=True, **options) for _ in "ab")
    shard_experts(many, expert_mesh(device), average_gradients=False, **style)
    dtype = one.experts.w_up.dtype
    tokens, upstream = (draw(device, num_tokens, seed).to(dtype) for seed in (1, 3))
    inputs = tokens, experts, weights.to(dtype), upstream
    by_token, offsets, gradients = run_dispatcher(one, *inputs)
    own_by_token, own_offsets, own_gradients = run_dispatcher(many, *(own(tensor, lengths) for tensor in inputs))
    assert torch.equal(summed(own_offsets), offsets), (style, lengths, routing)
    expected = [*(own(tensor, lengths) for tensor in by_token), *gradients]
    for number, (a, b) in enumerate(zip([*own_by_token, *own_gradients], expected, strict=True)):
        if bitwise and device.type == "cpu":
            assert torch.equal(a, b), (style, lengths, routing, number)
        else:
            assert_close(a, b)


def alltoall_is_bitwise_equal(device):
    for lengths, routing in product(LENGTHS, ("spread", "some_dropped")):
        compare_dispatchers(device, STYLES[0], lengths, routing, bitwise=True)


def skewed_routing(device):
    """Route all tokens to one expert or rank, leave experts without tokens, and leave slots without experts."""
    for style, routing in product(STYLES[:2], ("one_expert", "one_process", "some_empty", "all_dropped")):
        compare_dispatchers(device, style, "even", routing, bitwise=style is STYLES[0])


def allgather_equals_one_process(device):
    for lengths, routing in product(("even", "none"), ("spread", "some_dropped")):
        compare_dispatchers(device, STYLES[1], lengths, routing)


def bounded_rows(device):
    bounded = [style for style in styles() if "max_rows_factor" in style]
    routings = ("spread", "some_empty", "some_dropped", "one_process", "all_dropped")
    for style, lengths, routing in product(bounded, ("even", "none"), routings):
        compare_dispatchers(device, style, lengths, routing)


def chunks_equal_the_whole(device):
    """With three chunks, some chunks are shorter or empty."""
    for style in STYLES[4:6]:
        names = ["even", "none"]
        if style["dispatcher"] == "alltoall":
            names.append("one_each_but_the_first")
        for lengths, routing in product(names, ("spread", "some_dropped", "one_expert")):
            compare_dispatchers(device, style, lengths, routing)


def kernels_write_all_that_is_read(device):
    """Kernels read no unwritten memory, which holds NaN in tests, for slots without experts or with remote experts."""
    for style, routing in zip(STYLES[:4], ("some_dropped", "one_process", "one_process", "some_dropped"), strict=True):
        compare_dispatchers(device, style, "even", routing, **KERNELS)


def reserved_sms_reach_the_kernels(device):
    layer = shard_experts(make_layer(device), expert_mesh(device), reserved_sms=16)
    with mock.patch.object(grouped, "compute_experts", side_effect=grouped.compute_experts) as fused:
        layer(draw(device, 4))
    assert fused.call_args.kwargs["reserved_sms"] == 16


def empty_experts_have_zero_gradients(device):
    for style in styles():
        layer = sharded_layer(device, style)
        tokens, weights = draw(device, 6), draw(device, 6, width=TOP_K)
        run_dispatcher(layer, tokens, torch.full((6, TOP_K), NUM_EXPERTS - 1).int().to(device), weights, tokens)
        gradient = layer.experts.w_up.grad
        assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0),)
        nonzero = gradient.full_tensor().flatten(1).any(1)
        assert nonzero.tolist() == [False] * (NUM_EXPERTS - 1) + [True]


LAYERS = {
    "plain": {},
    "shared_and_bias": {"shared_d_ff": 12, "shared_gate": True, "bias": True},
    "zero_experts": {"num_zero_experts": 2},
    "latent": {"latent_dim": 12},
    "weight_on_input": {"router": RouterSpec.llama4(), "top_k": 1},
    "capacity": {"capacity": 2},
}


def layers_equal_one_process(device):
    """Compare the complete layer: outputs, gradients of the tokens, and the mean gradients of every parameter."""
    for name, options in LAYERS.items():
        for style in styles():
            compare_layers(name, make_layer(device, **options), make_layer(device, **options), style, device)


def compare_layers(name, one, many, style, device):
    shard_experts(many, expert_mesh(device), **style)
    lengths, dtype = lengths_of("even"), one.router.weight.dtype
    x, upstream = (draw(device, sum(lengths), seed).to(dtype) for seed in (1, 3))
    x_one, x_many = x.clone().requires_grad_(), own(x, lengths).clone().requires_grad_()
    shape = len(lengths), -1, x.shape[1]
    y_one = one(x_one.view(shape)).view(x.shape)
    (y_one * upstream).sum().backward()
    y_many, routing = many(x_many, return_routing=True)
    (y_many * own(upstream, lengths)).sum().backward()
    assert_close(y_many, own(y_one, lengths))
    assert_close(x_many.grad, own(x_one.grad, lengths))
    if "capacity" not in name:
        counts = one(x, return_routing=True)[1].tokens_per_expert
        assert torch.equal(summed(routing.tokens_per_expert), counts)
    for (parameter_name, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
        mean = full(a.grad) if isinstance(a.grad, DTensor) else summed(a.grad) / len(lengths)
        assert_close(mean, b.grad / len(lengths))
        assert isinstance(a, DTensor) == parameter_name.startswith("experts."), parameter_name


def each_process_keeps_its_experts_only(device):
    """Each rank holds only its experts in memory. They come from the first rank, from its own, or were never whole."""
    mesh = expert_mesh(device)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    share = range(rank * NUM_EXPERTS // size, (rank + 1) * NUM_EXPERTS // size)
    expected = make_layer(device).experts.w_up[share.start : share.stop]
    from_first = shard_experts(make_layer(device, seed=rank), mesh)
    from_own = parallelize_module(make_layer(device), mesh["ep"], ExpertParallel(), src_data_rank=None)
    kept = make_layer(device)
    kept.keep_local_experts(share)
    shard_experts(kept, mesh)
    for layer in (from_first, from_own, kept):
        local = layer.experts.w_up.to_local()
        assert torch.equal(local, expected)
        assert layer.experts.w_up.shape == (NUM_EXPERTS, *expected.shape[1:])
        assert layer.experts.w_up.is_leaf and layer.experts.w_up.requires_grad
    for layer in (from_own, kept):
        assert layer.experts.w_up.to_local().untyped_storage().nbytes() == expected.nbytes
    meta = shard_experts(make_layer(torch.device("meta")), mesh)
    meta.to_empty(device=device)
    meta.reset_parameters(0.3)
    assert meta.experts.w_up.to_local().shape == expected.shape


def all_ranks_start_equal(device):
    """Router, selection bias, shared and latent parameters come from the first rank, as the experts do."""
    options = {"shared_d_ff": 12, "shared_gate": True, "bias": True, "latent_dim": 12}
    options["router"] = RouterSpec.deepseek_v3()
    one, many = make_layer(device, **options), make_layer(device, seed=distributed.get_rank(), **options)
    for layer, value in ((one, 0), (many, distributed.get_rank())):
        layer.router.selection_bias.fill_(value)
    many.router.weight.data = many.router.weight.data.t().contiguous().t()  # strides of its own
    shard_experts(many, expert_mesh(device))
    for (name, a), (other, b) in zip(many.state_dict().items(), one.state_dict().items(), strict=True):
        assert name == other and torch.equal(full(a), b), name
    x = draw(device, 7)
    assert_close(many(x), one(x))
    other = make_layer(device, seed=distributed.get_rank())
    before = other.router.weight.clone()
    parallelize_module(other, expert_mesh(device)["ep"], ExpertParallel(), src_data_rank=None)
    assert torch.equal(other.router.weight, before)


def frozen_experts_stay_frozen(device):
    layer = make_layer(device)
    layer.experts.requires_grad_(False)
    shard_experts(layer, expert_mesh(device))
    layer(draw(device, 5)).sum().backward()
    assert layer.experts.w_up.grad is None and layer.router.weight.grad is not None


def auto_chooses_by_traffic(device):
    mesh = expert_mesh(device)
    for top_k, expected in ((1, "AllToAllDispatcher"), (2, "AllGatherDispatcher")):
        layer = shard_experts(make_layer(device, top_k=top_k), mesh)
        assert type(layer.dispatcher).__name__ == expected


def copies_share_the_processes(device):
    layer = shard_experts(make_layer(device), expert_mesh(device))
    x = draw(device, 5)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def errors_come_before_the_first_collective(device):
    mesh = expert_mesh(device)
    with CollectiveCounter() as sent:
        with pytest.raises(KeyError, match=r"tp.*efsdp.*ep"):
            parallelize_module(make_layer(device), mesh["tp"], ExpertParallel())
        with pytest.raises(ValueError, match="num_experts must be a multiple of the mesh's 2 ranks, got 7"):
            shard_experts(make_layer(device, num_experts=7), mesh)
        with pytest.raises(ValueError, match=r"must have one dimension, as mesh\[\"ep\"\] has, got .*efsdp.* \[1, 2\]"):
            ExpertParallel()._apply(make_layer(device), mesh)
        with pytest.raises(ValueError, match="the module must be a MoEFeedForward, got Linear"):
            parallelize_module(torch.nn.Linear(2, 2), mesh["ep"], ExpertParallel())
        layer = shard_experts(make_layer(device), mesh)
        with pytest.raises(ValueError, match="experts must be plain parameters, got DTensors"):
            shard_experts(layer, mesh)
        with pytest.raises(ValueError, match=r"keep_local_experts: .* all still here"):
            layer.keep_local_experts(range(0, 2))
        strangers = make_layer(device)
        strangers.keep_local_experts(range(1, 5))
        with pytest.raises(ValueError, match=r"must hold all experts or those of this rank, .* got range\(1, 5\)"):
            shard_experts(strangers, mesh)
        with pytest.raises(NotImplementedError, match="saved_bytes"):
            layer.saved_bytes(5)
    assert sent.names == []


def parameters_keep_their_attributes(device):
    layer = make_layer(device)
    layer.experts.w_up.weight_decay = 0.5
    shard_experts(layer, expert_mesh(device))
    assert isinstance(layer.experts.w_up, DTensor) and layer.experts.w_up.weight_decay == 0.5


@on_cpu("on a GPU the error ends the process")
def wrong_sizes_of_tokens(device):
    """Wider tokens, or another dtype, on one rank raise an error on every rank before any communication of tokens."""
    mesh, rank = expert_mesh(device), distributed.get_rank()
    for kind in ({"d_model": D_MODEL * (1 + rank)}, {"dtype": (torch.float64, torch.float32)[rank]}):
        for style in STYLES:
            plan = ExpertParallel(**style)
            layer = parallelize_module(make_layer(device, **kind), mesh["ep"], plan, src_data_rank=None)
            x = torch.zeros(6, layer.d_model, dtype=layer.router.weight.dtype)
            with CollectiveCounter() as sent, pytest.raises(ValueError, match=r"ranks must have .*many bytes"):
                layer(x)
            assert len(sent.names) == 1, style


@on_cpu("on a GPU the error ends the process")
def wrong_numbers_of_tokens(device):
    """The error occurs on every rank before any tokens are sent."""
    rank = distributed.get_rank()
    sizes = r"equally many tokens .*got \[T, K, bytes, gradients\] of \[\[5, 3, \d+, 7\], \[6, 3, \d+, 7\]\]; the all"
    equal = "max_rows_factor=2.0 every rank must have equally many tokens, .* and at most"
    own = "max_rows_factor=1.3 .* own slots, here 24, got more"
    for dispatcher, factor, message, collective in (
        ("allgather", None, sizes, "all_gather_into_tensor"),
        ("overlapped", None, sizes, "all_gather_into_tensor"),
        ("alltoall", 2.0, equal, "all_to_all_single"),
        ("allgather", 1.3, own, "all_gather_into_tensor"),
        ("overlapped", 1.3, own, "all_gather_into_tensor"),
        ("alltoall", 1.3, "at most 12 slots for any rank", "all_to_all_single"),
    ):
        layer = sharded_layer(device, {"dispatcher": dispatcher, "max_rows_factor": factor})
        # With the factor 1.3, only the first rank's slots are too many, for the second rank.
        routing, num_tokens = "spread" if rank else "one_expert", 6 if factor == 1.3 else 5 + rank
        tokens, (experts, weights) = draw(device, num_tokens), draw_slots(device, num_tokens, routing)
        tokens, weights = (tensor.to(layer.router.weight.dtype) for tensor in (tokens, weights))
        with CollectiveCounter() as sent, pytest.raises(ValueError, match=message):
            run_dispatcher(layer, tokens, experts, weights, tokens)
        assert sent.names == [collective], (dispatcher, factor)


EIGHT = [
    alltoall_is_bitwise_equal,
    skewed_routing,
    allgather_equals_one_process,
    bounded_rows,
    chunks_equal_the_whole,
    empty_experts_have_zero_gradients,
    layers_equal_one_process,
    each_process_keeps_its_experts_only,
]
TWO = [
    *EIGHT,
    reserved_sms_reach_the_kernels,
    all_ranks_start_equal,
    frozen_experts_stay_frozen,
    parameters_keep_their_attributes,
    auto_chooses_by_traffic,
    copies_share_the_processes,
    errors_come_before_the_first_collective,
    wrong_numbers_of_tokens,
    wrong_sizes_of_tokens,
]

test_two_processes = make_test(TWO, 2)
test_two_processes_with_kernels = slow(make_test([kernels_write_all_that_is_read], 2))  # in the interpreter
test_eight_processes = eight_gpus(make_test(EIGHT, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dispatcher": "ring"},
            r"dispatcher must be one of \('auto', 'allgather', 'alltoall', 'overlapped'\), got 'ring'",
        ),
        ({"max_rows_factor": 0.5}, "max_rows_factor must be at least 1, or None, got 0.5"),
        ({"max_rows_factor": float("nan")}, "max_rows_factor must be at least 1"),
        ({"chunks": 0}, "chunks must be a positive integer, got 0"),
        ({"reserved_sms": -1}, "reserved_sms must not be negative, got -1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ExpertParallel(**options)


def test_a_process_group_of_one_needs_no_other(tmp_path):
    """With one rank, the style computes the same as a layer without it, with either dispatcher."""
    with gloo_group(tmp_path):
        device = torch.device("cpu")
        one = make_layer(device)
        assert isinstance(one.dispatcher, LocalDispatcher)
        x = draw(device, 7)
        for style in STYLES:
            assert_close(sharded_layer(device, style)(x), one(x))
