"""Launches made as an earlier one was, without the kernel's `launch`, which takes several times as long.

A launch's arguments are tensors that its `Arguments` hold, descriptors of those, and values that
`Arguments.replay_key` decides. So of one launch a template remains: where each argument comes from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..runtime.launch import Launch
from ..types import TileTable
from .arguments import Arguments
from .kernel import Kernel

Template = Callable[[Arguments], Launch]  # for all arguments of one replay key; holds no tensor


def make_template(kernel: Kernel, args: Arguments) -> Template | None:
    """None where a tensor of the launch is neither one of the arguments nor of their tile table."""
    # Two fields may hold one tensor now, and two the next time. Of stand-ins each is another object.
    stand_ins = _with_stand_ins(args)
    table = "args.tile_table"
    if kernel.metadata_bytes(args):
        # The arguments lack a table that the launch reads. It is made for every launch; here its tensors suffice.
        stand_ins = kernel.with_metadata(stand_ins, None, write=False)
        table = "kernel.tile_table(args)"
    launch = kernel.launch(stand_ins)
    places = _places(stand_ins)
    constants: list[Any] = []
    sources: list[str] = []
    for value in launch.arguments:
        if isinstance(value, Tensor):
            source = places.get(id(value))
        elif _is_descriptor(value):
            source = places.get(id(value.base))
            source = source and f"x{len(constants)}({source})"
            constants.append(_descriptor_maker(value))
        else:
            source = f"x{len(constants)}" if _is_constant(value) else None
            constants.append(value)
        if source is None:
            return None
        sources.append(source)
    arguments = f"({', '.join(sources)},)"
    if any("table." in source for source in sources):
        arguments = f"(table := {table}, {arguments})[1]"
    return _compiled(arguments, len(constants))(kernel, launch.function, launch.grid, launch.options, *constants)


@functools.lru_cache(maxsize=4096)
def _compiled(arguments: str, num_constants: int) -> Callable[..., Template]:
    """Makes templates from constants. One expression, as a loop takes longer than what it is to replace; compiling it
    takes longest, and launches that differ in numbers share it."""
    constants = "".join(f", x{i}" for i in range(num_constants))
    source = f"lambda kernel, function, grid, options{constants}: lambda args: "
    return eval(f"{source}Launch(function, grid, {arguments}, options)", {"Launch": Launch})


def _with_stand_ins(args: Arguments) -> Arguments:
    """The same addresses, sizes and strides in tensors of their own."""
    given = {name: getattr(args, name) for name in args.tensors}
    changes: dict[str, Any] = {name: tensor.detach() for name, tensor in given.items() if tensor is not None}
    if args.tile_table is not None:
        *tensors, block_rows = args.tile_table
        changes["tile_table"] = TileTable(*(tensor.detach() for tensor in tensors), block_rows)
    return dataclasses.replace(args, **changes)


def _places(args: Arguments) -> dict[int, str]:
    """Expressions by the ids of the tensors that they give."""
    places = {id(getattr(args, name)): f"args.{name}" for name in args.tensors}
    if args.tile_table is not None:
        places |= {id(getattr(args.tile_table, name)): f"table.{name}" for name in TileTable._fields[:4]}
    return places


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape")


def _descriptor_maker(like: Any) -> Callable[[Tensor], Any]:
    """Another descriptor each time, as threads may replay at once."""
    cls = type(like)
    form = {name: value for name, value in like.__dict__.items() if name != "base"}
    new = cls.__new__

    def describe(tensor: Tensor) -> Any:
        descriptor = new(cls)
        descriptor.__dict__.update(form, base=tensor)
        return descriptor

    return describe


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str))
