"""python -m moe_layers.checkpoint: inspect checkpoints, and convert the layout of their experts."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from .convert import convert
from .files import CONFIG, CheckpointFiles
from .layouts import LAYOUTS
from .survey import BlockSurvey, survey

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COLUMNS = ("layer", "block", "layout", "experts", "d_model", "d_ff", "dtype", "quantisation", "MiB")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def inspect_command(options: argparse.Namespace) -> None:
    for directory in _checkpoints(options.directory):
        with CheckpointFiles(directory) as files:
            blocks = survey(files)
            print(f"{directory}: {len(blocks)} MoE blocks, {len(files.file_of)} tensors in {files.num_files} files")
        if blocks:
            _print_table([_COLUMNS, *map(_row, blocks)])


def convert_command(options: argparse.Namespace) -> None:
    sources = _checkpoints(options.source)
    for directory in sources:
        target = options.target if directory == options.source else options.target / directory.name
        convert(
            directory,
            target,
            options.layout,
            dtype=_DTYPES[options.dtype],
            max_shard_bytes=int(options.shard_gb * 1e9),
            progress=partial(tqdm, desc=directory.name, unit="tensor"),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moe_layers.checkpoint",
        description="Inspect checkpoints, and convert the layout of their experts.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("inspect", help="a table of the MoE blocks")
    command.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint, or a directory of checkpoints")
    command.set_defaults(run=inspect_command)
    command = commands.add_parser("convert", help="write a model with its experts in another layout")
    command.add_argument("source", type=Path, metavar="IN", help="a checkpoint, or a directory of checkpoints")
    command.add_argument("target", type=Path, metavar="OUT", help="must be empty or not exist")
    command.add_argument("--layout", required=True, choices=_layout_names(), help="of the experts in OUT")
    command.add_argument("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of weights that are quantised")
    command.add_argument("--shard-gb", type=float, default=5.0, help="largest size of a file, in 10^9 bytes")
    command.set_defaults(run=convert_command)
    return parser


def _layout_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(layout.name for layout in LAYOUTS if not layout.encoding))


def _checkpoints(directory: Path) -> list[Path]:
    """Return the directory itself, or its subdirectories that are checkpoints."""
    if (directory / CONFIG).is_file():
        return [directory]
    children = sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
    if not children:
        raise ValueError(f"checkpoint: {directory} must hold {CONFIG}, or directories that do; got neither")
    return children


def _row(found: BlockSurvey) -> tuple[str, ...]:
    sizes = found.sizes[0] if found.sizes else None
    layouts = " or ".join(f"{layout.name} ({layout.family})" for layout in found.layouts) or "unknown"
    return (
        str(found.block.layer),
        found.block.prefix.rstrip(".") or "(top)",
        layouts,
        str(sizes.num_experts) if sizes else "?",
        str(sizes.d_model) if sizes else "?",
        str(sizes.d_ff) if sizes and len({sizes.d_ff for sizes in found.sizes}) == 1 else "?",
        "/".join(sorted(str(dtype).removeprefix("torch.") for dtype in found.dtypes)) or "?",
        "/".join(sorted(found.encodings - {"plain"})) or "none",
        f"{found.num_bytes / 2**20:.1f}",
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
