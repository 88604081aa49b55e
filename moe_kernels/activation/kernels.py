"""Kernels that apply activations to rows, forward and backward."""

from __future__ import annotations

from ..quantization.fp8_device import quantize_tile, store_scales
from ..runtime.triton import tl, triton


@triton.jit(do_not_specialize=["num_rows"])
def activation_kernel(
    preactivation_ptr,
    preactivation_strides,  # [R, 2F], or [R, F] if not GATED
    bias_ptr,  # [E, 2F or F] contiguous, or None
    row_to_expert_ptr,  # [R]; read only if bias_ptr is given
    out_ptr,  # [R, F]; if scales_ptr is given, contiguous bytes of e4m3
    out_stride,  # distance between rows
    scales_ptr,  # [cdiv(F, 128), R] contiguous, or None
    num_rows,
    F,
    limit,
    alpha,
    FORWARD: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr,  # common divisor of F and the row strides of preactivation and out
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes a tile of activation(preactivation + bias). Grid: (cdiv(R, BLOCK_R), cdiv(F, BLOCK_F)). If
    `scales_ptr` is given, the activation is rounded to the dtype of the preactivation, then quantised."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    first = tl.program_id(1).to(tl.int64) * BLOCK_F
    is_row = r < num_rows
    F = F // ALIGNED * ALIGNED
    pointer = preactivation_ptr + r * (preactivation_strides[0] // ALIGNED * ALIGNED)
    gate, up = _load_pair(pointer, preactivation_strides[1], is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
    if bias_ptr is not None:
        expert = tl.load(row_to_expert_ptr + r, mask=is_row, other=0).to(tl.int64)  # [BLOCK_R, 1]
        gate, up = _add_bias(gate, up, bias_ptr, expert, is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
    f = first + tl.arange(0, BLOCK_F)[None, :]
    value = FORWARD(gate, up, limit, alpha)
    if scales_ptr is None:
        out_ptr += r * (out_stride // ALIGNED * ALIGNED) + f
        tl.store(out_ptr, value.to(out_ptr.dtype.element_ty), mask=is_row & (f < F))
    else:
        value = value.to(preactivation_ptr.dtype.element_ty)
        _store_scaled(out_ptr, scales_ptr, value, r, is_row, first, F, F, 0, num_rows, BLOCK_F)


@triton.jit(do_not_specialize=["num_rows"])
def activation_backward_kernel(
    preactivation_ptr,
    preactivation_strides,  # [R, 2F], or [R, F] if not GATED
    dactivated_ptr,
    dactivated_strides,  # [R, F]
    dpreactivation_ptr,  # [R, 2F or F] contiguous
    num_rows,
    F,
    limit,
    alpha,
    BACKWARD: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes the gate and up gradients of a tile. Grid: (cdiv(R, BLOCK_R), cdiv(F, BLOCK_F))."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    first = tl.program_id(1).to(tl.int64) * BLOCK_F
    f = first + tl.arange(0, BLOCK_F)[None, :]
    is_row = r < num_rows
    pointer = preactivation_ptr + r * preactivation_strides[0]
    gate, up = _load_pair(pointer, preactivation_strides[1], is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
    dactivated_ptr += r * dactivated_strides[0] + f * dactivated_strides[1]
    dactivated = tl.load(dactivated_ptr, mask=is_row & (f < F), other=0.0).to(tl.float32)
    _, dgate, dup = BACKWARD(gate, up, dactivated, limit, alpha)
    out = dpreactivation_ptr + r * (F * (2 if GATED else 1))
    _store_pair(out, dgate, dup, is_row, first, F, GATED, INTERLEAVED, BLOCK_F)


@triton.jit(do_not_specialize=["num_rows", "num_items"])
def weighted_activation_backward_kernel(
    preactivation_ptr,  # [R, 2F], or [R, F] if not GATED
    preactivation_stride,  # distance between rows, like all strides here
    bias_ptr,  # [E, 2F or F] contiguous, or None
    row_to_expert_ptr,  # [R]; read only if bias_ptr is given
    dweighted_ptr,  # [R, F]
    dweighted_stride,
    weights_ptr,  # [T * K]
    slot_to_row_ptr,  # [T * K]
    row_to_token_ptr,  # [R]; None: programs handle slots instead of rows
    dpreactivation_ptr,  # [R, 2F or F]; [S, 2F or F] if destination_ptr is given
    dpreactivation_stride,
    weighted_ptr,  # receives A_w: [R, F], equal to dweighted_ptr; [S, F] if destination_ptr is given
    weighted_stride,
    destination_ptr,  # [T * K], in [0, S): each slot's row in dpreactivation and weighted; None: the row in slot_to_row
    dweights_ptr,  # [T * K]; initialised to zeros if programs handle rows
    scaled_ptr,  # [R, 2F or F]: e4m3 bytes of dpreactivation, or None (then scales_ptr and num_rows are None, too)
    scales_ptr,  # [cdiv(2F or F, 128), R] contiguous
    num_rows,  # R
    num_items,  # number of slots, or number of rows if programs handle rows
    F,
    limit,
    alpha,
    BACKWARD: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,  # None if programs handle slots
    ALIGNED: tl.constexpr,  # common divisor of F and the row strides
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program writes dH, A_w and dw of BLOCK_S slots or rows. `launch_weighted_activation_backward` defines these
    results. Grid: (cdiv(num_items, BLOCK_S),)."""
    item = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    if row_to_token_ptr is None:
        slot, is_kept = item, item < num_items
        row = tl.load(slot_to_row_ptr + slot, mask=is_kept, other=-1).to(tl.int64)[:, None]
    else:
        first = tl.load(row_to_token_ptr + item, mask=item < num_items, other=0).to(tl.int64) * TOP_K
        slot = tl.full((BLOCK_S,), -1, tl.int64)
        for k in tl.static_range(TOP_K):
            slot = tl.where(tl.load(slot_to_row_ptr + first + k) == item, first + k, slot)
        is_kept = (slot >= 0) & (item < num_items)
        row = tl.where(is_kept, item, -1)[:, None]
    weight = tl.load(weights_ptr + slot, mask=is_kept, other=0.0)
    dtype: tl.constexpr = dweighted_ptr.dtype.element_ty
    products = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)  # [BLOCK_S, BLOCK_F]
    if bias_ptr is not None:
        expert = tl.load(row_to_expert_ptr + row, mask=row >= 0, other=0).to(tl.int64)  # [BLOCK_S, 1]
    out_row = row
    if destination_ptr is not None:
        out_row = tl.load(destination_ptr + slot, mask=is_kept, other=-1).to(tl.int64)[:, None]
    F = F // ALIGNED * ALIGNED
    width = F * (2 if GATED else 1)
    preactivation_ptr += row * (preactivation_stride // ALIGNED * ALIGNED)
    dweighted_ptr += row * (dweighted_stride // ALIGNED * ALIGNED)
    dpreactivation_ptr += out_row * (dpreactivation_stride // ALIGNED * ALIGNED)
    weighted_ptr += out_row * (weighted_stride // ALIGNED * ALIGNED)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)[None, :]
        is_row = row >= 0
        gate, up = _load_pair(preactivation_ptr, 1, is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
        if bias_ptr is not None:
            gate, up = _add_bias(gate, up, bias_ptr, expert, is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
        dweighted = tl.load(dweighted_ptr + f, mask=is_row & (f < F), other=0.0).to(tl.float32)
        activated, dgate, dup = BACKWARD(gate, up, weight[:, None] * dweighted, limit, alpha)
        products += dweighted * activated
        is_row = is_row & (out_row >= 0)
        tl.store(weighted_ptr + f, (weight[:, None] * activated).to(dtype), mask=is_row & (f < F))
        _store_pair(dpreactivation_ptr, dgate, dup, is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
        if scaled_ptr is not None:
            dgate = dgate.to(dtype)
            _store_scaled(scaled_ptr, scales_ptr, dgate, out_row, is_row, first, F, width, 0, num_rows, BLOCK_F)
            if GATED:
                dup = dup.to(dtype)
                _store_scaled(scaled_ptr, scales_ptr, dup, out_row, is_row, first, F, width, F, num_rows, BLOCK_F)
    tl.store(dweights_ptr + slot, tl.sum(products, 1), mask=is_kept)


@triton.jit
def _load_pair(
    pointer,  # [BLOCK_R, 1]: column 0 of each row
    stride,  # distance between columns
    is_row,  # [BLOCK_R, 1]
    first,
    F,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Return gate columns and up columns [first, first + BLOCK_F) in float32. If not GATED, return the gate columns
    twice. Interleaved columns are loaded in memory order and separated in registers."""
    if INTERLEAVED:
        c = 2 * first + tl.arange(0, 2 * BLOCK_F)[None, :]
        pairs = tl.load(pointer + c * stride, mask=is_row & (c < 2 * F), other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (pairs.shape[0], BLOCK_F, 2)))
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    else:
        f = first + tl.arange(0, BLOCK_F)[None, :]
        gate = tl.load(pointer + f * stride, mask=is_row & (f < F), other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(pointer + (F + f) * stride, mask=is_row & (f < F), other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _store_pair(
    pointer,  # [BLOCK_R, 1]: column 0 of each row; the column stride is 1
    gate,  # [BLOCK_R, BLOCK_F] float32
    up,
    is_row,  # [BLOCK_R, 1]
    first,
    F,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Write gate and up columns: alternating if INTERLEAVED, else all gate columns first. If not GATED, skip `up`."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    if INTERLEAVED:
        c = 2 * first + tl.arange(0, 2 * BLOCK_F)[None, :]
        pairs = tl.reshape(tl.join(gate.to(dtype), up.to(dtype)), (gate.shape[0], 2 * BLOCK_F))
        tl.store(pointer + c, pairs, mask=is_row & (c < 2 * F))
    else:
        f = first + tl.arange(0, BLOCK_F)[None, :]
        tl.store(pointer + f, gate.to(dtype), mask=is_row & (f < F))
        if GATED:
            tl.store(pointer + F + f, up.to(dtype), mask=is_row & (f < F))


@triton.jit
def _store_scaled(
    values_ptr,  # [R, width] contiguous, e4m3 bytes
    scales_ptr,  # [cdiv(width, 128), R] contiguous
    values,  # [BLOCK_R, BLOCK_F], rounded to the dtype of the preactivation
    row,  # [BLOCK_R, 1]
    is_row,  # [BLOCK_R, 1]
    first,  # column of the first value, counted from `place`
    size,  # F: number of gate columns or of up columns
    width,
    place,  # column of `values_ptr` at which the gate or up columns begin, a multiple of 128
    num_rows,
    BLOCK_F: tl.constexpr,
):
    """Quantise a tile to e4m3, with a scale for each 128 columns of a row. Write the bytes and scales."""
    f = first + tl.arange(0, BLOCK_F)[None, :]
    inside = tl.where(is_row & (f < size), values.to(tl.float32), 0.0)
    quantised, scales = quantize_tile(inside, BLOCK_F // 128)
    tl.store(values_ptr + row * width + place + f, quantised, mask=is_row & (f < size))
    BLOCK_R: tl.constexpr = values.shape[0]
    rows, are_rows = tl.reshape(row, (BLOCK_R,)), tl.reshape(is_row, (BLOCK_R,))
    block = (place + first) // 128
    store_scales(scales_ptr, 1, num_rows, scales, rows, are_rows, block, place + size, BLOCK_F // 128)


@triton.jit
def _add_bias(
    gate, up, bias_ptr, expert, is_row, first, F, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr
):
    pointer = bias_ptr + expert * (F * (2 if GATED else 1))
    bias_gate, bias_up = _load_pair(pointer, 1, is_row, first, F, GATED, INTERLEAVED, BLOCK_F)
    return gate + bias_gate, up + bias_up
