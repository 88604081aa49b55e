"""Gathers tokens in parts and sums the results of all ranks. Both transfers overlap with computation.

`CollectiveTransport` uses PyTorch's collectives. `PeerCopies` lets copy engines copy between the memories of one host's
GPUs. With `PeerCopies`, a concurrent GEMM keeps all SMs except the few that the barriers need. NCCL's kernels would
take 16 to 32 SMs. If a GEMM fills the GPU, the GEMM and NCCL's kernels run one after the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, _symmetric_memory

from moe_kernels.permutation.partial_sums import sum_shares
from moe_kernels.runtime.pytorch import unseen_by_modes

from .collectives import Ranks, wait

# Selective checkpointing raises if a recomputation runs more ops than its forward. The ops that this file runs depend
# on earlier calls, so `unseen_by_modes` hides these ops from all dispatch modes.


class Gathering(NamedTuple):
    """A gather in flight, which collects every rank's tensor [N, ...] in parts.

    `wait` returns a part of `whole`, ready for use on the current stream. Call `wait` for each part in order.
    """

    whole: Tensor  # [P * N, ...]: the parts in order; each part holds n rows of rank 0, then of rank 1, and so on
    wait: Callable[[int], Tensor]  # takes a part's index; returns [P * n, ...], n rows of each rank


# A `Scattering` waits for this rank's part of a sum, and writes the part to a tensor [n, ...]. Call the function once.
Scattering = Callable[[Tensor], object]


class Transport(ABC):
    """Base class of the two transports. Every rank must start the same operations in the same order. Tensors are
    contiguous, and have the same shape on all ranks."""

    @abstractmethod
    def begin(self, *sizes: int) -> None:
        """Announce the sizes in bytes of the tensors that each rank will gather or scatter. Earlier operations must
        be complete or abandoned. The recomputation of a checkpointed region stops once all tensors for backward exist,
        and abandons its remaining operations."""

    @abstractmethod
    def gather(self, tensor: Tensor, lengths: list[int]) -> Gathering:
        """Start to gather every rank's tensor [N, ...]. Part i has `lengths[i]` rows of each rank."""

    @abstractmethod
    def scatter(self, shares: Tensor) -> Scattering:
        """Start to sum all ranks' tensors [P * n, ...]. This rank gets its part [n, ...] of the sum. Call `gather`
        between `begin` and the first `scatter`."""


class CollectiveTransport(Transport):
    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def begin(self, *sizes: int) -> None:
        pass

    def gather(self, tensor: Tensor, lengths: list[int]) -> Gathering:
        whole, parts = _empty_parts(self.ranks.size, tensor, lengths)
        under_way = [self.ranks.all_gather(part) for part in tensor.split(lengths)]
        return Gathering(whole, lambda part: parts[part].copy_(wait(under_way[part])))

    def scatter(self, shares: Tensor) -> Scattering:
        under_way = self.ranks.reduce_scatter(shares)
        return lambda out: out.copy_(wait(under_way))


class PeerCopies(Transport):
    """Transport through memory that all GPUs of the group map. A gather reads from the other ranks. A scatter writes
    each share to the rank that sums the share. Sums accumulate in float32.

    The copies run on a separate stream. A barrier starts each gather, and another barrier ends each operation. The
    barriers keep a rank from reading memory too early, and from overwriting memory that another rank still reads. Calls
    use the memory in turn: a call on another stream waits for the previous call's stream. If CUDA graphs are replayed
    on another stream than the surrounding calls, the user must order the replays.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory (raised by PyTorch), or a sum is awaited only after the
            next `begin`, which reuses the memory. If a rank does not reach a barrier within the group's timeout, the
            other ranks fail on the GPU.

    If a single rank fails between the barriers of a call, the group can no longer be used, as with any collective.
    """

    def __init__(self, group: ProcessGroup, device: torch.device):
        self.device = device
        self.rank, self.size, self.group_name = group.rank(), group.size(), group.group_name
        timeout = group._get_backend(device).options._timeout
        self.timeout_ms = int(timeout.total_seconds() * 1000)
        self.stream = torch.cuda.Stream(device)
        self._memory: Tensor | None = None
        self._outgrown: list[Tensor] = []  # earlier, smaller allocations; never freed, as CUDA graphs may use them
        self.under_way: set[object] = set()  # operations in flight, kept until the copy stream has used their tensors
        self._used_bytes = 0
        self.num_begun = 0
        self.all_have_begun = False  # whether a barrier was queued on the copy stream after the last `begin`
        self._last: torch.Event | None = None  # end of the last operation; None once a stream has waited for this event
        self._user = self._current_stream()  # stream of the last `begin`

    @classmethod
    def of(cls, ranks: Ranks, device: torch.device) -> PeerCopies:
        """Return the group's only instance. All layers of the group use the instance's memory in turn."""
        group = distributed.distributed_c10d._resolve_process_group(ranks.name)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]  # private API
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
            # Views are cached, because every step uses the same sizes.
            self._views = lru_cache(_MOST_VIEWS)(partial(_views_of, handle, self.size))
        self._used_bytes = 0
        self.num_begun += 1
        self.all_have_begun = False
        # Skip the wait if a stream has already waited for the last operation. While a CUDA graph is captured, a stream
        # must not wait for work from before the capture.
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
        whole, parts = _empty_parts(self.size, tensor, lengths)
        self.under_way.add(whole)
        buffers = self.buffers(tensor.shape, tensor.dtype)
        buffers[self.rank].copy_(tensor)
        places = [_by_rank(part, self.size) for part in parts]
        sources = [buffer.split(lengths) for buffer in buffers]
        events = []
        with self.on_copy_stream():
            self.barrier()
            for part, place in enumerate(places):
                for peer in self.others():
                    place[peer].copy_(sources[peer][part])
                events.append(self.stream.record_event())
            self.end()
        for place, own in zip(places, tensor.split(lengths), strict=True):
            place[self.rank].copy_(own)  # copy this rank's rows while other ranks' rows are in flight

        def arrive(part: int) -> Tensor:
            self.wait(events[part])
            if part == len(parts) - 1:
                self.under_way.discard(whole)
            return parts[part]

        return Gathering(whole, arrive)

    def scatter(self, shares: Tensor) -> Scattering:
        return _CopiedScattering(self, shares)

    def buffers(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return memory on each rank for a tensor of this shape and dtype. Each call until the next `begin` gets
        separate memory."""
        start, num_bytes = self._used_bytes, math.prod(shape) * dtype.itemsize
        self._used_bytes += _aligned(num_bytes)
        assert self._memory is not None and self._used_bytes <= self._memory.numel(), "begin announced fewer bytes"
        return self._views(shape, dtype, start // dtype.itemsize)

    def others(self) -> list[int]:
        """Return the other ranks in an order in which no two ranks access the same rank at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Run the context on the copy stream, after the work already queued on the current stream."""
        # Use `set_stream`: torch.cuda.stream() takes three times as long, because it queries device and stream again.
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

    def end(self) -> torch.Event:
        """End an operation on the copy stream with a barrier of all ranks. Return an event that marks the end."""
        self.barrier()
        self._last = event = self.stream.record_event()
        return event

    def wait(self, event: torch.Event) -> None:
        self._current_stream().wait_event(event)
        if event is self._last:
            self._last = None

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # without `.index`, the call takes several times as long


_PEER_COPIES: WeakKeyDictionary[ProcessGroup, PeerCopies] = WeakKeyDictionary()
_ALIGNMENT = 256
_MOST_VIEWS = 1024


def _views_of(handle: Any, size: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> list[Tensor]:
    with unseen_by_modes(), torch.inference_mode(False):  # training cannot write to inference tensors
        return [handle.get_buffer(peer, shape, dtype, start) for peer in range(size)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _by_rank(tensor: Tensor, size: int) -> Tensor:  # [P, n, ...]
    return tensor.view(size, len(tensor) // size, *tensor.shape[1:])


def _empty_parts(size: int, tensor: Tensor, lengths: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return an uninitialised tensor for the rows of all ranks, and a view of `size * length` rows for each part."""
    whole = tensor.new_empty(size * len(tensor), *tensor.shape[1:])
    return whole, whole.split([size * length for length in lengths])


class _CopiedScattering:
    def __init__(self, copies: PeerCopies, shares: Tensor):
        self._copies, self._number = copies, copies.num_begun
        copies.under_way.add(self)
        self._shares = _by_rank(shares, copies.size)  # keeps the shares' memory allocated until the copies end
        buffers = copies.buffers(self._shares.shape, shares.dtype)
        self._received = buffers[copies.rank]  # memory to which the other ranks copy their shares
        assert copies.all_have_begun, "another rank may still read the memory written here"
        with copies.on_copy_stream():
            for peer in copies.others():
                buffers[peer][copies.rank].copy_(self._shares[peer])
            self._event = copies.end()

    def __call__(self, out: Tensor) -> None:
        if self._copies.num_begun != self._number:
            raise RuntimeError(
                "ExpertParallel: outputs in flight were lost, because another layer with the overlapped dispatcher "
                "reused their memory; let each call return before the next one"
            )
        self._copies.wait(self._event)
        assert self._shares is not None and self._received is not None
        with unseen_by_modes():
            sum_shares(self._shares[self._copies.rank], self._received, self._copies.rank, out)
        self._shares = self._received = None
        self._copies.under_way.discard(self)


def transport_for(ranks: Ranks, device: torch.device) -> Transport:
    return PeerCopies.of(ranks, device) if device.type == "cuda" else CollectiveTransport(ranks)
