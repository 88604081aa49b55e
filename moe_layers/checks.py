"""Argument checks."""

from __future__ import annotations

from torch import Tensor, nn

from moe_kernels.errors import first_three as first_three


def check_positive(owner: str, **sizes: int) -> None:
    """Raise ValueError unless every size is a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive integer, got {size!r}")


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {choices}, got {value!r}")


def check_kind(owner: str, name: str, value: object, kind: type) -> None:
    """Raise ValueError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"
        raise ValueError(f"{owner}: {name} must be a {kind.__name__}, got {got[:100]}")


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing the class. The import takes half as long as PyTorch's."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh")  # plain tensors skip the slow `hasattr`


def whole_state(op: str, module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict. Raise ValueError if its tensors are sharded over ranks or on the meta device."""
    state = module.state_dict()
    for name, tensor in state.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"{op}: tensors must be whole, got a DTensor {name}; torch.distributed.checkpoint takes those"
            )
        if tensor.is_meta:
            raise ValueError(f"{op}: tensors must have memory, got {name} on meta; to_empty(device=...) allocates it")
    return state
