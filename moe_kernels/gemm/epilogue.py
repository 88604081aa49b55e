"""Launches of a grouped GEMM with bias, row scale and activation. Its kernel computes them, or further launches do.

The fastest kernels support no row scale and not every bias. After such a kernel, a memory-bound pass over the output
applies them and rounds the product once more. In float16, where the product might overflow, a slower kernel computes
everything.
"""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import torch
from torch import Tensor

from ..activation.ops import _activation_backward_op, launch_activation
from ..specs import as_activation
from . import selection
from .arguments.block_scaled import BlockScaledGemmArguments
from .arguments.grouped import GroupedGemmArguments
from .kernel import Kernel, PointerDesign
from .kernels.families import GroupedGemmKernel, RowTileKernel
from .passes import launch_bias_and_scale


def check_epilogue(op: str, activation: str, num_columns: int) -> None:
    """Raise ValueError unless `activation` names a gated activation that fits this number of columns."""
    if not isinstance(activation, str):
        raise ValueError(
            f"{op}: activation must be a name, got {activation!r}; apply_activation and fused_experts take more"
        )
    if not as_activation(op, activation).gated:
        raise ValueError(f"{op}: activation must be gated, got {activation!r}")
    if num_columns % 2:
        raise ValueError(f"{op}: b must have an even number of columns with an activation, got N={num_columns}")


def launch_epilogue_backward(
    preactivation: Tensor,  # [R, 2F]
    dout: Tensor,  # [R, F]
    activation: str,
) -> Tensor:  # [R, 2F]
    """Return the gradient through the activation, computed by a registered op."""
    spec = as_activation("grouped_gemm", activation)
    return _activation_backward_op(preactivation, dout, spec.name, spec.limit, spec.alpha, spec.interleaved)


def launch_grouped_gemm(args: GroupedGemmArguments) -> None:
    """Write `args.out`, and with an epilogue `args.preactivation`. Takes one launch if a kernel computes everything."""
    if args.epilogue is None:
        launch_product(args)
    elif args.bias is not None or not selection.run_if_supported(args):
        # A fused kernel would leave the bias out of the preactivation, so the activation is a separate launch.
        launch_product(dataclasses.replace(args, out=args.product, epilogue=None, preactivation=None))
        args.out.copy_(launch_activation(args.product, as_activation("grouped_gemm", args.epilogue)))


def launch_block_scaled_gemm(
    args: BlockScaledGemmArguments,
    bias: Tensor | None,  # [G, N]
    row_scale: Tensor | None,  # [R] float32
    activation: str | None,
    out: Tensor,  # [R, N], `args.out`; with an activation, [R, F]
) -> None:
    """Write `args.out` and `out`. Bias, row scale and activation are separate passes."""
    if bias is not None or row_scale is not None:
        kernel = selection.select(args)
        assert isinstance(kernel, RowTileKernel)
        args = dataclasses.replace(args, tile_table=kernel.tile_table(args))  # a table for the same kernel
    selection.run(args)
    if args.tile_table is not None:
        launch_bias_and_scale(args.out, bias, row_scale, args.tile_table)
    if activation is not None:
        out.copy_(launch_activation(args.out, as_activation("grouped_gemm", activation)))


def launch_product(args: GroupedGemmArguments) -> None:
    """Write `args.out`, without an epilogue.

    Raises:
        NotImplementedError: no kernel supports the arguments.
    """
    if args.bias is None and args.row_scale is None:
        return selection.run(args)
    if args.row_scale is None and _is_fast(selection.find(args)):
        return selection.run(args)
    plain = dataclasses.replace(args, bias=None, row_scale=None)
    kernel = selection.find(plain)
    # float16 may overflow before the scale or the bias makes the values small.
    if args.out.dtype == torch.float16 or not _is_fast(kernel):
        return selection.run(args)
    table = kernel.tile_table(plain)
    selection.run(dataclasses.replace(plain, tile_table=table))  # runs the same kernel
    launch_bias_and_scale(args.out, args.bias, args.row_scale, table)


def _is_fast(kernel: Kernel | None) -> TypeGuard[GroupedGemmKernel]:
    return kernel is not None and not isinstance(kernel.metadata.design, PointerDesign)
