"""Small runs of the benchmarks, in one process: `python -m tests.benchmarks.commands FOLDER DEVICE NAME ...`."""

import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

QUICK = "--rounds 1 --round-ms 1 --commit abc"
COMMANDS = {
    "activations": "--shapes tiny --variants relu",
    "batch_invariance": "--shapes tiny --num-tokens 3",
    "checkpoint": "--shape tiny",
    "compiled_block": "--shapes tiny",
    "fp8": "--shapes tiny",
    "grouped_gemm": "--shapes tiny --gemms up up_wgrad --routing even",
    "grouped_gemm_list": "--problems 2x16",
    "huggingface": "--shape tiny --routing",
    "huggingface --lora": "--shape tiny --lora 2",
    "jagged_gemm": "--problems 40,16,16,3 --skews uneven",
    "layer": "--shapes tiny --routing even",
    "lora": "--shapes tiny --tokens 16 --ranks 4",
    "quantized": "--shapes tiny --train-tokens 40 --decode-tokens 4 --forms plain mxfp4",
    "routing": "--routers deepseek-v3 --num-tokens 8",
    "small_batches": "--shapes tiny --tokens 1",
}


def run(name: str, device: str, folder: Path) -> list[dict]:
    """Run a command of the list. Return its rows, as its results file holds them."""
    path = folder / f"{name}.json"
    options = [*COMMANDS[name].split(), *QUICK.split(), "--device", device, "--output", str(path)]
    rows = import_module(f"benchmarks.{name.split()[0]}").main(options)
    assert rows == json.loads(path.read_text())
    return rows


def main(folder: str, device: str, *names: str) -> None:
    for name in names:
        try:
            run(name, device, Path(folder))
        except Exception:
            (Path(folder) / f"{name}.failed").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(*sys.argv[1:])
