"""A fuzzing case: plain values that print as one line, and a check.

Kernels are compared with the reference by the error budget of `assert_accurate`. In float64, where no kernel computes,
the reference is compared with a formula without sorting, to the precision of float64.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_kernels.testing import check_accuracy, run_with_grads

from .tensors import Random

FLOAT64_PRECISION = 1e-12  # relative to the largest value

CASES: dict[str, type[Case]] = {}


@dataclass(frozen=True)
class Case:
    """A case whose fields are literals, so that `parse` reads what `repr` prints."""

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            CASES[cls.__name__] = cls

    def check(self, device: str) -> None:
        """Raise AssertionError if a result is wrong."""
        raise NotImplementedError

    def compare(self, device: str, op: Callable, reference_op: Callable, names: tuple[str, ...]) -> None:
        """Hold a public op to its reference, or in float64 the reference to the formula. No gradients with `out`."""
        op = partial(op, implementation=self.implementation)
        into_out = getattr(self, "into_out", False)
        run, frozen = (self.run_into_out, names) if into_out else (self.run, self.frozen)
        draw = partial(self.draw, device)
        hold(partial(run, op), partial(self.run, reference_op), self.formula, draw, names, frozen)

    @property
    def implementation(self) -> str:
        """Return the implementation that is judged: no kernel computes in float64."""
        return "reference" if self.dtype == "float64" else "triton"

    def random(self, device: str, seed: int, *, multiples: bool = False) -> Random:
        return Random(self.dtype, device, 1000 * self.seed + seed, integers=self.integers, multiples=multiples)

    @property
    def command(self) -> str:
        """Return the command that checks this case again."""
        return f'python -m tests.fuzz "{self!r}"'

    def out_dtype(self, operand: Tensor) -> torch.dtype | None:
        # float64 operands give float64.
        return torch.float32 if self.wide and operand.dtype.itemsize <= 4 else None

    @property
    def integers(self) -> bool:
        """Return whether values are integers, so that float32 sums are exact: see `Random`."""
        return self.dtype == "float32" or (self.dtype != "float64" and getattr(self, "wide", False))


def sums_decide(limit: float | None, dtype: str) -> bool:
    """Return whether rounding decides what an activation with this limit clamps, unless earlier sums are exact."""
    return limit is not None and dtype in ("float16", "bfloat16")


def parse(text: str) -> Case:
    """Return the case of a line that `repr` printed.

    Raises:
        ValueError: the line is not a case.
    """
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return CASES[call.func.id](**fields)
    except (SyntaxError, AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"fuzz: a case must be one of {sorted(CASES)} with its fields, got {text!r}") from error


def _storage(tensor: Tensor) -> Tensor:  # bytes, including the gaps between elements
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def hold(
    op: Callable[..., Tensor],
    reference_op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    draw: Callable[[int], tuple[Tensor, ...]],
    names: tuple[str, ...],
    frozen: Collection[str] = (),
) -> None:
    """Compare `op` with the reference, or in float64 with the formula: output, gradients and unchanged inputs.

    Args:
        draw: returns the inputs for a seed, in float64 if the formula is the standard.
        names: names of the floating-point inputs, in order.
        frozen: those inputs that require no gradient.
    """
    watched: list[tuple[Tensor, Tensor]] = []  # each input and its storage before the op

    def watched_inputs(seed: int) -> tuple[Tensor, ...]:
        inputs = draw(seed)
        watched.extend((tensor, _storage(tensor).clone()) for tensor in inputs)
        return inputs

    def check_unchanged() -> None:
        for position, (tensor, before) in enumerate(watched):
            assert torch.equal(_storage(tensor), before), f"input {position} was written to"

    def judged(*inputs: Tensor) -> Tensor:
        out = op(*inputs)
        check_unchanged()  # before the reference reads the inputs
        return out

    inputs = draw(0)
    positions = [i for i, tensor in enumerate(inputs) if tensor.is_floating_point()]
    still = {i for i, name in zip(positions, names, strict=True) if name in frozen}
    results = ("out", *(f"gradient of {name}" for name in names if name not in frozen))
    if inputs[positions[0]].dtype == torch.float64:
        inputs = watched_inputs(0)
        actual, exact = (run_with_grads(function, inputs, frozen=still) for function in (judged, formula))
        for name, a, e in zip(results, actual, exact, strict=True):
            assert a.shape == e.shape, f"{name}: shape {list(a.shape)}, expected {list(e.shape)}"
            error, largest = (t.abs().max().item() if t.numel() else 0.0 for t in (a - e, e))
            assert error <= FLOAT64_PRECISION * max(largest, 1.0), f"{name}: error {error:.3e}, largest {largest:.3e}"
    else:
        check_accuracy(judged, reference_op, watched_inputs, results, still)
    check_unchanged()


def with_upstream(out: Tensor, change: Callable[[Tensor], Tensor], *, integers: bool) -> Tensor:
    """Return `out`, whose gradient is changed on arrival: other strides, or NaN where nothing may read it.

    Args:
        integers: round the gradient first, to numbers so small that sums of products with large ones fit float16.
    """
    if out.requires_grad:
        out.register_hook(lambda dout: change(dout.round() / 32 if integers else dout))
    return out
