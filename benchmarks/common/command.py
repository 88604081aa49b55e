"""The command line of a benchmark: options, measurements one after another, and the file of results."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .results_file import ResultsFile, Row, Task, environment, is_first_rank


@dataclass(frozen=True)
class Command:
    """A benchmark as a function of its command line, which returns the rows of results.

    Args:
        doc: text of `--help`.
        add_options: adds the benchmark's own options. `set_defaults` changes the defaults of shared options.
        tasks: a generator of measurements. `options.dtype` is bfloat16 on a GPU, otherwise float32.
        columns: fields to print, if a row has them; default: all fields of the first row.
        readers: functions by option ("--plot") that print or plot results files. These options measure nothing.
        constants: returns fields of every row, in addition to those of the environment.
        finish: called with the options and all rows at the end.
    """

    doc: str | None
    add_options: Callable[[argparse.ArgumentParser], object]
    tasks: Callable[[argparse.Namespace], Iterator[Task]]
    columns: Sequence[str] = ()
    readers: dict[str, Callable[[list[Path]], object]] = field(default_factory=dict)
    constants: Callable[[argparse.Namespace], Row] = lambda options: {}
    finish: Callable[[argparse.Namespace, list[Row]], object] = lambda options, rows: None

    def __call__(self, arguments: list[str] | None = None) -> list[Row]:
        options = self.parse(arguments)
        for name, read in self.readers.items():
            if paths := getattr(options, name[2:]):
                read(paths)
                return []

        def constants() -> Row:
            return {**self.constants(options), **environment(options.device, options.commit)}

        file = ResultsFile(options, constants)
        with closing(self.tasks(options)) as tasks:
            for rows in file.measure(tasks):
                if is_first_rank() and rows:
                    columns = self.columns or list(rows[0])
                    print_rows(rows, [name for name in columns if any(name in row for row in rows)])
                torch.cuda.empty_cache()  # the next operands have other sizes; does nothing without a GPU
        self.finish(options, file.rows)
        return file.rows

    def parse(self, arguments: list[str] | None = None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
        milliseconds = "least milliseconds per timing and round, default: %(default)s"
        parser.add_argument("--round-ms", type=float, default=200.0, help=milliseconds)
        parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
        parser.add_argument("--output", type=Path, help="JSON file to write, after every measurement")
        parser.add_argument("--resume", action="store_true", help="keep the rows of --output and measure what it lacks")
        limit = "start no measurement that may end later; default: no limit"
        parser.add_argument("--time-limit-s", type=float, help=limit)
        self.add_options(parser)
        for name in self.readers:
            what = "print what results files say and stop"
            parser.add_argument(name, type=Path, nargs="+", metavar="RESULTS", help=what)
        options = parser.parse_args(arguments)
        options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        return options


def each(read: Callable[[Path], object]) -> Callable[[list[Path]], None]:
    """Return a function that calls `read` for each of several results files."""

    def read_each(paths: list[Path]) -> None:
        for path in paths:
            read(path)

    return read_each


def print_rows(rows: list[Row], columns: Sequence[str]) -> None:
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3f}"
    return str(value)
