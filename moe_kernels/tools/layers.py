"""Expert layers of given sizes, and their GEMMs with every combination of gather and epilogue to measure."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..experts.plan import Step, plan_experts
from ..gemm.selection import Copies, Target
from ..quantization.quantize import quantize
from ..specs import is_gated
from ..testing import Case, make_inputs
from ..types import ExpertWeights

_EVERY, _NONE = Copies(True, True, True), Copies(False, False, False)


def parse_layer(text: str) -> Case:
    """Parse T,D,F,E,K from a command line.

    Raises:
        argparse.ArgumentTypeError: the text is not five valid sizes of a layer.
    """
    try:
        num_tokens, d_model, d_ff, num_experts, top_k = sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a layer must be T,D,F,E,K, got {text!r}") from error
    if min(sizes) < 1 or top_k > num_experts:
        raise argparse.ArgumentTypeError(f"T, D, F, E and K must be at least 1, and K at most E, got {text!r}")
    return Case(num_tokens, d_model, d_ff, num_experts, top_k)


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
        """Return the steps of `plan_experts`."""
        weights = ExpertWeights(self.w_up, self.w_down, None, None)
        if self.format is not None:
            w_up, w_down = quantize(self.w_up, self.format), quantize(self.w_down, self.format)
            weights = ExpertWeights(w_up, w_down, None, None)
        settings = {"activation": self.activation, "precision": self.precision}
        options = {"target": target, "copies": copies, "fuses": fuses}
        return plan_experts(self.tokens, self.topk_experts, self.topk_weights, weights, **settings, **options)

    def forms(self) -> Iterator[tuple[str, Step]]:
        """Yield the name and step of each GEMM to measure, except GEMMs with the activation's gradient as epilogue.

        A name is the name of the step, with "_gather" if rows are gathered instead of copied, and "_plain" for an "up"
        without activation.
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
