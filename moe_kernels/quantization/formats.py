"""The formats of quantised weights, and the checks of quantised weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..runtime.checks import check_dtype
from ..runtime.dispatch import once_per_form
from ..types import QuantizedWeight, WeightFormat

FP8 = WeightFormat("fp8", (128, 128))  # e4m3 values; used by DeepSeek-V3 and Qwen3
MXFP4 = WeightFormat("mxfp4", (1, 32))  # e2m1 values, e8m0 scales; used by gpt-oss
NF4 = WeightFormat("nf4", (1, 64))  # bitsandbytes' 4-bit format
NF4_NESTED = WeightFormat("nf4", (1, 64), nested_block=256)  # bitsandbytes' double quantisation
INT8 = WeightFormat("int8", (1, 0))  # bitsandbytes' LLM.int8(): a scale per row; 0 columns mean the whole row

FORMATS = {"fp8": FP8, "mxfp4": MXFP4, "nf4": NF4, "nf4_nested": NF4_NESTED, "int8": INT8}

# Known formats that are not supported, each with the reason.
_REFUSED = {
    "awq": "its groups have zero points",
    "gptq": "its groups have zero points",
    "nvfp4": "its scales have two levels of another kind",
    "fp4": "of bitsandbytes' 4-bit types only nf4 is supported",
}

E8M0 = (torch.uint8, torch.float8_e8m0fnu)  # dtypes of scales that are powers of two
_SCALE_DTYPES = {
    "fp8": (torch.float32, torch.bfloat16, torch.float16, *E8M0),
    "mxfp4": E8M0,
    "nf4": (torch.float32,),
    "int8": (torch.float32,),
}
_VALUE_DTYPES = {"fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8, "int8": torch.int8}


def as_format(op: str, format: str | WeightFormat) -> WeightFormat:
    """Return the format that a name denotes. A `WeightFormat` is checked and returned unchanged.

    Raises:
        NotImplementedError: the name denotes a known format that is not supported, such as "awq".
        ValueError: the name is unknown, or the block size is not allowed for the format.
    """
    if isinstance(format, str) and format in FORMATS:
        return FORMATS[format]
    name = format.name if isinstance(format, WeightFormat) else format
    if reason := _REFUSED.get(str(name).lower()):
        raise NotImplementedError(f"{op}: the format {name!r} is not supported: {reason}")
    if not isinstance(format, WeightFormat) or name not in FORMATS:
        raise ValueError(f"{op}: format must be one of {list(FORMATS)} or a WeightFormat of them, got {name!r}")
    _check_block(op, format)
    return format


def _check_block(op: str, format: WeightFormat) -> None:
    rows, columns = format.block
    known = FORMATS[format.name].block
    if format.name == "fp8":
        if any(size < 1 or size & (size - 1) for size in format.block):
            raise ValueError(f"{op}: blocks of fp8 must have sizes that are powers of two, got {rows}x{columns}")
    elif format.name == "nf4":
        if rows != 1 or columns < 32 or columns & (columns - 1):
            raise ValueError(f"{op}: blocks of nf4 must be 1 x a power of two from 32, got {rows}x{columns}")
    elif format.block != known:
        raise ValueError(f"{op}: blocks of {format.name} must be {known[0]}x{known[1]}, got {rows}x{columns}")
    nested = format.nested_block
    if nested is not None and (format.name != "nf4" or nested < 1 or nested & (nested - 1)):
        raise ValueError(f"{op}: nested_block must be a power of two and of nf4 only, got {nested} of {format.name}")


def scales_shape(format: WeightFormat, shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [E, out, in]. The scales of NF4 have one axis: one scale per block of
    the flattened weight."""
    rows, columns = format.block
    num_experts, size_out, size_in = shape
    if format.name == "nf4":
        return (-(-math.prod(shape) // columns),)
    return num_experts, -(-size_out // rows), -(-size_in // columns) if columns else 1


def check_quantized(op: str, name: str, weight: QuantizedWeight) -> None:
    """Raise ValueError unless a quantised weight's tensors have the dtypes and sizes that its format and shape require.
    The tensors must also be contiguous, be on one device and require no gradient. Their values are not read."""
    if not isinstance(weight, QuantizedWeight):
        raise ValueError(f"{op}: {name} must be a QuantizedWeight, got {type(weight).__name__}")
    as_format(op, weight.format)
    if any(tensor.requires_grad for tensor in weight.tensors.values()):
        raise ValueError(f"{op}: {name} is stored as {weight.format.name} and frozen, got one that requires a gradient")
    _check_tensors(op, name, weight)
    for part, tensor in weight.tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: the {part} of {name} must be contiguous, got strides {tensor.stride()}")


@once_per_form
def _check_tensors(op: str, name: str, weight: QuantizedWeight) -> None:
    format, shape = weight.format, weight.shape
    if len(shape) != 3:
        raise ValueError(f"{op}: {name} must have the shape [E, out, in], got {list(shape)}")
    columns = format.block[1]
    if format.name == "mxfp4" and shape[2] % columns:
        raise ValueError(f"{op}: mxfp4 needs rows of whole blocks of {columns}, got {name} {list(shape)}")
    _check_values(op, name, weight)
    _check_scales(op, name, weight)
    _check_tables(op, name, weight)
    for part, tensor in weight.tensors.items():
        if tensor.device != weight.device:
            raise ValueError(f"{op}: the {part} of {name} must be on {weight.device}, got {tensor.device}")


def _check_values(op: str, name: str, weight: QuantizedWeight) -> None:
    values, kind, shape = weight.values, weight.format.name, weight.shape
    if kind == "nf4":
        num_bytes = -(-math.prod(shape) // 2)
        if values.numel() * values.element_size() != num_bytes:
            raise ValueError(f"{op}: the values of {name} must be {num_bytes} bytes, got {_described(values)}")
        return
    check_dtype(op, f"the values of {name}", values, _VALUE_DTYPES[kind])
    allowed = [list(shape)]
    if kind == "mxfp4":
        allowed = [[*shape[:2], shape[2] // 2], [*shape[:2], shape[2] // 32, 16]]
    if list(values.shape) not in allowed:
        rule = " or ".join(map(str, allowed))
        raise ValueError(f"{op}: the values of {name} must be {rule}, got {_described(values)}")


def _check_scales(op: str, name: str, weight: QuantizedWeight) -> None:
    scales, format = weight.scales, weight.format
    nested = format.nested_block is not None
    check_dtype(op, f"the scales of {name}", scales, *((torch.uint8,) if nested else _SCALE_DTYPES[format.name]))
    wanted = scales_shape(format, weight.shape)
    # Scales of int8 and NF4 may have any shape of the right size, because bitsandbytes stores scales flat.
    fits = scales.numel() == math.prod(wanted) if format.name in ("int8", "nf4") else scales.shape == wanted
    if not fits:
        raise ValueError(
            f"{op}: the scales of {name} must be {list(wanted)} for {format} {list(weight.shape)}, "
            f"got {_described(scales)}"
        )


def _check_tables(op: str, name: str, weight: QuantizedWeight) -> None:
    format = weight.format
    wanted: dict[str, int] = {"codes": 16} if format.name == "nf4" else {}
    if format.nested_block is not None:
        num_nested = -(-weight.scales.numel() // format.nested_block)
        wanted |= {"nested_codes": 256, "nested_scales": num_nested, "nested_offset": 1}
    for part in ("codes", "nested_codes", "nested_scales", "nested_offset"):
        tensor = getattr(weight, part)
        if (tensor is None) != (part not in wanted):
            raise ValueError(f"{op}: {name} as {format} {'needs' if tensor is None else 'has no'} {part}")
        if tensor is not None:
            check_dtype(op, f"the {part} of {name}", tensor, torch.float32)
            if tensor.numel() != wanted[part]:
                raise ValueError(f"{op}: the {part} of {name} must be [{wanted[part]}], got {_described(tensor)}")


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
