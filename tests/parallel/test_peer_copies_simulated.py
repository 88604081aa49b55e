"""The order in which the overlapped dispatcher's copies and sums use memory, on simulated streams: no races."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_layers.parallel.overlapped import OverlappedDispatcher
from moe_layers.parallel.symmetric_memory import PeerCopies

from ..tiers import default_tier, slow
from .expert_parallel_cases import KERNELS, NUM_EXPERTS, assert_close, draw, make_layer
from .simulated_streams import Process, Simulation

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run in the interpreter")

CPU = torch.device("cpu")


def make_shared(process: Process, kind: type[PeerCopies], *, chunks=2, num_layers=1, **options):
    """Return layers whose experts the ranks share, with one kind of copies."""
    copies, layers = process.peer_copies(kind), []
    num_local = NUM_EXPERTS // process.size
    for seed in range(num_layers):
        layer = make_layer(CPU, seed, **KERNELS, **options)
        layer.keep_local_experts(range(process.rank * num_local, (process.rank + 1) * num_local))
        layer.experts.num_experts = NUM_EXPERTS
        layer.dispatcher = OverlappedDispatcher(process, chunks=chunks)
        layer.dispatcher.transport = lambda ranks, device: copies
        layers.append(layer)
    return layers


def train(layers, batches, region=None):
    """Return outputs and gradients of layers in sequence, summed over the batches."""
    outputs = []
    for x in batches:
        y = x = x.requires_grad_()
        for layer in layers:
            y = layer(y) if region is None else region(layer, y)
        y.sin().sum().backward()
        outputs.append((y.detach(), x.grad))
    return outputs, [(layer.experts.w_up.grad, layer.experts.w_down.grad) for layer in layers]


def draw_batches(num_processes, sizes, d_model):
    return [draw(CPU, size * num_processes, seed, d_model).float() for seed, size in enumerate(sizes)]


def train_shared(process, sizes, kind=PeerCopies, region=None, **options):
    layers = make_shared(process, kind, **options)
    batches = draw_batches(process.size, sizes, layers[0].d_model)
    return train(layers, [batch.chunk(process.size)[process.rank].clone() for batch in batches], region)


def compare_with_one_process(results, sizes, num_layers=1, **options):
    layers = [make_layer(CPU, seed, **KERNELS, **options) for seed in range(num_layers)]
    outputs, gradients = train(layers, draw_batches(len(results), sizes, layers[0].d_model))
    for batch, expected in enumerate(outputs):
        for kind, whole in enumerate(expected):
            assert_close(torch.cat([result[0][batch][kind] for result in results]), whole)
    for layer, expected in enumerate(gradients):
        for kind, whole in enumerate(expected):
            assert_close(torch.cat([result[1][layer][kind] for result in results]), whole)


region = partial(checkpoint, use_reentrant=False)

CASES = {
    "one_chunk": (2, [6], {"chunks": 1}),
    "layers_in_sequence": (2, [6, 6], {"num_layers": 2}),
    "memory_grows": (2, [4, 12, 4], {"chunks": 3}),
    "recomputed": (2, [6, 6], {"region": region}),
    "recomputed_layers": (2, [6], {"num_layers": 2, "region": region}),
    "outputs_in_pieces": (2, [4], {"d_model": 512, "init_std": 0.05}),
    "four_processes": (4, [6, 6], {"bias": True}),
    "eight_processes": (8, [5], {}),
}


@pytest.mark.parametrize("name", default_tier(CASES, ["one_chunk", "recomputed"]))
def test_nothing_races(name):
    num_processes, sizes, options = CASES[name]
    simulation = Simulation(num_processes)
    results = simulation.run(partial(train_shared, sizes=sizes, **options))
    assert not simulation.races, simulation.races[0]
    options = {key: value for key, value in options.items() if key not in ("chunks", "region")}
    compare_with_one_process(results, sizes, **options)


def infer_on_two_streams(process, kind=PeerCopies):
    """Run inference on two streams and training on a third."""
    layers = make_shared(process, kind, num_layers=3)
    batches = [draw(CPU, 6, seed).float() for seed in range(3)]
    streams = [process.make_stream() for _ in layers]
    for stream in streams:
        stream.wait_stream(process.stream)  # that stream makes the parameters and tokens
    for layer, x, stream in zip(layers, batches, streams, strict=True):
        process.stream = stream
        if stream is streams[-1]:
            train([layer], [x])
        else:
            with torch.inference_mode():
                layer(x)
    return layers, batches  # in use until the end


@slow  # test_races_are_found runs the same calls
def test_nothing_races_between_streams():
    simulation = Simulation(2)
    simulation.run(infer_on_two_streams)
    assert not simulation.races, simulation.races[0]


class WithoutFirstBarrier(PeerCopies):
    def barrier(self):
        if self.all_have_begun:
            super().barrier()
        self.all_have_begun = True


class WithoutLastBarrier(PeerCopies):
    def end(self):
        self._last = self.stream.record_event()
        return self._last


class AheadOfItsCaller(PeerCopies):
    @contextmanager
    def on_copy_stream(self):
        caller = torch.cuda.current_stream()
        torch.cuda.set_stream(self.stream)
        yield
        torch.cuda.set_stream(caller)


class WithoutWaits(PeerCopies):
    def wait(self, event):
        pass


class WithoutOtherStreams(PeerCopies):
    def begin(self, *sizes):
        self._user = torch.cuda.current_stream()
        super().begin(*sizes)


class WithoutWhatIsUnderWay(PeerCopies):
    def __init__(self, *args):
        super().__init__(*args)
        self.under_way = SimpleNamespace(add=id, discard=id, clear=list)  # keeps nothing


recompute = partial(train_shared, sizes=[6, 6], region=region)
BROKEN = {
    WithoutFirstBarrier: recompute,
    WithoutLastBarrier: recompute,
    AheadOfItsCaller: recompute,
    WithoutWaits: recompute,
    WithoutWhatIsUnderWay: recompute,
    WithoutOtherStreams: infer_on_two_streams,
}


@pytest.mark.parametrize(
    "kind", default_tier(BROKEN, [WithoutFirstBarrier, WithoutOtherStreams]), ids=lambda kind: kind.__name__
)
def test_races_are_found(kind):
    """Each source of order is removed in turn, and the simulation must find a race."""
    simulation = Simulation(2)
    simulation.run(partial(BROKEN[kind], kind=kind))
    assert simulation.races
