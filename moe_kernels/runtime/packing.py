"""Operands packed by name: NamedTuples of tensors and other values as the flat arguments of a registered op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from ..types import QuantizedWeight, Weight, WeightFormat


def is_packed(kind: Any) -> bool:
    """Return whether a type is a NamedTuple."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


_TENSORS = ("values", "scales", "codes", "nested_codes", "nested_scales", "nested_offset")  # of a quantised weight
_LEAVES = {"": Tensor | None, **{f"_{name}": Tensor | None for name in _TENSORS}, "_layout": str | None}
_NOT_QUANTIZED = (None,) * (len(_LEAVES) - 1)


def _weight_to_leaves(weight: Weight) -> tuple[Tensor | str | None, ...]:
    """Return the leaves of a weight: the tensor, or the tensors of a quantised weight and the rest as a string."""
    if not isinstance(weight, QuantizedWeight):
        return weight, *_NOT_QUANTIZED
    return None, *[getattr(weight, name) for name in _TENSORS], _layout_to_string(weight.format, weight.shape)


def _weight_of_leaves(tensor: Tensor | None, values: Tensor, scales: Tensor, *rest: Any) -> Weight:
    if tensor is not None:
        return tensor
    *tables, layout = rest
    return QuantizedWeight(values, scales, *_layout_of_string(layout), *tables)


def _layout_to_string(format: WeightFormat, shape: torch.Size) -> str:
    # Not cached, because torch.compile warns of caches.
    return " ".join(map(str, (format.name, *format.block, format.nested_block or 0, *shape)))


@functools.lru_cache(maxsize=4096)
def _layout_of_string(layout: str) -> tuple[WeightFormat, torch.Size]:
    name, *numbers = layout.split()
    rows, columns, nested, *shape = map(int, numbers)
    return WeightFormat(name, (rows, columns), nested or None), torch.Size(shape)


_PLAIN = frozenset((Tensor, Parameter, type(None), bool, int, float, str, torch.dtype))


class Places(NamedTuple):
    """The tensors among values of certain types."""

    places: tuple[int, ...]
    read: Callable[[Any], tuple[Tensor, ...]]  # returns the tensors of a sequence of such values
    are_plain: bool  # whether all values are plain: tensors of no subclass, None, numbers, strings, dtypes


def places_of(values: Iterable[Any]) -> Places:
    """Return where the tensors are. The types decide, in one look-up, because a loop over the values takes longer."""
    return _places_of_types(tuple(map(type, values)))


@functools.lru_cache(maxsize=4096)
def _places_of_types(types: tuple[type, ...]) -> Places:
    places = tuple(i for i, kind in enumerate(types) if issubclass(kind, Tensor))
    # With one place, itemgetter returns the tensor itself.
    read = itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])
    return Places(places, read, _PLAIN.issuperset(types))


class Packing:
    """Conversion between values and their leaves: NamedTuples are replaced by their fields, recursively.

    A leaf has the name of its field, so field names must be unique. A weight that may be quantised has a leaf of its
    own name, None if it is quantised, and leaves for the parts of a quantised weight: `w_up`, `w_up_values`, ...
    """

    def __init__(self, hints: dict[str, Any]):
        self.types: dict[str, Any] = {}  # of the leaves
        self._kinds: dict[str, type] = {}
        self._paths: list[str] = []
        packed = [self._visit(name, kind, name) for name, kind in hints.items()]
        # Generated code, like the methods of NamedTuples, is several times as fast as loops over the fields.
        split = {"weight_to_leaves": _weight_to_leaves}
        join = {"weight_of_leaves": _weight_of_leaves, **self._kinds}
        self.flatten = eval(f"lambda {', '.join(hints)}: ({', '.join(self._paths)},)", split)  # values -> leaves
        self.pack = eval(f"lambda {', '.join(self.types)}: ({', '.join(packed)},)", join)  # the inverse

    def _visit(self, name: str, kind: Any, path: str) -> str:
        """Add the leaves below `path`. Return the expression that packs them again."""
        if kind in (Weight, QuantizedWeight):
            self.types |= {f"{name}{leaf}": leaf_type for leaf, leaf_type in _LEAVES.items()}
            self._paths.append(f"*weight_to_leaves({path})")
            return f"weight_of_leaves({', '.join(f'{name}{leaf}' for leaf in _LEAVES)})"
        if not is_packed(kind):
            assert name not in self.types, name
            self.types[name] = kind
            self._paths.append(path)
            return name
        constructor = f"kind_{len(self._kinds)}"
        self._kinds[constructor] = kind
        hints = get_type_hints(kind)
        fields = [self._visit(field, hints[field], f"{path}.{field}") for field in kind._fields]
        return f"{constructor}({', '.join(fields)})"


class PackedSignature(Packing):
    """The parameters and the result of a function that becomes a registered op."""

    def __init__(self, function: Callable[..., Any]):
        hints = get_type_hints(function)
        result = hints.pop("return")
        super().__init__(hints)
        self.has_packed = bool(self._kinds) or QuantizedWeight in hints.values()
        self.result = result if is_packed(result) else None
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in self.types.items()
        ]
        returned = result if self.result is None else tuple[(Tensor,) * len(result._fields)]
        self._flat = inspect.Signature(parameters, return_annotation=returned)

    def on_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the leaves of its packed parameters as parameters."""

        @functools.wraps(function)
        def of_leaves(*leaves: Any) -> Any:
            return function(*self.pack(*leaves))

        of_leaves.__signature__ = self._flat  # pyright: ignore[reportAttributeAccessIssue]  # a function's
        return of_leaves


@functools.cache
def packing_of(kind: type) -> Packing:
    """Return the packing of a NamedTuple."""
    return Packing({"packed": kind})


def save_for_backward(ctx: Any, packed: tuple[Any, ...]) -> None:
    """Keep a NamedTuple for `saved_for_backward`: its tensors through autograd, other values as they are."""
    leaves = list(packing_of(type(packed)).flatten(packed))
    places, read, _ = places_of(leaves)
    ctx.save_for_backward(*read(leaves))
    for place in places:
        leaves[place] = None
    ctx.kind, ctx.places, ctx.constants = type(packed), places, leaves


def saved_for_backward(ctx: Any) -> Any:
    """Return the argument of `save_for_backward`. Call it once in a backward.

    Releases autograd's references to the tensors, unless the graph is retained. A tensor's memory is then free as soon
    as the caller drops it, not only after backward.
    """
    leaves = ctx.constants.copy()
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        leaves[place] = tensor
    ctx.maybe_clear_saved_tensors()
    (packed,) = packing_of(ctx.kind).pack(*leaves)
    return packed
