"""Check cases again: python -m tests.fuzz "Experts(num_tokens=3, ...)" """

from __future__ import annotations

import argparse
import sys

import torch

from .. import conftest  # noqa: F401 - the interpreter where there is no GPU, before any import of ours
from .case import parse
from .strategies import KINDS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, epilog=f"There are cases of {', '.join(KINDS)}."
    )
    parser.add_argument("cases", nargs="+", type=parse, metavar="CASE", help="as a failing test prints it")
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True, warn_only=True)  # poisons memory
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in options.cases:
        case.check(device)
        print(f"right: {case!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
