"""A results file that a benchmark writes after every measurement, within a time limit, in one run or several."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]
Task = tuple[Row, Callable[[], list[Row]]]  # values that all rows of a measurement share, and the measurement


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ResultsFile.of` reads."""
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write, after every measurement")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --output and measure what it lacks")
    parser.add_argument("--time-limit-s", type=float, help="start no measurement that may end later; default: no limit")


def attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result and None, or None and the error, which takes the place of the times of a failing variant."""
    try:
        return function(), None
    except Exception as error:  # of any kind: other libraries, compilers and missing memory fail in many ways
        return None, f"{type(error).__name__}: {error}"[:500]


class ResultsFile:
    """Rows of results, and the file that holds them.

    Args:
        path: None writes nothing.
        constants: added to every row.
        limit_s: seconds from now; None for no limit.
    """

    def __init__(self, path: Path | None, constants: Row, limit_s: float | None = None):
        self.rows: list[Row] = []
        self._path, self._constants = path, constants
        self._limit_s, self._begin, self._longest_s = limit_s, time.monotonic(), 0.0

    @classmethod
    def of(cls, options: argparse.Namespace, constants: Row) -> ResultsFile:
        """Return the file of a command.

        Raises:
            SystemExit: the rows to keep are of another commit.
        """
        file = cls(options.output, constants, options.time_limit_s)
        if options.resume and options.output is not None and options.output.exists():
            file.rows = json.loads(options.output.read_text())
            if others := sorted({row["commit"] for row in file.rows} - {options.commit}):
                raise SystemExit(f"--resume: rows of {options.output} must be of {options.commit}, got {others}")
        return file

    def measure(self, tasks: Iterable[Task]) -> Iterator[list[Row]]:
        """Run the tasks that the file lacks, while the longest one so far would end in time. Yield their rows."""
        for shared, measure in tasks:
            if any(shared.items() <= row.items() for row in self.rows):
                continue
            begin = time.monotonic()
            if self._limit_s is not None and begin - self._begin + self._longest_s > self._limit_s:
                print(f"stopped after {begin - self._begin:.0f} s: run again with --resume to go on")
                return
            rows = measure()
            assert all(shared.items() <= row.items() for row in rows), shared
            self._longest_s = max(self._longest_s, time.monotonic() - begin)
            self._add(rows)
            yield rows

    def _add(self, rows: list[Row]) -> None:
        self.rows += [{**row, **self._constants} for row in rows]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.rows, indent=1) + "\n")
