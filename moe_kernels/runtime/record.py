"""Repeats a recorded function as a list of steps: kernel launches and PyTorch operations. Each run writes the addresses
of its tensors into the parameters of the launches.

`replay.py` decides when a function is recorded. A record holds no tensor. Temporaries that only kernels use are placed
in one block, where temporaries with separate lifetimes share bytes. A run allocates the block first and frees it at
the end. If there are only launches, a run also allocates all other tensors first, and makes all launches at once. If
PyTorch operations divide the launches into groups, every tensor outside the block is allocated right before the group
or operation that first uses the tensor.

Early allocation raises the peak memory above that of the recorded function. If the rise exceeds 64 MiB, tensors above
1 MiB are placed outside the block. Each of them is freed after the last launch that uses it, before a run allocates
tensors for later launches. The launches between two such allocations are made at once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch_list import LaunchList, scratch_bytes
from .pytorch import EMPTY_STRIDED, unseen_by_autocast
from .recording import Form, Memory, RecordedCall, RecordedLaunch, Recording, Ref, view_of

_ALIGNMENT = 512  # alignment in bytes of PyTorch's caching allocator; recorded launches rely on this alignment
_MOST_EXTRA_BYTES = 64 << 20  # a run allocates all tensors first if this raises the peak by at most this many bytes
# Maximum size in bytes of a small tensor if the peak would rise by more than `_MOST_EXTRA_BYTES`. Otherwise all tensors
# count as small. The block holds the small temporaries. Other small tensors may stay allocated after their last use.
_MOST_SMALL_BYTES = 1 << 20


class _Segment(NamedTuple):
    """A range of steps during which no memory is allocated or freed."""

    allocations: tuple[tuple[int, Form], ...]  # (index in `memory`, form) of each allocation
    run: Callable[[list[Any]], None]
    dead: tuple[int, ...]  # indices in `memory` of the tensors that are freed after the segment


class Record:
    """Repeats a recording on tensors of the same form as its inputs. Any thread may call a record at any time."""

    def __init__(self, recording: Recording, outputs: Sequence[Tensor | None], *, frees_inputs: bool = False):
        self._born = [memory.form for memory in recording.memories]
        refs = [None if tensor is None else recording.ref(tensor, in_call=True) for tensor in outputs]
        self._outputs = [None if ref is None else self._reader(ref) for ref in refs]
        self._device = recording.device
        self._empty = EMPTY_STRIDED[recording.device.type]
        num_inputs = sum(memory.made_by == "caller" for memory in recording.memories)
        # Entries of `memory` for the tensors that a run allocates. The last entry is for the block.
        self._others = (None,) * (len(recording.memories) - num_inputs + 1)
        self._is_below_autocast = torch.is_autocast_enabled(recording.device.type)
        plan = _Plan(recording, frees_inputs)
        self._segments = [
            _Segment(allocations, self._runner(recording, first, last, plan), dead)
            for first, last, allocations, dead in plan.segments
        ]

    def __call__(self, memory: list[Any]) -> list[Tensor | None]:
        """Repeat the recording and return its outputs.

        Args:
            memory: the inputs. This call appends the tensors that it allocates. With `frees_inputs`, this call also
                replaces each input, except parameters and outputs, by None after the input's last use.
        """
        memory += self._others
        empty = self._empty
        for allocations, run, dead in self._segments:
            for place, form in allocations:
                memory[place] = empty(*form)
            run(memory)
            for place in dead:
                memory[place] = None
        return [None if read is None else read(memory) for read in self._outputs]

    def _reader(self, ref: Ref) -> Callable[[list[Any]], Tensor]:
        """Return a function that takes a run's list `memory` and returns the tensor of `ref`: an entry of the list, or
        a view of an entry."""
        place, offset, form = ref
        if offset == 0 and form == self._born[place]:
            return itemgetter(place)
        return view_of(place, offset, form)

    def _runner(self, recording: Recording, first: int, last: int, plan: _Plan) -> Callable[[list[Any]], None]:
        steps = recording.steps[first:last]
        if steps and isinstance(steps[0], RecordedCall):
            return self._caller(steps[0])
        return LaunchList(steps, plan.places, plan.scratch[first:last], self._device, self._born).run  # pyright: ignore[reportArgumentType]  # all steps are launches

    def _caller(self, call: RecordedCall) -> Callable[[list[Any]], None]:
        function, (args, kwargs), results = call
        if self._is_below_autocast:  # the recorded arguments are already in autocast's dtypes
            function = _unseen_by_autocast(function)
        template, readers = list(args), self._readers(enumerate(args))
        named_template, named_readers = dict(kwargs), self._readers(kwargs.items())

        def run(memory: list[Any]) -> None:
            args, kwargs = template.copy(), named_template.copy()
            for place, read in readers:
                args[place] = read(memory)
            for name, read in named_readers:
                kwargs[name] = read(memory)
            made = function(*args, **kwargs)
            if len(results) == 1:
                memory[results[0]] = made
            elif results:  # false for operations in place
                for place, tensor in zip(results, made, strict=True):
                    memory[place] = tensor

        return run

    def _readers(self, arguments: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Callable[[list[Any]], Any]]]:
        """Return (key, reader) for each argument that is or holds a tensor. A reader takes a run's list `memory` and
        returns the argument."""
        readers = []
        for key, value in arguments:
            if isinstance(value, Ref):
                readers.append((key, self._reader(value)))
            elif isinstance(value, list) and any(isinstance(part, Ref) for part in value):
                parts = [self._reader(part) if isinstance(part, Ref) else lambda memory: None for part in value]
                readers.append((key, lambda memory, parts=parts: [read(memory) for read in parts]))
        return readers


def _unseen_by_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with unseen_by_autocast():
            return function(*args, **kwargs)

    return run


class _Plan:
    """Decides where each tensor of a recording is placed, and divides the recording's steps into segments."""

    def __init__(self, recording: Recording, frees_inputs: bool):
        steps, memories = recording.steps, recording.memories
        # index in `Recording.memories` -> (index in a run's `memory`, byte offset)
        self.places = {index: (index, 0) for index in range(len(memories))}
        self.scratch: list[tuple[int, int] | None] = [None] * len(steps)
        block = len(memories)
        temporaries = [
            (_aligned(memory.num_bytes), memory.steps[0], memory.steps[-1], index)
            for index, memory in enumerate(memories)
            if memory.made_by == "function" and memory.num_bytes and memory.steps and not memory.in_calls
        ]
        managed = {  # tensors that a run allocates, outputs included, and inputs that a run frees
            index: memory
            for index, memory in enumerate(memories)
            if memory.steps and (memory.made_by != "caller" or (frees_inputs and not memory.is_parameter))
        }
        others = managed.keys() - {index for *_, index in temporaries}
        bytes_at_once = self._place(temporaries, block) + sum(memories[index].num_bytes for index in others)
        rise = bytes_at_once - _peak(managed.values())
        most_small = sys.maxsize if rise <= _MOST_EXTRA_BYTES else _MOST_SMALL_BYTES
        small = [entry for entry in temporaries if entry[0] <= most_small]
        self.places |= {index: (index, 0) for *_, index in temporaries}
        block_bytes = self._place_scratch(steps, block, self._place(small, block))
        in_block = {index for *_, index in small}
        own = {index: memory for index, memory in managed.items() if index not in in_block}
        self.segments = self._segments(steps, own, (block, block_bytes), most_small)

    def _place(self, temporaries: list[tuple[int, int, int, int]], block: int) -> int:
        """Place temporaries in the block, and return its size in bytes. Temporaries in use at once share no bytes."""
        placed: list[tuple[int, int, int, int]] = []
        for size, first, last, index in sorted(temporaries, key=lambda entry: (-entry[0], entry[1])):
            offset = 0
            for start, end, other_first, other_last in sorted(placed):
                if other_first <= last and first <= other_last and offset + size > start and offset < end:
                    offset = end
            placed.append((offset, offset + size, first, last))
            self.places[index] = block, offset
        return max((end for _, end, _, _ in placed), default=0)

    def _place_scratch(self, steps: Sequence[Any], block: int, num_bytes: int) -> int:
        """Append to the block of `num_bytes` a buffer in which kernels make descriptors, and return the new size. All
        kernels share the buffer, because kernels run in sequence."""
        sizes = [scratch_bytes(step) if isinstance(step, RecordedLaunch) else 0 for step in steps]
        self.scratch = [(block, num_bytes) if size else None for size in sizes]
        return num_bytes + _aligned(max(sizes, default=0))

    def _segments(
        self, steps: Sequence[Any], own: dict[int, Memory], block: tuple[int, int], most_small: int
    ) -> list[tuple[int, int, tuple[tuple[int, Form], ...], tuple[int, ...]]]:
        """Return (first step, step after the last, allocations, indices in `memory` to free afterwards) per segment."""
        outputs = {index for index, memory in own.items() if memory.steps[-1] == len(steps)}
        cuts = {0}
        for at, step in enumerate(steps):
            if isinstance(step, RecordedCall):
                cuts |= {at, at + 1}
            begins = any(memory.steps[0] == at and memory.made_by != "caller" for memory in own.values())
            previous = max(cut for cut in cuts if cut <= at)
            large = (memory for memory in own.values() if memory.num_bytes > most_small)
            if begins and any(previous <= memory.steps[-1] < at for memory in large):
                cuts.add(at)
        bounds = [*sorted(cuts - {len(steps)} or {0}), len(steps)]  # without steps, one empty segment
        segments = []
        for first, last in pairwise(bounds):
            allocations = [
                (index, memory.form)
                for index, memory in own.items()
                if memory.made_by == "function"
                and (first <= memory.steps[0] < last or last == len(steps) <= memory.steps[0])
            ]
            if first == 0 and block[1]:
                allocations.append((block[0], Form((block[1],), (1,), torch.uint8)))
            dead = [index for index, memory in own.items() if first <= memory.steps[-1] < last and index not in outputs]
            segments.append((first, last, tuple(allocations), tuple(dead)))
        return segments


def _peak(memories: Iterable[Memory]) -> int:
    """Return the largest number of bytes in use at any step if each tensor is freed after its last use."""
    changes: Counter[int] = Counter()
    for memory in memories:
        changes[0 if memory.made_by == "caller" else memory.steps[0]] += memory.num_bytes
        changes[memory.steps[-1] + 1] -= memory.num_bytes
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
