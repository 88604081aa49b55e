"""A fuzzing case: plain values that print as one line, and a check that they are held to.

The kernels are held to the reference by the error budget of `assert_accurate`. In float64, where no kernel computes,
the reference is held to a formula that is written without sorting, to the precision of float64.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_kernels.testing import Errors, check_accuracy, measure_errors, run_with_grads

FLOAT64_PRECISION = 1e-12  # of the largest value

CASES: dict[str, type[Case]] = {}


@dataclass(frozen=True)
class Case:
    """Its fields are literals, so that `parse` reads what `repr` prints."""

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            CASES[cls.__name__] = cls

    def check(self, device: str) -> None:
        """Raises AssertionError where a result is wrong."""
        raise NotImplementedError

    @property
    def command(self) -> str:
        """What to type to check this case again."""
        return f'python -m tests.fuzz "{self!r}"'

    @property
    def integers(self) -> bool:
        """Whether values are integers, so that float32 sums are exact: see `Random`."""
        return self.dtype == "float32"


def sums_decide(limit: float | None, dtype: str) -> bool:
    """Whether rounding decides what an activation with this limit clamps, unless the sums before it are exact."""
    return limit is not None and dtype in ("float16", "bfloat16")


def parse(text: str) -> Case:
    """The case of a line that `repr` printed.

    Raises:
        ValueError: the line is none.
    """
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return CASES[call.func.id](**fields)
    except (SyntaxError, AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"fuzz: a case must be one of {sorted(CASES)} with its fields, got {text!r}") from error


class Unchanged:
    """Watches tensors: the whole storage of each, so that gaps between the elements are watched, too."""

    def __init__(self) -> None:
        self._watched: list[tuple[Tensor, Tensor]] = []

    def watch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._watched += [(tensor, _storage(tensor).clone()) for tensor in tensors]
        return tensors

    def check(self) -> None:
        for position, (tensor, before) in enumerate(self._watched):
            assert torch.equal(_storage(tensor), before), f"input {position} was written to"


def _storage(tensor: Tensor) -> Tensor:  # bytes
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def hold(
    op: Callable[..., Tensor],
    reference_op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    draw: Callable[[int], tuple[Tensor, ...]],
    names: tuple[str, ...],
    frozen: Collection[str] = (),
) -> None:
    """Hold `op` to the reference, or in float64 to the formula: output and gradients. And inputs stay as they are.

    Args:
        draw: the inputs for a seed; those of float64 where the formula is to judge.
        names: of the floating-point inputs, in order.
        frozen: those of them that require no gradient.
    """
    unchanged = Unchanged()

    def watched(seed: int) -> tuple[Tensor, ...]:
        return unchanged.watch(draw(seed))

    def judged(*inputs: Tensor) -> Tensor:
        out = op(*inputs)
        unchanged.check()  # before the reference reads them
        return out

    inputs = draw(0)
    positions = [i for i, tensor in enumerate(inputs) if tensor.is_floating_point()]
    still = {i for i, name in zip(positions, names, strict=True) if name in frozen}
    results = ("out", *(f"gradient of {name}" for name in names if name not in frozen))
    if inputs[positions[0]].dtype == torch.float64:
        inputs = unchanged.watch(inputs)
        actual, exact = (run_with_grads(function, inputs, frozen=still) for function in (judged, formula))
        for name, a, e in zip(results, actual, exact, strict=True):
            assert a.shape == e.shape, f"{name}: shape {list(a.shape)}, expected {list(e.shape)}"
            error, largest = (t.abs().max().item() if t.numel() else 0.0 for t in (a - e, e))
            assert error <= FLOAT64_PRECISION * max(largest, 1.0), f"{name}: error {error:.3e}, largest {largest:.3e}"
    elif inputs[positions[0]].dtype == torch.float32:  # whose sums are exact: see `Random`
        check_accuracy(judged, reference_op, watched, results, still)
    else:
        hold_to_budget(partial(measure_errors, judged, reference_op, watched, results, still))
    unchanged.check()


def hold_to_budget(measure: Callable[..., dict[str, Errors]]) -> None:
    """Each error within its budget; or, where it is within two, within one on four times as many other elements.

    Of ten thousand cases a few overrun the budget by luck: where errors are sums of a few products, now and then the
    largest of one sample is more than twice that of another, though they are drawn alike. What is wrong is wrong again.
    """
    errors = measure()
    for name, error in errors.items():
        error.hold(name, budgets=2)
    if any(error.actual > error.budget for error in errors.values()):
        for name, error in measure(seeds=range(32, 160), num_elements=256).items():
            error.hold(name)


def with_upstream(out: Tensor, change: Callable[[Tensor], Tensor], *, integers: bool) -> Tensor:
    """`out`, whose gradient is changed on its way in: to other strides, or to hold NaN where nobody may read it.

    Args:
        integers: it is rounded first, and so small that sums of its products with large ones fit float16.
    """
    if out.requires_grad:
        out.register_hook(lambda dout: change(dout.round() / 32 if integers else dout))
    return out
