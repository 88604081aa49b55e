"""Reads and writes checkpoints in transformers' own layout, for models whose experts are sharded over ranks.

    with reading_shares(mesh["ep"]):
        model = AutoModelForCausalLM.from_pretrained(name)
    ...
    save_sharded(model, directory)

Each rank reads only its own experts. The first rank writes all files. While writing, the first rank holds one gathered
decoder layer and the tensors of one file at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ....checks import check_kind, first_three
from ....parallel.collectives import full_tensor
from ....parallel.meeting import SECONDS, agree, meet, together
from ..enabling import enable, transformers_has
from ..experts.experts_forward import SHARING
from .shard_model import group_of, shard_experts

_READ, _SAVE = "reading_shares", "save_sharded"
_LOAD = "_load_pretrained_model"  # PreTrainedModel's method that reads weights into a model on the meta device
_LONG_SECONDS = 1800.0  # maximum wait for a rank that downloads, reads or writes a file
_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@contextmanager
def reading_shares(
    mesh: DeviceMesh,
    *,
    implementation: str | None = None,
    precision: str | None = None,
    seconds: float = SECONDS,
    **options: Any,
) -> Iterator[None]:
    """Make `from_pretrained` call `enable` and `shard_experts` for each model before any weight is read.

    Each rank then reads its own experts and all weights that are not experts. A weight is read only when transformers
    starts to convert the weight to the model's layout. With GPUs, pass `device_map={"": device}` to `from_pretrained`.
    The context needs a version of transformers that reads parts of DTensors, such as 5.23. Use safetensors files,
    because other files are read whole.

    All ranks must enter and leave the context, and call `from_pretrained` equally often. In `from_pretrained`, and at
    the end of the context, a rank waits up to 30 minutes for slower ranks. An error on one rank ends the wait at once.

    Args:
        mesh: see `shard_experts`.
        implementation: see `enable`.
        precision: see `enable`.
        seconds: longest wait for ranks that have not entered the context or `shard_experts` yet. Default: 15.
        options: further arguments of `shard_experts`.

    Raises:
        NotImplementedError: this version of transformers cannot read parts of DTensors.
        ValueError: a rank has not entered in time. `from_pretrained` raises ValueError on all ranks if `enable` or
            `shard_experts` raises ValueError, the checkpoint is quantised or lacks experts, or another rank fails.
    """
    owner = transformers.PreTrainedModel
    reads_parts = transformers_has("distributed.sharding_utils", "DtensorShardOperation")
    if not (reads_parts and _LOAD in vars(owner)):
        raise NotImplementedError(
            f"reading_shares: transformers must read parts of DTensors, as 5.23 does, got {transformers.__version__}"
        )
    original, group = getattr(owner, _LOAD), group_of(_READ, mesh)

    def load(model: Any, *args: Any, **kwargs: Any) -> Any:
        with together(_READ, group, _LONG_SECONDS):
            if getattr(model, "is_quantized", False):
                raise ValueError(
                    f"{_READ}: weights must not be quantised, got {type(model).__name__} with a quantization_config; "
                    "load it whole, then call enable and shard_experts"
                )
            enable(model, implementation=implementation, precision=precision)
        report = shard_experts(model, mesh, seconds=seconds, **options)
        with together(_READ, group, _LONG_SECONDS):
            info, offloaded = original(model, *args, **kwargs)
            if missing := _missing(info, report.experts):
                raise ValueError(
                    f"{_READ}: the checkpoint must hold all experts of this rank, got none or others of {missing}"
                )
        return info, offloaded

    meet(_READ, group, "", seconds)
    with (
        together(_READ, group, _LONG_SECONDS),
        _without_reading_ahead(),
        mock.patch.object(owner, _LOAD, staticmethod(load)),
    ):
        yield


@contextmanager
def _without_reading_ahead() -> Iterator[None]:
    """Let transformers read each weight only when its conversion starts. By default, threads may read all weights of
    the rank into memory before the conversion."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _missing(info: Any, experts: dict[str, nn.Module]) -> str:
    names = {*info.missing_and_mismatched(), *info.conversion_errors}
    return first_three(sorted(name for name in names if name.startswith(tuple(f"{part}." for part in experts))))


@torch.no_grad()
def save_sharded(
    model: nn.Module, directory: str | os.PathLike[str], *, max_shard_size: str = "50GB", seconds: float = SECONDS
) -> None:
    """Write a model whose experts are sharded over ranks. All ranks must call this function. The first rank writes.

    The files are those that `save_pretrained` writes for the whole model. Parameters are gathered one at a time.

    Args:
        model: a transformers model after `shard_experts`. FSDP2 may also shard the model. To save the adapters of a
            PeftModel, call the PeftModel's own `save_pretrained`.
        max_shard_size: largest size of a file, see `save_pretrained`. Default: "50GB".
        seconds: longest wait for ranks that have not called yet. Default: 15. While the first rank writes files, the
            other ranks wait up to 30 minutes.

    Raises:
        ValueError: a rank has not called in time, experts are not sharded, the model contains adapters, parameters of
            ranks differ, or writing a file fails. All ranks raise ValueError. If writing a file fails, however, the
            first rank raises OSError instead.
    """
    group = distributed.group.WORLD if distributed.is_initialized() else None
    if group is None:
        raise ValueError(f"{_SAVE}: the model must be sharded by shard_experts, got no process group")
    with together(_SAVE, group, seconds):
        state, metadata = _state(model)
        is_first = distributed.get_rank() == 0
        writer = _Writer(model, Path(directory), state, metadata, max_shard_size) if is_first else None
    agree(_SAVE, group, {"names, shapes and dtypes of parameters": _digest(state)}, seconds)
    for names in _layers(state):
        gathered = {}
        for name in names:
            tensor = state[name]
            tensor = full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            if writer is not None and name in writer.kept:
                gathered[name] = tensor.cpu()
            del tensor
        with together(_SAVE, group, _LONG_SECONDS):
            if writer is not None:
                writer.write(gathered)


def _state(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write and the files' metadata. Raise ValueError if the model cannot be saved."""
    check_kind(_SAVE, "model", model, transformers.PreTrainedModel)
    if not any(SHARING in vars(module) for module in model.modules()):
        raise ValueError(f"{_SAVE}: the model must be sharded by shard_experts, got {type(model).__name__}")
    quantizer = getattr(model, "hf_quantizer", None)
    state, metadata = (model.state_dict(), {}) if quantizer is None else quantizer.get_state_dict_and_metadata(model)
    ignored = set(model._keys_to_ignore_on_save or ())
    if adapted := [name for name in state if ".base_layer." in name]:
        raise ValueError(f"{_SAVE}: adapters must be unloaded, got those of {first_three(adapted)}")
    return {name: tensor for name, tensor in state.items() if name not in ignored}, {**metadata, "format": "pt"}


def _digest(state: dict[str, Tensor]) -> str:
    held = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()]
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()


def _layers(state: dict[str, Tensor]) -> list[list[str]]:
    """Return one list of names per decoder layer, because transformers converts the tensors of one layer together."""
    groups: dict[str, list[str]] = {}
    for name in state:
        layer = re.match(r".*?\.\d+\.", name)
        groups.setdefault(layer.group() if layer else "", []).append(name)
    return list(groups.values())


class _Writer:
    """Converts gathered layers to the published layout, and writes each file once all its tensors are gathered."""

    def __init__(
        self, model: Any, directory: Path, state: dict[str, Tensor], metadata: dict[str, str], max_shard_size: str
    ):
        from huggingface_hub import split_state_dict_into_shards_factory
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        self.model, self.directory, self.metadata = model, directory, metadata
        self.convert = revert_weight_conversion
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
        own = model.state_dict().keys()  # a quantiser may have added names to `state`
        untied = remove_tied_weights_from_state_dict({name: empty[name] for name in state if name in own}, model)
        self.kept = {name for name in state if name in untied or name not in own}
        converted = self.convert(model, {name: empty[name] for name in state if name in self.kept})
        # Count each storage once, and keep all tensors of a storage in one file, as `save_pretrained` does.
        self.split = split_state_dict_into_shards_factory(
            converted,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self.waiting: dict[str, Tensor] = {}
        self.is_begun = False

    def write(self, gathered: dict[str, Tensor]) -> None:
        self.waiting |= self.convert(self.model, gathered)
        if not self.is_begun:
            self._begin()
        for file, names in self.split.filename_to_tensors.items():
            if names and all(name in self.waiting for name in names):
                tensors = {name: self.waiting.pop(name).contiguous() for name in names}
                save_file(tensors, self.directory / file, metadata=self.metadata)

    def _begin(self) -> None:
        """Write the configurations and the index, and remove weight files of an earlier model."""
        self.is_begun = True
        self.directory.mkdir(parents=True, exist_ok=True)
        model, config = self.model, self.model.config
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(self.directory)
        if model.can_generate():
            model.generation_config.save_pretrained(self.directory)
        for path in self.directory.iterdir():
            if _FILE.fullmatch(path.name) and path.name not in self.split.filename_to_tensors:
                path.unlink()
        if self.split.is_sharded:
            about = {"total_parameters": model.num_parameters(), **self.split.metadata}
            index = {"metadata": about, "weight_map": self.split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
