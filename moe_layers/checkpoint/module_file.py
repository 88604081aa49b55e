"""One module, one safetensors file, the names of its state dict."""

from __future__ import annotations

import os

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor


def save_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the module's state dict to one file.

    Raises:
        ValueError: the parameters are shared with other processes.
    """
    _check_whole("save_safetensors", module)
    save_file({name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}, path)


def _check_whole(op: str, module: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{op}: tensors must be whole, got a DTensor {name}; torch.distributed.checkpoint takes those"
            )


def load_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a file that `save_safetensors` wrote, tensor by tensor, into the module's existing tensors.

    Raises:
        ValueError: lists missing, unexpected and wrongly shaped tensors, or the parameters are shared with other
            processes; the module is then unchanged.
    """
    _check_whole("load_safetensors", module)
    state = module.state_dict()
    with safe_open(path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        problems = [f"missing: {name} {tuple(state[name].shape)}" for name in state if name not in shapes]
        problems += [f"unexpected: {name} {shape}" for name, shape in shapes.items() if name not in state]
        problems += [
            f"wrong shape: {name} is {shape} in the file, must be {tuple(state[name].shape)}"
            for name, shape in shapes.items()
            if name in state and shape != tuple(state[name].shape)
        ]
        if problems:
            raise ValueError(f"load_safetensors: {os.fspath(path)} does not fit the layer:\n  " + "\n  ".join(problems))
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))
