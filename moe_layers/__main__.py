"""Commands of this project:

    python -m moe_layers.checkpoint    inspect, convert and repair checkpoints; convert and merge LoRA
    python -m moe_layers.integrations.hub_kernel   write a kernel for the Hugging Face Hub
    python -m moe_kernels              explain which kernels run, tune tables, show and verify them

`--help` after a command lists its options.
"""

from __future__ import annotations

import argparse

from . import __version__


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"moe-layers {__version__}")
    parser.parse_args(arguments)
    parser.print_help()


if __name__ == "__main__":
    main()
