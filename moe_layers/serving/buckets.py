"""Packs weights into buckets. Each bucket is one buffer of bytes, which one broadcast can send."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_positive

_ALIGNMENT = 16  # in bytes; a tensor that starts at a multiple of 16 bytes can be viewed in any dtype


class Entry(NamedTuple):
    """The description of a tensor in a bucket, without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # offset in the buffer, in bytes
    checksum: int | None


@dataclass(frozen=True)
class Bucket:
    """Weights that are sent together: the entries as a Python object, and the buffer as one tensor.

    Attributes:
        entries: name, dtype, shape, offset and (with `checksums=True`) checksum of each weight.
        buffer: [bytes] uint8, on the device of the weights.
    """

    entries: tuple[Entry, ...]
    buffer: Tensor

    def unpack(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each weight. The tensors are views of the buffer.

        Raises:
            ValueError: a tensor's checksum differs from the checksum in the tensor's entry.
        """
        for entry in self.entries:
            num_bytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
            tensor = self.buffer[entry.start : entry.start + num_bytes].view(entry.dtype).view(entry.shape)
            if entry.checksum is not None and (got := checksum(tensor)) != entry.checksum:
                raise ValueError(f"unpack: {entry.name} must have the checksum {entry.checksum}, got {got}")
            yield entry.name, tensor


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes in row-major order. The tensor is copied to the host."""
    return zlib.crc32(_bytes(tensor).cpu().numpy().data)


def pack(weights: Iterable[tuple[str, Tensor]], max_bytes: int, *, checksums: bool = False) -> Iterator[Bucket]:
    """Yield the weights in order, in buckets of at most `max_bytes` on one device. A larger tensor gets its own bucket.

    At any time, memory holds only one bucket and the tensors that were packed into this bucket.

    Args:
        checksums: also store the checksum of each tensor, which `Bucket.unpack` verifies. Default: False.

    Raises:
        ValueError: `max_bytes` is not positive.
    """
    check_positive("pack", max_bytes=max_bytes)
    return _buckets(weights, max_bytes, checksums)


def _buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int, checksums: bool) -> Iterator[Bucket]:
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and (size + _padded(tensor) > max_bytes or tensor.device != held[0][1].device):
            yield _bucket(held, checksums)
            held, size = [], 0
        held.append((name, tensor))
        size += _padded(tensor)
    if held:
        yield _bucket(held, checksums)


def _bucket(held: list[tuple[str, Tensor]], checksums: bool) -> Bucket:
    entries, start = [], 0
    buffer = torch.empty(sum(_padded(tensor) for _, tensor in held), dtype=torch.uint8, device=held[0][1].device)
    for name, tensor in held:
        buffer[start : start + tensor.nbytes] = _bytes(tensor)
        crc = checksum(tensor) if checksums else None
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), start, crc))
        start += _padded(tensor)
    return Bucket(tuple(entries), buffer)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
