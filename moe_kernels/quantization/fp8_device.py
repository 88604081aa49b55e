"""Device functions that quantise float32 values to e4m3 with a scale per block. Results equal those of `reference_fp8`
bit for bit."""

from __future__ import annotations

from ..reference_fp8 import LARGEST, SMALLEST
from ..runtime.triton import tl, triton
from .kernels import INTERPRET

_LARGEST = tl.constexpr(LARGEST)  # pyright: ignore[reportCallIssue]  # for pyright, tl.constexpr is Any
_SMALLEST = tl.constexpr(SMALLEST)  # pyright: ignore[reportCallIssue]


@triton.jit
def block_scales(sizes):
    """Return (scales, inverse scales) of blocks. `sizes` holds the largest absolute value of each block."""
    at_least = tl.maximum(sizes, _SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    # PyTorch computes number / tensor as (1 / tensor) * number. The kernel also divides first and then multiplies, so
    # that results equal those of PyTorch bit for bit.
    inverse = tl.where(sizes == 0.0, 1.0, tl.div_rn(1.0, at_least) * _LARGEST)
    return tl.div_rn(1.0, inverse), inverse


@triton.jit
def largest_size(values, AXIS: tl.constexpr):
    """Return the largest absolute value along an axis, or NaN if any value is NaN. With axis None, reduce all axes.

    The bits without the sign bit, compared as integers, have the order of the absolute values. NaN is the largest.
    """
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(values):
    """Return the bytes of the nearest e4m3 numbers. Values must be within [-448, 448], or NaN."""
    if not INTERPRET:
        # Triton's own conversion uses the instruction below, too. Here, four numbers are packed into one 32-bit
        # register, because ptxas 12.8 drops half of a 16-bit register that is used more than once.
        code: tl.constexpr = """{ .reg .b16 first, second; cvt.rn.satfinite.e4m3x2.f32 first, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 second, $4, $3; mov.b32 $0, {first, second}; }"""
        return tl.inline_asm_elementwise(code, "=r,f,f,f,f", [values], dtype=tl.uint8, is_pure=True, pack=4)
    # Round the bits here, ties to even, because the interpreter's conversion truncates.
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # keep 3 mantissa bits; 120 = 127 - 7 (biases)
    # e4m3 numbers below 2 ** -6 are multiples of 2 ** -9. Adding 2 ** 14 in float32 rounds to a multiple of 2 ** -9.
    subnormal = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, subnormal, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_tile(values, BLOCKS: tl.constexpr):
    """Quantise rows [R, BLOCKS * 128]. Return (bytes of the same shape, scales [R, BLOCKS])."""
    blocks = tl.reshape(values, (values.shape[0], BLOCKS, 128))
    scales, inverse = block_scales(largest_size(blocks, 2))
    return tl.reshape(encode_e4m3(blocks * inverse[:, :, None]), values.shape), scales


@triton.jit
def store_scales(scales_ptr, row_stride, block_stride, scales, row, is_row, first, K, BLOCKS: tl.constexpr):
    """Write scales [R, BLOCKS] of rows with K columns. Column 0 of the scales belongs to block `first` of the row."""
    block = first + tl.arange(0, BLOCKS)
    mask = is_row[:, None] & (block < (K + 127) // 128)[None, :]
    scales_ptrs = scales_ptr + row[:, None] * row_stride + block.to(tl.int64)[None, :] * block_stride
    tl.store(scales_ptrs, scales, mask=mask)
