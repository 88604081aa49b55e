"""Communication of expert parallelism: no more than necessary, overlapped with computation, and never repeated."""

import itertools
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import distributed
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_layers import ExpertParallel, save_communication, save_routing

from ..processes import make_test, on_cpu, run_cases
from ..tiers import slow
from .expert_parallel_cases import (
    D_MODEL,
    OVERLAPPED,
    STYLES,
    CollectiveCounter,
    assert_all_close,
    assert_close,
    assert_gradients,
    draw,
    expert_mesh,
    make_layer,
    own,
    recorded,
    shard_experts,
    sharded_layer,
)

BOUNDED_OVERLAPPED = OVERLAPPED | {"max_rows_factor": 2.0}


def count_waits(run, *arguments):
    """Return (result, number of host synchronisations)."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        result = run(*arguments)
        torch.cuda.set_sync_debug_mode("default")
    return result, sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)


def the_host_waits_at_most_once(device):
    """Forward synchronises once, to read the number of rows, unless that has a limit; backward never does."""
    for style in (*STYLES, OVERLAPPED, BOUNDED_OVERLAPPED):
        layer = sharded_layer(device, style)
        x = draw(device, 12)
        layer(x).sum().backward()  # compiles
        y, forward = count_waits(layer, x)
        _, backward = count_waits(y.sum().backward)
        assert (forward, backward) == (int("max_rows_factor" not in style), 0), style


def graphs_capture_bounded_rows(device):
    """A CUDA graph captures forward and backward; replays use other tokens."""
    for style in (*STYLES, BOUNDED_OVERLAPPED):
        if "max_rows_factor" not in style:
            continue
        layer = sharded_layer(device, style, shared_d_ff=8)
        x = draw(device, 12).requires_grad_()

        def step(x=x, layer=layer):
            return torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and lets NCCL connect
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            x.copy_(draw(device, 12, seed=7 + distributed.get_rank()))
        graph.replay()
        assert_all_close(captured, step())


def tokens_travel_in_autocast_dtype(device):
    sent = CollectiveCounter()
    layer = shard_experts(make_layer(device).float(), expert_mesh(device), "alltoall")
    with torch.autocast(device.type, torch.bfloat16), sent:
        y = layer(draw(device, 5).float())
    assert y.dtype == torch.bfloat16
    assert sent.dtypes.count(torch.bfloat16) == 2


def no_more_collectives_than_needed(device):
    """Forward sends counts, and per chunk the weights, the tokens and the outputs; with allgather also the choices.
    Backward sends, per chunk, the gradients of outputs, tokens and weights."""
    for style in STYLES:
        layer = sharded_layer(device, style)
        recorders = recorded(CollectiveCounter, layer, draw(device, 6).requires_grad_())
        chunks = style.get("chunks", 1)
        expected = {
            "alltoall": [{"all_to_all_single": 1 + 3 * chunks}, {"all_to_all_single": 3 * chunks}],
            "allgather": [
                {"all_gather_into_tensor": 1 + 3 * chunks, "reduce_scatter_tensor": chunks},
                {"all_gather_into_tensor": chunks, "reduce_scatter_tensor": 2 * chunks},
            ],
        }[style["dispatcher"]]
        for seen, numbers in zip(recorders, expected, strict=True):
            assert {name: seen.names.count(name) for name in seen.names} == numbers


class Order(TorchDispatchMode):
    """Records the order in which token collectives start and end, and in which products of named widths run."""

    def __init__(self, widths):
        super().__init__()
        self.widths, self.events, self.waits = widths, [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op.name()
        if name == "_c10d_functional::wait_tensor":
            self.events += ["wait"] * (args[0].dim() == 2 and args[0].shape[1] == D_MODEL)
        elif name.startswith("_c10d_functional"):
            self.events += ["start"] * (args[0].dim() == 2 and args[0].shape[1] == D_MODEL)
        elif "mm" in name:
            sizes = {size for tensor in args if isinstance(tensor, torch.Tensor) for size in tensor.shape}
            self.events += [event for width, event in self.widths.items() if width in sizes]
        return result


def communication_overlaps(device):
    """The shared expert runs while outputs are in flight, and in backward while their gradients are. With chunks, one
    chunk is computed while another is in flight."""
    widths = {11: "experts", 22: "experts", 13: "shared", 26: "shared"}
    for dispatcher, chunks in itertools.product(("alltoall", "allgather"), (1, 2)):
        layer = make_layer(device, d_ff=11, shared_d_ff=13, implementation="reference")
        shard_experts(layer, expert_mesh(device), dispatcher, chunks=chunks)
        forward, backward = recorded(partial(Order, widths), layer, draw(device, 6).requires_grad_())
        chunk = ["start", "wait", "experts"]
        for order, expected in (
            (forward, [*chunk * chunks, "start", "shared", "wait"]),
            (backward, ["start", "shared", *chunk[1:], *chunk * (chunks - 1), "start", "wait"]),
        ):
            events = [event for event, _ in itertools.groupby(order.events)]
            assert events == expected, (dispatcher, chunks, events)


@on_cpu("on a GPU NCCL's watchdog ends the other ranks")
def a_process_that_stays_away_is_an_error(device):
    """Other ranks fail after the group's timeout."""
    group = distributed.new_group(timeout=timedelta(seconds=4))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    layer = parallelize_module(make_layer(device), mesh, ExpertParallel(), src_data_rank=None)
    if distributed.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed ?out|timeout"):
            layer(draw(device, 5))
    distributed.barrier()


def checkpointed_regions(device):
    """Experts are chosen once, `save_communication` sends nothing twice, and gradients stay equal."""
    for dispatcher, lengths in (("alltoall", [5, 6]), ("allgather", [6, 6])):
        x = own(draw(device, sum(lengths)), lengths).requires_grad_()
        layer = shard_experts(make_layer(device), expert_mesh(device), dispatcher)
        expected = torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
        chosen = []
        layer.router.register_forward_hook(lambda router, inputs, routed, to=chosen: to.append(routed.topk_experts))
        for context_fn in (save_routing, save_communication):
            forward, backward = CollectiveCounter(), CollectiveCounter()
            region = partial(checkpoint, layer, use_reentrant=False, context_fn=context_fn)
            with forward:
                y = region(x).sin()
            with backward:
                gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
            assert_all_close(gradients, expected)
            # Nothing of the reduce-scatter's result is saved, so the recomputation stops before it.
            num_again = {"alltoall": len(forward.names), "allgather": len(forward.names) - 1}[dispatcher]
            num_again = num_again if context_fn is save_routing else 0
            assert len(backward.names) == 3 + num_again, (dispatcher, backward.names)
            # Emulate another rounding of the logits than in the forward, but exaggerated.
            y, weight = region(x), layer.router.weight.detach().clone()
            layer.router.weight.data.neg_()
            y.sum().backward()
            layer.router.weight.data.copy_(weight)
            assert torch.equal(chosen[-1], chosen[-2])


def outputs_of_regions_may_change_in_place(device):
    """Outputs may be changed in place, whatever the region saves for its recomputation."""
    for dispatcher, chunks, average_gradients, kept in itertools.product(
        ("alltoall", "allgather", "overlapped"), (1, 2), (False, True), (save_routing, save_communication)
    ):
        style = {"dispatcher": dispatcher, "chunks": chunks, "average_gradients": average_gradients}
        layer = sharded_layer(device, style)
        x = draw(device, 6, seed=distributed.get_rank()).to(layer.router.weight.dtype).requires_grad_()
        leaves = [x, *layer.parameters()]
        expected = torch.autograd.grad((layer(x) + x).sin().sum(), leaves)
        y = checkpoint(lambda x, layer=layer: layer(x).add_(x).sin(), x, use_reentrant=False, context_fn=kept)
        assert_all_close(torch.autograd.grad(y.sum(), leaves), expected)


def compiled_around_the_dispatcher(device):
    """The code before and after the dispatcher compiles: router, shared expert and sum. More tokens need no new
    graph."""
    for style in ({"dispatcher": "allgather"}, {"dispatcher": "alltoall", "chunks": 2}):
        layer, compiled = (sharded_layer(device, style, shared_d_ff=8) for _ in "ab")
        graphs = {}  # graphs that ran, by code: PyTorch may compile a graph twice, and restarts drop graphs

        def backend(graph, inputs, graphs=graphs):
            compiled = aot_eager(graph, inputs)

            def run(*arguments):
                graphs[graph.code] = graph
                return compiled(*arguments)

            return run

        torch._dynamo.reset()
        compile_layer = torch.compile(compiled, backend=backend, dynamic=True)
        for num_tokens in (5, 7):
            x = draw(device, num_tokens)
            y = layer(x)
            assert_close(compile_layer(x), y)
            y.sin().sum().backward()
            compile_layer(x).sin().sum().backward()
        parts = [
            "router" if "router" in graph else "shared" if "shared_expert" in graph else "rest" for graph in graphs
        ]
        assert parts == ["router", "shared", "rest"], "\n".join(graphs)
        assert not any("c10d" in graph or "item()" in graph for graph in graphs), list(graphs)
        assert_gradients(compiled, layer)


CASES = [
    tokens_travel_in_autocast_dtype,
    no_more_collectives_than_needed,
    communication_overlaps,
    checkpointed_regions,
    compiled_around_the_dispatcher,
    a_process_that_stays_away_is_an_error,
]
GPU_CASES = [the_host_waits_at_most_once, graphs_capture_bounded_rows]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.__name__)
def test_two_gpus(case, tmp_path):
    failures = run_cases([case], 2, tmp_path)
    assert not failures[case.__name__], failures[case.__name__]


test_two_processes = make_test(CASES, 2)
# The interpreter runs every dispatcher with every number of chunks and every region.
test_two_processes_slowly = slow(make_test([outputs_of_regions_may_change_in_place], 2))
