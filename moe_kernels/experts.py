"""The expert feed-forward of all tokens as one differentiable op that saves the least it can.

Forward:   H = gather(tokens) @ w_up^T      A = activation(H)      Y = A @ w_down^T      out = combine(Y, weights)
Saved:     tokens, H, topk_weights and the routing integers. Not the gathered tokens, not A, not Y.
Backward, with w the routing weight of a row:

    dA' = gather(dout) @ w_down             dw = <dA', A>                    (so no saved Y is needed)
    dA  = w * dA'      A_w = w * A          dH = dA * activation'(H)         (A again from H, elementwise)
    dw_down = gather(dout)^T @ A_w          dX = dH @ w_up                   dw_up = dH^T @ gather(tokens)
    dtokens = sum of a token's rows of dX

The identity for dw is from SonicMoE (https://arxiv.org/abs/2512.14080). A gather happens inside the GEMM that wants its
rows, or as a copy before it, whichever `tuning.choose_copies` says is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import reference, tuning
from ._checks import check_dtype, check_same_device, check_same_dtype, check_shapes
from ._dispatch import choose, registered_op
from .activation import check_activation, launch_activation, launch_weighted_activation_backward
from .catalog import GroupedGemmArguments, WgradArguments
from .permutation import launch_combine, launch_spread
from .reference import Permutation, TileTable


def fused_experts(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    w_up: Tensor,  # [E, 2F, D] gate rows, then up rows
    w_down: Tensor,  # [E, D, F]
    *,
    activation: str = "swiglu",
    implementation: str | None = None,
) -> Tensor:  # [T, D]
    """Each token through its experts, summed with its routing weights.

    Keeps for backward `tokens`, the pre-activations [R, 2F] and the routing; what a frozen operand would need is
    skipped. GEMMs and sums accumulate in float32; rows are stored in the dtype of the tokens. Deterministic, never
    waits for the GPU. Differentiable in `tokens`, `topk_weights`, `w_up` and `w_down`.

    Args:
        permutation: of the same choice of experts as `topk_weights`, from `sort_by_expert`. Dropped slots add nothing.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, or the activation is unknown.
    """
    check_activation("fused_experts", activation)
    sizes = check_shapes(
        "fused_experts",
        tokens=(tokens, "T D"),
        topk_weights=(topk_weights, "T K"),
        slot_to_row=(permutation.slot_to_row, "T K"),
        offsets=(permutation.offsets, "E"),
        w_up=(w_up, "E 2F D"),
        w_down=(w_down, "E D F"),
    )
    if sizes["2F"] != 2 * sizes["F"]:
        raise ValueError(
            f"fused_experts: w_up must be [E, 2F, D] and w_down [E, D, F], "
            f"got {list(w_up.shape)} and {list(w_down.shape)}"
        )
    check_same_dtype("fused_experts", tokens=tokens, w_up=w_up, w_down=w_down)
    check_dtype("fused_experts", "topk_weights", topk_weights, torch.float32, torch.float64)
    check_same_device(
        "fused_experts",
        tokens=tokens,
        topk_weights=topk_weights,
        permutation=permutation.offsets,
        w_up=w_up,
        w_down=w_down,
    )
    if choose("fused_experts", implementation, tokens) == "reference":
        return reference.fused_experts(tokens, topk_weights, permutation, w_up, w_down, activation=activation)
    out, _ = _fused_experts_op(
        tokens,
        topk_weights.float().contiguous(),
        w_up,
        w_down,
        permutation.slot_to_row.contiguous(),
        permutation.row_to_token,
        *permutation.tile_table,
        activation,
    )
    return out


class _Rows(NamedTuple):
    """Where the rows are: the integers of a permutation."""

    slot_to_row: Tensor  # [T, K] contiguous
    row_to_token: Tensor  # [R]
    table: TileTable

    def gemm(self, a: Tensor, b: Tensor, *, gather: bool = False) -> Tensor:  # [R, N]
        """One product per row, its own expert's; `gather` reads the rows of `a` by token."""
        out = a.new_empty(len(self.row_to_token), b.shape[2])
        index = self.row_to_token if gather else None
        args = GroupedGemmArguments(a, b, out, row_to_token=index, tile_table=self.table, zero_tail=False)
        tuning.run(args)
        return out

    def gated_gemm(self, a: Tensor, b: Tensor, activation: str, *, gather: bool) -> tuple[Tensor, Tensor]:
        """(product [R, 2F], its activation [R, F])."""
        num_rows, num_columns = len(self.row_to_token), b.shape[2]
        args = GroupedGemmArguments(
            a,
            b,
            a.new_empty(num_rows, num_columns // 2),
            row_to_token=self.row_to_token if gather else None,
            tile_table=self.table,
            epilogue=activation,
            preactivation=a.new_empty(num_rows, num_columns),
            zero_tail=False,
        )
        if kernel := tuning.find(args):
            kernel.run(args, assume_supported_args=True)
            return args.preactivation, args.out
        preactivation = self.gemm(a, b, gather=gather)
        return preactivation, launch_activation(preactivation, activation)

    def wgrad(self, a: Tensor, dout: Tensor, *, gather_a: bool = False, gather_dout: bool = False) -> Tensor:
        """a.T @ dout of every expert's rows, [E, K, N]."""
        out = a.new_empty(len(self.table.bounds) - 2, a.shape[1], dout.shape[1])
        args = WgradArguments(
            a,
            dout,
            out,
            a_row_to_token=self.row_to_token if gather_a else None,
            dout_row_to_token=self.row_to_token if gather_dout else None,
            tile_table=self.table,
        )
        tuning.run(args)
        return out

    def spread(self, tokens: Tensor) -> Tensor:  # [R, D]
        """Each token copied to its rows."""
        rows = tokens.new_empty(len(self.row_to_token), tokens.shape[1])
        launch_spread(tokens, None, self.slot_to_row, rows)
        return rows

    def collect(self, rows: Tensor, topk_weights: Tensor | None) -> Tensor:  # [T, D]
        """Each token's rows, weighted and summed."""
        return launch_combine(rows, topk_weights, self.slot_to_row)


@registered_op("fused_experts")
def _fused_experts_op(
    tokens: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    slot_to_row: Tensor,
    row_to_token: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    order: Tensor,
    block_rows: int,
    activation: str,
) -> tuple[Tensor, Tensor]:  # out [T, D], preactivation [R, 2F]
    rows = _Rows(slot_to_row, row_to_token, TileTable(bounds, tiles, num_tiles, order, block_rows))
    copy = tuning.choose_copies(tokens, w_up, len(row_to_token)).tokens_forward
    up_input = rows.spread(tokens) if copy else tokens
    preactivation, activated = rows.gated_gemm(up_input, w_up.transpose(1, 2), activation, gather=not copy)
    del up_input
    expert_out = rows.gemm(activated, w_down.transpose(1, 2))  # [R, D]
    del activated
    return rows.collect(expert_out, topk_weights), preactivation


@_fused_experts_op.register_fake
def _(
    tokens, topk_weights, w_up, w_down, slot_to_row, row_to_token, bounds, tiles, num_tiles, order, block_rows,
    activation,
):  # fmt: skip
    return tokens.new_empty(tokens.shape), tokens.new_empty(row_to_token.shape[0], w_up.shape[1])


def _setup(ctx, inputs, output):
    *tensors, ctx.block_rows, ctx.activation = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, dout, _):
    if dout is None:
        return (None,) * 12
    *tensors, preactivation = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    gradients = _experts_backward_op(dout, preactivation, *tensors, ctx.block_rows, ctx.activation, needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), *(None,) * 8


_fused_experts_op.register_autograd(_backward, setup_context=_setup)


@registered_op("experts_backward")
def _experts_backward_op(
    dout: Tensor,
    preactivation: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    slot_to_row: Tensor,
    row_to_token: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    order: Tensor,
    block_rows: int,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # dtokens, dtopk_weights, dw_up, dw_down; empty where not needed
    rows = _Rows(slot_to_row, row_to_token, TileTable(bounds, tiles, num_tiles, order, block_rows))
    copies = tuning.choose_copies(tokens, w_up, len(row_to_token))
    needs_tokens, _, needs_up, needs_down = needs
    dtokens, dw_up, dw_down = (dout.new_empty(0) for _ in range(3))
    # At most H, dH, A_w and one [R, D] are alive at any time.
    drows = rows.spread(dout) if copies.dout else dout.contiguous()
    weighted = rows.gemm(drows, w_down, gather=not copies.dout)  # [R, F] dA'
    dpreactivation, dweights = launch_weighted_activation_backward(
        preactivation, weighted, topk_weights, slot_to_row, activation
    )  # and dA' has become A_w
    if needs_down:
        dw_down = rows.wgrad(drows, weighted, gather_a=not copies.dout)  # [E, D, F]
    del drows, weighted
    if needs_tokens:
        dtokens = rows.collect(rows.gemm(dpreactivation, w_up), None)
    if needs_up:
        up_input = rows.spread(tokens) if copies.tokens_backward else tokens
        dw_up = rows.wgrad(dpreactivation, up_input, gather_dout=not copies.tokens_backward)  # [E, 2F, D]
    return dtokens, dweights, dw_up, dw_down


@_experts_backward_op.register_fake
def _(
    dout, preactivation, tokens, topk_weights, w_up, w_down, slot_to_row, row_to_token, bounds, tiles, num_tiles,
    order, block_rows, activation, needs,
):  # fmt: skip
    def like(tensor: Tensor, needed: bool) -> Tensor:
        return dout.new_empty(tensor.shape if needed else 0)

    needs_tokens, _, needs_up, needs_down = needs
    dweights = torch.empty_like(topk_weights)
    return like(tokens, needs_tokens), dweights, like(w_up, needs_up), like(w_down, needs_down)
