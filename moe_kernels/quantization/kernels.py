"""Device functions that decode tiles of quantised weights, and the kernel that dequantises whole weights.

Integer operations convert codes to float32 if the GPU has no instruction for the conversion. The interpreter, which
cannot convert float8, uses the same operations. Results equal those of `decode.py` bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel
from ..runtime.triton import INTERPRET as _INTERPRET
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from ..types import QuantizedWeight
from .decode import ONE_127TH

INTERPRET = tl.constexpr(_INTERPRET)  # pyright: ignore[reportCallIssue]  # for pyright, tl.constexpr is Any
_NAN = tl.constexpr(0x7FC00000)  # pyright: ignore[reportCallIssue]
_ONE_127TH = tl.constexpr(ONE_127TH)  # pyright: ignore[reportCallIssue]


@triton.jit
def decode_e4m3(byte):
    """Return the float32 value of e4m3 bits."""
    # From Ada on, GPUs convert two e4m3 numbers to float16 with one instruction.
    HAS_FLOAT8: tl.constexpr = False if INTERPRET else tl.target_info.cuda_capability_geq(8, 9)
    if HAS_FLOAT8:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        # Copy the 4 exponent bits of the e4m3 number to the low end of float32's exponent. Copy the 3 mantissa bits to
        # the high end of float32's mantissa. The biases of the exponents, 7 and 127, differ by 120. The copied bits
        # therefore encode the value divided by 2 ** 120.
        bits = byte.to(tl.int32)
        value = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _int8(byte):
    """Convert an int8 number to float32: write number + 128 to the last mantissa bits of 2 ** 23, then subtract
    2 ** 23 + 128. A conversion instruction takes four times as long."""
    return ((byte.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _twice_e2m1(nibble):
    """Return twice the value of e2m1 bits as float32: 0, 1, 2, 3, 4, 6, 8, 12, then their negatives."""
    return (((nibble & 7) << 22) | ((nibble & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**127


@triton.jit
def _mxfp4_pairs(packed, half_powers):
    """Return the numbers in the low and in the high four bits of bytes, times 2 * half_powers, as bfloat16.

    26 instructions convert four bytes, two numbers at a time, with the arithmetic of `_twice_e2m1`. Products of these
    numbers and powers of two are exact, even subnormal products. Compute capability 8 multiplies bfloat16 only in a
    fused multiply-add. The addend here is -0, which changes no value.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p, q, s, t, big, none;
        mov.b32 big, 0x7f007f00;
        mov.b32 none, 0x80008000;
        prmt.b32 p, $4, 0, 0x4140;
        prmt.b32 q, $4, 0, 0x4342;
        shl.b32 s, p, 6;  and.b32 s, s, 0x01c001c0;
        shl.b32 t, p, 12; lop3.b32 s, t, 0x80008000, s, 0xea;
        fma.rn.bf16x2 s, s, big, none; fma.rn.bf16x2 $0, s, $5, none;
        shl.b32 s, q, 6;  and.b32 s, s, 0x01c001c0;
        shl.b32 t, q, 12; lop3.b32 s, t, 0x80008000, s, 0xea;
        fma.rn.bf16x2 s, s, big, none; fma.rn.bf16x2 $1, s, $6, none;
        shl.b32 s, p, 2;  and.b32 s, s, 0x01c001c0;
        shl.b32 t, p, 8;  lop3.b32 s, t, 0x80008000, s, 0xea;
        fma.rn.bf16x2 s, s, big, none; fma.rn.bf16x2 $2, s, $5, none;
        shl.b32 s, q, 2;  and.b32 s, s, 0x01c001c0;
        shl.b32 t, q, 8;  lop3.b32 s, t, 0x80008000, s, 0xea;
        fma.rn.bf16x2 s, s, big, none; fma.rn.bf16x2 $3, s, $6, none;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [packed, half_powers],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _code(codes_ptr, nibble):
    """Look up a code in a table of 16. Inline assembly hides the load from software pipelining, which would copy each
    code to shared memory first."""
    if INTERPRET:
        return tl.load(codes_ptr + nibble)
    else:
        address = codes_ptr.to(tl.int64) + nibble * 4
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [address], tl.float32, True, 1)


@triton.jit
def _spread(scale, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Return a tile [BLOCK_OUT, BLOCK_IN] that holds, for each element, the scale of the element's block."""
    ROWS: tl.constexpr = scale.shape[0]
    COLUMNS: tl.constexpr = scale.shape[1]
    by_block = scale.reshape(ROWS, 1, COLUMNS, 1)
    spread = tl.broadcast_to(by_block, (ROWS, BLOCK_OUT // ROWS, COLUMNS, BLOCK_IN // COLUMNS))
    return spread.reshape(BLOCK_OUT, BLOCK_IN)


@triton.jit
def _power(byte, HALF: tl.constexpr, NAN_255: tl.constexpr):
    """Return an e8m0 number as float32, halved if HALF. The byte 255 is NaN if NAN_255."""
    stored = byte.to(tl.int32)
    exponent = stored - HALF
    # 2 ** -127 and 2 ** -128 are subnormal: a mantissa bit represents them.
    subnormal = tl.where(exponent < 0, 1 << 21, 1 << 22)
    bits = tl.where(exponent < 1, subnormal, exponent << 23)
    if NAN_255:
        bits = tl.where(stored == 255, _NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _add(a, b):
    """Return a + b. Inline assembly keeps the compiler from fusing the sum with a multiplication. A fused multiply-add
    would round once, not twice."""
    if INTERPRET:
        return a + b
    else:
        return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _scale(ptr, index, inside, nested_codes_ptr, nested_scales_ptr, nested_offset_ptr, FORM: tl.constexpr):
    """Load scales as float32. `index` counts from the first scale of the whole weight."""
    stored = tl.load(ptr + index, mask=inside, other=0)
    NESTED: tl.constexpr = FORM[2]
    if NESTED > 0:
        code = tl.load(nested_codes_ptr + stored, mask=inside, other=0.0)
        size = tl.load(nested_scales_ptr + index // NESTED, mask=inside, other=0.0)
        return _add(code * size, tl.load(nested_offset_ptr))
    elif FORM[3] == "bfloat16":
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORM[3] is not None:
        return _power(stored, FORM[0] == "mxfp4", FORM[3] == "power_or_nan")
    else:
        return stored.to(tl.float32)


@triton.jit
def decode_tile(
    values_ptr,
    scales_ptr,
    codes_ptr,
    nested_codes_ptr,
    nested_scales_ptr,
    nested_offset_ptr,
    expert,  # int64
    first_out,  # a multiple of BLOCK_OUT
    first_in,  # a multiple of BLOCK_IN
    OUT: tl.constexpr,
    IN: tl.constexpr,
    FORM: tl.constexpr,  # format, block sizes and decoding of scales, from `form_of`
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the tile [BLOCK_OUT, BLOCK_IN] of one expert's matrix. Elements outside the matrix are zero, or NaN if the
    scale of their block is NaN."""
    KIND: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1][0]
    COLUMNS: tl.constexpr = FORM[1][1]
    o = first_out + tl.arange(0, BLOCK_OUT)
    i = first_in + tl.arange(0, BLOCK_IN)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    if KIND == "nf4" and IN % COLUMNS != 0:
        # NF4 flattens the weight, so blocks and pairs of codes in a byte may cross the ends of rows.
        index = (expert * OUT + o[:, None]) * IN + i[None, :]
        packed = tl.load(values_ptr + index // 2, mask=inside, other=0).to(tl.int32)
        code = _code(codes_ptr, tl.where(index % 2 == 0, packed >> 4, packed & 15))
        scale = _scale(
            scales_ptr, index // COLUMNS, inside, nested_codes_ptr, nested_scales_ptr, nested_offset_ptr, FORM
        )
        return (code * scale).to(DTYPE)
    # Load one scale for each block that the tile touches.
    NUM_ROWS: tl.constexpr = max(BLOCK_OUT // ROWS, 1)
    NUM_COLUMNS: tl.constexpr = max(BLOCK_IN // COLUMNS, 1)
    SCALE_ROWS: tl.constexpr = (OUT + ROWS - 1) // ROWS
    SCALE_COLUMNS: tl.constexpr = (IN + COLUMNS - 1) // COLUMNS
    scale_row = first_out // ROWS + tl.arange(0, NUM_ROWS)
    scale_column = first_in // COLUMNS + tl.arange(0, NUM_COLUMNS)
    exists = (scale_row < SCALE_ROWS)[:, None] & (scale_column < SCALE_COLUMNS)[None, :]
    index = (expert * SCALE_ROWS + scale_row[:, None]) * SCALE_COLUMNS + scale_column[None, :]
    # [NUM_ROWS, NUM_COLUMNS]
    scale = _scale(scales_ptr, index, exists, nested_codes_ptr, nested_scales_ptr, nested_offset_ptr, FORM)
    row = expert * OUT + o[:, None]
    if KIND == "mxfp4" or KIND == "nf4":
        pair = first_in // 2 + tl.arange(0, BLOCK_IN // 2)
        pair_inside = (o < OUT)[:, None] & (pair < IN // 2)[None, :]
        packed = tl.load(values_ptr + row * (IN // 2) + pair[None, :], mask=pair_inside, other=0)
        if KIND == "mxfp4" and DTYPE is tl.bfloat16 and not INTERPRET:
            low, high = _mxfp4_pairs(packed, _spread(scale.to(tl.bfloat16), BLOCK_OUT, BLOCK_IN // 2))
            return tl.join(low, high).reshape(BLOCK_OUT, BLOCK_IN)
        packed = packed.to(tl.int32)
        if KIND == "mxfp4":
            code = tl.join(_twice_e2m1(packed & 15), _twice_e2m1(packed >> 4))
        else:
            code = tl.join(_code(codes_ptr, packed >> 4), _code(codes_ptr, packed & 15))
        code = code.reshape(BLOCK_OUT, BLOCK_IN)
    else:
        stored = tl.load(values_ptr + row * IN + i[None, :], mask=inside, other=0)
        code = decode_e4m3(stored) if KIND == "fp8" else _int8(stored)
    value = code * _spread(scale, BLOCK_OUT, BLOCK_IN)
    if KIND == "int8":
        value *= _ONE_127TH
    return value.to(DTYPE)


@triton.jit
def _dequantize_kernel(
    values_ptr,
    scales_ptr,
    codes_ptr,
    nested_codes_ptr,
    nested_scales_ptr,
    nested_offset_ptr,
    out_ptr,  # [E, OUT, IN] contiguous
    OUT: tl.constexpr,
    IN: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program decodes a tile [BLOCK_OUT, BLOCK_IN] of out[e]. Grid: (E * NUM_OUT * NUM_IN,)."""
    NUM_OUT: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    NUM_IN: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    program = tl.program_id(0)
    expert = (program // (NUM_OUT * NUM_IN)).to(tl.int64)
    first_out = program // NUM_IN % NUM_OUT * BLOCK_OUT
    first_in = program % NUM_IN * BLOCK_IN
    value = decode_tile(
        values_ptr,
        scales_ptr,
        codes_ptr,
        nested_codes_ptr,
        nested_scales_ptr,
        nested_offset_ptr,
        expert,
        first_out,
        first_in,
        OUT,
        IN,
        FORM,
        BLOCK_OUT,
        BLOCK_IN,
        out_ptr.dtype.element_ty,
    )
    o = first_out + tl.arange(0, BLOCK_OUT)
    i = first_in + tl.arange(0, BLOCK_IN)
    ptrs = out_ptr + (expert * OUT + o[:, None]) * IN + i[None, :]
    tl.store(ptrs, value, mask=(o < OUT)[:, None] & (i < IN)[None, :])


def launch_dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:  # [E, out, in] contiguous
    """Return the dequantised weight. The caller has checked the weight."""
    num_experts, size_out, size_in = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if not out.numel():
        return out
    block_in = min(max(next_power_of_2(size_in), 64), 256)  # at least 64, the default block size of nf4
    block_out = min(next_power_of_2(size_out), 8192 // block_in)
    launch_kernel(
        _dequantize_kernel,
        (num_experts * cdiv(size_out, block_out) * cdiv(size_in, block_in),),
        *kernel_arguments(weight),
        out,
        OUT=size_out,
        IN=size_in,
        FORM=form_of(weight),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=8,
    )
    return out


def kernel_arguments(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Return the tensors that `decode_tile` takes as pointers."""
    values = weight.values if weight.values.dtype == torch.int8 else weight.values.view(torch.uint8)
    # Pass e8m0 and bfloat16 as bits: Triton's interpreter supports neither e8m0 nor every bfloat16 number.
    as_bits = {torch.float8_e8m0fnu: torch.uint8, torch.bfloat16: torch.int16}.get(weight.scales.dtype)
    scales = weight.scales if as_bits is None else weight.scales.view(as_bits)
    return values, scales, weight.codes, weight.nested_codes, weight.nested_scales, weight.nested_offset


# How kernels decode scales that they load as integers, by dtype. The byte 255 is NaN only in float8_e8m0fnu.
_SCALE_BITS = {torch.uint8: "power", torch.float8_e8m0fnu: "power_or_nan", torch.bfloat16: "bfloat16"}


def form_of(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Return (name of the format, block, `nested_block` or 0, how to decode integer scales) as one compile-time value.
    The last entry is None for float32 and float16 scales, which kernels load as floating point."""
    (rows, columns), size_in = weight.format.block, weight.shape[2]
    block = rows, columns or max(next_power_of_2(size_in), 256)  # 0 columns: a block covers the whole row
    return weight.format.name, block, weight.format.nested_block or 0, _SCALE_BITS.get(weight.scales.dtype)
