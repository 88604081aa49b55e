"""Makes expert layers of given sizes, and lists a layer's GEMMs to measure, with and without gathers and epilogues."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..experts.fused import make_operands
from ..experts.fused_op import compute_gradients, fused_experts_op, read_by_backward
from ..gemm.arguments.base import Arguments
from ..gemm.kernel import Kernel
from ..gemm.selection import Copies, Target, planning
from ..quantization.quantize import quantize
from ..specs import as_activation, is_gated
from ..testing import Case, make_inputs
from ..types import ExpertWeights

TRAINED = ("up", "down", "down_dgrad", "down_wgrad", "up_dgrad", "up_wgrad")
FROZEN = ("up", "down", "down_dgrad", "up_dgrad")
_EVERY, _NONE = Copies(True, True, True), Copies(False, False, False)


def parse_layer(text: str) -> Case:
    """Return the layer sizes in a text T,D,F,E,K. Raise argparse.ArgumentTypeError if the text is not valid."""
    try:
        num_tokens, d_model, d_ff, num_experts, top_k = sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a layer must be T,D,F,E,K, got {text!r}") from error
    if min(sizes) < 1 or top_k > num_experts:
        raise argparse.ArgumentTypeError(f"T, D, F, E and K must be at least 1, and K at most E, got {text!r}")
    return Case(num_tokens, d_model, d_ff, num_experts, top_k)


class Step(NamedTuple):
    """A GEMM of the layer."""

    name: str  # name of the GEMM, one of `TRAINED`, such as "up"
    args: Arguments
    kernel: Kernel | None  # None: no kernel supports the arguments

    @property
    def gathers(self) -> bool:
        """Return whether the GEMM gathers the rows of an operand."""
        return any("row_to_token" in name and getattr(self.args, name) is not None for name in self.args.tensors)


class Layer(NamedTuple):
    """The operands of a layer."""

    tokens: Tensor  # [T, D]
    topk_experts: Tensor  # [T, K] int32
    topk_weights: Tensor  # [T, K] float32
    w_up: Tensor  # [E, 2F, D], or [E, F, D] with a plain activation
    w_down: Tensor  # [E, D, F]
    activation: str
    precision: str | None
    format: str | None  # the format to which `plan` quantises the weights, or None

    @property
    def num_rows(self) -> int:
        return self.topk_experts.numel()

    def plan(self, target: Target | None = None, *, copies: Copies | None = None, fuses: bool = True) -> list[Step]:
        """Run a forward and backward of `fused_experts` and return its GEMMs. Quantised weights get no gradients.

        If no kernel computes the activation in its epilogue, the list has two steps "up": the attempt with this
        epilogue, whose `kernel` is None, and the GEMM without an epilogue.

        Args:
            target: a GPU to select kernels for; tensors may then be meta tensors. None, the default: the tensors' GPU.
            copies: which gathers run as separate copies instead of in the GEMM. Default None: the op chooses.
            fuses: whether a GEMM may have an activation in its epilogue; True by default.
        """
        weights, names = ExpertWeights(self.w_up, self.w_down), list(TRAINED)
        needed = {"tokens", "topk_weights", "w_up", "w_down"}
        if self.format is not None:
            weights = ExpertWeights(quantize(self.w_up, self.format), quantize(self.w_down, self.format))
            names, needed = list(FROZEN), {"tokens", "topk_weights"}
        kind = as_activation("explain", self.activation)
        # With gradients enabled, the forward pass keeps the pre-activations. The backward pass need not recompute them.
        with planning(target, copies=copies, fuses=fuses) as choices, torch.enable_grad():
            operands = make_operands(self.tokens, weights, activation=kind, precision=self.precision)
            operands = operands._replace(topk_experts=self.topk_experts, topk_weights=self.topk_weights)
            made = fused_experts_op(operands)
            compute_gradients(torch.randn_like(self.tokens), [read_by_backward(operands, *made[1:])], needed, {})
        steps = []
        for args, kernel in choices:
            is_tried = kernel is None and args.epilogue is not None
            steps.append(Step(names[0] if is_tried else names.pop(0), args, kernel))
        return steps

    def forms(self) -> Iterator[tuple[str, Step]]:
        """Yield (name, step) for each GEMM to measure, except GEMMs with the activation's gradient as epilogue.

        The name is the step's name, followed by "_plain" for an "up" without activation, and by "_gather" if rows are
        gathered instead of copied.
        """
        for copies in (_EVERY, _NONE):
            ending = "" if copies is _EVERY else "_gather"
            yield f"up{ending}", next(step for step in self.plan(copies=copies) if step.name == "up")
            for step in self.plan(copies=copies, fuses=False):
                if copies is _EVERY or step.gathers:
                    yield f"{'up_plain' if step.name == 'up' else step.name}{ending}", step


def layer_of(
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    activation: str = "swiglu",
    precision: str | None = None,
    format: str | None = None,
) -> Layer:
    """Return a layer of random operands in which every expert has an equal share of the rows.

    Args:
        device: on "meta" the operands have only shapes and strides, which suffice to select kernels.
        format: the format to which `plan` quantises the weights; None, the default, does not quantise them.
    """
    if str(device) == "meta":
        shapes = (
            (case.num_tokens, case.d_model),
            (case.num_experts, 2 * case.d_ff, case.d_model),
            (case.num_experts, case.d_model, case.d_ff),
        )
        tokens, w_up, w_down = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        topk_weights = tokens.new_empty(case.num_tokens, case.top_k, dtype=torch.float32)
        topk_experts = topk_weights.to(torch.int32)
    else:
        tokens, logits, w_up, w_down = make_inputs(dataclasses.replace(case, routing="even"), dtype, device)
        topk_experts, topk_weights, _ = reference.topk_routing(logits, case.top_k)
    if not is_gated(activation):
        w_up = w_up[:, : case.d_ff].contiguous()
    return Layer(tokens, topk_experts, topk_weights, w_up, w_down, activation, precision, format)
