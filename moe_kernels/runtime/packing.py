"""Converts NamedTuples of tensors and other values to the flat arguments of a registered op, and back."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from ..types import QuantizedWeight, Weight, WeightFormat


def is_packed(kind: Any) -> bool:
    """Return whether a type is a NamedTuple."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


_TENSORS = ("values", "scales", "codes", "nested_codes", "nested_scales", "nested_offset")
_LEAVES = ("", *(f"_{name}" for name in _TENSORS), "_layout")


def _quantized_to_leaves(weight: QuantizedWeight) -> tuple[Tensor | str | None, ...]:
    """Return the flat arguments (leaves) of a quantised weight: None for the unquantised tensor, the tensor fields, and
    the format and shape as a string."""
    format = weight.format
    layout = " ".join(map(str, (format.name, *format.block, format.nested_block or 0, *weight.shape)))
    return None, *[getattr(weight, name) for name in _TENSORS], layout


def _quantized_of_leaves(values: Tensor, scales: Tensor, *rest: Any) -> QuantizedWeight:
    *tables, layout = rest
    return QuantizedWeight(values, scales, *_layout_of_string(layout), *tables)


@functools.lru_cache(maxsize=4096)
def _layout_of_string(layout: str) -> tuple[WeightFormat, torch.Size]:
    name, *numbers = layout.split()
    rows, columns, nested, *shape = map(int, numbers)
    return WeightFormat(name, (rows, columns), nested or None), torch.Size(shape)


_PLAIN = frozenset((Tensor, Parameter, type(None), bool, int, float, str, torch.dtype))


class Places(NamedTuple):
    """Positions of the tensors in a sequence of values. All sequences with the same types share one `Places`."""

    number: int  # a unique number for this sequence of types
    places: tuple[int, ...]
    read: Callable[[Any], tuple[Tensor, ...]]  # function: sequence of values of these types -> the tensors among them
    others: tuple[int, ...]  # positions of the values that are neither tensors nor None
    read_others: Callable[[Any], tuple[Any, ...]]  # function: sequence of values -> the values at `others`
    num_values: int
    are_plain: bool  # whether all values are plain: tensors of no subclass, None, numbers, strings, dtypes

    def join(self, tensors: Iterable[Tensor], others: Iterable[Any]) -> list[Any]:
        """Return a sequence in which `read` finds these tensors, and `read_others` finds these other values."""
        values: list[Any] = [None] * self.num_values
        for place, value in itertools.chain(
            zip(self.places, tensors, strict=True), zip(self.others, others, strict=True)
        ):
            values[place] = value
        return values


_numbers = itertools.count()


@functools.lru_cache(maxsize=4096)
def places_of(*types: type) -> Places:
    """Return the positions of the tensors among values of these types. Cached, because a look-up is faster than a
    loop over the values."""
    places = [i for i, kind in enumerate(types) if issubclass(kind, Tensor)]
    others = [i for i, kind in enumerate(types) if kind is not type(None) and i not in places]
    readers = tuple(places), _reader(places), tuple(others), _reader(others)
    return Places(next(_numbers), *readers, len(types), _PLAIN.issuperset(types))


def _reader(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    # With one place, itemgetter would return a value instead of a tuple.
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])


class PackedSignature:
    """The parameters and the result of a function that becomes a registered op.

    Parameters are converted to leaves and back: NamedTuples are replaced by their fields, recursively. A leaf has the
    name of its field, so field names must be unique. A NamedTuple that may be None has one more leaf, `has_<name>`,
    which says whether the NamedTuple is given. A weight that may be quantised has a leaf with the weight's name, for
    example `w_up`. This leaf is None if the weight is quantised. Further leaves (`w_up_values`, ...) hold the parts of
    a quantised weight.

    If a parameter is a NamedTuple or a `QuantizedWeight`, the op's schema has two parameters: the list of given
    tensors, and a string of all other leaves.
    """

    def __init__(self, function: Callable[..., Any]):
        hints = get_type_hints(function)
        result = hints.pop("return")
        self.names: list[str] = []  # names of the leaves
        self._kinds: dict[str, type] = {}
        self._paths: list[str] = []
        packed = [self._visit(name, kind, name) for name, kind in hints.items()]
        self.result = result if is_packed(result) else None
        self.has_packed = bool(self._kinds) or QuantizedWeight in hints.values()
        if not self.has_packed:  # convert nothing, so that calls may omit arguments with defaults
            self.flatten = self.pack = lambda *arguments: arguments
            self.schema = torch.library.infer_schema(function, mutates_args=())
            return
        # Generate code, as `NamedTuple` does for its methods, because loops over the fields take several times as long.
        split = {"to_leaves": _quantized_to_leaves, "QuantizedWeight": QuantizedWeight}
        join = {"of_leaves": _quantized_of_leaves, **self._kinds}
        self.flatten = eval(f"lambda {', '.join(hints)}: ({', '.join(self._paths)},)", split)  # values -> leaves
        self.pack = eval(f"lambda {', '.join(self.names)}: ({', '.join(packed)},)", join)  # leaves -> values
        # A result may be None although the schema has the type Tensor.
        num_results = len(self.result._fields if self.result else get_args(result))
        returned = f"({', '.join(['Tensor'] * num_results)})" if num_results else "Tensor"
        self.schema = f"(Tensor[] tensors, str others) -> {returned}"

    def _visit(self, name: str, kind: Any, path: str) -> str:
        """Add the leaves of the value at `path`. Return the expression that rebuilds the value from the leaves."""
        if kind in (Weight, QuantizedWeight):
            self.names += [f"{name}{leaf}" for leaf in _LEAVES]
            plain = ", ".join([path, *["None"] * (len(_LEAVES) - 1)])
            self._paths.append(f"*(to_leaves({path}) if type({path}) is QuantizedWeight else ({plain}))")
            parts = ", ".join(f"{name}{leaf}" for leaf in _LEAVES if leaf)
            return f"{name} if {name}_layout is None else of_leaves({parts})"
        given = [part for part in get_args(kind) if is_packed(part)]
        if given:
            self._add_leaf(f"has_{name}", f"{path} is not None")
            first_name, first_path = len(self.names), len(self._paths)
            packed = self._visit(name, given[0], path)
            inner, absent = ", ".join(self._paths[first_path:]), "None, " * (len(self.names) - first_name)
            self._paths[first_path:] = [f"*(({absent}) if {path} is None else ({inner},))"]
            return f"{packed} if has_{name} else None"
        if not is_packed(kind):
            self._add_leaf(name, path)
            return name
        constructor = f"kind_{len(self._kinds)}"
        self._kinds[constructor] = kind
        hints = get_type_hints(kind)
        fields = [self._visit(field, hints[field], f"{path}.{field}") for field in kind._fields]
        return f"{constructor}({', '.join(fields)})"

    def _add_leaf(self, name: str, path: str) -> None:
        assert name not in self.names, name
        self.names.append(name)
        self._paths.append(path)

    def to_schema(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the registered op."""
        if not self.has_packed:
            return leaves
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors, ", ".join(map(_leaf_to_string, leaves))

    def from_schema(self, *arguments: Any) -> tuple[Any, ...]:
        """Return the leaves: the inverse of `to_schema`."""
        if not self.has_packed:
            return arguments
        tensors, others = arguments
        given = iter(tensors)
        return tuple([next(given) if leaf is ... else leaf for leaf in _leaves_of_string(others)])

    def name_results(self, results: Any) -> Any:
        """Return the results in the function's NamedTuple, or unchanged if the function returns no NamedTuple."""
        return results if self.result is None else self.result._make(results)


def _leaf_to_string(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "..."
    if isinstance(leaf, torch.SymInt):
        return repr(int(leaf))  # symbolic sizes of the model, such as top_k, become constants
    if isinstance(leaf, float):  # Dynamo makes floats symbolic with dynamic shapes; `hex` makes them constants again
        leaf = float.fromhex(leaf.hex())
    return repr(str(leaf) if isinstance(leaf, torch.dtype) else leaf)


@functools.lru_cache(maxsize=4096)
def _leaves_of_string(others: str) -> tuple[Any, ...]:
    leaves = ast.literal_eval(f"({others},)")
    return tuple([_dtype_of(leaf) if isinstance(leaf, str) and leaf.startswith("torch.") else leaf for leaf in leaves])


def _dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))
