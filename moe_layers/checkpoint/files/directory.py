"""Reads the tensors of a checkpoint directory: one safetensors file, or shards and their index."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Iterable
from io import FileIO
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checks import first_three

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HUGE_BYTES = 4 << 20  # 4 MiB, two huge pages; `prefer_huge_pages` skips smaller tensors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorInfo(NamedTuple):
    """A tensor's entry in the header of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # name of the dtype in the file
    first_byte: int  # offset of the tensor's data in the file, in bytes


def read_json(path: Path) -> dict:
    """Read a JSON object. Raise ValueError if the file is missing or does not hold a JSON object."""
    if not path.is_file():
        raise ValueError(f"checkpoint: {path.parent} must hold {path.name}, which is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"checkpoint: {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint: {path} must hold a JSON object, got {type(value).__name__}")
    return value


class CheckpointFiles:
    """The names, shapes and bytes of a checkpoint's tensors. Leaving a `with` block closes the files.

    Opening a checkpoint reads only the names. The first use of a tensor reads the header of the tensor's file. Shards
    may be missing if their tensors are not used; `require` checks that the needed shards exist.

    Raises:
        ValueError: the directory holds no weights, a file is damaged, or a file lacks a tensor that the index lists.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._raw: dict[str, FileIO] = {}
        self._headers: dict[str, dict[str, _Entry]] = {}
        if (self.directory / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        elif (self.directory / INDEX).is_file():
            self.file_of = self._read_index()
        else:
            raise ValueError(f"checkpoint: {self.directory} must hold {SINGLE} or {INDEX}, got neither")

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._raw:
            self._raw.popitem()[1].close()

    def info(self, name: str) -> TensorInfo:
        entry = self._entry(name)
        if entry.dtype not in DTYPES:
            raise ValueError(f"checkpoint: the dtype of {name} must be one of {first_three(DTYPES)}, got {entry.dtype}")
        return TensorInfo(entry.shape, DTYPES[entry.dtype])

    def read(self, name: str, rows: slice | None = None, *, into: Tensor | None = None) -> Tensor:
        """Return the tensor, or the range `rows` of its first axis. Only the bytes of that range are read.

        The file is not memory-mapped, because a page fault takes several times as long as copying the page's bytes.

        Args:
            into: contiguous CPU tensor that receives the bytes, with the dtype and number of elements of the result.
                None (default) allocates a tensor.
        """
        shape, dtype = self.info(name)
        size = shape[0] if shape else 1
        start, stop, _ = (rows or slice(None)).indices(size)
        if into is None:
            into = torch.empty((stop - start, *shape[1:]) if shape else (), dtype=dtype, device="cpu")
        assert into.dtype == dtype and into.is_contiguous() and into.numel() * size == (stop - start) * prod(shape)
        if into.numel():
            first = self._entry(name).first_byte + start * (into.nbytes // max(stop - start, 1))
            self._read_bytes(self.file_of[name], first, _memory_of(into))
        return into

    def _entry(self, name: str) -> _Entry:
        header = self._header(self.file_of[name])
        if name not in header:
            raise ValueError(f"checkpoint: the index puts {name} into {self.file_of[name]}, which does not hold it")
        return header[name]

    def _header(self, file_name: str) -> dict[str, _Entry]:
        """Return the entry of each tensor in a file, by name (https://github.com/huggingface/safetensors#format)."""
        if file_name not in self._headers:
            path = self.directory / file_name
            try:
                with safe_open(path, framework="pt"):  # safe_open checks the header
                    pass
            except SafetensorError as error:
                raise ValueError(f"checkpoint: {path} is damaged or truncated: {error}") from error
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._headers[file_name] = {
                name: _Entry(tuple(held["shape"]), held["dtype"], 8 + length + held["data_offsets"][0])
                for name, held in header.items()
            }
        return self._headers[file_name]

    def _read_bytes(self, file_name: str, first: int, memory: memoryview) -> None:
        path = self.directory / file_name
        if file_name not in self._raw:
            self._raw[file_name] = path.open("rb", buffering=0)
        file = self._raw[file_name]
        file.seek(first)
        while memory:
            num_bytes = file.readinto(memory)
            if not num_bytes:
                raise ValueError(f"checkpoint: {path} is damaged or truncated: it ended {len(memory)} bytes early")
            memory = memory[num_bytes:]

    def _read_index(self) -> dict[str, str]:
        weight_map = read_json(self.directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"checkpoint: {self.directory / INDEX} must hold a weight_map from tensors to files")
        return weight_map

    def require(self, names: Iterable[str]) -> None:
        """Raise ValueError if files that hold these tensors are missing."""
        example_in: dict[str, str] = {}
        for name in names:
            example_in.setdefault(self.file_of[name], name)
        missing = sorted(file for file in example_in if not (self.directory / file).is_file())
        if missing:
            raise ValueError(
                f"checkpoint: {self.directory / INDEX} names files that do not exist: {first_three(missing)} "
                f"(for instance for {example_in[missing[0]]})"
            )


def _memory_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous host tensor's bytes. The tensor must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to use huge pages where a tensor's memory was never accessed. Linux may ignore this request. Huge pages
    save time, because the first access to a small page takes longer than reading its bytes from the page cache."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.nbytes < _HUGE_BYTES:
        return
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    length = tensor.data_ptr() + tensor.nbytes - first
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
