"""Templates of launches: functions that make a launch for other tensors, several times faster than `Kernel.launch`.

A launch's arguments are tensors of its `Arguments`, descriptors of those tensors, and values that the launch key
determines. A template therefore stores the source of each argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..runtime.launch import Launch, describe
from .arguments import Arguments
from .kernel import Kernel

Template = Callable[[Arguments], Launch]  # for all arguments of one launch key; holds no tensor


def make_template(kernel: Kernel, args: Arguments) -> Template | None:
    """Return a template, or None if a tensor of the launch belongs neither to the arguments nor to their tile table."""
    # Two fields may share one tensor now and hold two tensors later. Stand-ins are distinct objects for each field.
    stand_ins = args.stand_ins()
    table = "args.tile_table"
    if kernel.metadata_bytes(args):
        # The arguments lack a table, so every launch makes one. Here its unwritten tensors suffice.
        stand_ins = kernel.with_metadata(stand_ins, None, write=False)
        table = "kernel.tile_table(args)"
    launch = kernel.launch(stand_ins)
    assert launch is not None  # the first launch of this key wrote something
    names = stand_ins.tensor_names()
    constants: list[Any] = []
    sources: list[str] = []
    for value in launch.arguments:
        if isinstance(value, Tensor):
            source = names.get(id(value))
        elif hasattr(value, "block_shape"):
            source = names.get(id(value.base))
            # Each launch makes new descriptors, because threads may launch at the same time.
            source = source and f"describe(x{len(constants)}, {source})"
            constants.append((type(value), {name: part for name, part in value.__dict__.items() if name != "base"}))
        else:
            source = f"x{len(constants)}" if _is_constant(value) else None
            constants.append(value)
        if source is None:
            return None
        sources.append(source)
    arguments = f"({', '.join(sources)},)"
    if any("table." in source for source in sources):
        arguments = f"(table := {table}, {arguments})[1]"
    return _evaluated(arguments, len(constants))(kernel, launch.function, launch.grid, launch.options, *constants)


@functools.lru_cache(maxsize=4096)
def _evaluated(arguments: str, num_constants: int) -> Callable[..., Template]:
    """Return a function that makes templates from constants.

    A template is one expression, which is faster than a loop. Evaluating the expression is the slowest part, so
    launches that differ only in numbers share it.
    """
    constants = "".join(f", x{i}" for i in range(num_constants))
    source = f"lambda kernel, function, grid, options{constants}: lambda args: "
    return eval(f"{source}Launch(function, grid, {arguments}, options)", {"Launch": Launch, "describe": describe})


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str))
