"""Decides for each form (shapes, strides, dtypes, alignment, ...) of a function's operands whether the function runs,
is recorded, or is replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import launch_hooks, launching
from .launch_list import NotRecordable
from .pytorch import TensorGuards, fp32_precision
from .record import Record
from .recording import Recording
from .triton import INTERPRET

_MOST_FORMS = 512  # maximum number of forms stored per function; each new number of tokens makes a form
# Number of calls with operands of one form before a call is recorded. Recording takes longer than one replay saves. A
# model with few layers and a new number of tokens in each step would otherwise record often and replay rarely.
CALLS_BEFORE_RECORD = 5

_all: list[Replayed] = []
_single_launches: list[str] = []  # reasons why no record may be replayed; usually empty


class Form:
    """The properties of operands, except values, that decide what a function computes: alignment, and all properties
    that `TensorGuards` compares. A form also holds the operands' record, or the reason why no record can be made."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self._alignments = _alignments(tensors)
        self.requires_grad = any([tensor.requires_grad for tensor in tensors])
        self.calls = 0
        self.obstacle: str | None = None
        self.record: Record | None = None
        self.make: Callable[[list[Tensor | None]], Any] | None = None  # outputs -> result; None: result is outputs[0]

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        return self._check(*tensors) and _alignments(tensors) == self._alignments

    def replay(self, tensors: list[Tensor]) -> Any:
        """Replay the record and return the result. The record appends the tensors that it allocates to the list
        `tensors`, and may replace operands in the list by None."""
        assert self.record is not None
        outputs = self.record(tensors)
        return outputs[0] if self.make is None else self.make(outputs)

    def keep(self, recording: Recording, result: Any, frees_operands: bool) -> None:
        """Make a record, or store the reason why no record can be made."""
        outputs = [result] if isinstance(result, Tensor) else result
        try:
            record = None if recording.obstacle else Record(recording, outputs, frees_inputs=frees_operands)
        except NotRecordable as error:
            self.obstacle = str(error)
            return
        self.obstacle = recording.obstacle
        if self.obstacle is None:
            self.make = None if isinstance(result, Tensor) else getattr(type(result), "_make", tuple)
            self.record = record

    def state(self) -> str:
        if self.record is not None:
            return "replayed"
        return self.obstacle or f"called {self.calls} times, recorded after {CALLS_BEFORE_RECORD}"


def _alignments(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() % 16 for tensor in tensors]


class Replayed:
    """The records of a function that launches kernels. The function mutates only `main_grad` (gradients of weights) and
    counters of tile tables, which the function leaves at 0.

    The first calls with operands of one form run the function, so that kernels are chosen and compiled. The next such
    call is recorded: see `Record`. Every further call replays the record.

    Every call runs the function if Triton has launch hooks, MOE_VERIFY is set, or PyTorch fills uninitialised memory
    deterministically, because these must see each launch or allocation. Every call also runs the function if its
    launches cannot be repeated: see `Recording.obstacle`.
    """

    def __init__(self, name: str, *, frees_operands: bool = False):
        """With `frees_operands`, a replay drops each operand, except parameters and outputs, after its last use. The
        operand's memory is then free, unless other references exist."""
        self.name = name
        self._frees_operands = frees_operands
        self._forms: dict[Any, list[Form]] = {}
        self._num_forms = 0
        self._lock = threading.Lock()  # guards changes of `_forms`
        _all.append(self)

    def find(
        self,
        key: Any,  # the operands that are not tensors
        tensors: Sequence[Tensor],
    ) -> Form | None:
        """Return the known `Form` of these operands if it has a record that can be replayed now, else None."""
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            return None
        form = self._known(self._key(key, tensors), tensors)
        return form if form is not None and form.record is not None and not _sees_launches(device) else None

    def run(self, key: Any, tensors: list[Tensor], function: Callable[[list[Tensor]], Any]) -> Any:
        """Run or replay the function and return its result. The first tensor's GPU becomes the current device, because
        Triton launches there. The function may empty the list `tensors`. Ops that the function calls become part of its
        record."""
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.run(key, tensors, function)
        outer, launching.is_in_function = launching.is_in_function, True
        try:
            return self._run(key, tensors, function, device)
        finally:
            launching.is_in_function = outer

    def _run(self, key: Any, tensors: list[Tensor], function: Callable[[list[Tensor]], Any], device: int) -> Any:
        if _sees_launches(device):
            return function(tensors)
        key = self._key(key, tensors)
        form = self._known(key, tensors)
        if form is None:
            if len({id(tensor) for tensor in tensors}) < len(tensors):  # `TensorGuards` refuses a repeated tensor
                return function(tensors)
            form = self._add(key, tensors)
        if form.record is not None:
            return form.replay(tensors)
        is_due = form.obstacle is None and form.calls >= CALLS_BEFORE_RECORD
        if not is_due or (device >= 0 and torch.cuda.is_current_stream_capturing()):
            form.calls += 1
            return function(tensors)
        recording = Recording(tensors)
        result = recording.run(function, tensors)
        if recording.operands_overlap:  # record a later call, whose operands might not overlap
            form.calls = 0
        else:
            form.keep(recording, result, self._frees_operands)
        return result

    def _key(self, key: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return a key that few forms share: `key`, the first shape, and the settings that decide what is computed."""
        first = tensors[0]
        kind = "cuda" if first.is_cuda else "cpu"
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        is_deterministic = torch._C._get_deterministic_algorithms()
        return key, first.shape, fp32_precision("cuda", "matmul"), is_deterministic, autocast

    def _known(self, key: Any, tensors: Sequence[Tensor]) -> Form | None:
        for form in self._forms.get(key, ()):
            if form.accepts(tensors):
                return form
        return None

    def _add(self, key: Any, tensors: Sequence[Tensor]) -> Form:
        form = Form(tensors)
        with self._lock:
            if self._num_forms >= _MOST_FORMS:
                self._num_forms -= len(self._forms.pop(next(iter(self._forms))))  # forget the forms of the oldest key
            self._forms[key] = [*self._forms.get(key, ()), form]
            self._num_forms += 1
        return form

    def clear(self) -> None:
        with self._lock:
            self._forms.clear()
            self._num_forms = 0

    def states(self) -> list[str]:
        """Return for each known form "replayed", or the reason why its record is not replayed."""
        return [form.state() for forms in list(self._forms.values()) for form in forms]


def _sees_launches(device: int) -> bool:
    """Return whether functions must run instead of being replayed. Reasons are an observer of launches or allocations,
    and a device without kernels, such as a CPU."""
    if _single_launches or (device < 0 and not INTERPRET) or launch_hooks():
        return True
    is_deterministic = torch._C._get_deterministic_algorithms()
    return is_deterministic and torch._C._get_deterministic_fill_uninitialized_memory()


def states() -> dict[str, list[str]]:
    """Return a dict from each function's name to its `Replayed.states`. Omit functions without known forms."""
    return {replayed.name: found for replayed in _all if (found := replayed.states())}


def require_single_launches(reason: str) -> None:
    """Make every `Replayed` run its function from now on, and never replay a record."""
    _single_launches.append(reason)


def clear_records() -> None:
    """Forget all records and forms. Every function that changes the choice of kernels calls this function."""
    for replayed in _all:
        replayed.clear()
