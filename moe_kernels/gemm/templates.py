"""Templates of launches: a function that makes the launch of other tensors, several times faster than `Kernel.launch`.

A launch's arguments are tensors that its `Arguments` hold, descriptors of those, and values that the launch key
decides. So a template keeps where each argument comes from.
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
    """None where a tensor of the launch is neither one of the arguments nor of their tile table."""
    # Two fields may hold one tensor now, and two tensors the next time. Stand-ins are distinct objects.
    stand_ins = args.stand_ins()
    table = "args.tile_table"
    if kernel.metadata_bytes(args):
        # The arguments lack a table that the launch reads. Every launch makes one; here its tensors suffice.
        stand_ins = kernel.with_metadata(stand_ins, None, write=False)
        table = "kernel.tile_table(args)"
    launch = kernel.launch(stand_ins)
    names = stand_ins.tensor_names()
    constants: list[Any] = []
    sources: list[str] = []
    for value in launch.arguments:
        if isinstance(value, Tensor):
            source = names.get(id(value))
        elif hasattr(value, "block_shape"):
            source = names.get(id(value.base))
            # A descriptor is new each time, as threads may launch at once.
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
    """Makes templates from constants. The template is one expression, which is faster than a loop. Evaluating it takes
    longest, so launches that differ in numbers share it."""
    constants = "".join(f", x{i}" for i in range(num_constants))
    source = f"lambda kernel, function, grid, options{constants}: lambda args: "
    return eval(f"{source}Launch(function, grid, {arguments}, options)", {"Launch": Launch, "describe": describe})


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str))
