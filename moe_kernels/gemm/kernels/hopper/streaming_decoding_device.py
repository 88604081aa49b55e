"""Grouped GEMM of quantised weights for few rows per group, bound by the time to read and decode the weights.

One program multiplies a tile's rows, ROWS at a time, by BLOCK_OUT rows of a weight [OUT, IN]. TMA copies the weight
through a ring buffer in shared memory, 64 or 128 bytes of each row per step. Each thread reads 16 stored bytes of a row
at a time, decodes the bytes in registers, and multiplies with mma.sync. The weight is the left operand of mma, so that
ROWS can be as small as 8. wgmma is no alternative: ptxas up to 12.9 miscompiles wgmma with decoded values in registers.

mma may sum over the reduction axis in any order. Each thread therefore keeps weight values in the order in which they
are stored. `_mma_order` permutes the values of the tile's rows to the same order. No value moves to another thread.
"""

# This file omits `from __future__ import annotations`, because kernels need annotations as types, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....runtime.gluon import barrier, tma_load
from .ring import buffers


@gluon.constexpr_function
def values_per_64_bytes(FORM):
    return {"fp8": 64, "mxfp4": 128}[FORM]


@gluon.constexpr_function
def _row_bases(block_out, num_warps):
    """Return linear-layout bases (lanes, warps, registers) of a weight's rows. Each warp in turn gets 16 rows."""
    powers = [1 << i for i in range(block_out.bit_length() - 1)]
    return powers[:3], powers[4 : 4 + num_warps.bit_length() - 1], [8, *powers[4 + num_warps.bit_length() - 1 :]]


@gluon.constexpr_function
def _stored_layout(block_out, chunks, num_warps):
    """Return the layout of stored bytes [BLOCK_OUT, chunks * 64]. A thread holds 16 bytes of each 64-byte chunk of its
    rows, and the next thread holds the next 16 bytes."""
    lanes, warps, registers = _row_bases(block_out, num_warps)
    columns = [[0, 1 << i] for i in range(4)] + ([[0, 64]] if chunks == 2 else [])
    return gl.DistributedLinearLayout(
        columns + [[row, 0] for row in registers],
        [[0, 16], [0, 32], *([row, 0] for row in lanes)],
        [[row, 0] for row in warps],
        [],
        [block_out, 64 * chunks],
    )


@gluon.constexpr_function
def _by_16_bytes_layout(block_out, chunks, num_warps):
    """Return the layout of one number per 16 stored bytes, [BLOCK_OUT, 4 * chunks]."""
    stored = _stored_layout(block_out, chunks, num_warps)

    def split(bases):
        return [[row, column // 16, column % 16] for row, column in bases]

    bases = split(stored.reg_bases), split(stored.lane_bases), split(stored.warp_bases), []
    return gl.SliceLayout(2, gl.DistributedLinearLayout(*bases, [block_out, 4 * chunks, 16]))


@gluon.constexpr_function
def _rows_layout(num_rows, values, chunks, num_warps):
    """Return the layout of a tile's rows [ROWS, chunks * values]. A thread holds the row values that are multiplied by
    the thread's weight values. Every warp holds all rows."""
    own = values // 4
    columns = [[0, 1 << i] for i in range(own.bit_length() - 1)] + ([[0, values]] if chunks == 2 else [])
    further = [[1 << i, 0] for i in range(3, num_rows.bit_length() - 1)]
    lanes = [[0, own], [0, 2 * own], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        columns + further, lanes, [[0, 0]] * (num_warps.bit_length() - 1), [], [num_rows, values * chunks]
    )


@gluon.jit
def _mma_order(rows, CHUNKS: gl.constexpr, FORM: gl.constexpr):
    """Return rows [ROWS, K] whose reduction axis has the same order as that of the weight from `_decoded`. A chunk of
    64 bytes has four axes: thread, 4-byte word of the thread, pair in the word, and value in the pair. The result's
    order is word, pair, thread, value, because one mma instruction reads a pair from each of four threads."""
    ROWS: gl.constexpr = rows.shape[0]
    if FORM == "mxfp4":  # a word holds 8 values; values j and j + 4 are pair j
        ordered = rows.reshape(ROWS, CHUNKS, 4, 4, 2, 4).permute(0, 1, 3, 5, 2, 4)
    else:  # a word holds 4 values; values 2 * j and 2 * j + 1 are pair j
        ordered = rows.reshape(ROWS, CHUNKS, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return ordered.reshape(ROWS, rows.shape[1])


@gluon.jit
def _decoded(stored, scale, CHUNKS: gl.constexpr, FORM: gl.constexpr, NAN_255: gl.constexpr):  # [BLOCK_OUT, VALUES]
    """Return one step's weight in bfloat16, bitwise as by `dequantize`. The columns have the order of `_mma_order`."""
    BLOCK_OUT: gl.constexpr = stored.shape[0]
    VALUES: gl.constexpr = values_per_64_bytes(FORM) * CHUNKS
    if FORM == "mxfp4":
        low, high = _decode_mxfp4(stored, scale, NAN_255)
        # `low` holds pairs 0 and 1 of each word, and `high` holds pairs 2 and 3. The last five axes are thread, word,
        # pair in `low` or `high`, value in the pair, and choice of `low` or `high`.
        value = gl.join(low, high).reshape(BLOCK_OUT, CHUNKS, 4, 4, 2, 2, 2).permute(0, 1, 3, 6, 4, 2, 5)
    else:
        value = _decode_fp8(stored.to(gl.uint8, bitcast=True), scale)
        value = value.reshape(BLOCK_OUT, CHUNKS, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return value.reshape(BLOCK_OUT, VALUES)


@gluon.constexpr_function
def _mxfp4_assembly(nan_255):
    """Return assembly that multiplies the 32 values in $16 to $19 by the e8m0 scale in $20's low byte. The bfloat16
    products are written to $0 to $15.

    Values j and j + 4 of a 4-byte word are 16 bits apart and are decoded as a pair. A multiplication by a sum of two
    powers of two shifts the fields of both values to their bfloat16 positions. Exponents become the lowest exponent
    bits, and fractions become the highest fraction bit. The result is the value times 2 ** -126. The code then
    multiplies the result by 2 ** (s - 1), where s is the byte of the scale. If s > 128, bfloat16 cannot hold this
    factor, and the code multiplies by two factors in turn.
    """
    power = "shl.b32 f, f, 7; prmt.b32 f, f, f, 0x1010;"
    lines = [f"and.b32 e, $20, 255; add.u32 f, e, 126; min.u32 f, f, 254; {power}"]
    decode = "and.b32 s, {0}, {1}; mul.lo.u32 s, s, {2}; and.b32 s, s, 0x81c081c0; mul.rn.bf16x2 ${3}, s, f;"
    for word in range(4):
        stored = f"${16 + word}"
        lines += [
            f"shr.u32 t, {stored}, 8;",
            decode.format(stored, "0x000f000f", 0x1040, 2 * word),
            decode.format(stored, "0x00f000f0", 0x0104, 2 * word + 1),
            decode.format("t", "0x000f000f", 0x1040, 2 * word + 8),
            decode.format("t", "0x00f000f0", 0x0104, 2 * word + 9),
        ]
    not_a_number = "setp.eq.u32 p, e, 255; @p mov.b32 f, 0x7fc07fc0;" if nan_255 else ""
    again = "".join(f"mul.rn.bf16x2 ${i}, ${i}, f;" for i in range(16))
    lines.append(f"setp.le.u32 p, e, 128; @p bra DONE; sub.u32 f, e, 1; {power} {not_a_number} {again} DONE:")
    return "{ .reg .pred p; .reg .b32 e, f, s, t; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _fp8_assembly():
    """Return assembly that multiplies the 4 e4m3 values in $2 by the scale in $3 and writes bfloat16 to $0 and $1."""
    half = "mov.b32 {{a, b}}, x; cvt.f32.f16 p, a; cvt.f32.f16 q, b; mul.rn.f32 p, p, $3; mul.rn.f32 q, q, $3; "
    half = "cvt.rn.f16x2.e4m3x2 x, {0}; " + half + "cvt.rn.bf16x2.f32 {1}, q, p; "
    declared = "{ .reg .b16 a, b, c, d; .reg .b32 x; .reg .f32 p, q; mov.b32 {c, d}, $2; "
    return declared + half.format("c", "$0") + half.format("d", "$1") + "}"


_MXFP4_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))


@gluon.jit
def _decode_mxfp4(stored, exponents, NAN_255: gl.constexpr):
    """Return the decoded pairs of values j and j + 4 of each word, in two tensors. The first tensor holds j = 0 and 1,
    the second tensor j = 2 and 3. `exponents` holds the e8m0 scale of each byte."""
    assembly: gl.constexpr = _mxfp4_assembly(NAN_255)
    return gl.inline_asm_elementwise(
        assembly,
        _MXFP4_CONSTRAINTS,
        [stored, exponents],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=16,
    )


@gluon.jit
def _decode_fp8(stored, scale):
    assembly: gl.constexpr = _fp8_assembly()
    return gl.inline_asm_elementwise(
        assembly, "=r,=r,r,f,f,f,f", [stored, scale], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def _load_scales(ptr, row, exists, step, IN: gl.constexpr, CHUNKS: gl.constexpr, FORM: gl.constexpr):
    """Load a step's scales. MXFP4 has one scale per 16 stored bytes: [BLOCK_OUT, 4 * CHUNKS]. FP8 has one float32 scale
    per row in a step: [BLOCK_OUT]. `ptr` points to the first scale of the group's matrix."""
    if FORM == "mxfp4":
        layout: gl.constexpr = _by_16_bytes_layout(row.shape[0], CHUNKS, gl.num_warps())
        column = step * (4 * CHUNKS) + gl.arange(0, 4 * CHUNKS, layout=gl.SliceLayout(0, layout))
        pointers = ptr + row[:, None] * (IN // 32) + column[None, :]
        return gl.load(
            pointers, mask=exists[:, None] & (column < IN // 32)[None, :], other=0, eviction_policy="evict_last"
        )
    else:
        pointers = ptr + row // 128 * ((IN + 127) // 128) + step * CHUNKS // 2
        return gl.load(pointers, mask=exists, other=0.0).to(gl.float32)


@gluon.jit
def _scales_of_stored(scales, layout: gl.constexpr, BLOCK_OUT: gl.constexpr, CHUNKS: gl.constexpr, FORM: gl.constexpr):
    """Return the scale of each stored byte [BLOCK_OUT, 64 * CHUNKS]."""
    if FORM == "mxfp4":
        spread = scales.expand_dims(2).broadcast_to(BLOCK_OUT, 4 * CHUNKS, 16).reshape(BLOCK_OUT, 64 * CHUNKS)
        return gl.convert_layout(spread, layout, assert_trivial=True)
    else:
        return scales.expand_dims(1).broadcast_to(BLOCK_OUT, 64 * CHUNKS)


@gluon.jit
def _load_rows(pointers, row_mask, step, IN: gl.constexpr, layout: gl.constexpr):
    """Load one step's VALUES values of each row: [ROWS, VALUES]. Values past IN or past the last row are zeros."""
    VALUES: gl.constexpr = pointers.shape[1]
    k = step * VALUES + gl.arange(0, VALUES, layout=gl.SliceLayout(0, layout))
    return gl.load(pointers + step * VALUES, mask=row_mask[:, None] & (k < IN)[None, :], other=0.0)


@gluon.jit
def _load_stored(w_desc, ring, full, group, first, step, pred, STAGES: gl.constexpr):
    """Start to copy one step's weight bytes to shared memory. `step` is (number of earlier copies, step along IN)."""
    slot = step[0] % STAGES
    mbarrier.expect(full.index(slot), w_desc.block_type.nbytes, pred=pred)
    column = step[1] * w_desc.block_type.shape[-1]
    tma_load(w_desc, [group, first, column], full.index(slot), ring.index(slot), pred=pred)


@gluon.jit(do_not_specialize=["x_stride", "bias_stride", "out_stride"])
def streaming_kernel(
    x_ptr,  # [R, IN], or [T, IN] with row_to_token
    x_stride,  # a multiple of 8
    row_to_token_ptr,  # [R], or None
    w_desc,  # [G, OUT, bytes of a row]
    scales_ptr,
    bias_ptr,  # [G, OUT], or None
    bias_stride,
    out_ptr,  # [R, OUT]
    out_stride,
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    G,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    FORM: gl.constexpr,  # format of the weight: "fp8" or "mxfp4"
    NAN_255: gl.constexpr,  # whether the e8m0 scale 255 is NaN
    TILE_ROWS: gl.constexpr,  # maximum number of rows of a tile in the tile table
    BLOCK_OUT: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,  # number of 64-byte chunks that a step reads from each row of the weight
    STAGES: gl.constexpr,
):
    """One program writes BLOCK_OUT columns of x @ w[g].T + bias[g] for one tile of the table, ROWS rows at a time.
    Grid: (capacity * cdiv(OUT, BLOCK_OUT),)."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    VALUES: gl.constexpr = values_per_64_bytes(FORM) * CHUNKS
    STEPS: gl.constexpr = (IN + VALUES - 1) // VALUES
    COLUMN_TILES: gl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    stored_layout: gl.constexpr = _stored_layout(BLOCK_OUT, CHUNKS, NUM_WARPS)
    rows_layout: gl.constexpr = _rows_layout(ROWS, VALUES // CHUNKS, CHUNKS, NUM_WARPS)
    scale_layout: gl.constexpr = stored_layout if FORM != "mxfp4" else _by_16_bytes_layout(BLOCK_OUT, CHUNKS, NUM_WARPS)
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma_layout, 2)
    right_layout: gl.constexpr = gl.DotOperandLayout(1, mma_layout, 2)

    tile = gl.program_id(0) // COLUMN_TILES
    first = gl.program_id(0) % COLUMN_TILES * BLOCK_OUT
    if tile >= gl.load(num_tiles_ptr):
        return
    group = gl.load(tiles_ptr + 2 * tile)
    start = gl.load(bounds_ptr + group) + gl.load(tiles_ptr + 2 * tile + 1) * TILE_ROWS
    end = gl.minimum(gl.load(bounds_ptr + group + 1), start + TILE_ROWS)
    # `has_weight` is always true. Without this condition, ptxas spills 8 bytes of the MXFP4 kernel.
    has_weight = group < G
    num_steps = gl.where(has_weight, STEPS, 0)
    read_end = gl.where(has_weight, end, start)
    total_steps = (end - start + ROWS - 1) // ROWS * num_steps

    ring = buffers(w_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for stage in gl.static_range(STAGES - 1):
        _load_stored(w_desc, ring, full, group, first, (stage, stage % STEPS), stage < total_steps, STAGES)

    weight_row = first + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, scale_layout))
    exists = weight_row < OUT
    wide_group = group.to(gl.int64)
    if FORM == "mxfp4":
        scales_ptr += wide_group * (OUT * (IN // 32))
    else:
        scales_ptr += wide_group * (((OUT + 127) // 128) * ((IN + 127) // 128))
    k = gl.arange(0, VALUES, layout=gl.SliceLayout(0, rows_layout))
    x_stride = x_stride.to(gl.int64) // 8 * 8  # the rounding tells the compiler that rows are aligned to 16 bytes
    position = 0
    for first_row in range(start, end, ROWS):
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, rows_layout))
        token = row
        if row_to_token_ptr is not None:
            token = gl.load(row_to_token_ptr + row, mask=row < read_end, other=0)
        pointers = x_ptr + token.to(gl.int64)[:, None] * x_stride + k[None, :]
        product = gl.zeros([BLOCK_OUT, ROWS], gl.float32, layout=mma_layout)
        scales = _load_scales(scales_ptr, weight_row, exists, 0, IN, CHUNKS, FORM)
        for step in range(num_steps):
            slot = position % STAGES
            mbarrier.wait(full.index(slot), position // STAGES & 1)
            stored = ring.index(slot).reshape([BLOCK_OUT, 64 * CHUNKS]).load(stored_layout)
            # After the barrier, all warps have read the previous step's slot, and the next copy may overwrite the slot.
            barrier()
            ahead = position + (STAGES - 1)
            _load_stored(w_desc, ring, full, group, first, (ahead, ahead % STEPS), ahead < total_steps, STAGES)
            # Rows and scales are loaded after the copy has started, because the copy waits for all earlier loads.
            # Decoding hides the latency of the rows, but needs scales at once. Scales are thus loaded one step ahead.
            rows = _load_rows(pointers, row < read_end, step, IN, rows_layout)
            next_scales = _load_scales(scales_ptr, weight_row, exists, step + 1, IN, CHUNKS, FORM)
            spread = _scales_of_stored(scales, stored_layout, BLOCK_OUT, CHUNKS, FORM)
            weight = _decoded(stored, spread, CHUNKS, FORM, NAN_255)
            left = gl.convert_layout(weight, left_layout)
            right = gl.convert_layout(_mma_order(rows, CHUNKS, FORM).permute(1, 0), right_layout)
            product = mma_v2(left, right, product)
            scales = next_scales
            position += 1
        column = first + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, mma_layout))
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + wide_group * bias_stride + column
            product += gl.load(bias_ptrs, mask=column < OUT, other=0.0).to(gl.float32)[:, None]
        out_row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, mma_layout))
        out_ptrs = out_ptr + out_row.to(gl.int64)[None, :] * out_stride + column[:, None]
        value = product.to(out_ptr.dtype.element_ty)
        gl.store(out_ptrs, value, mask=(out_row < end)[None, :] & (column < OUT)[:, None])
