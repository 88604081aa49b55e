"""Convergence of a language model whose experts multiply e4m3 operands, compared with bfloat16 and float32.

    python -m benchmarks.fp8_convergence --time-limit-s 460 --resume --commit COMMIT --output FILE
    python -m benchmarks.fp8_convergence --precisions bfloat16 fp8 --seeds 0 1 2 --resume --commit COMMIT --output FILE
    python -m benchmarks.fp8_convergence --plot FILE_OF_SEED_0 FILE_OF_SEED_1

Trains the model of `examples/train_language_model.py` with 101 million parameters in experts for 2,000 steps of 16,384
bytes of the standard library's source. Runs with one seed start from the same weights and see the same batches. A row
holds the losses of one part of a run. Started again with `--resume`, the command continues from the last part and the
checkpoint in `--checkpoints`; without that checkpoint, a run starts again. Losses are in nats per byte.

On a GPU "float32" multiplies in TF32: exact float32 products take ten times as long. Without a GPU, "bfloat16" computes
in float32, and the preset "cpu" is small.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .common import plots
from .common.command import Command
from .common.results_file import Row, Task

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # its scripts import each other by name
example: Any = import_module("train_language_model")

# Name of a precision -> `precision` of the model.
PRECISIONS = {"bfloat16": None, "fp8": "fp8", "fp8_saved": "fp8_saved", "float32": "float32"}
PRESETS = {
    "cpu": example.PRESETS["cpu"],
    "gpu": dataclasses.replace(example.PRESETS["gpu"], width=512, num_layers=8, num_heads=8, batch=16),
}
NUM_PARTS, LOSSES_PER_PART = 8, 10


class Runs:
    """Training runs. Only one at a time is in memory."""

    def __init__(self, settings: Any, device: str, checkpoints: Path):
        self._settings, self._checkpoints = settings, checkpoints
        self._text = example.load_text(Path(sysconfig.get_paths()["stdlib"]), device)
        self._run: Any = None

    def advance(self, shared: Row) -> list[Row]:
        """Train the part of a run that ends at `shared["step"]`. Return its row."""
        end = shared["step"]
        begin = end - part_steps(self._settings)
        run = self._advanced(shared["precision"], shared["seed"], begin)
        started = time.monotonic()
        self._train(run, end)
        losses = run.history.training_loss[begin:end].tolist()  # host synchronisation
        seconds = time.monotonic() - started
        size = max(len(losses) // LOSSES_PER_PART, 1)
        row = {
            "held_out_loss": example.evaluate(run),
            "training_losses": [statistics.fmean(losses[i : i + size]) for i in range(0, len(losses), size)],
            "seconds": seconds,
            "bytes_per_s": len(losses) * self._settings.batch * self._settings.context / seconds,
            "num_parameters": sum(p.numel() for p in run.model.parameters()),
            "num_parameters_of_experts": sum(p.numel() for n, p in run.model.named_parameters() if ".experts." in n),
        }
        return [row]

    def save(self) -> None:
        """Save a checkpoint of the current run to disk, unless the run is finished."""
        if self._run is not None and self._run.step < self._settings.steps:
            path = self._path(self._run.settings)
            path.parent.mkdir(parents=True, exist_ok=True)
            example.save_checkpoint(self._run, path)

    def _advanced(self, precision: str, seed: int, step: int) -> Any:
        """Return the run at the end of this step, from memory, from its checkpoint or from the start."""
        settings = dataclasses.replace(self._settings, precision=PRECISIONS[precision], seed=seed)
        if self._run is None or self._run.settings != settings or self._run.step > step:
            self._run = None  # free the memory of the last run
            if torch.cuda.is_available():
                torch.set_float32_matmul_precision("high" if precision == "float32" else "highest")
            self._run = example.start_run(settings, self._text)
            path = self._path(settings)
            if path.exists():
                example.load_checkpoint(self._run, path)
            if self._run.step > step:  # start again, because the results file lacks earlier rows
                self._run = example.start_run(settings, self._text)
        self._train(self._run, step)
        return self._run

    def _train(self, run: Any, step: int) -> None:
        while run.step < step:
            example.train_step(run)

    def _path(self, settings: Any) -> Path:
        return self._checkpoints / f"{settings.precision or 'default'}_{settings.seed}.safetensors"


def part_steps(settings: Any) -> int:
    return settings.steps // NUM_PARTS


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Yield the parts of all runs. Group the runs by seed, so that runs with one seed can be compared early."""
    settings = PRESETS[options.preset]
    runs = Runs(settings, options.device, options.checkpoints)
    steps = range(part_steps(settings), settings.steps + 1, part_steps(settings))
    try:
        for seed in options.seeds:
            for precision in options.precisions:
                for step in steps:
                    row = {"case": "convergence", "precision": precision, "seed": seed, "step": step}
                    yield row, partial(runs.advance, row)
    finally:
        runs.save()


def print_summary(rows: list[Row]) -> None:
    """Print the held-out losses of finished runs, and their differences from bfloat16's with the same seed."""
    last = max(row["step"] for row in rows)
    finished = {key: curve[last] for key, curve in curves_of(rows).items() if last in curve}
    for precision in dict.fromkeys(precision for precision, _ in finished):
        losses = {seed: loss for (of, seed), loss in finished.items() if of == precision}
        differences = [loss - finished["bfloat16", s] for s, loss in losses.items() if ("bfloat16", s) in finished]
        line = f"{precision:10s} mean {statistics.fmean(losses.values()):.4f} ({[*losses.values()]})"
        if precision != "bfloat16" and differences:
            line += f", differs from bfloat16 by {statistics.fmean(differences):+.4f}"
        print(line)


def plot(paths: list[Path]) -> None:
    """Plot the losses by step, and their differences from bfloat16's with the same seed, next to the first file."""
    rows = [row for path in paths for row in plots.read(path) if row["case"] == "convergence"]
    figure, axes = plots.panels(2, 1, 9, 7, sharex=True)
    losses, differences = axes
    curves = curves_of(rows)
    labelled: set[str] = set()
    for (precision, seed), curve in curves.items():
        base = curves.get(("bfloat16", seed), {})
        pairs = [(step, loss - base[step]) for step, loss in curve.items() if step in base]
        style = {"color": f"C{list(PRECISIONS).index(precision)}", "linewidth": 0.9, "marker": "."}
        losses.plot([*curve], [*curve.values()], label=None if precision in labelled else precision, **style)
        differences.plot([step for step, _ in pairs], [difference for _, difference in pairs], **style)
        labelled.add(precision)
    losses.set_ylabel("held-out loss (nats per byte)")
    differences.set_ylabel("minus that of bfloat16, same seed")
    differences.set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    losses.legend()
    first = rows[0]
    plots.save(figure, paths[0], f"{first['gpu']}, PyTorch {first['torch']}, Triton {first['triton']}")


def curves_of(rows: list[Row]) -> dict[tuple[str, int], dict[int, float]]:
    """Return a dict for each (precision, seed). It maps a step to the held-out loss."""
    curves: dict[tuple[str, int], dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: (list(PRECISIONS).index(row["precision"]), row["seed"], row["step"])):
        curves.setdefault((row["precision"], row["seed"]), {})[row["step"]] = row["held_out_loss"]
    return curves


def add_options(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.set_defaults(device="cuda" if on_gpu else "cpu")
    default_preset = "gpu" if on_gpu else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default here: %(default)s")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16", "fp8", "float32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/fp8_convergence"), help="default: %(default)s")


def finish(options: argparse.Namespace, rows: list[Row]) -> None:
    if rows:
        print_summary(rows)
    if options.output is not None and rows:
        plot([options.output])


COLUMNS = ("precision", "seed", "step", "held_out_loss", "seconds")
main = Command(__doc__, add_options, tasks, COLUMNS, readers={"--plot": plot}, finish=finish)


if __name__ == "__main__":
    main()
