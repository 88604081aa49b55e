"""Judge a report of racecheck: `python -m tests.machine_code.racecheck REPORT`. Exit status 1: unknown races.

    compute-sanitizer --tool racecheck --print-limit 100000 python -m tests.machine_code.sanitize > REPORT

racecheck reports the words by which Triton starts and ends the warps of `warp_specialize`, although a block barrier
separates every write and every read of them. Only these hazards are known. They are identified by their source lines:
the kernel's `def` and its call of `warp_specialize`. The compiler may attribute other accesses to these lines, so
`test_aot.py` checks the barriers in the machine code of each such kernel.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

HOPPER = Path(__file__).parents[2] / "moe_kernels" / "gemm" / "kernels" / "hopper"

_PREFIX = "========="
_ACCESS = r"(Read|Write) access at (\S+)\+0x[0-9a-f]+ in (\S+):(\d+)"
_FIRST = re.compile(rf"(?:Error|Warning): Race reported between {_ACCESS}")
_OTHER = re.compile(rf"and {_ACCESS} \[\d+ hazards?\]")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \(\d+ errors?, \d+ warnings?\)")


class Access(NamedTuple):
    kind: str  # "Read" or "Write"
    kernel: str
    file: str  # without its folder
    line: int


class Hazard(NamedTuple):
    first: Access
    others: list[Access]  # each races with the first access


@functools.cache
def warp_specialize_lines() -> dict[str, set[tuple[str, int]]]:
    """Return, by kernel, file and line of its `def` and of its call of `warp_specialize`."""
    found: dict[str, set[tuple[str, int]]] = {}
    for path in sorted(HOPPER.glob("*.py")):
        for function in ast.parse(path.read_text()).body:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            lines = {call.lineno for call in calls if ast.unparse(call.func) == "gl.warp_specialize"}
            if lines:
                found[function.name] = {(path.name, line) for line in (function.lineno, *lines)}
    return found


def parse(report: str) -> list[Hazard]:
    """Return the hazards of a report. Output of the program itself may be mixed in.

    Raises:
        ValueError: the report holds something else, or is incomplete.
    """
    hazards: list[Hazard] = []
    summary = None
    for line in report.splitlines():
        text = line.removeprefix(_PREFIX).strip()
        if not line.startswith(_PREFIX) or text in ("", "COMPUTE-SANITIZER"):
            continue
        if found := _FIRST.fullmatch(text):
            hazards.append(Hazard(_access(found), []))
        elif (found := _OTHER.fullmatch(text)) and hazards:
            hazards[-1].others.append(_access(found))
        elif found := _SUMMARY.fullmatch(text):
            summary = int(found[1])
        else:
            raise ValueError(f"racecheck: expected races and a summary, got {text!r}")
    if summary != len(hazards) or not all(hazard.others for hazard in hazards):
        raise ValueError(f"racecheck: expected a summary of all {len(hazards)} hazards, got {summary}")
    return hazards


def _access(found: re.Match[str]) -> Access:
    kind, kernel, file, line = found.groups()
    return Access(kind, kernel, file, int(line))


def is_known(hazard: Hazard) -> bool:
    """Return whether a read and writes, or a write and reads, race on the words of `warp_specialize` in one kernel."""
    lines = warp_specialize_lines().get(hazard.first.kernel, set())
    return (hazard.first.file, hazard.first.line) in lines and all(
        other.kernel == hazard.first.kernel and other.kind != hazard.first.kind and (other.file, other.line) in lines
        for other in hazard.others
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    hazards = parse(parser.parse_args().report.read_text())
    unknown = [hazard for hazard in hazards if not is_known(hazard)]
    for hazard in unknown:
        print(hazard)
    print(f"{len(hazards) - len(unknown)} hazards on the words of warp_specialize, {len(unknown)} others")
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
