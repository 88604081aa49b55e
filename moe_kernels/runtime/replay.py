"""Decides for each form of an op's operands whether its function runs, is recorded, or is replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import launch_hooks
from .launch_list import NotRecordable
from .packing import Places
from .pytorch import fp32_precision
from .record import Record
from .recording import Recording
from .triton import INTERPRET

_MOST_FORMS = 512  # of one op; each form of unpacked text has a number of tokens of its own
# Recording takes longer than one replay gains. A model with few layers and a new number of tokens in each step would
# only pay for records.
CALLS_BEFORE_RECORD = 5

_all: list[Replayed] = []
_single_launches: list[str] = []  # reasons to run functions instead of records


class Replayed:
    """A function of leaves, tensors and plain values, that launches kernels. It mutates none of them.

    The first calls of a form run the function, so that kernels are chosen and compiled. The next one is recorded: see
    `Record`. Every further call repeats the record. A form is all but the values in the tensors' memory: shapes,
    strides, dtypes, device and alignment, the plain values, and the settings of PyTorch that decide what is computed.

    The function runs each time where single launches or allocations must be seen: with hooks of Triton, MOE_VERIFY, or
    poisoned memory; and where its sequence of launches cannot be repeated: see `Recording.obstacle`.
    """

    def __init__(self, name: str, function: Callable[[tuple[Any, ...]], Any]):
        self.name = name
        self._function = function
        self._forms: dict[Any, int | str | _Program] = {}  # number of calls, or an obstacle, or the record
        self._lock = threading.Lock()  # of changes
        _all.append(self)

    def __call__(self, leaves: tuple[Any, ...], places: Places, tensors: tuple[Tensor, ...]) -> Any:
        """Compute on the GPU of the first tensor, because Triton launches on the current one."""
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(leaves, places, tensors)
        is_deterministic = torch._C._get_deterministic_algorithms()
        poisons = is_deterministic and torch._C._get_deterministic_fill_uninitialized_memory()
        if _single_launches or poisons or (device < 0 and not INTERPRET) or launch_hooks():
            return self._function(leaves)
        kind = "cuda" if device >= 0 else "cpu"
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        settings = device, fp32_precision("cuda", "matmul"), is_deterministic, autocast
        of_tensors = [(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16) for t in tensors]
        form = (settings, places.number, places.read_others(leaves), *of_tensors)
        program = self._forms.get(form)
        if isinstance(program, _Program):
            outputs = program.record(tensors)
            return outputs[0] if program.make is None else program.make(outputs)
        if program is None or isinstance(program, int):
            calls = program or 0
            if calls >= CALLS_BEFORE_RECORD and not (device >= 0 and torch.cuda.is_current_stream_capturing()):
                return self._record(form, leaves, tensors)
            self._keep(form, calls + 1)
        return self._function(leaves)

    def _record(self, form: Any, leaves: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Any:
        recording = Recording(tensors)
        result = recording.run(self._function, leaves)
        # Operands that share memory may not in later calls.
        self._keep(form, 0 if recording.operands_overlap else _program(recording, result))
        return result

    def _keep(self, form: Any, program: int | str | _Program) -> None:
        with self._lock:
            if len(self._forms) >= _MOST_FORMS and form not in self._forms:
                del self._forms[next(iter(self._forms))]  # the oldest
            self._forms[form] = program

    def clear(self) -> None:
        with self._lock:
            self._forms.clear()

    def states(self) -> list[str]:
        """Return for each known form "replayed" or why it is not."""
        return [_state(program) for program in list(self._forms.values())]


def _state(program: int | str | _Program) -> str:
    if isinstance(program, int):
        return f"called {program} times, recorded after {CALLS_BEFORE_RECORD}"
    return program if isinstance(program, str) else "replayed"


class _Program(NamedTuple):
    record: Record
    make: Callable[[list[Tensor | None]], Any] | None  # makes the function's result of outputs; None: it is a tensor


def _program(recording: Recording, result: Any) -> str | _Program:
    outputs = [result] if isinstance(result, Tensor) else result
    try:
        record = None if recording.obstacle else Record(recording, outputs)
    except NotRecordable as error:
        return str(error)
    if record is None or recording.obstacle:
        return recording.obstacle or ""
    return _Program(record, None if isinstance(result, Tensor) else getattr(type(result), "_make", tuple))


def states() -> dict[str, list[str]]:
    """Return the states of the known forms of each op."""
    return {replayed.name: found for replayed in _all if (found := replayed.states())}


def require_single_launches(reason: str) -> None:
    """Run the functions from now on, never a record."""
    _single_launches.append(reason)


def clear_records() -> None:
    """Forget all records and forms. Whatever changes the choice of kernels calls this."""
    for replayed in _all:
        replayed.clear()
