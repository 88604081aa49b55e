"""Reads expert parameters that a PyTorch parametrization keeps in 4 bits, without dequantising them.

A parametrization computes a parameter from a stored tensor at each access. Two kinds are known:

* bitsandbytes' `replace_parameter_4bit`, which quantises parameters of modules other than Linear
  (https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/parametrize.py)
* `StoredMxfp4`, with which `keep_mxfp4` loads gpt-oss

Code that reads the attribute, such as transformers' own experts and PEFT, gets the dequantised parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moe_kernels.quantization.formats import MXFP4, as_format
from moe_kernels.quantization.ops import dequantize
from moe_kernels.types import QuantizedWeight, WeightFormat

from ....checks import first_three, is_dtensor

_BITSANDBYTES = ("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")


class StoredMxfp4(nn.Module):
    """Computes a parameter [E, in, out] from the blocks [E, out, in / 32, 16] of a published gpt-oss."""

    scales: Tensor

    def __init__(
        self,
        scales: Tensor,  # [E, out, in / 32] uint8: one power of two for each block of 32 inputs
        dtype: torch.dtype,  # dtype of the parameter
    ):
        super().__init__()
        self.register_buffer("scales", scales)
        self.dtype = dtype

    def weight(self, blocks: Tensor) -> QuantizedWeight:
        return _of_blocks(blocks, self.scales)

    def forward(self, blocks: Tensor) -> Tensor:  # [E, in, out]
        if is_dtensor(blocks):  # true if PEFT reads a parameter of experts that are sharded over ranks
            parts: Any = blocks, self.scales
            local = dequantize(_of_blocks(*(part.to_local() for part in parts)), self.dtype).transpose(1, 2)
            return type(parts[0]).from_local(local, parts[0].device_mesh, parts[0].placements, run_check=False)
        num_experts, size_out, num_blocks, _ = blocks.shape
        out = torch.empty(num_experts, 32 * num_blocks, size_out, dtype=self.dtype, device=blocks.device)
        for matrix, *stored in zip(out, blocks.split(1), self.scales.split(1), strict=True):  # the loop saves memory
            matrix.copy_(dequantize(_of_blocks(*stored), self.dtype)[0].T)
        return out

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}"


def _of_blocks(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    num_experts, size_out, num_blocks, _ = blocks.shape
    return QuantizedWeight(blocks, scales, MXFP4, torch.Size((num_experts, size_out, 32 * num_blocks)))


class _Stored(NamedTuple):
    weight: QuantizedWeight
    transposed: bool  # True if the weight is [E, out, in] and the parameter [E, in, out]


def stored_weight(
    experts: Any, names: tuple[str, ...], name: str, *, transposed: bool
) -> QuantizedWeight | None:  # [E, out, in]
    """Return the quantised weight of a parameter, or None if the parameter must be read as a tensor.

    Args:
        names: parameters that are read either all in stored form, or all as tensors. If other code, such as a PEFT
            wrapper that adds adapters, changes one of these parameters, all are read as tensors.
        transposed: whether the parameter is [E, in, out] instead of [E, out, in].
    """
    if "parametrizations" not in experts._modules or name not in names:
        return None
    found = {n: _read(experts, n) for n in names}
    if any(stored is None or stored.transposed != transposed for stored in found.values()):
        return None
    stored = found[name]
    return None if stored is None else stored.weight


def parameter_shape(experts: Any, name: str) -> torch.Size:
    """Return the shape of a parameter without dequantising it."""
    stored = _read(experts, name)
    if stored is None:
        return getattr(experts, name).shape
    num_experts, size_out, size_in = stored.weight.shape
    return torch.Size((num_experts, size_in, size_out)) if stored.transposed else stored.weight.shape


def check_stored(name: str, experts: nn.Module, readable: tuple[str, ...], *, transposed: bool) -> None:
    """Raise ValueError unless all 4-bit parameters of an experts module can be read in their stored form.

    Args:
        name: name of the experts in the model.
        readable: names of the parameters that the experts' op reads in their stored form.
        transposed: whether these parameters are [E, in, out] instead of [E, out, in].
    """
    kind = parametrize.type_before_parametrizations(experts).__name__
    held = sorted(_names(experts))
    if not held:
        return
    if not readable:
        raise ValueError(
            f"moe_layers: the weights of {kind} must be plain, because the kernels read parts of its parameters, "
            f"got {first_three(held)} of {name} in 4 bits"
        )
    if held != sorted(readable):
        raise ValueError(
            f"moe_layers: {name} ({kind}) must hold either no parameter or exactly {first_three(readable)} in 4 bits, "
            f"got {first_three(held)}"
        )
    for parameter in readable:
        stored = _read(experts, parameter)
        if stored is None:
            raise ValueError(f"moe_layers: {parameter} of {name} must have one parametrization, got several")
        if stored.transposed != transposed:
            raise ValueError(
                f"moe_layers: {parameter} of {name} ({kind}) must be stored as [E, out, in] if it is in 4 bits, "
                "because blocks run along the inputs, got [E, in, out]"
            )


def _names(experts: nn.Module) -> Iterator[str]:
    """Yield the names of all parameters in 4 bits."""
    for path, module in experts.named_modules():
        if path.startswith("parametrizations") or ".parametrizations" in path:
            continue
        for name, chain in getattr(module, "parametrizations", {}).items():
            if any(_is_bitsandbytes(part) or isinstance(part, StoredMxfp4) for part in chain):
                yield f"{path}.{name}".lstrip(".")


def _read(experts: Any, name: str) -> _Stored | None:
    """Return a parameter's stored form. Return None unless the parameter has one parametrization, of a known kind."""
    chain = getattr(experts, "parametrizations", {})
    if name not in chain or len(chain[name]) != 1:
        return None
    (part,), values = chain[name], chain[name].original
    if isinstance(part, StoredMxfp4):
        return _Stored(part.weight(values), True)
    if _is_bitsandbytes(part):
        kind = parametrize.type_before_parametrizations(experts).__name__
        return _Stored(_of_bitsandbytes(f"{kind}.{name}", values, part.quant_state), False)
    return None


def _is_bitsandbytes(part: nn.Module) -> bool:
    return (type(part).__module__, type(part).__name__) == _BITSANDBYTES


def _of_bitsandbytes(name: str, values: Tensor, state: Any) -> QuantizedWeight:
    """Return a parameter of bitsandbytes as a `QuantizedWeight`, from its values and its QuantState.

    Raises:
        NotImplementedError: the parameter is not in nf4.
        ValueError: the block size is less than 32, or is not a power of two.
    """
    op = f"moe_layers: {name}, quantised by bitsandbytes"
    if state.quant_type != "nf4":
        as_format(op, state.quant_type)  # raises an error with the reason
    nested = state.state2 if state.nested else None
    block = WeightFormat("nf4", (1, state.blocksize), None if nested is None else nested.blocksize)
    format, shape = as_format(op, block), torch.Size(state.shape)
    if nested is None:
        return QuantizedWeight(values, state.absmax, format, shape, state.code)
    return QuantizedWeight(values, state.absmax, format, shape, state.code, nested.code, nested.absmax, state.offset)
