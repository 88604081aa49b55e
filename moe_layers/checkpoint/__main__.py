"""`python -m moe_layers.checkpoint` inspects, converts and repairs checkpoints, and converts or merges LoRA."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from .adapters.adapter_files import ADAPTER_LAYOUTS, ORIENTATIONS, read_peft_adapter, write_adapter
from .adapters.merge import merge_adapter
from .files.directory import CONFIG, CheckpointFiles
from .files.layouts import LAYOUTS
from .files.stored_weights import dtype_name
from .model.convert import convert
from .model.repair import repair
from .model.survey import BlockSurvey, survey

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COLUMNS = ("layer", "block", "layout", "experts", "d_model", "d_ff", "dtype", "quantisation", "MiB")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def inspect_command(options: argparse.Namespace) -> None:
    for directory in _checkpoints(options.directory):
        with CheckpointFiles(directory) as files:
            blocks = survey(files)
            names, num_files = files.file_of, len({*files.file_of.values()})
            print(f"{directory}: {len(blocks)} MoE blocks, {len(names)} tensors in {num_files} files")
        if blocks:
            _print_table([_COLUMNS, *map(_row, blocks)])


def convert_command(options: argparse.Namespace) -> None:
    for directory in _checkpoints(options.source):
        target = options.target if directory == options.source else options.target / directory.name
        convert(
            directory,
            target,
            options.layout,
            dtype=_DTYPES[options.dtype],
            max_shard_bytes=int(options.shard_gb * 1e9),
            progress=partial(tqdm, desc=directory.name, unit="tensor"),
        )


def repair_command(options: argparse.Namespace) -> None:
    for directory in _checkpoints(options.directory):
        print(repair(directory))


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
    layouts = dict.fromkeys(layout.name for layout in LAYOUTS if not layout.encoding)
    command.add_argument("--layout", required=True, choices=tuple(layouts), help="of the experts in OUT")
    command.add_argument("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of weights that are quantised")
    command.add_argument("--shard-gb", type=float, default=5.0, help="largest size of a file, in 10^9 bytes")
    command.set_defaults(run=convert_command)
    command = commands.add_parser("repair", help="rename the weights to what transformers' Trainer resumes from")
    command.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint of the Trainer, or its output_dir")
    command.set_defaults(run=repair_command)
    lora = commands.add_parser("lora", help="adapters of experts in PEFT's files")
    _add_lora_commands(lora.add_subparsers(required=True, metavar="COMMAND"))
    return parser


def _add_lora_commands(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("inspect", help="the adapted parameters and their ranks")
    command.add_argument("directory", type=Path, metavar="DIR", help="holds adapter_config.json")
    command.set_defaults(run=inspect_lora_command)
    _add_orientation(command)
    command = commands.add_parser("convert", help="write an adapter in another layout")
    command.add_argument("source", type=Path, metavar="IN")
    command.add_argument("target", type=Path, metavar="OUT", help="must be empty or not exist")
    command.add_argument("--layout", required=True, choices=ADAPTER_LAYOUTS, help="of OUT")
    command.add_argument("--interleaved", action="store_true", help="rows of IN's gate and up alternate (gpt-oss)")
    command.set_defaults(run=convert_lora_command)
    _add_orientation(command)
    command = commands.add_parser("merge", help="write a model with the adapter added to its weights")
    command.add_argument("source", type=Path, metavar="MODEL")
    command.add_argument("adapter", type=Path, metavar="ADAPTER")
    command.add_argument("target", type=Path, metavar="OUT", help="must be empty or not exist")
    command.add_argument("--shard-gb", type=float, default=5.0, help="largest size of a file, in 10^9 bytes")
    command.set_defaults(run=merge_lora_command)
    _add_orientation(command)


def _add_orientation(command: argparse.ArgumentParser) -> None:
    command.add_argument("--orientation", choices=ORIENTATIONS, help="of the adapter, where its shapes do not tell it")


def inspect_lora_command(options: argparse.Namespace) -> None:
    print(read_peft_adapter(options.directory, orientation=options.orientation).report)


def convert_lora_command(options: argparse.Namespace) -> None:
    interleaved = options.interleaved
    adapter = read_peft_adapter(options.source, orientation=options.orientation, interleaved=interleaved)
    write_adapter(adapter, options.target, options.layout, interleaved=interleaved)
    print(adapter.report)


def merge_lora_command(options: argparse.Namespace) -> None:
    report = merge_adapter(
        options.source,
        options.adapter,
        options.target,
        orientation=options.orientation,
        max_shard_bytes=int(options.shard_gb * 1e9),
        progress=partial(tqdm, desc=options.source.name, unit="tensor"),
    )
    print(report)


def _checkpoints(directory: Path) -> list[Path]:
    """Return the directory itself if it is a checkpoint, else its subdirectories that are checkpoints."""
    if (directory / CONFIG).is_file():
        return [directory]
    children = sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
    if not children:
        raise ValueError(f"checkpoint: {directory} must hold {CONFIG}, or directories that do; got neither")
    return children


def _row(found: BlockSurvey) -> tuple[str, ...]:
    sizes = found.sizes[0] if found.sizes else None
    num_experts, d_model = (str(sizes.num_experts), str(sizes.d_model)) if sizes else ("?", "?")
    widths = {sizes.d_ff for sizes in found.sizes}
    layouts = " or ".join(f"{layout.name} ({layout.family})" for layout in found.layouts) or "unknown"
    return (
        str(found.block.layer),
        found.block.prefix.rstrip(".") or "(top)",
        layouts,
        num_experts,
        d_model,
        str(*widths) if len(widths) == 1 else "?",
        "/".join(sorted({dtype_name(stored.dtype) for stored in found.experts.values()})) or "?",
        "/".join(sorted({stored.encoding for stored in found.experts.values()} - {"plain"})) or "none",
        f"{found.num_bytes / 2**20:.1f}",
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
