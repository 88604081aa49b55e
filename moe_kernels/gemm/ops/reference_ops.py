"""The reference implementations of the grouped products as registered ops, for tracers.

The reference splits rows at the values of `offsets`, but a traced, fake or meta tensor has no values. torch.compile,
torch.export and calls with fake or meta tensors therefore use these ops. The ops' result shapes do not depend on
values. The backward of each op calls these ops again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import reference
from ...runtime.registered_ops import registered_op


@registered_op("reference_grouped_gemm")
def multiply_groups_op(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return reference.multiply_groups(a, b, offsets)


@multiply_groups_op.register_fake
def _(a, b, offsets):
    return a.new_empty(a.shape[0], b.shape[2])


@registered_op("reference_grouped_gemm_wgrad")
def wgrad_op(a: Tensor, dout: Tensor, offsets: Tensor) -> Tensor:
    return reference.grouped_gemm_wgrad(a, dout, offsets)


@wgrad_op.register_fake
def _(a, dout, offsets):
    return a.new_empty(offsets.shape[0], a.shape[1], dout.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = ctx.saved_tensors
    needs_a, needs_b, *_ = ctx.needs_input_grad
    da = multiply_groups_op(dout, b.mT, offsets) if needs_a else None
    db = wgrad_op(a, dout, offsets) if needs_b else None
    return da, db, None


def _wgrad_backward(ctx: Any, dmatrices: Tensor) -> tuple[Tensor | None, ...]:
    a, dout, offsets = ctx.saved_tensors
    needs_a, needs_dout, *_ = ctx.needs_input_grad
    da = multiply_groups_op(dout, dmatrices.mT, offsets) if needs_a else None
    ddout = multiply_groups_op(a, dmatrices, offsets) if needs_dout else None
    return da, ddout, None


multiply_groups_op.register_autograd(_backward, setup_context=_setup)
wgrad_op.register_autograd(_wgrad_backward, setup_context=_setup)
