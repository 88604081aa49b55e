"""Small runs of the benchmarks, in one process: `python -m tests.benchmarks.commands FOLDER DEVICE NAME ...`."""

import json
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

QUICK = "--rounds 1 --round-ms 1 --commit abc"
COMMANDS = {
    "activations": "--shapes tiny --variants relu",
    "batch_invariance": "--shapes tiny --num-tokens 3",
    "checkpoint": "--shape tiny",
    "fp8": "--shapes tiny",
    "grouped_gemm": "--shapes tiny --gemms up up_wgrad --routing even",
    "grouped_gemm_list": "--problems 2x16",
    "jagged_gemm": "--problems 40,16,16,3 --skews uneven",
    "layer": "--shapes tiny --routing even",
    "lora": "--shapes tiny --tokens 16 --ranks 4",
    "quantized": "--shapes tiny --train-tokens 40 --decode-tokens 4 --forms plain mxfp4",
    "routing": "--routers deepseek-v3 --num-tokens 8",
    "small_batches": "--shapes tiny --tokens 1",
}


def measure(command: Callable[[list[str]], list[dict]], path: Path, *options: str) -> list[dict]:
    """Run a command quickly. Return its rows, which must be those of its results file, `path`."""
    rows = command([*QUICK.split(), "--output", str(path), *options])
    assert rows == json.loads(path.read_text())
    return rows


def run(name: str, device: str, folder: Path) -> None:
    """Run a command of the list."""
    command = import_module(f"benchmarks.{name}").main
    measure(command, folder / f"{name}.json", *COMMANDS[name].split(), "--device", device)


def main(folder: str, device: str, *names: str) -> None:
    for name in names:
        try:
            run(name, device, Path(folder))
        except Exception:
            (Path(folder) / f"{name}.failed").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(*sys.argv[1:])
