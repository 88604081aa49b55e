"""Measure ahead of time which kernels are fastest, and show and verify the measurements.

    python -m moe_kernels tune 16384,2048,768,128,8 8192,4096,14336,8,2      # T, D, F, E, K of each layer
    python -m moe_kernels tune --lists 4x512 64x128 --jagged 131072,2048,2048,16     # GxN: G products of N x N; R,K,N,G
    python -m moe_kernels tune 16,2048,768,128,8 --quantized fp8 mxfp4
    python -m moe_kernels tune 32768,4096,1024,128,8 --precision fp8
    python -m moe_kernels show
    python -m moe_kernels verify

`tune` writes the table after every measurement and skips entries that the table already has, so a second run continues
where the first run stopped. The exit status is 1 if `tune` runs out of time or `verify` finds a wrong entry.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..activation.functions import EPILOGUES
from ..gemm import measurements
from ..gemm.kernel import Kernel
from ..gemm.measurements import Table
from ..gemm.selection import get_kernels
from ..quantization.formats import FORMATS
from ..runtime.triton import triton
from .layers import parse_layer
from .measurement_keys import arguments_of
from .tune import check, jagged_job, layer_job, list_job, product_job, tune


def tune_command(options: argparse.Namespace) -> int:
    gpu = _this_gpu("tune")
    path = options.output
    if path is None:
        if measurements.USER is None:
            raise SystemExit("tune: MOE_KERNELS_TUNING is off: name the table to write by --output")
        path = measurements.USER / measurements.table_name(gpu)
    dtype = getattr(torch, options.dtype)
    if options.precision is not None:
        settings = {"activation": options.activation, "precision": options.precision}
        of_layers = [product_job(case, dtype, "cuda", **settings) for case in options.layers]
    elif options.quantized:
        kinds = itertools.product(options.layers, options.quantized)
        of_layers = [product_job(case, dtype, "cuda", format=format) for case, format in kinds]
    else:
        of_layers = [layer_job(case, dtype, "cuda", options.activation) for case in options.layers]
    jobs = [
        *of_layers,
        *(list_job(*map(int, problem.split("x")), dtype=dtype, device="cuda") for problem in options.lists),
        *(jagged_job(*map(int, problem.split(",")), dtype=dtype, device="cuda") for problem in options.jagged),
    ]
    fields = {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__}
    is_complete = tune(jobs, path, seconds=options.seconds, again=options.again, **fields)
    print(f"{path}: {'complete' if is_complete else 'out of time: run again to go on'}")
    return 0 if is_complete else 1


def show_command(options: argparse.Namespace) -> int:
    paths = _tables("show", options)
    if not paths:
        print("show: there are no tables; tune writes them")
    for path in paths:
        table = measurements.read(path)
        print(path)
        for key, name in table.kernels.items():
            ms = (table.milliseconds or {}).get(key)
            missing = "" if _kernel(name) else " (not in the catalog: never selected)"
            print(f"  {key}: {name}{missing}{'' if ms is None else f', {ms:.4f} ms'}")
        for key, copies in table.copies.items():
            print(f"  {key}: copies {copies}")
    return 0


def verify_command(options: argparse.Namespace) -> int:
    _this_gpu("verify")
    (path,) = _tables("verify", options)
    table = measurements.read(path)
    errors = verify(table, "cuda")
    print(f"{len(table.kernels) - len(errors)} of {len(table.kernels)} kernels agree with the reference")
    return 1 if errors else 0


def verify(table: Table, device: torch.device | str) -> dict[str, str]:
    """Run every entry's kernel on random operands and check the results. Return a dictionary from the key of each wrong
    entry to its error."""
    errors = {}
    for key, name in tqdm(table.kernels.items(), unit="entry"):
        if error := _error(key, name, device):
            errors[key] = error
            tqdm.write(f"{key}: {error}")
    return errors


def _error(key: str, name: str, device: torch.device | str) -> str | None:
    if (kernel := _kernel(name)) is None:
        return f"{name} is not in the catalog"
    args = arguments_of(key, device)
    if not (status := kernel.supports(args)):
        return f"{name}: {status.error}"
    try:
        check(kernel, args)
    except AssertionError as error:
        return str(error)
    return None


def _kernel(name: str) -> Kernel | None:
    """Return the kernel of this name, or None. It may be a kernel of the catalog with another of its `epilogues`."""
    for kernel in get_kernels():
        if kernel.metadata.kernel_name == name:
            return kernel
        if kernel.metadata.epilogue is not None:
            for epilogue in kernel.epilogues:
                if kernel.metadata.kernel_name.replace(kernel.metadata.epilogue, epilogue) == name:
                    return kernel.with_epilogue(epilogue)
    return None


def _this_gpu(command: str) -> str:
    if not torch.cuda.is_available():
        raise SystemExit(f"{command}: kernels run on a CUDA GPU, got none")
    return torch.cuda.get_device_name()


def _tables(command: str, options: argparse.Namespace) -> list[Path]:
    if options.table is not None:
        return [options.table]
    if options.gpu is None and command == "show" and not torch.cuda.is_available():
        return measurements.paths()
    gpu = options.gpu or _this_gpu(command)
    if paths := measurements.paths(gpu):
        return paths
    raise SystemExit(f"{command}: there is no {measurements.table_name(gpu)}; tune writes it")


def add_commands(commands: Any) -> None:
    """Add `tune`, `show` and `verify` to the subparsers of an `argparse` parser."""
    tuning = commands.add_parser("tune", help="measure and write a table")
    tuning.add_argument("layers", nargs="*", type=parse_layer, metavar="T,D,F,E,K", help="sizes of the layers")
    tuning.add_argument("--lists", nargs="+", default=[], metavar="GxN", help="square products in one launch")
    tuning.add_argument("--jagged", nargs="+", default=[], metavar="R,K,N,G", help="packed rows and a shared matrix")
    tuning.add_argument(
        "--quantized",
        nargs="+",
        default=[],
        choices=list(FORMATS),
        help="measure the GEMMs that decode weights of these formats; the layers' other entries are left alone",
    )
    tuning.add_argument(
        "--precision",
        choices=["fp8"],
        help="measure the GEMMs of e4m3 operands instead of the layers' other entries",
    )
    tuning.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    tuning.add_argument("--activation", default="swiglu", choices=sorted(EPILOGUES))
    tuning.add_argument("--seconds", type=float, default=math.inf, help="start no measurement later than this")
    tuning.add_argument("--again", action="store_true", help="measure also what the table has")
    tuning.add_argument("--output", type=Path, help="table to add to; default: one's own of this GPU")
    tuning.set_defaults(run=tune_command)
    for name, run, does in (
        ("show", show_command, "print the tables that are selected by"),
        ("verify", verify_command, "run the kernel of every entry and check its result against the reference"),
    ):
        command = commands.add_parser(name, help=does)
        command.add_argument("--table", type=Path, help="only this table")
        without = "; without a GPU, all tables" if name == "show" else ""
        command.add_argument("--gpu", help=f"the tables of a GPU of this name; default: this machine's{without}")
        command.set_defaults(run=run)
