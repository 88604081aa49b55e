"""Reads weights that a checkpoint stores plain, or quantised as a tensor of numbers and a tensor of scales.

`moe_kernels.quantization.decode` defines the arithmetic of the exact dequantisation. float8 (DeepSeek-V3) has one scale
per block. Despite its name, the tensor `weight_scale_inv` holds the scales that multiply the numbers. MXFP4 (gpt-oss)
stores 4-bit numbers as uint8 [..., N, K / 32, 16], with one power-of-two scale per 32 numbers. Packed float4
(DeepSeek-V4) stores the same bytes as int8 [..., N, K / 2].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.quantization.decode import decode_mxfp4, decode_scales, multiply_blocks

from ...checks import first_three
from .directory import CheckpointFiles, TensorInfo

_MXFP4_GROUP = 32
_E8M0_NAN = 255
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, *_E8M0_DTYPES)
_EXPERT_SCALE = re.compile(r"experts\.\d+\.\w+\.scale$")  # DeepSeek-V4 names all scales ".scale"


@dataclass(frozen=True)
class Stored:
    """A weight of the checkpoint.

    Attributes:
        encoding: "plain", "float8", "float4" or "mxfp4".
        names: names of the tensors on disk: the weight itself, or its quantised values and their scales.
        shape: shape of the weight.
        dtype: dtype of the first tensor on disk.
        block: (rows, columns) of the blocks of a float8 weight. Each block has one scale.
        num_bytes: size of the tensors on disk, in bytes.
    """

    name: str
    encoding: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, int] = (0, 0)
    num_bytes: int = 0

    def read(self, files: CheckpointFiles, rows: slice | None, device: torch.device | str) -> Tensor:
        """Return the weight, or a range of its first axis, on `device`. A quantised weight is decoded to float32."""
        numbers, *others = (files.read(name, rows).to(device) for name in self.names)
        if self.encoding == "plain":
            return numbers
        (scales,) = others
        if self.encoding == "float8":
            return dequantize_float8(numbers, scales, self.block, self.name)
        return dequantize_mxfp4(numbers, scales, self.name)


Group = tuple[str, tuple[str, ...]]  # (encoding of a weight, names of its tensors on disk)


def group_names(names: Iterable[str]) -> dict[str, Group]:
    """Map each weight to (encoding, names of its tensors). An "mxfp4" weight lists scales even if `names` lacks them.

    Packed float4 has the same names as float8 and is returned as "float8"; `describe` distinguishes the two by dtype.
    """
    names = set(names)
    suffixes = {"_scale_inv": ""}
    if any(map(_EXPERT_SCALE.search, names)):
        suffixes[".scale"] = ".weight"
    weights: dict[str, Group] = {name: ("plain", (name,)) for name in names}
    for name in names:
        for suffix, replacement in suffixes.items():
            weight = name.removesuffix(suffix) + replacement
            if name.endswith(suffix) and weight in names:
                weights[weight] = ("float8", (weight, name))
                del weights[name]
        weight = name.removesuffix("_blocks")
        if weight != name and (f"{weight}_scales" in names or "experts." in name):
            weights[weight] = ("mxfp4", (name, f"{weight}_scales"))
            del weights[name]
            weights.pop(f"{weight}_scales", None)
    return weights


def describe(
    files: CheckpointFiles, name: str, group: Group, block: tuple[int, int], problems: list[str]
) -> Stored | None:
    """Return a weight's description from the headers of its files, or None if a tensor is missing. Append errors to
    `problems`. `block` is (rows, columns) of the blocks of float8 weights."""
    encoding, names = group
    missing = [part for part in names if part not in files.file_of]
    if missing:
        problems.extend(f"missing: {part}" for part in missing)
        return None
    infos = [files.info(part) for part in names]
    if encoding == "float8" and infos[0].dtype == torch.int8:
        encoding = "float4"
    shape = infos[0].shape
    if encoding == "plain":
        if infos[0].dtype in _FLOAT8:
            kind = dtype_name(infos[0].dtype)
            problems.append(f"missing: {name}_scale_inv, the scales of {name}, which is {kind}")
            return None
    else:
        shape, wrong = _ENCODINGS[encoding](names, infos, block)
        problems.extend(wrong)
    return Stored(name, encoding, names, shape, infos[0].dtype, block, sum(info.num_bytes for info in infos))


def describe_all(
    files: CheckpointFiles, weights: dict[str, tuple[str, Group]], block: tuple[int, int], where: str
) -> dict[str, Stored]:
    """Map each key of `weights` to the `Stored` of its (full name, group). Raise ValueError if a weight has errors."""
    problems: list[str] = []
    described = {key: describe(files, name, group, block, problems) for key, (name, group) in weights.items()}
    if problems:
        raise ValueError(f"checkpoint: {where}:\n  " + first_three(problems, "\n  "))
    return {key: stored for key, stored in described.items() if stored is not None}


_Finding = tuple[tuple[int, ...], list[str]]  # (shape of a weight, error texts about its tensors)


def _describe_float8(names: tuple[str, ...], infos: list[TensorInfo], block: tuple[int, int]) -> _Finding:
    numbers, scales = infos
    shape, wrong = numbers.shape, []
    expected = (*shape[:-2], *(-(-size // b) for size, b in zip(shape[-2:], block, strict=False)))
    if numbers.dtype not in _FLOAT8 or scales.dtype not in _SCALE_DTYPES:
        wrong.append(f"wrong dtype: {names[0]} is {dtype_name(numbers.dtype)}, its scales {dtype_name(scales.dtype)}")
    if len(shape) < 2 or scales.shape != expected:
        wrong.append(f"wrong shape: {names[1]} is {scales.shape}, must be {expected} for {names[0]} {shape}")
    return shape, wrong


def _describe_float4(names: tuple[str, ...], infos: list[TensorInfo], block: tuple[int, int]) -> _Finding:
    numbers, scales = infos
    shape = (*numbers.shape[:-1], 2 * numbers.shape[-1]) if numbers.shape else ()
    expected = (*shape[:-1], shape[-1] // _MXFP4_GROUP) if shape else ()
    wrong = []
    if scales.dtype not in _E8M0_DTYPES:
        wrong.append(
            f"wrong dtype: {names[1]}, the scales of packed float4, is {dtype_name(scales.dtype)}, must be e8m0"
        )
    if len(shape) < 2 or shape[-1] % _MXFP4_GROUP or scales.shape != expected:
        wrong.append(f"wrong shape: {names[1]} is {scales.shape}, must be {expected} for {names[0]} {numbers.shape}")
    return shape, wrong


def _describe_mxfp4(names: tuple[str, ...], infos: list[TensorInfo], block: tuple[int, int]) -> _Finding:
    numbers, scales = infos
    shape, wrong = numbers.shape, []
    groups, num_bytes = shape[-2:] if len(shape) > 2 else (0, 0)
    if {numbers.dtype, scales.dtype} != {torch.uint8}:
        wrong.append(f"wrong dtype: {names[0]} and {names[1]} must be uint8, got {dtype_name(numbers.dtype)}")
    if not groups or num_bytes != _MXFP4_GROUP // 2 or scales.shape != shape[:-1]:
        wrong.append(
            f"wrong shape: {names[0]} is {shape} with scales {scales.shape}, "
            f"must be [..., groups, {_MXFP4_GROUP // 2}] with scales [..., groups]"
        )
    return (*shape[:-2], groups * _MXFP4_GROUP), wrong


_ENCODINGS = {"float8": _describe_float8, "float4": _describe_float4, "mxfp4": _describe_mxfp4}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dequantize_float8(
    weight: Tensor,  # [..., N, K] float8
    scale: Tensor,  # [..., ceil(N / block), ceil(K / block)] float32, float8_e8m0fnu, or uint8 that encodes e8m0
    block: tuple[int, int],
    name: str,
) -> Tensor:  # [..., N, K] float32
    """Return the weight with every block multiplied by its scale. Raise ValueError with `name` if a scale is not
    finite."""
    scale = decode_scales(scale)
    if not scale.isfinite().all():
        raise ValueError(f"checkpoint: the scales of {name} must be finite, got {scale[~scale.isfinite()][0].item()}")
    return multiply_blocks(weight.float(), scale, block)


def dequantize_mxfp4(
    blocks: Tensor,  # [..., N, K / 32, 16] uint8, or packed float4 [..., N, K / 2] int8
    scales: Tensor,  # [..., N, K / 32] uint8 or float8_e8m0fnu
    name: str,
) -> Tensor:  # [..., N, K] float32
    """Return the exact weight: every 4-bit number times its scale. Each group of 32 numbers shares one scale, a power
    of two. Raise ValueError with `name` if a scale is 255, the NaN of e8m0."""
    if blocks.dtype == torch.int8:
        blocks = blocks.view(torch.uint8).unflatten(-1, (-1, _MXFP4_GROUP // 2))
    scales = scales.view(torch.uint8)
    if (scales == _E8M0_NAN).any():
        raise ValueError(f"checkpoint: the scales of {name} must be finite, got the NaN of e8m0 (255)")
    return decode_mxfp4(blocks, scales)
