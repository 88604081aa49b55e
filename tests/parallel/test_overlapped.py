"""Sharded experts with communication overlapped with computation: the results equal those of one rank."""

from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import LoRA, save_communication, save_routing
from moe_layers.parallel.overlapped import _Plan
from moe_layers.parallel.symmetric_memory import CollectiveTransport

from ..processes import eight_gpus, make_test, on_cpu
from ..tiers import slow
from .expert_parallel_cases import (
    D_MODEL,
    KERNELS,
    OVERLAPPED,
    CollectiveCounter,
    assert_all_close,
    assert_close,
    draw,
    draw_adapters,
    expert_mesh,
    full,
    lengths_of,
    make_layer,
    own,
    recorded,
    shard_experts,
    summed,
)
from .test_expert_parallel import LAYERS, compare_dispatchers, compare_layers
from .test_expert_parallel_training import compare_two_steps


def make_overlapped(device, style=OVERLAPPED, **options):
    layer = make_layer(device, **KERNELS | options)
    return shard_experts(layer, expert_mesh(device), average_gradients=False, **style)


def gathering_layers(device, style=OVERLAPPED, **options):
    """Return a layer with each dispatcher that gathers all tokens."""
    styles = (style | {"dispatcher": dispatcher} for dispatcher in ("overlapped", "allgather"))
    return [make_overlapped(device, style, **options) for style in styles]


def own_tokens(device, seed=1):
    lengths = lengths_of("even")
    return own(draw(device, sum(lengths), seed).float(), lengths)


def gradients_of(run, x, parameters):
    """Return the output, then the gradients of everything that needs one."""
    y = run(x)
    leaves = [leaf for leaf in (x, *parameters) if leaf.requires_grad]
    return [y.detach(), *map(full, torch.autograd.grad(y.sin().sum(), leaves))]


def assert_equal(actual, expected):
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), number


def compare(device, lengths, routing, **style):
    compare_dispatchers(device, OVERLAPPED | style, lengths, routing, **KERNELS)


def any_routing_equals_one_process(device):
    for routing in ("spread", "some_dropped", "one_process", "one_expert", "some_empty", "all_dropped"):
        compare(device, "even", routing)


def bounded_rows_equal_one_process(device):
    """Limits on the rows change nothing, also if rows are left over or all slots belong to one rank."""
    for max_rows_factor, chunks, routing in ((1.5, 1, "spread"), (2.0, 2, "some_dropped"), (2.0, 2, "one_process")):
        compare(device, "even", routing, max_rows_factor=max_rows_factor, chunks=chunks)


def any_chunks_equal_one_process(device):
    """Any number of chunks equals one rank; with 12 tokens in five chunks the first chunk is empty."""
    for chunks in (1, 5):
        compare(device, "even", "some_dropped", chunks=chunks)


def no_tokens(device):
    for style in ({"chunks": 1}, {}, {"max_rows_factor": 2.0}):
        compare(device, "none", "spread", **style)


def layers_equal_one_process(device):
    for name in LAYERS:
        if name == "weight_on_input":
            continue
        one, many = (make_layer(device, **KERNELS, **LAYERS[name]) for _ in "ab")
        compare_layers(name, one, many, OVERLAPPED, device)


def adapters_equal_one_process(device):
    """Compare every gradient of adapters and of the weights, which are trained, too."""
    one, many = (make_layer(device, **KERNELS) for _ in "ab")
    for layer in (one, many):
        torch.manual_seed(4)
        layer.add_lora(LoRA(3, 6))
        draw_adapters(layer.requires_grad_(True))
    compare_layers("adapters", one, many, OVERLAPPED, device)


def wide_outputs_leave_in_pieces(device):
    """Outputs are sent in column slices of whole tiles; the interpreter computes at most two slices."""
    expected = {
        256: [256],
        512: [256] * 2,
        768: [768],
        1024: [256] * 4,
        2880: [2880],
        4096: [1024] * 4,
        7168: [1792] * 4,
    }
    for d_model, widths in expected.items():
        plan, tokens = SimpleNamespace(lengths=[1, 3]), torch.empty(0, d_model)
        pieces = _Plan.columns(plan, 1, tokens)
        assert [piece.stop - piece.start for piece in pieces] == widths
        assert [piece.start for piece in pieces] == [0, *accumulate(widths[:-1])]
        assert _Plan.columns(plan, 0, tokens) == [slice(None)]
    for d_model in (512, 1024) if device.type == "cuda" else (512,):
        x = draw(device, 6, seed=distributed.get_rank(), width=d_model).float().requires_grad_()
        compare_dispatchers_that_gather(device, x, OVERLAPPED, bias=True, d_model=d_model, init_std=0.05)


def more_chunks_than_tokens(device):
    x = own_tokens(device)[:2].requires_grad_()
    compare_dispatchers_that_gather(device, x, OVERLAPPED | {"chunks": 3})


def the_first_chunk_is_the_smallest(device):
    for chunks, lengths in ((1, [12]), (2, [3, 9]), (3, [1, 5, 6]), (5, [0, 3, 3, 3, 3])):
        dispatcher = make_overlapped(device, OVERLAPPED | {"chunks": chunks}).dispatcher
        assert dispatcher.lengths(12) == lengths
        assert dispatcher.lengths(0) == [0] * chunks


def compare_dispatchers_that_gather(device, x, style, **options):
    layers = gathering_layers(device, style, **options)
    assert_all_close(*(gradients_of(layer, x, layer.parameters()) for layer in layers))


def layers_in_sequence(device):
    """The transport's memory is reused by the next layer, backward, the next step and recomputation."""
    one = nn.Sequential(*(make_layer(device, seed, **KERNELS) for seed in range(2)))
    many = nn.Sequential(*(make_overlapped(device, seed=seed) for seed in range(2)))
    for step in range(2):
        lengths = lengths_of("even")
        x_one = draw(device, sum(lengths), seed=step).float().requires_grad_()
        x = own(x_one.detach(), lengths).requires_grad_()
        y, dx, *gradients = gradients_of(one, x_one, one.parameters())
        actual = gradients_of(many, x, many.parameters())
        assert_close(actual[0], own(y, lengths))
        assert_close(actual[1], own(dx, lengths))
        for (name, _), a, b in zip(many.named_parameters(), actual[2:], gradients, strict=True):
            assert_close(a if ".experts." in name else summed(a), b)
    region = partial(checkpoint, many, use_reentrant=False)
    assert_equal(gradients_of(region, x, many.parameters()), actual)
    regions = [partial(checkpoint, layer, use_reentrant=False) for layer in many]
    assert_equal(gradients_of(lambda x: regions[1](regions[0](x)), x, many.parameters()), actual)


def regions_see_nothing_of_launches(device):
    """Regions do not see launches, whose first one compiles, for any routing."""
    for kept in (save_routing, save_communication):
        many = nn.Sequential(*(make_overlapped(device, seed=seed, bias=True) for seed in range(2)))
        regions = [partial(checkpoint, layer, use_reentrant=False, context_fn=kept) for layer in many]
        for step in range(3):
            x = own_tokens(device, seed=step).requires_grad_()
            actual = gradients_of(lambda x, regions=regions: regions[1](regions[0](x)), x, many.parameters())
            assert_equal(actual, gradients_of(many, x, many.parameters()))


def training_equals_one_process(device):
    """Training with FSDP2 over the experts of the same name, clipping and AdamW equals one rank."""
    compare_two_steps(device, 2, OVERLAPPED, {"foreach": True}, **KERNELS)


def without_gradients(device):
    """Inference works, also before training, which reuses its buffers."""
    layer, x = make_overlapped(device), own_tokens(device)
    outputs = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            outputs.append(layer(x))
    expected = layer(x)
    expected.sum().backward()
    assert expected.requires_grad and not any(y.requires_grad for y in outputs)
    assert_equal(outputs, [expected] * 2)


def what_is_frozen_has_no_gradient(device):
    """Frozen tensors get no gradient, and all other gradients stay the same."""
    layer = make_overlapped(device, bias=True)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    leaves = dict(zip(names, [own_tokens(device), *layer.parameters()], strict=True))
    experts = {name for name in names if name.startswith("experts.")}
    leaves["x"].requires_grad_()
    y, *gradients = gradients_of(layer, leaves["x"], layer.parameters())
    expected = dict(zip(names, gradients, strict=True))
    for frozen in ({"experts.w_up"}, {"x"}, {"router.weight"}, {"x", "router.weight"}, experts, {"x"} | experts):
        assert frozen < set(names)
        for name, leaf in leaves.items():
            leaf.requires_grad_(name not in frozen)
            leaf.grad = None
        again = layer(leaves["x"])
        again.sin().sum().backward()
        assert torch.equal(again, y), frozen
        for name, leaf in leaves.items():
            assert (leaf.grad is None) == (name in frozen), (name, frozen)
            assert leaf.grad is None or torch.equal(full(leaf.grad), expected[name]), (name, frozen)


def backward_runs_twice(device):
    layer, x = make_overlapped(device), own_tokens(device).requires_grad_()
    loss, leaves = layer(x).sin().sum(), [x, *layer.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_equal(map(full, torch.autograd.grad(loss, leaves)), map(full, first))


def a_recomputed_choice_has_its_own_gradient(device):
    """Without `save_routing`, the recomputation may choose other experts, and the gradient is theirs."""
    x, results = own_tokens(device).requires_grad_(), []
    for layer in gathering_layers(device):
        y = checkpoint(layer, x, use_reentrant=False, determinism_check="none")
        layer.router.weight.data.neg_()
        results.append(torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]))
    assert_all_close(*results)


def weights_that_a_hook_changes(device):
    x, results = own_tokens(device).requires_grad_(), []
    for layer in gathering_layers(device):
        layer.experts.register_forward_pre_hook(
            lambda _, inputs: (inputs[0]._replace(topk_weights=3 * inputs[0].topk_weights),)
        )
        results.append(gradients_of(layer, x, layer.parameters()))
    assert_all_close(*results)


def half_precision(device):
    """Under autocast, results equal those of the other dispatcher that gathers all tokens, except for rounding."""
    x, results = own_tokens(device).requires_grad_(), []
    for layer in gathering_layers(device, {"chunks": 2}, bias=True):
        with torch.autocast(device.type, torch.float16):
            results.append(gradients_of(layer, x, layer.parameters()))
    assert results[0][0].dtype == torch.float16
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).float().norm() <= 3e-3 * b.float().norm()


def what_kernels_do_not_compute(device):
    """Autocast's dtype decides, not the parameters': the interpreter has no bfloat16."""
    layers = gathering_layers(device, {}, implementation=None)
    with torch.autocast(device.type, torch.bfloat16):
        actual, expected = (layer(own_tokens(device)) for layer in layers)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def the_reference_gathers(device):
    x = own_tokens(device).double().requires_grad_()
    compare_dispatchers_that_gather(device, x, OVERLAPPED, implementation="reference", dtype=torch.float64)


def options_that_it_lacks(device):
    """The error comes before anything changes, so that another dispatcher can still be applied."""
    mesh = expert_mesh(device)
    for options, message in (
        ({"router": RouterSpec.llama4(), "top_k": 1}, "'weight_on_input': True"),
        ({"recompute": "up"}, "'recompute': 'up'"),
        ({"batch_invariant": True}, "'batch_invariant': True"),
    ):
        layer = make_layer(device, **KERNELS, **options)
        with pytest.raises(NotImplementedError, match=f"ExpertParallel: the overlapped dispatcher .*{message}"):
            shard_experts(layer, mesh, "overlapped")
        shard_experts(layer, mesh, "allgather")


def options_that_come_later(device):
    for implementation in ("triton", "reference"):
        for part, name, value in (("layer", "batch_invariant", True), ("experts", "recompute", "up")):
            layer = make_overlapped(device, implementation=implementation)
            setattr({"layer": layer, "experts": layer.experts}[part], name, value)
            message = f"has none of .*'{name}': {value!r}"
            with CollectiveCounter() as sent, pytest.raises(NotImplementedError, match=message):
                layer(own_tokens(device))
            assert not sent.names


def chunks_and_sms_unless_said_otherwise(device):
    chunks = 1 if distributed.get_world_size() < 4 else 2
    for style, expected in (({}, (chunks, 2)), ({"chunks": 3, "reserved_sms": 0}, (3, 0))):
        layer = make_overlapped(device, {"dispatcher": "overlapped", **style})
        assert (layer.dispatcher.chunks, layer.experts.reserved_sms) == expected


def backward_needs_no_more_memory(device):
    """Backward needs no more of the transport's memory, which keeps outgrown buffers."""
    layer, begun = make_overlapped(device), []

    class Recording(CollectiveTransport):
        def begin(self, *sizes):
            begun.append(sizes)

    layer.dispatcher.transport = lambda ranks, device: Recording(ranks)
    layer(own_tokens(device).requires_grad_()).sum().backward()
    forward, backward = begun
    assert forward == backward


@on_cpu("on a GPU tokens are copied without collectives")
def collectives_are_those_needed(device):
    """Forward sends the counts, the choices with their weights, and per chunk the tokens and its outputs. The last
    chunk's outputs are sent in up to four column slices of whole tiles. Backward sends the gradients of the outputs,
    and those of weights and tokens if they need one."""
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    cases = (D_MODEL, 1, True), (D_MODEL, 1, False), (512, 2, True)
    for d_model, num_pieces, needs_tokens in cases:
        layer = make_overlapped(device, d_model=d_model)
        x = draw(device, 4, width=d_model).float().requires_grad_(needs_tokens)
        forward, backward = recorded(CollectiveCounter, layer, x)
        assert forward.names == [gather] * 4 + [scatter] * (1 + num_pieces)
        assert backward.names == [gather] * 2 + [scatter] * (4 if needs_tokens else 2)


TWO = [
    adapters_equal_one_process,
    any_chunks_equal_one_process,
    the_first_chunk_is_the_smallest,
    without_gradients,
    backward_runs_twice,
    the_reference_gathers,
    options_that_it_lacks,
    options_that_come_later,
    chunks_and_sms_unless_said_otherwise,
    backward_needs_no_more_memory,
]
# The interpreter takes seconds for each step of these.
SLOW = [
    any_routing_equals_one_process,
    bounded_rows_equal_one_process,
    no_tokens,
    layers_equal_one_process,
    wide_outputs_leave_in_pieces,
    more_chunks_than_tokens,
    layers_in_sequence,
    regions_see_nothing_of_launches,
    what_is_frozen_has_no_gradient,
    a_recomputed_choice_has_its_own_gradient,
    weights_that_a_hook_changes,
    half_precision,
    what_kernels_do_not_compute,
    collectives_are_those_needed,
]
FOUR = [any_chunks_equal_one_process, training_equals_one_process, chunks_and_sms_unless_said_otherwise]
EIGHT = [
    any_routing_equals_one_process,
    any_chunks_equal_one_process,
    layers_equal_one_process,
    wide_outputs_leave_in_pieces,
    layers_in_sequence,
    training_equals_one_process,
]

test_two_processes = make_test(TWO, 2)
test_two_processes_slowly = slow(make_test(SLOW, 2))
test_four_processes = slow(make_test(FOUR, 4))
test_eight_processes = eight_gpus(make_test(EIGHT, 8))
