"""Decides for each form of an op's operands whether its function runs, is recorded, or is replayed."""

from __future__ import annotations

import os
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
_NEW = "called once"

_all: list[Replayed] = []
_single_launches = "MOE_VERIFY" in os.environ and os.environ["MOE_VERIFY"] not in ("", "0")


class Replayed:
    """A function of leaves, tensors and plain values, that launches kernels. It mutates none of them.

    The first call of a form runs the function, so that kernels are chosen and compiled. The second one is recorded:
    see `Record`. Every further call repeats the record. A form is all but the values in the tensors' memory: shapes,
    strides, dtypes, device and alignment, the plain values, and the settings of PyTorch that decide what is computed.

    The function runs each time where single launches or allocations must be seen: with hooks of Triton, MOE_VERIFY, or
    poisoned memory; and where its sequence of launches cannot be repeated: see `obstacle`.
    """

    def __init__(self, name: str, function: Callable[[tuple[Any, ...]], Any]):
        self.name = name
        self._function = function
        self._forms: dict[Any, str | _Program] = {}
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
        of_tensors = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
        form = (settings, places.number, places.read_others(leaves), *of_tensors)
        program = self._forms.get(form)
        if isinstance(program, _Program):
            outputs = program.record(tensors)
            return outputs[0] if program.make is None else program.make(outputs)
        if program is None:
            self._keep(form, _NEW)
        elif program is _NEW and not (device >= 0 and torch.cuda.is_current_stream_capturing()):
            return self._record(form, leaves, tensors)
        return self._function(leaves)

    def _record(self, form: Any, leaves: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Any:
        recording = Recording(tensors)
        result = recording.run(self._function, leaves)
        self._keep(form, _program(recording, result))
        return result

    def _keep(self, form: Any, program: str | _Program) -> None:
        if len(self._forms) >= _MOST_FORMS and form not in self._forms:
            for oldest in list(self._forms)[:1]:  # a copy, because other threads may change the dictionary
                self._forms.pop(oldest, None)
        self._forms[form] = program

    def clear(self) -> None:
        self._forms.clear()

    def states(self) -> list[str | None]:
        """Return for each known form None if it is replayed, else the reason why it is not."""
        return [None if isinstance(program, _Program) else program for program in self._forms.values()]


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


def clear_records() -> None:
    """Forget all records and forms. Whatever changes the choice of kernels calls this."""
    for replayed in _all:
        replayed.clear()
