"""A list of recorded launches. One call of a C function launches all kernels, as one CUDA graph. Between runs, only the
addresses in the kernels' parameters change.

Parameters have the layout of Triton 3.6 to 3.9 (`backends/nvidia/driver.py` and `driver.c`). From CUDA 12.4 on,
the driver reports the sizes of a kernel's parameters. `LaunchList` compares these sizes with the layout.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .launch import FUSION, ensure_context
from .recording import Descriptor, Form, RecordedLaunch, Ref, view_of
from .triton import INTERPRET, triton

Place = tuple[int, int]  # index of a tensor, and a byte offset in this tensor


class NotRecordable(Exception):
    """Raised for a launch that a `LaunchList` cannot repeat, for example because a parameter's type is unknown."""


class LaunchList:
    """Launches kernels in order on the current stream of `device`, which must be the current device.

    Args:
        places: for each index in `Recording.memories`, the index of a tensor in the list that `run` gets, and a byte
            offset in this tensor.
        scratch: for each launch, the place of the memory in which its kernel makes TMA descriptors, or None.
        born: the shape, strides and dtype of each memory in `Recording.memories` at its allocation.
    """

    def __init__(
        self,
        launches: Sequence[RecordedLaunch],
        places: dict[int, Place],
        scratch: Sequence[Place | None],
        device: torch.device,
        born: Sequence[Form],
    ):
        self._launches = launches  # a reference keeps the kernels loaded
        if INTERPRET:
            self._places, self.run = places, self._interpret
            return
        self._device = device.index
        self._run, self._stream = _library().run, torch._C._cuda_getCurrentRawStream
        self._list = _Parameters(places, born, device).make_list(launches, scratch)

    def run(self, memory: list[Any]) -> None:
        """Launch all kernels on the tensors in `memory`."""
        device = self._device
        ensure_context(device)
        self._run(self._list, memory, self._stream(device))

    def _interpret(self, memory: list[Any]) -> None:
        for launch, _ in self._launches:
            arguments = [self._argument(memory, value) for value in launch.arguments]
            launch.function[launch.grid](*arguments, **launch.options, **FUSION)

    def _argument(self, memory: list[Any], value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        place, offset = self._places[value.memory]
        return view_of(place, offset + value.offset, value.form)(memory)


def scratch_bytes(step: RecordedLaunch) -> int:
    """Return the number of bytes of the descriptors that a kernel makes on the device."""
    if step.compiled is None:
        return 0
    return math.prod(step.launch.grid) * step.compiled.metadata.global_scratch_size


_INT_BYTES = {f"{sign}{bits}": max(bits // 8, 1) for sign in "iu" for bits in (1, 8, 16, 32, 64)}
_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}
_MAP_BYTES = 128
_ATTRIBUTES = ("launch_cooperative_grid", "launch_pdl")  # attributes of launches that `launch_list.c` cannot set
REQUIRED = 1 << 31  # marks the index of a non-empty tensor: its address must not be null. Also defined in launch_list.c
DRIVER: str | None = "libcuda.so.1"  # None in tests without a GPU, which launch nothing
# Triton's number of a dtype -> the driver's number in descriptors. For other dtypes, both numbers are equal.
_ENCODER_TYPES = {8: 10, 9: 8, 10: 9}
_TF32 = 11


class _Parameters:
    """The parameters of all kernels of a list as bytes, and the offsets at which each run writes addresses."""

    def __init__(self, places: dict[int, Place], born: Sequence[Form], device: torch.device):
        self._places, self._born = places, born
        self._values = bytearray()
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._pointers: list[tuple[int, int, int]] = []  # offset in _values, index in _bases, byte offset in tensor
        self._maps: list[tuple[int, int, int]] = []  # per CUtensorMap, the numbers that `_pointers` has per pointer
        self._bases: dict[int, int] = {}  # index of a tensor in `run`'s list -> its index here, in order of first use
        # A descriptor can be encoded with any aligned address, because each run replaces the address.
        self._anchor = torch.empty(1024, dtype=torch.uint8, device=device)

    def make_list(self, launches: Sequence[RecordedLaunch], scratch: Sequence[Place | None]) -> Any:
        kernels = []
        for step, place in zip(launches, scratch, strict=True):
            first = len(self._starts)
            self._add_launch(step, place)
            known = _library().parameter_sizes(step.compiled.function)
            if known is not None and known != self._sizes[first:]:
                name = step.launch.function.fn.__name__
                raise NotRecordable(f"{name} has parameters of {known} bytes, not {self._sizes[first:]}")
            kernels.append(_kernel_numbers(step, first))
        return _library().make_list(
            bytes(self._values),
            _pack("I", self._starts),
            _pack("I", [place | (REQUIRED if self._is_required(place) else 0) for place in self._bases]),
            b"".join(struct.pack("=IIQ", *patch) for patch in self._pointers),
            b"".join(struct.pack("=IIQ", *patch) for patch in self._maps),
            b"".join(_pack("Q", numbers) for numbers in kernels),
        )

    def _is_required(self, place: int) -> bool:
        return place >= len(self._born) or self._born[place].num_bytes > 0

    def _add_launch(self, step: RecordedLaunch, scratch: Place | None) -> None:
        """Add the function's arguments in order, with flattened tuples. Arguments of type "constexpr" are left out:
        declared constexpr parameters, None, and integers specialised to 1. Two pointers follow: memory for
        descriptors, and a profiler's memory."""
        launch, compiled = step
        metadata = compiled.metadata
        if getattr(metadata, "num_ctas", 1) > 1 or any([getattr(metadata, name, False) for name in _ATTRIBUTES]):
            raise NotRecordable("a kernel is launched with clusters, cooperatively or programmatically")
        if getattr(metadata, "profile_scratch_size", 0) or "gsan" in str(getattr(metadata, "instrumentation_mode", "")):
            raise NotRecordable("a kernel was compiled for a profiler or a sanitizer")
        metas = iter(getattr(metadata, "tensordesc_meta", None) or ())
        constants = [launch.options[name] for name in launch.function.arg_names[len(launch.arguments) :]]
        for kind, value in zip(compiled.src.signature.values(), (*launch.arguments, *constants), strict=True):
            self._add(kind, value, metas)
        self._add_pointer(scratch)
        self._add_pointer(None)

    def _add(self, kind: Any, value: Any, metas: Any) -> None:
        if isinstance(kind, tuple):
            for part_kind, part in zip(kind, value, strict=True):
                self._add(part_kind, part, metas)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            self._add_descriptor(value, next(metas, None))
        elif kind[0] == "*":
            self._add_pointer(None if value is None else self._place(value))
        elif kind in _INT_BYTES:
            size = _INT_BYTES[kind]
            self._add_bytes((int(value) & (2 ** (8 * size) - 1)).to_bytes(size, "little"))
        elif kind in _FLOATS:
            self._add_bytes(struct.pack(_FLOATS[kind], value))
        else:
            raise NotRecordable(f"a kernel has a parameter of type {kind}")

    def _place(self, ref: Ref) -> Place:
        place, offset = self._places[ref.memory]
        return place, offset + ref.offset

    def _add_bytes(self, value: bytes, alignment: int = 8) -> int:
        self._values.extend(bytes(-len(self._values) % alignment))
        start = len(self._values)
        self._starts.append(start)
        self._sizes.append(len(value))
        self._values.extend(value)
        return start

    def _add_pointer(self, place: Place | None) -> None:
        start = self._add_bytes(bytes(8))
        if place is not None:
            self._pointers.append((start, *self._patch(place)))

    def _patch(self, place: Place) -> tuple[int, int]:
        tensor, offset = place
        return self._bases.setdefault(tensor, len(self._bases)), offset

    def _add_descriptor(self, descriptor: Descriptor, meta: dict[str, Any] | None) -> None:
        """Add the CUtensorMap by value, then each size in 32 bits, then each stride in 64 bits."""
        if meta is None or meta.get("fp4_padded") or meta.get("is_im2col"):
            raise NotRecordable("a TMA descriptor is not passed by value, or is one of FP4 or of convolutions")
        shape, strides = list(descriptor.fields["shape"]), list(descriptor.fields["strides"])
        itemsize = meta["elem_size"]
        kind = _ENCODER_TYPES.get(meta["elem_type"], meta["elem_type"])
        encoded = _library().encode(
            _TF32 if descriptor.fields.get("round_f32_to_tf32") else kind,
            self._anchor.data_ptr(),
            _pack("Q", shape[::-1]),
            _pack("Q", [itemsize * stride for stride in strides[-2::-1]]),
            _pack("I", list(meta["block_size"])[::-1]),
            meta["swizzle"],
            descriptor.fields.get("padding") == "nan",
        )
        start = self._add_bytes(encoded, _MAP_BYTES)
        self._maps.append((start, *self._patch(self._place(descriptor.base))))
        for size in shape:
            self._add_bytes(struct.pack("<i", size))
        for stride in strides:
            self._add_bytes(struct.pack("<q", stride))


def _pack(kind: str, numbers: Any) -> bytes:
    return struct.pack(f"={len(numbers)}{kind}", *numbers)


def _kernel_numbers(step: RecordedLaunch, first: int) -> tuple[int, ...]:
    """Return a launch as integers for `make_list`: kernel, grid, warps, shared memory, index of first parameter."""
    compiled = step.compiled
    num_warps, _, shared = compiled.packed_metadata[:3]
    return compiled.function, *(*step.launch.grid, 1, 1)[:3], num_warps, shared, first


@functools.cache
def _library() -> Any:
    """Return launch_list.c as a Python module. Triton compiles the file once per machine and caches the result."""
    from triton.runtime.build import compile_module_from_src

    include = str(Path(triton.__file__).parent / "backends" / "nvidia" / "include")
    source = Path(__file__).with_suffix(".c").read_text()
    library = compile_module_from_src(source, "launch_list", include_dirs=[include])
    if DRIVER is not None:
        library.use_driver(DRIVER)
    return library
