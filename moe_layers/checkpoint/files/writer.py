"""Writes a checkpoint, and holds only one shard in memory at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from .directory import CONFIG, INDEX, SINGLE

DEFAULT_SHARD_BYTES = 5_000_000_000


class ShardWriter:
    """Collects tensors in order, and writes a shard when the next tensor would not fit. A tensor above
    `max_shard_bytes` gets its own shard.

    The files have temporary names until `finish`. An interrupted run therefore leaves no partial checkpoint to load.

    Raises:
        ValueError: the directory already holds files, `max_shard_bytes` is not positive, or `add` gets a name twice.
    """

    def __init__(self, directory: str | os.PathLike[str], max_shard_bytes: int = DEFAULT_SHARD_BYTES):
        self.directory = Path(directory)
        if max_shard_bytes < 1:
            raise ValueError(f"checkpoint: the size of a shard must be positive, got {max_shard_bytes}")
        if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise ValueError(f"checkpoint: {self.directory} must be an empty directory or not exist")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.max_shard_bytes = max_shard_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._total_bytes = 0
        self._shards: list[tuple[str, ...]] = []
        self._written: set[str] = set()

    def make_room(self, num_bytes: int) -> None:
        """Write the held tensors if `num_bytes` more would overfill a shard. Call before the next tensor is made."""
        if self._held and self._held_bytes + num_bytes > self.max_shard_bytes:
            self._write_shard()

    def add(self, name: str, tensor: Tensor) -> None:
        """Hold a tensor until its shard is written. The tensor must be contiguous and on the CPU."""
        if name in self._written or name in self._held:
            raise ValueError(f"checkpoint: {name} must be written once, got it twice")
        self.make_room(tensor.nbytes)
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self, config: dict) -> None:
        """Write the last shard, an index if there are several shards, and the configuration."""
        if self._held or not self._shards:
            self._write_shard()
        (self.directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        count = len(self._shards)
        if count == 1:
            self._partial(0).rename(self.directory / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._partial(number).rename(self.directory / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _partial(self, number: int) -> Path:
        return self.directory / f"partial-{number + 1:05d}"

    def _write_shard(self) -> None:
        save_file(self._held, self._partial(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(tuple(self._held))
        self._written |= set(self._held)
        self._held, self._held_bytes = {}, 0
