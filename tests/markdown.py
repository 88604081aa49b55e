"""Run the code blocks of a Markdown page from top to bottom, as a reader would: python -m tests.markdown PAGE

Blocks share their names and the current folder. `python` blocks run. `pycon` blocks are sessions whose output,
including errors, must equal that on the page. Of `sh` blocks, only commands run that need neither network nor much
time. `yaml` blocks are read by tests of what they configure. After the line `<!-- needs: gpu -->` a block runs only
where there is a GPU, and after a line with the name of a package, `<!-- needs: peft -->`, only where it is installed.
"""

from __future__ import annotations

import doctest
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

LANGUAGES = ("python", "pycon", "sh", "yaml")
# A command that starts with one of these runs; other commands are only checked.
QUICK = ("python -m moe_kernels explain", "python -m moe_layers.checkpoint", "python -m tests.fuzz")
BLOCK = re.compile(r"^(?:<!-- needs: (\w+) -->\n)?```(.*)\n((?:(?!```).*\n)*)```", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z]{2,}")  # DIR, IN, OUT: for the reader to replace


class Block(NamedTuple):
    language: str
    needs: str  # "gpu", the name of a package, or nothing
    text: str
    line: int  # line of its first line in the page, from 1


def blocks_of(page: Path) -> list[Block]:
    """Return all code blocks of a page.

    Raises:
        ValueError: a block has no language that can be checked.
    """
    found, page_text = [], page.read_text()
    for block in BLOCK.finditer(page_text):
        needs, language, text = block.groups(default="")
        line = 1 + page_text.count("\n", 0, block.start(3))
        if language not in LANGUAGES:
            raise ValueError(f"{page.name}:{line - 1}: a block must be one of {LANGUAGES}, got {language!r}")
        found.append(Block(language, needs, text, line))
    return found


class Command(NamedTuple):
    variables: tuple[str, ...]  # environment variables set for the command
    words: tuple[str, ...]


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a shell block, without comments."""
    found = []
    for part in (part for line in block.text.splitlines() for part in line.split(" && ")):
        words = shlex.split(part, comments=True)
        variables = tuple(itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
        if words := words[len(variables) :]:
            found.append(Command(tuple(variable.split("=")[0] for variable in variables), tuple(words)))
    return found


def is_quick(command: Command) -> bool:
    return " ".join(command.words).startswith(QUICK) and not any(map(PLACEHOLDER.fullmatch, command.words))


def is_here(needs: str) -> bool:
    if needs == "gpu":
        return torch.cuda.is_available()
    return not needs or importlib.util.find_spec(needs) is not None


def run_page(page: Path) -> None:
    """Run the page. An error of a block is raised with the line of the page."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks_of(page):
        if not is_here(block.needs):
            continue
        if block.language == "python":
            # Compiled with the page's line numbers, for tracebacks.
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
        elif block.language == "pycon":
            run_session(page, block, names)
        elif block.language == "sh":
            for command in filter(is_quick, commands_of(block)):
                subprocess.run([sys.executable, *command.words[1:]], check=True)


def run_session(page: Path, block: Block, names: dict[str, Any]) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    session = parser.get_doctest(block.text, names, page.name, str(page), block.line - 1)
    said: list[str] = []
    failed, _ = runner.run(session, out=said.append, clear_globs=False)
    names.update(session.globs)
    if failed:
        raise AssertionError("".join(said))


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve())
