"""Gathering tokens in parts, and adding up what all processes computed for them, while something else is computed.

`CollectiveTransport` does so by PyTorch's collectives. `PeerCopies` does so by copies between the memories of the GPUs
of one host, which their copy engines make: a GEMM beside them keeps all its multiprocessors but the few that the
barriers need. NCCL's kernels take 16 to 32, and a GEMM that fills the GPU lets them wait, or waits for them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, _symmetric_memory

from moe_kernels import sum_shares

from .collectives import Ranks, wait

# What launches and caches do on the host depends on what was before, and selective checkpointing raises where a
# recomputation does more than its forward did. So its mode, like any other, sees no more of them here than inside of a
# registered op. A name for what PyTorch calls `no_dispatch`, which takes a microsecond.
unseen_by_modes = torch._C._DisableTorchDispatch


class Gathering(ABC):
    """Of all processes' tensors. `whole` holds part after part, and of each part process after process."""

    whole: Tensor  # [P * N, ...]

    @abstractmethod
    def wait(self, part: int) -> Tensor:  # [P * n, ...]
        """That part of `whole`, which may be read now on the current stream. To be called for each part, in turn."""


class Scattering(ABC):
    """Of the sums over all processes."""

    @abstractmethod
    def wait(self, out: Tensor) -> None:  # [n, ...]
        """Write this process's part of the sum. To be called once."""


class Transport(ABC):
    """Every process must start the same in the same order. Tensors are contiguous, and alike in all processes."""

    @abstractmethod
    def begin(self, *sizes: int) -> None:
        """Tensors of so many bytes will be gathered, or scattered, by each process. What was started before has
        arrived, or never will: the recomputation of a checkpointed region ends when it has what backward needs."""

    @abstractmethod
    def gather(self, tensor: Tensor, lengths: list[int]) -> Gathering:
        """Start to gather [N, ...] in parts of so many rows."""

    @abstractmethod
    def scatter(self, shares: Tensor) -> Scattering:
        """Start to add up [P * n, ...] and to keep this process's [n, ...]. What starts first after `begin` is a
        gather."""


class CollectiveTransport(Transport):
    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def begin(self, *sizes: int) -> None:
        pass

    def gather(self, tensor: Tensor, lengths: list[int]) -> Gathering:
        return _CollectiveGathering(self.ranks, tensor, lengths)

    def scatter(self, shares: Tensor) -> Scattering:
        return _CollectiveScattering(self.ranks, shares)


class _CollectiveGathering(Gathering):
    def __init__(self, ranks: Ranks, tensor: Tensor, lengths: list[int]):
        self.whole = tensor.new_empty(ranks.size * len(tensor), *tensor.shape[1:])
        self._parts = self.whole.split([ranks.size * length for length in lengths])
        self._under_way = [ranks.all_gather(part) for part in tensor.split(lengths)]

    def wait(self, part: int) -> Tensor:
        return self._parts[part].copy_(wait(self._under_way[part]))


class _CollectiveScattering(Scattering):
    def __init__(self, ranks: Ranks, shares: Tensor):
        self._under_way = ranks.reduce_scatter(shares)

    def wait(self, out: Tensor) -> None:
        out.copy_(wait(self._under_way))


class PeerCopies(Transport):
    """Through memory that all GPUs of the group map: what is gathered is read from the others, a share of a sum is
    written to the process that adds it up, in float32.

    Beside it runs a stream of its own. There each gathering waits for all processes (so nobody reads what is not
    written, or writes what is still read since the last `begin`), and each end does, too. The memory is used by turns:
    a call on another stream waits for what the last one did on its own. Replays of CUDA graphs on another stream than
    the calls around them are for the user to order, as ever.

    Raises:
        RuntimeError: from PyTorch, if the GPUs cannot map each other's memory. A process that does not come to a
            barrier within the group's timeout fails the others on the GPU. Also if a sum is to arrive after the next
            `begin`, which gave its memory away.

    An error in one process alone, between the barriers of a call, leaves the processes out of step, as with any
    collective: the group is of no further use.
    """

    def __init__(self, group: ProcessGroup, device: torch.device):
        self.device = device
        self.rank, self.size, self.group_name = group.rank(), group.size(), group.group_name
        timeout = group._get_backend(device).options._timeout
        self.timeout_ms = int(timeout.total_seconds() * 1000)
        self.stream = torch.cuda.Stream(device)
        self._memory: Tensor | None = None
        self._outgrown: list[Tensor] = []  # kept, as CUDA graphs may go on using it
        self.under_way: set[object] = set()  # what has not arrived, and so its tensors, which the stream uses
        self._used_bytes = 0
        self.num_begun = 0
        self.all_have_begun = False  # in the stream's order
        self._last: torch.cuda.Event | None = None  # of the stream, if nobody has waited for it
        self._user = self._current_stream()  # that of the last `begin`

    @classmethod
    def of(cls, ranks: Ranks, device: torch.device) -> PeerCopies:
        """One for all layers: its memory is used by turns."""
        group = distributed.distributed_c10d._resolve_process_group(ranks.name)
        if group not in _PEER_COPIES:
            _PEER_COPIES[group] = cls(group, device)
        return _PEER_COPIES[group]

    def begin(self, *sizes: int) -> None:
        total = max(sum(map(_aligned, sizes)), _ALIGNMENT)
        if self._memory is None or self._memory.numel() < total:
            with unseen_by_modes():
                memory = _symmetric_memory.empty(total, dtype=torch.uint8, device=self.device)
                handle = _symmetric_memory.rendezvous(memory, self.group_name)
            if self._memory is not None:
                self._outgrown.append(self._memory)
            self._memory, self._handle = memory, handle
            # The same sizes come in every step.
            self._views = lru_cache(_MOST_VIEWS)(partial(_views_of, handle, self.size))
        self._used_bytes = 0
        self.num_begun += 1
        self.all_have_begun = False
        # Only then: a CUDA graph under capture must not wait for what was before.
        if self._last is not None:
            self.wait(self._last)
        self.under_way.clear()
        if torch.cuda.is_current_stream_capturing():
            return
        user = self._current_stream()
        if user != self._user:
            user.wait_stream(self._user)
        self._user = user

    def gather(self, tensor: Tensor, lengths: list[int]) -> Gathering:
        return _CopiedGathering(self, tensor, lengths)

    def scatter(self, shares: Tensor) -> Scattering:
        return _CopiedScattering(self, shares)

    def buffers(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Memory of each process for such a tensor, none of it used since `begin`."""
        start, num_bytes = self._used_bytes, math.prod(shape) * dtype.itemsize
        self._used_bytes += _aligned(num_bytes)
        assert self._used_bytes <= self._memory.numel(), "begin was told of less"
        return self._views(shape, dtype, start // dtype.itemsize)

    def others(self) -> list[int]:
        """In an order in which no two processes turn to the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On the stream, behind what the current one has been given."""
        # torch.cuda.stream() asks for the current device and stream again, and takes three times as long.
        user = self._current_stream()
        self.stream.wait_stream(user)
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(user)

    def barrier(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=self.timeout_ms)
        self.all_have_begun = True

    def end(self) -> torch.cuda.Event:
        """Of something on the stream, when all processes have come to it."""
        self.barrier()
        self._last = self.stream.record_event()
        return self._last

    def wait(self, event: torch.cuda.Event) -> None:
        self._current_stream().wait_event(event)
        if event is self._last:
            self._last = None

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # a device takes several times as long


_PEER_COPIES: WeakKeyDictionary[ProcessGroup, PeerCopies] = WeakKeyDictionary()
_ALIGNMENT = 256
_MOST_VIEWS = 1024


def _views_of(handle: object, size: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> list[Tensor]:
    with unseen_by_modes(), torch.inference_mode(False):  # whose tensors training could not write to
        return [handle.get_buffer(peer, shape, dtype, start) for peer in range(size)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _by_process(tensor: Tensor, size: int) -> Tensor:  # [P, n, ...]
    return tensor.view(size, len(tensor) // size, *tensor.shape[1:])


class _CopiedGathering(Gathering):
    def __init__(self, copies: PeerCopies, tensor: Tensor, lengths: list[int]):
        self._copies = copies
        copies.under_way.add(self)
        self.whole = tensor.new_empty(copies.size * len(tensor), *tensor.shape[1:])
        buffers = copies.buffers(tensor.shape, tensor.dtype)
        buffers[copies.rank].copy_(tensor)
        self._parts = self.whole.split([copies.size * length for length in lengths])
        places = [_by_process(part, copies.size) for part in self._parts]
        sources = [buffer.split(lengths) for buffer in buffers]
        self._events = []
        with copies.beside():
            copies.barrier()
            for part, place in enumerate(places):
                for peer in copies.others():
                    place[peer].copy_(sources[peer][part])
                self._events.append(copies.stream.record_event())
            copies.end()
        for place, own in zip(places, tensor.split(lengths), strict=True):
            place[copies.rank].copy_(own)  # while the others' travel

    def wait(self, part: int) -> Tensor:
        self._copies.wait(self._events[part])
        if part == len(self._parts) - 1:
            self._copies.under_way.discard(self)
        return self._parts[part]


class _CopiedScattering(Scattering):
    def __init__(self, copies: PeerCopies, shares: Tensor):
        self._copies, self._number = copies, copies.num_begun
        copies.under_way.add(self)
        self._shares = _by_process(shares, copies.size)  # kept until they are copied
        buffers = copies.buffers(self._shares.shape, shares.dtype)
        self._received = buffers[copies.rank]  # but for its own
        assert copies.all_have_begun, "or somebody may still read what is written here"
        with copies.beside():
            for peer in copies.others():
                buffers[peer][copies.rank].copy_(self._shares[peer])
            self._event = copies.end()

    def wait(self, out: Tensor) -> None:
        if self._copies.num_begun != self._number:
            raise RuntimeError(
                "ExpertParallel: outputs under way were lost, as another layer with the overlapped dispatcher began "
                "to use their memory; let each call return before the next one"
            )
        self._copies.wait(self._event)
        own = self._shares[self._copies.rank]
        with unseen_by_modes():
            sum_shares(own, self._received, self._copies.rank, out)
        self._shares = self._received = None
        self._copies.under_way.discard(self)


def transport_for(ranks: Ranks, device: torch.device) -> Transport:
    return PeerCopies.of(ranks, device) if device.type == "cuda" else CollectiveTransport(ranks)
