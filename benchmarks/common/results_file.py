"""A results file that a benchmark writes after every measurement, within a time limit, in one run or several."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from moe_kernels.runtime.triton import HAS_TRITON, triton

T = TypeVar("T")
Row = dict[str, Any]
Task = tuple[Row, Callable[[], list[Row]]]  # (fields of all rows of a measurement, function that measures)


def attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (result, None) or (None, error). Rows of a failing variant hold the error instead of times."""
    try:
        return function(), None
    except Exception as error:  # libraries, compilers and missing memory raise errors of many classes
        return None, f"{type(error).__name__}: {error}"[:500]


def environment(device: str, commit: str) -> Row:
    """Return the GPU, the versions and the date, which every row of results has."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else None,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def is_first_rank() -> bool:
    """Return whether this process is the first of its group, or there is no group."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


class ResultsFile:
    """Rows of a command's results, and the file that holds them. With several ranks, only the first writes the file.

    Args:
        constants: returns the fields to add to every row of a measurement.
    """

    def __init__(self, options: argparse.Namespace, constants: Callable[[], Row]):
        self.rows: list[Row] = []
        self._path: Path | None = options.output
        self._constants, self._limit_s = constants, options.time_limit_s
        self._begin, self._longest_s = time.monotonic(), 0.0
        if options.resume and self._path is not None and self._path.exists():
            self.rows = json.loads(self._path.read_text())
            if others := sorted({row["commit"] for row in self.rows} - {options.commit}):
                raise SystemExit(f"--resume: rows of {self._path} must be of {options.commit}, got {others}")

    def measure(self, tasks: Iterable[Task]) -> Iterator[list[Row]]:
        """Run the tasks that the file lacks, and yield their rows. Stop before a task that may exceed the limit."""
        for shared, measure in tasks:
            if any(shared.items() <= row.items() for row in self.rows):
                continue
            begin_s = self._elapsed_s()
            if self._limit_s is not None and begin_s + self._longest_s > self._limit_s:
                print(f"stopped after {begin_s:.0f} s: run again with --resume to go on")
                return
            rows = [{**shared, **row} for row in measure()]
            self._longest_s = max(self._longest_s, self._elapsed_s() - begin_s)
            self._add(rows)
            yield rows

    def _elapsed_s(self) -> float:
        """Return the seconds since the start, the largest value of all ranks, so that they stop at the same task."""
        seconds = time.monotonic() - self._begin
        if distributed.is_initialized():
            device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
            longest = torch.tensor(seconds, dtype=torch.float64, device=device)
            distributed.all_reduce(longest, distributed.ReduceOp.MAX)
            seconds = longest.item()
        return seconds

    def _add(self, rows: list[Row]) -> None:
        constants = self._constants()
        self.rows += [{**row, **constants} for row in rows]
        if self._path is not None and is_first_rank():
            # Replace the file in one step, so that a reader always finds a complete file.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_name(f"{self._path.name}.part")
            written.write_text(json.dumps(self.rows, indent=1) + "\n")
            written.replace(self._path)
