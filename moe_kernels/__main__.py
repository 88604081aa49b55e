"""Run a command. `explain` says which kernels run. `tune` measures kernels ahead of time and tabulates the fastest.
`show` prints tables, and `verify` checks their entries.

    python -m moe_kernels explain 16384,2048,768,128,8     # tokens, d_model, d_ff, num_experts, top_k
    python -m moe_kernels tune 16384,2048,768,128,8 --seconds 600
    python -m moe_kernels show --gpu "NVIDIA H200"
    python -m moe_kernels verify

`python -m moe_kernels COMMAND --help` lists the options of a command.
"""

from __future__ import annotations

import argparse
import sys

from . import __version__
from .tools import explain, measure

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="moe_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"moe-layers {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain.add_command(commands)
    measure.add_commands(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
