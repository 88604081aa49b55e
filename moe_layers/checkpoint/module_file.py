"""Save and load one module as one safetensors file, under the names of its state dict."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checks import first_three, is_dtensor
from .files import DTYPES

# These dtypes convert to each other without change of meaning. Others may need scales, which such a file lacks.
_CONVERTIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def save_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the module's state dict to one file.

    Raises:
        ValueError: the parameters are sharded over several ranks, or on the meta device.
    """
    _check_tensors("save_safetensors", module)
    save_file({name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}, path)


def _check_tensors(op: str, module: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        if is_dtensor(tensor):
            raise ValueError(
                f"{op}: tensors must be whole, got a DTensor {name}; torch.distributed.checkpoint takes those"
            )
        if tensor.is_meta:
            raise ValueError(f"{op}: tensors must have memory, got {name} on meta; to_empty(device=...) allocates it")


def load_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a file written by `save_safetensors`, tensor by tensor, into the module's existing tensors.

    Raises:
        ValueError: names missing and unexpected tensors and wrong shapes or dtypes; or the file is damaged, or the
            parameters are sharded over several ranks or on the meta device. The module is then unchanged.
    """
    _check_tensors("load_safetensors", module)
    if Path(path).is_dir():
        raise ValueError(f"load_safetensors: {os.fspath(path)} must be a file, got a directory")
    state = module.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            problems = _problems(state, file)
            if problems:
                raise ValueError(
                    f"load_safetensors: {os.fspath(path)} does not fit the layer:\n  " + first_three(problems, "\n  ")
                )
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise ValueError(f"load_safetensors: {os.fspath(path)} is damaged or truncated: {error}") from error


def _problems(state: dict[str, Tensor], file: safe_open) -> list[str]:
    """Return the mismatches between the tensors in a file's header and those of a module."""
    entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    shapes = {name: tuple(entry.get_shape()) for name, entry in entries.items()}
    problems = [f"missing: {name} {tuple(state[name].shape)}" for name in state if name not in shapes]
    problems += [f"unexpected: {name} {shape}" for name, shape in shapes.items() if name not in state]
    for name in [name for name in state if name in shapes]:
        shape, dtype = tuple(state[name].shape), state[name].dtype
        if shapes[name] != shape:
            problems.append(f"wrong shape: {name} is {shapes[name]} in the file, must be {shape}")
        stored = entries[name].get_dtype()
        stored = DTYPES.get(stored, stored)
        allowed = _CONVERTIBLE if dtype in _CONVERTIBLE else (dtype,)
        if stored not in allowed:
            problems.append(f"wrong dtype: {name} is {stored} in the file, must be one of {allowed}")
    return problems
