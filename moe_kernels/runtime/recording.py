"""Records what a function does with tensors: its kernel launches, its allocations and its other PyTorch operations.

The function runs as usual, with real results. Each tensor that the function uses is identified by its `Memory`: an
input, an allocation, or a result of a PyTorch operation. `record.py` repeats the recorded steps on other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .launch import Launch, observing_launches

_aten = torch.ops.aten
_ALLOCATING = (
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
)
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Form(NamedTuple):
    """The shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes from the start of the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (1 + last) * self.dtype.itemsize


class Ref(NamedTuple):
    """A reference to a tensor by its memory, offset and form."""

    memory: int  # index in `Recording.memories`
    offset: int  # in bytes, from the start of the memory
    form: Form


def view_of(place: int, offset: int, form: Form) -> Callable[[list[Any]], Tensor]:
    """Return a function that takes a list of tensors and returns a view of this form. The view starts `offset` bytes
    after the start of the tensor at index `place`."""

    def view(memory: list[Any]) -> Tensor:
        tensor = memory[place]
        first = (tensor.storage_offset() * tensor.element_size() + offset) // form.dtype.itemsize
        if form.dtype == tensor.dtype:
            return tensor.as_strided(form.shape, form.strides, first)
        empty = torch.empty(0, dtype=form.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), first, form.shape, form.strides)

    return view


class Descriptor(NamedTuple):
    """A TMA descriptor made on the host."""

    kind: type
    fields: dict[str, Any]  # attribute -> value, without `base`
    base: Ref


class RecordedLaunch(NamedTuple):
    launch: Launch  # with Ref and Descriptor in place of tensors and TMA descriptors
    compiled: Any  # Triton's compiled kernel; None in the interpreter


class RecordedCall(NamedTuple):
    """An operation of PyTorch that is neither an allocation nor a view."""

    function: Any
    args: Any  # (args, kwargs), with Ref for tensors
    results: tuple[int, ...]  # index of each new result in `Recording.memories`


@dataclass
class Memory:
    """The memory of an input (`made_by` is "caller"), an allocation ("function") or a PyTorch result ("call")."""

    made_by: str
    address: int
    form: Form  # shape, strides and dtype at allocation
    num_bytes: int  # size of the storage in bytes
    storage: StorageWeakRef  # weak: the bytes can be freed, but the storage's id `cdata` stays unique
    steps: list[int] = field(default_factory=list)  # indices of the steps that use the memory
    in_calls: bool = False  # whether a PyTorch operation uses the memory, or the function returns it
    is_parameter: bool = False  # whether the memory is a parameter's; replays do not free a parameter's memory


def _is_on(device: torch.device, arguments: Any) -> bool:
    return any(isinstance(value, Tensor) and value.device == device for value in tree_leaves(arguments))


class Recording(TorchDispatchMode):
    """The steps of one run of a function. `obstacle` says why the steps cannot be repeated, or is None."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.device = inputs[0].device
        self.memories: list[Memory] = []
        self.steps: list[RecordedLaunch | RecordedCall] = []
        self.obstacle: str | None = None
        self._of_storage: dict[int, list[int]] = {}
        self._is_launching = False  # operations inside a launch are not recorded
        for tensor in inputs:
            self._add("caller", tensor)
        spans = sorted((m.address, m.address + m.form.num_bytes) for m in self.memories if m.form.num_bytes)
        # If inputs overlap, the recording is not used: a tensor in shared bytes would be attributed to only one input.
        self.operands_overlap = any(first[1] > second[0] for first, second in pairwise(spans))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        with observing_launches(self._observe), self:
            result = function(*args)
        if not any(isinstance(step, RecordedLaunch) for step in self.steps):
            # Refuse functions without launches, such as the reference, because they may read values by `tolist`. A
            # dispatch mode does not see `tolist`.
            self.obstacle = self.obstacle or "launches no kernel"
        return result

    def ref(self, tensor: Tensor, *, in_call: bool = False) -> Ref | None:
        """Return the reference to a tensor that the next step uses. If the tensor is neither an input nor made by the
        function, return None and set `obstacle`."""
        index = self._find(tensor)
        if index is None:
            self.obstacle = f"reads a tensor that is no operand: {list(tensor.shape)} {tensor.dtype}"
            return None
        memory = self.memories[index]
        memory.steps.append(len(self.steps))
        memory.in_calls |= in_call
        return Ref(index, tensor.data_ptr() - memory.address if tensor.numel() else 0, Form.of(tensor))

    def _add(self, made_by: str, tensor: Tensor) -> int:
        storage = StorageWeakRef(tensor.untyped_storage())
        num_bytes = tensor.untyped_storage().nbytes()
        memory = Memory(made_by, tensor.data_ptr(), Form.of(tensor), num_bytes, storage)
        memory.is_parameter = isinstance(tensor, Parameter)
        self.memories.append(memory)
        self._of_storage.setdefault(storage.cdata, []).append(len(self.memories) - 1)
        return len(self.memories) - 1

    def _find(self, tensor: Tensor) -> int | None:
        candidates = self._of_storage.get(tensor.untyped_storage()._cdata, ())
        for index in candidates:
            memory = self.memories[index]
            inside = 0 <= tensor.data_ptr() - memory.address < max(memory.form.num_bytes, 1)
            if memory.made_by != "caller" or inside or not tensor.numel():
                return index
        return None

    def _observe(self, launch: Launch, run: Callable[[], Any]) -> None:
        self._is_launching = True
        try:
            compiled = run()
        finally:
            self._is_launching = False
        arguments = tuple(map(self._argument, launch.arguments))
        self.steps.append(RecordedLaunch(launch._replace(arguments=arguments), compiled))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ref(value)
        if hasattr(value, "block_shape"):
            fields = {name: part for name, part in vars(value).items() if name != "base"}
            return Descriptor(type(value), fields, self.ref(value.base))  # pyright: ignore[reportArgumentType]  # None sets an obstacle
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_launching:
            return result
        if any(tag in func.tags for tag in _READS_VALUES):
            self.obstacle = f"{func} reads values of a tensor"
        returned = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if self.device.type != "cpu" and any(tensor.is_cpu for tensor in returned) and _is_on(self.device, args):
            self.obstacle = f"{func} copies a tensor to the host"
        outputs = [tensor for tensor in returned if not tensor.is_meta]
        made = [tensor for tensor in outputs if self._find(tensor) is None]
        if func in _ALLOCATING and all(tensor.device == self.device for tensor in made):
            for tensor in made:
                self._add("function", tensor)
        elif made or (outputs and func._schema.is_mutable):
            self._add_call(func, (args, kwargs), made, is_tuple=isinstance(result, tuple | list))
        elif not returned and (func._schema.is_mutable or not func._schema.returns):
            self.obstacle = f"{func} returns no tensor"
        return result  # if no branch applied, `func` returned a view or ran on meta tensors

    def _add_call(self, func: Any, args: Any, made: list[Tensor], *, is_tuple: bool) -> None:
        if is_tuple and len(made) != len(func._schema.returns):
            self.obstacle = f"{func} returns new tensors beside others"
        args = tree_map_only(Tensor, lambda tensor: self.ref(tensor, in_call=True), args)
        results = tuple(self._add("call", tensor) for tensor in made)
        for index in results:
            self.memories[index].steps.append(len(self.steps))
        self.steps.append(RecordedCall(func, args, results))
