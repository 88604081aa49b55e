"""Named cases, inputs and the error budget, shared by tests and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .types import Permutation


@dataclass(frozen=True)
class Case:
    """Sizes of an expert feed-forward, and the routing pattern of its tokens."""

    num_tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    routing: str = "random"  # "random", "even", "zipf" or "first": see `make_logits`


CASES = {
    "ordinary": Case(72, 64, 32, 8, 2),
    "one_token": Case(1, 64, 32, 8, 2),
    "zero_tokens": Case(0, 64, 32, 8, 2),
    "empty_experts": Case(10, 64, 32, 12, 1),
    "all_to_one": Case(150, 64, 32, 8, 1, "first"),
    "one_expert": Case(33, 64, 32, 1, 1),
    "every_expert": Case(9, 64, 32, 4, 4),
    "odd_sizes": Case(53, 97, 47, 5, 3),
    "skewed": Case(140, 64, 48, 6, 2, "zipf"),
}


class LayerInputs(NamedTuple):
    """Tensors of one expert feed-forward. `make_inputs` rounds tokens and weights to the dtype under test."""

    tokens: Tensor  # [T, D]
    logits: Tensor  # [T, E] float32
    w_up: Tensor  # [E, 2F, D]
    w_down: Tensor  # [E, D, F]


def make_logits(
    num_tokens: int, num_experts: int, routing: str, device: torch.device | str, generator: torch.Generator
) -> Tensor:  # [T, E] float32
    """Return logits whose top-k choice follows a pattern.

    "random": logits are independent. "even": the experts' numbers of slots differ by at most top_k. "zipf": the k-th
    most popular expert is chosen in proportion to 1 / k. "first": every token ranks experts 0, 1, ... in this order.
    """
    expert = torch.arange(num_experts, device=device)
    noise = torch.rand(num_tokens, num_experts, device=device, generator=generator)
    if routing == "random":
        return torch.randn(num_tokens, num_experts, device=device, generator=generator)
    if routing == "even":
        # In each block of E tokens, every expert is once the first choice, once the second, etc., in random order.
        num_blocks = -(-num_tokens // num_experts)
        order = torch.rand(num_blocks, num_experts, device=device, generator=generator).argsort(-1)
        token = torch.arange(num_tokens, device=device)
        return -((order[token // num_experts] - token[:, None]) % num_experts).float() / num_experts
    if routing == "zipf":
        # Adding Gumbel noise to log-probabilities samples without replacement in proportion to the probabilities.
        return -(expert + 1.0).log() - (-noise.clamp(1e-6, 1 - 1e-6).log()).log()
    if routing == "first":
        return noise * 0.1 - expert
    raise ValueError(f"make_logits: routing must be random, even, zipf or first, got {routing!r}")


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> LayerInputs:
    """Return random inputs of unit scale for a case."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=device, generator=generator)).to(dtype)

    return LayerInputs(
        normal(case.num_tokens, case.d_model),
        make_logits(case.num_tokens, case.num_experts, case.routing, device, generator),
        normal(case.num_experts, 2 * case.d_ff, case.d_model, scale=case.d_model**-0.5),
        normal(case.num_experts, case.d_model, case.d_ff, scale=case.d_ff**-0.5),
    )


def make_permutation(inputs: LayerInputs, top_k: int) -> tuple[Tensor, Permutation]:
    """Return the reference's routing weights and permutation for these inputs."""
    routed = reference.topk_routing(inputs.logits, top_k)
    return routed.topk_weights, reference.sort_by_expert(routed.topk_experts, inputs.logits.shape[1])


def to_float64(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors, with floating-point tensors converted to float64."""
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)


def run_with_grads(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], seed: int = 0, frozen: Collection[int] = ()
) -> tuple[Tensor, ...]:
    """Return `function(*inputs)`, then the gradient of each floating-point input for one random upstream gradient.

    Args:
        frozen: positions of floating-point inputs that require no gradient; none by default.
    """
    leaves = [t.detach().requires_grad_(t.is_floating_point() and i not in frozen) for i, t in enumerate(inputs)]
    out = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted:
        return (out,)
    generator = torch.Generator(out.device).manual_seed(seed)
    # Round to bfloat16, so that all dtypes get equal upstream gradients. float64 and float32 represent all bfloat16
    # values exactly. float16 represents bfloat16 values exactly from magnitude 2 ** -17 on.
    dout = torch.randn(out.shape, device=out.device, generator=generator).bfloat16().to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, wanted, dout)


class Errors(NamedTuple):
    """Largest errors of an op and of plain PyTorch, and one unit in the last place (ulp) of the largest exact value."""

    actual: float
    baseline: float
    ulp: float

    @property
    def budget(self) -> float:
        return 2 * self.baseline + self.ulp

    def __str__(self) -> str:
        return f"error {self.actual:.3e} exceeds 2 x {self.baseline:.3e} (plain PyTorch) + {self.ulp:.3e} (one ulp)"

    def hold(self, name: str, *, budgets: float = 1.0) -> None:
        """Raise AssertionError if the error exceeds `budgets` times the budget."""
        _require(self.actual <= budgets * self.budget, f"{name}: {self}")


def assert_accurate(actual: Tensor, baseline: Tensor, exact: Tensor, name: str = "", *, budgets: float = 1.0) -> None:
    """Check `actual` against the error budget: twice plain PyTorch's error in this dtype, plus one unit in the last
    place of the largest exact value.

    Args:
        baseline: the reference in the dtype of `actual`.
        exact: the reference in float64.
        budgets: multiple of the budget that the error may reach; 1 by default.

    Raises:
        AssertionError: the error exceeds the budget, the shape or dtype is wrong, or NaN is not where `exact` is NaN.
    """
    _errors(actual, baseline, exact, name).hold(name, budgets=budgets)


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError unless `condition` holds, even under `python -O`, because `MOE_VERIFY` needs the check."""
    if not condition:
        raise AssertionError(message)


def _errors(actual: Tensor, baseline: Tensor, exact: Tensor, name: str) -> Errors:
    _require(actual.shape == exact.shape, f"{name}: shape {list(actual.shape)}, expected {list(exact.shape)}")
    _require(actual.dtype == baseline.dtype, f"{name}: dtype {actual.dtype}, expected {baseline.dtype}")
    defined = ~exact.isnan()
    _require(torch.equal(actual.isnan(), ~defined), f"{name}: NaN at other places than expected")
    if not defined.any():
        return Errors(0.0, 0.0, 0.0)
    exact = exact[defined]
    largest = exact.abs().max().item()
    return Errors(
        (actual[defined].double() - exact).abs().max().item(),
        (baseline[defined].double() - exact).abs().max().item(),
        torch.finfo(actual.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0,
    )


def check_accuracy(
    op: Callable[..., Tensor],
    reference_op: Callable[..., Tensor],
    draw: Callable[[int], tuple[Tensor, ...]],
    names: tuple[str, ...],
    frozen: Collection[int] = (),
) -> None:
    """Check the output of `op` and the gradient of each floating-point input against the error budget, on drawn inputs.

    Args:
        draw: function that takes a seed and returns the inputs, which are floating-point or integer tensors.
        names: names of the output, then of each floating-point input's gradient.
        frozen: positions of floating-point inputs that require no gradient; none by default.
    """
    hold_to_budget(partial(measure_errors, op, reference_op, draw, names, frozen))


def hold_to_budget(measure: Callable[..., dict[str, Errors]]) -> None:
    """Check that each error is within budget. Measure again with larger samples if an error is 1 to 2 times the budget.

    Errors may be sums of only a few products. The largest of 64 such errors then exceeds twice the largest of 64
    others by chance, in about 1 % of cases. With samples of 256 errors, this happens in 0.2 % of cases. A real error
    exceeds its budget again.

    Args:
        measure: a function of `seeds` and `num_elements`, such as `measure_errors` with its other arguments bound.
    """
    errors = measure()
    for name, error in errors.items():
        error.hold(name, budgets=2)
    if any(error.actual > error.budget for error in errors.values()):
        for name, error in measure(seeds=range(32, 160), num_elements=256).items():
            error.hold(name)


def measure_errors(
    op: Callable[..., Tensor],
    reference_op: Callable[..., Tensor],
    draw: Callable[[int], tuple[Tensor, ...]],
    names: tuple[str, ...],
    frozen: Collection[int] = (),
    *,
    seeds: Iterable[int] = range(32),
    num_elements: int = 64,
) -> dict[str, Errors]:
    """Return, by name, the errors that `check_accuracy` checks.

    The budget compares largest errors, and the largest of a few numbers varies by chance. Inputs are therefore
    drawn with further seeds, until each nonzero result has `num_elements` nonzero elements over all draws, or `seeds`
    end. The errors cover all draws together.

    Raises:
        AssertionError: a shape or dtype is wrong, or NaN appears at other positions than in float64.
    """
    results: list[list[tuple[Tensor, ...]]] = []
    for seed in seeds:
        inputs = draw(seed)
        actual = run_with_grads(op, inputs, seed, frozen)
        baseline = run_with_grads(reference_op, inputs, seed, frozen)
        exact = run_with_grads(reference_op, to_float64(inputs), seed, frozen)
        results.append(list(zip(actual, baseline, exact, strict=True)))
        counts = [sum(e.count_nonzero().item() for _, _, e in draws) for draws in zip(*results, strict=True)]
        if min((count for count in counts if count), default=num_elements) >= num_elements:
            break
    assert len(set(names)) == len(results[0]), f"names {names} for {len(results[0])} results"
    errors = {}
    for name, *draws in zip(names, *results, strict=True):
        for a, _, e in draws:
            assert a.shape == e.shape, f"{name}: shape {list(a.shape)}, expected {list(e.shape)}"
        errors[name] = _errors(
            *(torch.cat([t.flatten() for t in kind]) for kind in zip(*draws, strict=True)), name=name
        )
    return errors
