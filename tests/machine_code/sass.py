"""Order of shared-memory accesses in a disassembled warp-specialised kernel.

Triton 3.6 to 3.9 start and end the warps of `warp_specialize` by words in shared memory. Warps 0 to 3 write them: the
function that each other warp is to run, and values that these functions need. The other warps read them. Barriers of
the whole block separate the accesses, three per turn of the other warps. The number of such barriers before an access,
modulo 3, therefore tells which accesses it can meet: two accesses with different numbers always have a barrier between
them. All warps exit after the same barrier, so no barrier waits for an exited warp.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?(\S.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_SOURCE = re.compile(r'//## File "(?:[^"]*/)?([^"/]+)", line (\d+)')
_BLOCK_BARRIER = re.compile(r"BAR\.SYNC(\.DEFER_BLOCKING)? 0x1$")  # the barrier without a number of threads
_BRANCH = re.compile(r"BRA\b")
_MULTIPLICATION = re.compile(r"[HQ]GMMA\b")
_LOCAL = re.compile(r"(STL|LDL)\b")
_UNFOLLOWED = re.compile(r"(BRX|BRXU|JMP|JMX|JMXU|CALL|RET|WARPSYNC\.COLLECTIVE)\b")
_KINDS = {
    "read": re.compile(r"(LDS|LDSM|UTMASTG)\b"),
    "write": re.compile(r"(STS|STSM|ATOMS|LDGSTS|UTMALDG|UBLKCP)\b"),
    "exit": re.compile(r"EXIT\b"),
}
_TURN = 3
_ORDERED = (("first", "write", {0}), ("other", "read", {1}), ("first", "exit", {1}), ("other", "exit", {1}))


class Instruction(NamedTuple):
    address: int
    guard: str | None  # the predicate under which it runs
    text: str
    source: tuple[str, int] | None  # file and line


def parse(disassembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return (instructions, index of the instruction after each label) of `nvdisasm -g -c`, for one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    source = None
    for line in disassembly.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := _SOURCE.search(line):
            source = found[1], int(found[2])
        elif found := _INSTRUCTION.search(line):
            code.append(Instruction(int(found[1], 16), found[2], found[3], source))
    return code, labels


def unordered_accesses(disassembly: str, lines: set[tuple[str, int]]) -> list[str]:
    """Return the accesses attributed to these source lines that may meet another one without a barrier in between.

    Allowed are writes of warps 0 to 3 after a multiple of 3 block barriers, and reads of the other warps after one
    more; no read has the same number as a write. Exits that do not follow one more barrier are also returned.

    Raises:
        ValueError: there are no such accesses, or the code jumps in a way that this parser does not follow.
    """
    code, labels = parse(disassembly)
    # The first branch separates warps 0 to 3 from the others. The side that jumps differs between Triton versions;
    # warps 0 to 3 are the side that writes.
    split = next((i for i, instruction in enumerate(code) if _BRANCH.match(instruction.text)), None)
    if split is None:
        raise ValueError(f"unordered_accesses: expected a branch in the kernel, got {len(code)} instructions without")
    sides = [_accesses(code, labels, start, lines) for start in (_targets(code[split], labels)[0], split + 1)]
    sides.sort(key=lambda accesses: all(kind != "write" for _, kind, _ in accesses))
    wrong, kinds = [], set()
    for warps, accesses in zip(("first", "other"), sides, strict=True):
        for instruction, kind, barriers in accesses:
            kinds.add((warps, kind))
            if (warps, kind, barriers) not in _ORDERED:
                behind = f"behind {sorted(barriers)} barriers"
                wrong.append(f"+{instruction.address:#x} {instruction.text}: {kind} of the {warps} warps {behind}")
    if not wrong and kinds != {(warps, kind) for warps, kind, _ in _ORDERED}:
        raise ValueError(f"unordered_accesses: expected writes and reads on lines {sorted(lines)}, got {sorted(kinds)}")
    return wrong


def spills_in_reductions(disassembly: str) -> int:
    """Return the local-memory accesses in reduction loops: loops that multiply and contain no other loop.

    Raises:
        ValueError: there are fewer such loops than consumers, which are two.
    """
    code, labels = parse(disassembly)
    ends: dict[int, int] = {}  # ends of loops by their first instruction
    for index, instruction in enumerate(code):
        for target in _targets(instruction, labels) if _BRANCH.match(instruction.text) else ():
            if target <= index:
                ends[target] = index
    bodies = [
        [instruction.text for instruction in code[first : last + 1]]
        for first, last in ends.items()
        if not any(first <= head and end <= last for head, end in ends.items() if head != first)
    ]
    bodies = [texts for texts in bodies if any(map(_MULTIPLICATION.match, texts))]
    if len(bodies) < 2:
        raise ValueError(f"spills_in_reductions: expected a loop of each consumer, got {len(bodies)}")
    return sum(bool(_LOCAL.match(text)) for texts in bodies for text in texts)


def functions_between_multiplications(disassembly: str) -> int:
    """Return the exponentials, reciprocals and the like between the multiplications of one reduction step.

    The compiler moved them there. The tensor cores wait for them: the step's later multiplications have not begun.
    """
    found, since, in_step = 0, 0, False
    for instruction in parse(disassembly)[0]:
        if _MULTIPLICATION.match(instruction.text):
            found += since if in_step else 0
            since, in_step = 0, "gsb0" not in instruction.text  # the last one of a step ends a group
        else:
            since += instruction.text.startswith("MUFU")
    return found


def multiply_adds_between_copies(disassembly: str) -> int:
    """Return the 64-bit multiply-adds right before asynchronous copies that follow another such copy."""
    found, since, follows = 0, [], False
    for instruction in parse(disassembly)[0]:
        if instruction.text.startswith("LDGSTS"):
            found += sum(text.startswith("IMAD.WIDE") for text in since) if follows else 0
            since, follows = [], True
        else:
            since.append(instruction.text)
            follows = follows and len(since) < 8  # further apart, they belong to two steps
    return found


def _accesses(
    code: list[Instruction], labels: dict[str, int], start: int, lines: set[tuple[str, int]]
) -> list[tuple[Instruction, str, set[int]]]:
    """Return (instruction, kind, possible numbers of earlier barriers) of the accesses on this side of the branch."""
    return [
        (code[index], kind, barriers)
        for index, barriers in _barriers_behind(code, labels, start).items()
        if (kind := _kind(code[index])) is not None and (kind == "exit" or code[index].source in lines)
    ]


def _kind(instruction: Instruction) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.match(instruction.text)), None)


def _targets(instruction: Instruction, labels: dict[str, int]) -> list[int]:
    return [labels[label] for label in re.findall(r"\.L_x_\d+", instruction.text)]


def _barriers_behind(code: list[Instruction], labels: dict[str, int], start: int) -> dict[int, set[int]]:
    """Return, per reachable instruction, the possible numbers of barriers before it, modulo 3.

    A barrier under a predicate is followed both ways. The assumed value of the predicate holds for the barriers,
    branches and exits directly after it.
    """
    found: dict[int, set[int]] = {}
    todo: list[tuple[int, int, str | None]] = [(start, 0, None)]  # and a guard that is known to hold
    seen = set()
    while todo:
        state = index, barriers, known = todo.pop()
        if index >= len(code) or state in seen:
            continue
        seen.add(state)
        instruction = code[index]
        if _UNFOLLOWED.match(instruction.text):
            raise ValueError(f"unordered_accesses: cannot follow jumps by register or calls, got {instruction.text}")
        is_barrier, guard = bool(_BLOCK_BARRIER.match(instruction.text)), instruction.guard
        is_followed = is_barrier or bool(_BRANCH.match(instruction.text)) or instruction.text.startswith("EXIT")
        known = known if is_followed else None
        runs = guard is None or known != _negated(guard)
        skipped = guard is not None and known != guard
        if runs:
            found.setdefault(index, set()).add(barriers)
            after = guard if is_followed and guard else known
            if _BRANCH.match(instruction.text):
                todo += [(target, barriers, after) for target in _targets(instruction, labels)]
            # A branch may also depend on a predicate among its operands.
            if not re.match(r"EXIT|BRA (\(|`)", instruction.text):
                todo.append((index + 1, (barriers + is_barrier) % _TURN, after))
        if skipped:
            todo.append((index + 1, barriers, _negated(guard) if is_followed else None))
    return found


def _negated(guard: str) -> str:
    return guard.removeprefix("!") if guard.startswith("!") else f"!{guard}"
