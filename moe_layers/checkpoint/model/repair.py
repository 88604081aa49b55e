"""Repairs checkpoints of transformers' Trainer from which the Trainer would resume without reading the experts.

transformers 5 saves the experts of most models under the names of the published files, one matrix per expert. When the
Trainer resumes, it passes these tensors to `load_state_dict(..., strict=False)` of a model with one tensor for all
experts. The names do not match, so the experts keep the values from before this call. `load_best_model_at_end` has the
same fault. `repair` writes the weights under the names that the model's modules use. `from_pretrained` reads these
files as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...checks import first_three
from ..files.directory import CONFIG, INDEX, SINGLE, CheckpointFiles, TensorInfo, read_json
from ..files.stored_weights import dtype_name

__all__ = ["RepairReport", "repair"]

_PARTIAL = "repair.partial"  # subdirectory for the new files until they are complete
_MANIFEST = "files.json"  # list of the new files, written when all new files are complete
_DONE = "done.json"  # the manifest gets this name when all new files are in place
_BACKUP = ".backup"


class RepairReport(NamedTuple):
    """The result of a repair. `renamed` lists the tensors that the Trainer would not have found."""

    directory: Path
    renamed: tuple[str, ...]

    def __str__(self) -> str:
        if not self.renamed:
            return f"{self.directory}: nothing to repair, the modules of the model know all names"
        return f"{self.directory}: repaired, {len(self.renamed)} tensors had other names than the model's modules"


def repair(directory: str | os.PathLike[str]) -> RepairReport:
    """Rename the weights of a checkpoint to the names that the Trainer reads on `resume_from_checkpoint`.

    transformers itself loads and writes the model, in host memory. The old files are kept under backup names until all
    new files are complete and in place. After an interruption, the next call restores the old files and starts again.
    Other files of the directory, such as the optimizer's state, do not change.

    Raises:
        ValueError: transformers is not installed or does not know the model; the model is quantised; tensors are
            missing, left over or would change their dtype; or there are no safetensors. The weights are then unchanged.
    """
    directory = Path(directory)
    _undo_interrupted(directory)
    held, old_files = _names_and_files(directory)
    model_class, config = _model_class(directory)
    with torch.device("meta"):
        known = set(model_class._from_config(config).state_dict())
    renamed = tuple(sorted(set(held) - known))
    if renamed:
        new_files = _write_new_files(directory, model_class, held, known, is_single=old_files == [SINGLE])
        for name in old_files:
            os.replace(directory / name, directory / (name + _BACKUP))
        for name in new_files:
            os.replace(directory / _PARTIAL / name, directory / name)
        os.replace(directory / _PARTIAL / _MANIFEST, directory / _PARTIAL / _DONE)
        _undo_interrupted(directory)
    return RepairReport(directory, renamed)


def _undo_interrupted(directory: Path) -> None:
    """Delete the backups if the last repair put all new files in place. Otherwise, restore the old files."""
    partial, backups = directory / _PARTIAL, sorted(directory.glob(f"model*{_BACKUP}"))
    if (partial / _DONE).is_file():
        for path in backups:
            path.unlink()
    elif (partial / _MANIFEST).is_file():
        moved = [name for name in json.loads((partial / _MANIFEST).read_text()) if not (partial / name).exists()]
        for name in moved:
            (directory / name).unlink()
        for path in backups:
            os.replace(path, path.with_name(path.name.removesuffix(_BACKUP)))
    elif backups:
        raise ValueError(f"repair: {directory} must hold no backup of another program, got {backups[0].name}")
    if partial.exists():
        shutil.rmtree(partial)


def _names_and_files(directory: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return each tensor's shape and dtype, and the names of the weight files and of the index, if there is one."""
    with CheckpointFiles(directory) as files:
        files.require(files.file_of)
        infos = {name: files.info(name) for name in files.file_of}
        return infos, sorted({*files.file_of.values(), *([INDEX] if (directory / INDEX).is_file() else [])})


def _model_class(directory: Path) -> tuple[Any, Any]:
    """Return the class of the model in transformers, and the model's configuration."""
    values = read_json(directory / CONFIG)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("repair: transformers must be installed, which loads and writes the model")
    transformers = importlib.import_module("transformers")
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if not hasattr(model_class, "from_pretrained"):
        raise ValueError(
            f"repair: architectures in {directory / CONFIG} must name a class of transformers "
            f"{transformers.__version__}, got {names!r}"
        )
    if values.get("quantization_config"):
        raise ValueError(f"repair: the model in {directory} must not be quantised, got a quantization_config")
    return model_class, transformers.AutoConfig.from_pretrained(directory)


def _write_new_files(
    directory: Path, model_class: Any, held: dict[str, TensorInfo], known: set[str], *, is_single: bool
) -> list[str]:
    """Write the weights, named as in the model, to the subdirectory `_PARTIAL`. Return the names of the files."""
    partial = directory / _PARTIAL
    model, info = model_class.from_pretrained(directory, dtype="auto", output_loading_info=True)
    problems = [f"{kind}: {name}" for kind, names in info.items() for name in sorted(map(str, names or ()))]
    if problems:
        raise ValueError(f"repair: transformers cannot read {directory}:\n  " + first_three(problems, "\n  "))
    sizes = [path.stat().st_size for path in directory.glob("model*.safetensors")]
    num_bytes = 2**60 if is_single else max(sizes)
    model.save_pretrained(partial, save_original_format=False, max_shard_size=num_bytes)
    written, new_files = _names_and_files(partial)
    _check_written(directory, held, written, known)
    (partial / _MANIFEST).write_text(json.dumps(new_files))
    return new_files


def _check_written(
    directory: Path, held: dict[str, TensorInfo], written: dict[str, TensorInfo], known: set[str]
) -> None:
    """Raise ValueError if a new name belongs to no module, or if the number of elements of a dtype changes. A tensor
    that keeps its name must also keep its shape and dtype."""
    if unknown := sorted(set(written) - known):
        raise ValueError(f"repair: transformers must write the names of its modules, got {first_three(unknown)}")
    before, after = _elements(held), _elements(written)
    changed = [name for name in sorted(held.keys() & written.keys()) if held[name] != written[name]]
    if changed or before != after:
        raise ValueError(
            f"repair: transformers must keep the elements of {directory} by dtype, {before}, got {after}"
            + (f"; it changes {first_three(changed)}" if changed else "")
        )


def _elements(infos: dict[str, TensorInfo]) -> dict[str, int]:
    """Return the total number of elements in tensors of each dtype."""
    counts: Counter[str] = Counter()
    for info in infos.values():
        counts[dtype_name(info.dtype)] += prod(info.shape)
    return dict(sorted(counts.items()))
