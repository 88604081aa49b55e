"""Simulation of the streams and memory of several GPUs on a CPU, to find races.

Each rank is a thread, and one thread runs at a time. Computations run at once, and are recorded under the stream on
which a GPU would run them. A race is a pair of accesses to the same bytes, at least one of them a write, without a
fixed order. Only a stream, an event or a barrier fixes the order. Memory must also not be freed while a stream other
than its allocating stream may still use it. Races are found in whatever order the accesses happened here. Other sources
of order on GPUs, the host's waits and PyTorch's collectives, are ignored.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moe_kernels.runtime import launch
from moe_layers.parallel import symmetric_memory
from moe_layers.parallel.symmetric_memory import PeerCopies

Clock = dict["Stream", int]  # how much of each stream is known to have finished

_SHAPES_ONLY = ("empty_like", "new_empty", "new_empty_strided", "new_full", "new_zeros", "ones_like", "zeros_like")


class Stream:
    def __init__(self, name: str):
        self.name = name
        self.clock: Clock = {self: 0}

    def know(self, clock: Clock) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(time, self.clock.get(stream, 0))

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        self.know(event)

    def wait_stream(self, other: Stream) -> None:
        self.know(other.clock)


@dataclass
class Access:
    stream: Stream
    time: int
    what: str
    writes: bool
    start: int  # first byte
    stop: int

    def is_before(self, stream: Stream) -> bool:
        return stream.clock.get(self.stream, 0) >= self.time

    def conflicts_with(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.what} on {self.stream.name}"


@dataclass
class Process:
    """A rank, with the interface that the dispatcher expects of `Ranks` and a process group."""

    simulation: Simulation
    rank: int
    size: int
    stream: Stream  # current stream
    num_meetings: int = 0
    name: str = "simulated"
    _made: list[Stream] = field(default_factory=list)

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensors = self.simulation.meet("all_gather", tensor.detach().clone())
        with _disable_current_modes():
            return torch.cat(tensors)

    def make_stream(self) -> Stream:
        self._made.append(Stream(f"stream {1 + len(self._made)} of process {self.rank}"))
        return self._made[-1]

    def peer_copies(self, kind: type[PeerCopies]) -> PeerCopies:
        backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=1)))
        group = SimpleNamespace(
            rank=lambda: self.rank, size=lambda: self.size, group_name=self.name, _get_backend=lambda device: backend
        )
        return kind(group, torch.device("cpu"))


class Simulation:
    def __init__(self, num_processes: int):
        self.processes = [
            Process(self, rank, num_processes, Stream(f"the first stream of process {rank}"))
            for rank in range(num_processes)
        ]
        self.races: list[str] = []
        self._turn = threading.Condition()
        self._meetings: dict[int, tuple[str, dict[int, Any]]] = {}
        self._accesses: dict[int, list[Access]] = {}  # by storage
        self._here = threading.local()
        self._failed = self._over = False

    def run(self, function: Callable[[Process], Any]) -> list[Any]:
        """Run `function(process)` on every rank, each in its own thread."""
        results: dict[int, Any] = {}

        def run_one(process: Process) -> None:
            self._here.process = process
            with self._turn:
                try:
                    with _Notes(self):
                        results[process.rank] = function(process)
                except BaseException as error:
                    results[process.rank] = error
                    self._failed = True
                    self._turn.notify_all()

        threads = [threading.Thread(target=run_one, args=(process,)) for process in self.processes]
        with self._patched():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self._over = True
        for result in results.values():
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return [results[process.rank] for process in self.processes]

    def meet(self, what: str, value: Any) -> list[Any]:
        """Wait for all ranks, and return the values that they passed."""
        process = self._here.process
        number, process.num_meetings = process.num_meetings, process.num_meetings + 1
        expected, values = self._meetings.setdefault(number, (what, {}))
        assert what == expected, f"process {process.rank} comes to {what}, others to {expected}"
        values[process.rank] = value
        self._turn.notify_all()
        self._turn.wait_for(lambda: self._failed or len(values) == len(self.processes))
        if self._failed:
            raise threading.BrokenBarrierError
        return [values[rank] for rank in range(len(self.processes))]

    def note(self, what: str, tensor: Tensor, writes: bool, start: int, stop: int) -> None:
        """Record an access on the current stream to these bytes of a tensor's memory. The tensor counts as contiguous
        from its first to its last element."""
        stream, storage = self._here.process.stream, tensor.untyped_storage()
        if not tensor.numel():
            return
        if storage._cdata not in self._accesses:
            self._accesses[storage._cdata] = []
            weakref.finalize(storage, self._free, storage._cdata, stream)
        stream.clock[stream] += 1
        access = Access(stream, stream.clock[stream], what, writes, start, stop)
        earlier = self._accesses[storage._cdata]
        for other in earlier:
            if access.conflicts_with(other) and not other.is_before(stream):
                self.races.append(f"{access} does not wait for {other}")
        earlier.append(access)

    def _free(self, key: int, owner: Stream) -> None:
        if self._over:
            return
        for access in self._accesses.pop(key):
            if not access.is_before(owner):
                self.races.append(f"memory of {owner.name} is freed before {access}")

    @contextmanager
    def _patched(self) -> Iterator[None]:
        here = self._here
        cuda = {
            "Stream": lambda device=None: here.process.make_stream(),
            "current_stream": lambda device=None: here.process.stream,
            "set_stream": lambda stream: setattr(here.process, "stream", stream),
            "is_current_stream_capturing": lambda: False,
        }
        memory = {
            "empty": lambda size, dtype, device: torch.empty(size, dtype=dtype),
            "rendezvous": lambda memory, name: _Handle(self, self.meet("rendezvous", memory)),
        }
        with ExitStack() as stack:
            for name, function in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            stack.enter_context(mock.patch.object(symmetric_memory, "_symmetric_memory", SimpleNamespace(**memory)))
            original = launch._launch
            stack.enter_context(mock.patch.object(launch, "_launch", lambda *args: self._launch(original, *args)))
            yield

    def _launch(self, launch: Callable[..., Any], launched: launch.Launch, ready: Any) -> Any:
        """Note a read of every tensor that the launch gets, and a write of the bytes that it changes."""
        arguments = (getattr(argument, "base", argument) for argument in launched.arguments)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor) and argument.numel()]
        with _disable_current_modes():
            before = [_bytes(tensor).clone() for tensor in tensors]
            ready = launch(launched, ready)
            changed = [
                (_bytes(tensor) != old).nonzero().flatten().tolist()
                for tensor, old in zip(tensors, before, strict=True)
            ]
        name = launched.function.fn.__name__
        for tensor, written in zip(tensors, changed, strict=True):
            self.note(name, tensor, False, *_extent(tensor))
            if written:
                self.note(name, tensor, True, written[0], written[-1] + 1)
        return ready

    def barrier(self) -> None:
        stream = self._here.process.stream
        for clock in self.meet("barrier", stream.record_event()):
            stream.know(clock)


class _Handle:
    """Handle of memory that all ranks map."""

    def __init__(self, simulation: Simulation, memories: list[Tensor]):
        self._simulation, self._memories = simulation, memories

    def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
        memory = self._memories[peer].view(dtype)
        return memory[start : start + torch.Size(shape).numel()].view(shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self._simulation.barrier()


class _Notes(TorchDispatchMode):
    """Records the reads and writes of PyTorch's ops."""

    def __init__(self, simulation: Simulation):
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        name = op.overloadpacket.__name__
        if op.is_view or name == "_unsafe_view":
            return result
        arguments = op._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        known = set()
        for argument in arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name)):
                if isinstance(tensor, Tensor):
                    known.add(tensor.untyped_storage()._cdata)
                    if writes or name not in _SHAPES_ONLY:
                        self._simulation.note(name, tensor, writes, *_extent(tensor))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self._simulation.note(name, tensor, True, *_extent(tensor))
        return result


def _bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's first byte, and the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()
