"""Conversion between token order and expert order: `permute` copies tokens to rows, `combine` sums a token's rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import reference
from ..runtime.checks import can_be_read, check_dtype, check_same_device, check_shapes
from ..runtime.dispatch import choose
from ..runtime.launch import launch_kernel
from ..runtime.registered_ops import registered_op
from ..runtime.row_layout import alignment
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from ..types import Permutation


def permute(
    tokens: Tensor,  # [T, D]
    permutation: Permutation,
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, D] expert order
    """Copy each slot's token to the slot's row. Padding rows (rows without a slot) are zeros.

    Differentiable: the gradient of a token is the sum of its rows' gradients. The gradient of padding rows is ignored.

    Shapes: tokens [T, D]; result [R, D].

    Raises:
        ValueError: a shape disagrees with the signature, or tensors are on several devices.
    """
    check_shapes("permute", tokens=(tokens, "T D"), slot_to_row=(permutation.slot_to_row, "T K"))
    check_same_device("permute", tokens=tokens, permutation=permutation.row_to_token)
    if choose("permute", implementation, tokens) == "reference":
        return reference.permute(tokens, permutation)
    return _permute_op(tokens, permutation.row_to_token.contiguous(), permutation.slot_to_row)


def combine(
    rows: Tensor,  # [R, D] expert order
    topk_weights: Tensor | None,  # [T, K] float32; None sums unweighted
    slot_to_row: Tensor,  # [T, K] int32
    *,
    implementation: str | None = None,
) -> Tensor:  # [T, D] token order
    """Sum each token's K expert outputs times their routing weights. Dropped slots and padding rows add nothing.

    Accumulates in float32 and rounds once, to `rows.dtype`. Deterministic. Differentiable in `rows` and `topk_weights`.

    Shapes: rows [R, D], topk_weights [T, K] float32, slot_to_row [T, K] int32; result [T, D].

    Args:
        slot_to_row: contains each row index at most once, and -1 for dropped slots. Row indices are checked only on the
            CPU, because on a GPU a check would need a host synchronisation.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, or a row index on the CPU is R or more.
    """
    operands = {"rows": (rows, "R D"), "slot_to_row": (slot_to_row, "T K")}
    if topk_weights is not None:
        operands["topk_weights"] = (topk_weights, "T K")
        check_dtype("combine", "topk_weights", topk_weights, torch.float32, torch.float64)
    check_shapes("combine", **operands)
    check_dtype("combine", "slot_to_row", slot_to_row, torch.int32)
    check_same_device("combine", **{name: tensor for name, (tensor, _) in operands.items()})
    if can_be_read(slot_to_row) and (slot_to_row >= len(rows)).any():
        raise ValueError(f"combine: slot_to_row must be below R={len(rows)}, got {int(slot_to_row.max())}")
    if choose("combine", implementation, rows) == "reference":
        return reference.combine(rows, topk_weights, slot_to_row)
    return _combine_op(rows, None if topk_weights is None else topk_weights.float(), slot_to_row)


@registered_op("permute")
def _permute_op(tokens: Tensor, row_to_token: Tensor, slot_to_row: Tensor) -> Tensor:
    num_rows, d_model = row_to_token.shape[0], tokens.shape[1]
    rows = tokens.new_empty(num_rows, d_model)
    slot_to_row = slot_to_row.contiguous()
    launch_permute(tokens, None, slot_to_row, rows)
    if rows.numel():
        top_k = slot_to_row.shape[1]
        launch_kernel(
            _zero_padding_kernel,
            (cdiv(num_rows, _PADDING_ROWS),),
            row_to_token,
            slot_to_row,
            rows,
            num_rows,
            d_model,
            TOP_K=top_k,
            K_P2=next_power_of_2(top_k),
            BLOCK_R=_PADDING_ROWS,
            BLOCK_D=min(next_power_of_2(d_model), 128),
        )
    return rows


@_permute_op.register_fake
def _(tokens, row_to_token, slot_to_row):
    return tokens.new_empty(row_to_token.shape[0], tokens.shape[1])


def _permute_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx, drows):
    (slot_to_row,) = ctx.saved_tensors
    return _combine_op(drows, None, slot_to_row), None, None


_permute_op.register_autograd(_permute_backward, setup_context=_permute_setup)


_TILE_BYTES = 2**17  # size in bytes of a tile that a program of 32 warps, alone on its SM, holds in registers
_FEWEST_TILES = 128  # with fewer tiles of _TILE_BYTES, SMs would be idle; each program then takes one token


def _permute_block(tokens: Tensor, weighted: bool) -> tuple[int, int, int]:
    """Return (tokens per program, columns per program, warps). Memory writes are fastest when no reads run at the same
    time. With many tokens and no weights, a program therefore reads a whole tile before writing the tile's rows."""
    num_tokens, d_model = tokens.shape
    block_d = min(next_power_of_2(d_model), 4096)
    block_t = _TILE_BYTES // (block_d * tokens.element_size())
    if weighted or num_tokens < _FEWEST_TILES * block_t:
        return 1, min(block_d, 2048), 4
    return block_t, block_d, 32


def launch_permute(tokens: Tensor, topk_weights: Tensor | None, slot_to_row: Tensor, rows: Tensor) -> None:
    """Write each token to its rows, times the slots' `topk_weights` if given. Padding rows are not written."""
    num_tokens, top_k = slot_to_row.shape
    d_model = tokens.shape[1]
    if rows.numel():
        block_t, block_d, num_warps = _permute_block(tokens, topk_weights is not None)
        launch_kernel(
            _permute_kernel,
            (cdiv(num_tokens, block_t), cdiv(d_model, block_d)),
            tokens,
            tokens.stride(),
            None if topk_weights is None else topk_weights.contiguous(),
            slot_to_row.contiguous(),
            rows,
            rows.stride(),
            num_tokens,
            d_model,
            TOP_K=top_k,
            ALIGNED=alignment(d_model, tokens.stride(0), rows.stride(0)),
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _permute_kernel(
    tokens_ptr,
    tokens_strides,  # [T, D]
    weights_ptr,  # [T, K] contiguous, or None
    slot_to_row_ptr,  # [T, K] contiguous
    rows_ptr,
    rows_strides,  # [R, D]
    num_tokens,
    D,
    TOP_K: tl.constexpr,
    ALIGNED: tl.constexpr,  # common divisor of D and the row strides of both tensors
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program copies a tile of tokens to their rows, times the slots' weights if `weights_ptr` is given. Grid:
    (cdiv(T, BLOCK_T), cdiv(D, BLOCK_D))."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    D = D // ALIGNED * ALIGNED
    rows_stride = rows_strides[0] // ALIGNED * ALIGNED
    pointer = tokens_ptr + t[:, None] * (tokens_strides[0] // ALIGNED * ALIGNED) + d[None, :] * tokens_strides[1]
    token = tl.load(pointer, mask=(t < num_tokens)[:, None] & (d < D)[None, :], other=0.0)  # [BLOCK_T, BLOCK_D]
    for k in range(TOP_K):
        slot = t * TOP_K + k
        row = tl.load(slot_to_row_ptr + slot, mask=t < num_tokens, other=-1).to(tl.int64)
        value = token
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + slot, mask=t < num_tokens, other=0.0)
            value = (token.to(tl.float32) * weight[:, None]).to(token.dtype)
        out = rows_ptr + row[:, None] * rows_stride + d[None, :] * rows_strides[1]
        tl.store(out, value, mask=(row >= 0)[:, None] & (d < D)[None, :])


_PADDING_ROWS = 16  # number of rows per program of the kernel that sets padding rows to zero


@triton.jit(do_not_specialize=["num_rows"])
def _zero_padding_kernel(
    row_to_token_ptr,  # [R] contiguous
    slot_to_row_ptr,  # [T, K] contiguous
    rows_ptr,  # [R, D] contiguous
    num_rows,
    D,
    TOP_K: tl.constexpr,
    K_P2: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program writes zeros to the padding rows among BLOCK_R rows. Grid: (cdiv(R, BLOCK_R),)."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, K_P2)
    exists = r < num_rows
    token = tl.load(row_to_token_ptr + r, mask=exists, other=0).to(tl.int64)
    slot = token[:, None] * TOP_K + k[None, :]
    row = tl.load(slot_to_row_ptr + slot, mask=exists[:, None] & (k < TOP_K)[None, :], other=-1)  # [BLOCK_R, K_P2]
    is_owned = tl.max((row == r[:, None]).to(tl.int32), 1) != 0
    is_padding = (exists & (is_owned == 0)).to(tl.int32)
    if tl.max(is_padding, 0) != 0:
        zeros = tl.zeros((BLOCK_R, BLOCK_D), rows_ptr.dtype.element_ty)
        for first in range(0, D, BLOCK_D):
            d = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
            mask = (is_padding != 0)[:, None] & (d < D)[None, :]
            tl.store(rows_ptr + r[:, None] * D + d[None, :], zeros, mask=mask)


def launch_combine(
    rows: Tensor,  # [R, D]
    topk_weights: Tensor | None,  # [T, K]
    slot_to_row: Tensor,  # [T, K]
) -> Tensor:  # [T, D]
    """Return the weighted sum of each token's rows. The arguments are already checked."""
    num_tokens, top_k = slot_to_row.shape
    d_model = rows.shape[1]
    out = rows.new_empty(num_tokens, d_model)
    if out.numel():
        block_d = combine_block(d_model)
        launch_kernel(
            _combine_kernel,
            (num_tokens, cdiv(d_model, block_d)),
            rows,
            rows.stride(),
            None if topk_weights is None else topk_weights.contiguous(),
            slot_to_row.contiguous(),
            out,
            d_model,
            TOP_K=top_k,
            ALIGNED=alignment(d_model, rows.stride(0)),
            BLOCK_D=block_d,
            SKIP=rows.shape[0] < slot_to_row.numel(),
            num_warps=max(1, block_d // 256),  # a thread takes 8 columns: 16 bytes of a 16-bit dtype
        )
    return out


@functools.lru_cache
def combine_block(d_model: int) -> int:
    """Return the number of columns per program: the largest power of two that divides `d_model`, so that no thread
    idles. If this power is below 512, return `d_model` rounded up to a power of two. The maximum is 2048."""
    divisor = d_model & -d_model  # the largest power of two that divides d_model
    return min(divisor if divisor >= 512 else next_power_of_2(d_model), 2048)


_combine_op = registered_op("combine")(launch_combine)


@_combine_op.register_fake
def _(rows, topk_weights, slot_to_row):
    return rows.new_empty(slot_to_row.shape[0], rows.shape[1])


def _combine_setup(ctx, inputs, output):
    rows, topk_weights, slot_to_row = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, topk_weights, slot_to_row)


def _combine_backward(ctx, dout):
    rows, topk_weights, slot_to_row = ctx.saved_tensors
    needs_rows, needs_weights, *_ = ctx.needs_input_grad
    drows = _combine_drows_op(dout, topk_weights, slot_to_row, ctx.num_rows) if needs_rows else None
    dweights = _combine_dweights_op(dout, rows, slot_to_row) if needs_weights else None
    return drows, dweights, None


_combine_op.register_autograd(_combine_backward, setup_context=_combine_setup)


@triton.jit
def _combine_kernel(
    rows_ptr,
    rows_strides,  # [R, D]
    weights_ptr,  # [T, K] contiguous, or None
    slot_to_row_ptr,  # [T, K] contiguous
    out_ptr,  # [T, D] contiguous
    D,
    TOP_K: tl.constexpr,
    ALIGNED: tl.constexpr,  # common divisor of D and the row stride
    BLOCK_D: tl.constexpr,
    SKIP: tl.constexpr,  # whether to branch around dropped slots; True if there are fewer rows than slots
):
    """One program writes out[t, d:d + BLOCK_D], the weighted sum of the token's rows. Grid: (T, cdiv(D, BLOCK_D))."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    D = D // ALIGNED * ALIGNED
    strides = (rows_strides[0] // ALIGNED * ALIGNED, rows_strides[1])
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(TOP_K):
        row = tl.load(slot_to_row_ptr + t * TOP_K + k).to(tl.int64)
        if SKIP:
            if row >= 0:
                total += _weighted_row(rows_ptr, strides, weights_ptr, row, t * TOP_K + k, d, D)
        else:
            total += _weighted_row(rows_ptr, strides, weights_ptr, row, t * TOP_K + k, d, D)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _weighted_row(rows_ptr, rows_strides, weights_ptr, row, slot, d, D):
    """Return columns d of `row` in float32, times the slot's weight if `weights_ptr` is given, or zeros if row < 0."""
    pointer = rows_ptr + row * rows_strides[0] + d.to(tl.int64) * rows_strides[1]
    kept = tl.where(row >= 0, D, 0)
    value = tl.load(pointer, mask=d < kept, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        value = tl.where(d < kept, value * tl.load(weights_ptr + slot), 0.0)
    return value


@registered_op("combine_drows")
def _combine_drows_op(dout: Tensor, topk_weights: Tensor | None, slot_to_row: Tensor, num_rows: int) -> Tensor:
    drows = dout.new_zeros(num_rows, dout.shape[1])  # padding rows keep the zeros
    launch_permute(dout, topk_weights, slot_to_row, drows)
    return drows


@_combine_drows_op.register_fake
def _(dout, topk_weights, slot_to_row, num_rows):
    return dout.new_empty(num_rows, dout.shape[1])


def launch_slot_products(dout: Tensor, rows: Tensor, slot_to_row: Tensor) -> Tensor:  # [T, K] float32
    """Return for each slot the inner product of its token in `dout` and its row in `rows`, or 0 for a dropped slot."""
    num_tokens, top_k = slot_to_row.shape
    dweights = dout.new_empty(num_tokens, top_k, dtype=torch.float32)
    if dweights.numel():
        d_model = dout.shape[1]
        launch_kernel(
            _combine_dweights_kernel,
            (num_tokens, top_k),
            dout,
            dout.stride(),
            rows,
            rows.stride(),
            slot_to_row.contiguous(),
            dweights,
            d_model,
            TOP_K=top_k,
            BLOCK_D=min(next_power_of_2(max(d_model, 1)), 1024),
        )
    return dweights


_combine_dweights_op = registered_op("combine_dweights")(launch_slot_products)


@_combine_dweights_op.register_fake
def _(dout, rows, slot_to_row):
    return dout.new_empty(slot_to_row.shape, dtype=torch.float32)


@triton.jit
def _combine_dweights_kernel(
    dout_ptr,
    dout_strides,  # [T, D]
    rows_ptr,
    rows_strides,  # [R, D]
    slot_to_row_ptr,  # [T, K] contiguous
    dweights_ptr,  # [T, K] contiguous
    D,
    TOP_K,
    BLOCK_D: tl.constexpr,
):
    """One program writes dweights[t, k], the inner product of dout[t] and the slot's row. Grid: (T, K)."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    row = tl.load(slot_to_row_ptr + t * TOP_K + k).to(tl.int64)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask = d < tl.where(row >= 0, D, 0)
        dout = tl.load(dout_ptr + t * dout_strides[0] + d * dout_strides[1], mask=mask, other=0.0)
        value = tl.load(rows_ptr + row * rows_strides[0] + d * rows_strides[1], mask=mask, other=0.0)
        total += dout.to(tl.float32) * value.to(tl.float32)
    tl.store(dweights_ptr + t * TOP_K + k, tl.sum(total, 0))
