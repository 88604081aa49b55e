"""Checks of the expert op's operands and, if the precision is "fp8", of the GPU."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from ..runtime.checks import check_dtype, check_same_device, check_same_dtype, check_shapes
from ..runtime.dispatch import once_per_form
from ..specs import is_gated
from ..types import Weight


@once_per_form
def check_operands(
    tokens: Tensor,
    topk_weights: Tensor | None,
    slots: Tensor | None,  # [T, K]: `slot_to_row` if `offsets` is given, else `topk_experts`
    offsets: Tensor | None,  # [E]
    w_up: Weight,
    w_down: Weight,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: str,
) -> None:
    """Raise ValueError unless shapes, dtypes and devices of the operands fit each other. Absent operands are None."""
    gated = is_gated(activation)
    width = "2F" if gated else "F"
    given = {
        "tokens": (tokens, "T D"),
        "topk_weights": (topk_weights, "T K"),
        "topk_experts" if offsets is None else "slot_to_row": (slots, "T K"),
        "offsets": (offsets, "E"),
        "w_up": (w_up, f"E {width} D"),
        "w_down": (w_down, "E D F"),
        "b_up": (b_up, f"E {width}"),
        "b_down": (b_down, "E D"),
    }
    given = {name: operand for name, operand in given.items() if operand[0] is not None}
    sizes = check_shapes("fused_experts", **given)
    if gated and sizes["2F"] != 2 * sizes["F"]:
        raise ValueError(
            f"fused_experts: w_up must be [E, 2F, D] and w_down [E, D, F], "
            f"got {list(w_up.shape)} and {list(w_down.shape)}"
        )
    parts = {"tokens": tokens, "w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down}
    check_same_dtype("fused_experts", **{name: part for name, part in parts.items() if isinstance(part, Tensor)})
    if topk_weights is not None:
        check_dtype("fused_experts", "topk_weights", topk_weights, torch.float32, torch.float64)
    if slots is not None and offsets is None:
        check_dtype("fused_experts", "topk_experts", slots, torch.int32, torch.int64)
    others = {"topk_weights": topk_weights, "permutation": offsets, "topk_experts": slots if offsets is None else None}
    operands = {"tokens": tokens, **others, **parts}
    check_same_device("fused_experts", **{name: part for name, part in operands.items() if part is not None})


# The smallest sizes at which e4m3 operands were measured to make layers faster on a GPU of compute capability
# 9.0. With fewer rows per expert, GEMMs save only as much time as quantising the weights once per step takes.
_LEAST_D_MODEL, _LEAST_D_FF, _LEAST_ROWS = 2048, 768, 1024
_MEASURED_CC = 90

_FIRST_CC = 90  # lowest compute capability, times 10, that runs the kernels of precision "fp8"


def check_fp8_gpu(cc: int) -> None:
    """Raise NotImplementedError unless a GPU of compute capability `cc` / 10 runs the kernels of precision "fp8"."""
    if cc < _FIRST_CC:
        raise NotImplementedError(
            f"fused_experts: precision='fp8' needs a GPU of compute capability {_FIRST_CC / 10}, this one has {cc / 10}"
        )


@functools.cache
def warn_if_unmeasured(cc: int, d_model: int, d_ff: int, rows_per_expert: int) -> None:
    """Warn once if no measurement shows that e4m3 operands are faster with these sizes on this GPU."""
    if cc != _MEASURED_CC or d_model < _LEAST_D_MODEL or d_ff < _LEAST_D_FF or rows_per_expert < _LEAST_ROWS:
        message = (
            f'fused_experts: precision="fp8" was measured to be faster on compute capability {_MEASURED_CC / 10}, from '
            f"d_model {_LEAST_D_MODEL}, d_ff {_LEAST_D_FF} and {_LEAST_ROWS} rows per expert on; it may be slower than "
            f"without on {cc / 10}, with {d_model}, {d_ff} and {rows_per_expert}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
