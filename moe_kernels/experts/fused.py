"""Checks the operands of the expert feed-forward and chooses its implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..permutation.sort import sort_by_expert
from ..quantization.formats import check_quantized
from ..routing.linear_op import LinearRouter, linear_routing_op
from ..runtime.checks import check_dtype
from ..runtime.dispatch import choose, is_traced
from ..specs import Activation, as_activation
from ..types import ExpertAdapters, ExpertWeights, Permutation, QuantizedWeight, Weight
from .fused_op import fused_experts_op
from .operand_checks import check_operands
from .operands import ExpertOperands
from .reference_op import ReferenceOperands, reference_experts_op, run_reference
from .row_products import Rows
from .steps import Experts

RECOMPUTE = (None, "up")
PRECISIONS = (None, "fp8", "fp8_saved")
_SWIGLU = Activation("swiglu")


def fused_experts(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    w_up: Weight,  # [E, 2F, D] gate rows, then up rows, or interleaved; [E, F, D] with a plain activation
    w_down: Weight,  # [E, D, F]
    *,
    b_up: Tensor | None = None,  # [E, 2F], or [E, F]
    b_down: Tensor | None = None,  # [E, D]
    adapters: ExpertAdapters | None = None,
    activation: str | Activation = "swiglu",
    weight_on_input: bool = False,
    recompute: str | None = None,
    reserved_sms: int = 0,
    batch_invariant: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> Tensor:  # [T, D]
    """Send each token through its experts and sum the outputs with its routing weights.

    The forward pass saves `tokens`, the pre-activations [R, 2F] and the routing. Frozen operands get no gradient. GEMMs
    and sums accumulate in float32; rows are stored in the dtype of the tokens. This function is deterministic, needs no
    host synchronisation, and is differentiable in `tokens`, `topk_weights`, weights, biases and adapters.

    Quantised weights are frozen, and only their stored bytes are saved for backward. If experts have at least 512 rows
    on average, weights are dequantised to the dtype of the tokens, in forward and again in backward. Each weight is
    dequantised right before the GEMM that reads the weight, and freed after this GEMM. PyTorch's caching allocator
    reuses the memory for the next weight and the next layer. The result has the same bits as with weights dequantised
    beforehand. With fewer rows, GEMMs decode weights while loading, and load only the weights of experts that have
    rows. Both cases give equal weight values, but GEMMs add products in different orders. Only tensor sizes decide
    whether GEMMs decode. With `batch_invariant` and in the reference, weights are always dequantised.

    Shapes: tokens [T, D], topk_weights [T, K] float32, w_up [E, 2F, D] or [E, F, D], w_down [E, D, F], b_up [E, 2F] or
    [E, F], b_down [E, D]; result [T, D].

    Args:
        w_up: a tensor, or a `QuantizedWeight` if `w_down` is a `QuantizedWeight` of the same format.
        permutation: result of `sort_by_expert` for the experts that `topk_weights` refer to. Dropped slots add nothing.
        adapters: low-rank changes of the weights, in any floating-point dtype. Adapters are rounded to the tokens'
            dtype. No tensor of the size of the weights is made. With an adapter of `w_up`, backward needs a further
            saved tensor [R, r], with the rank r rounded up to a multiple of 8.
        weight_on_input: whether the routing weight multiplies an expert's input instead of its output. Default: False.
        recompute: "up" does not save the pre-activations, and backward recomputes the same bits. None, the default,
            saves the pre-activations. The reference ignores this setting.
        reserved_sms: number of SMs that persistent GEMMs leave to concurrent communication, by default 0. The number
            does not change the bits of the results.
        batch_invariant: True makes a token's output, and the gradients of the token and its routing weights,
            independent of other tokens, bit for bit. The number of rows then does not decide which kernel runs, and the
            reference computes token by token. The default is False.
        precision: "fp8" multiplies e4m3 operands in forward and for the gradients of rows. A row has a float32
            scale for each 128 columns, and a weight has a float32 scale for each 128 x 128 block. GEMMs for the
            gradients of weights have operands in the dtype of the tokens. This function quantises the weights in every
            forward and backward, whereas `MoEFeedForward` caches the quantised weights. "fp8_saved" also saves the
            pre-activations in e4m3, with about half the bytes and less precise gradients. None, the default, quantises
            nothing.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature; activation, recompute or precision is
            unknown; reserved_sms is negative; only one weight is quantised, or the formats of both weights differ. With
            a precision: D or F is no multiple of 16, or the weights are quantised.
        NotImplementedError: a precision is set with adapters, or on a GPU below compute capability 9.0.
    """
    return compute_experts(
        tokens,
        topk_weights,
        permutation,
        ExpertWeights(w_up, w_down, b_up, b_down),
        adapters=adapters,
        activation=as_activation("fused_experts", activation),
        weight_on_input=weight_on_input,
        recompute=recompute,
        reserved_sms=reserved_sms,
        batch_invariant=batch_invariant,
        precision=precision,
        implementation=implementation,
    )


def compute_experts(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    weights: ExpertWeights,
    *,
    reserved_sms: int = 0,
    batch_invariant: bool = False,
    implementation: str | None = None,
    **settings: Any,
) -> Tensor:  # [T, D]
    """Compute `fused_experts` with packed weights. `settings` are further arguments of `make_operands`."""
    if reserved_sms < 0:
        raise ValueError(f"fused_experts: reserved_sms must not be negative, got {reserved_sms}")
    _check_formats(weights)
    activation = settings.get("activation", _SWIGLU).name
    check_operands(tokens, topk_weights, permutation.slot_to_row, permutation.offsets, *weights, activation)
    operands = make_operands(tokens, weights, **settings)
    if choose("fused_experts", implementation, tokens) == "reference":
        if operands.adds_to_main_grad:
            raise NotImplementedError(
                "fused_experts: adds_to_main_grad needs the Triton kernels, got implementation 'reference'; add .grad "
                "to main_grad after backward"
            )
        # With a tracer or quantised weights, run the reference as a registered op: see `reference_op.py`.
        is_quantized = isinstance(weights.w_up, QuantizedWeight)
        run = reference_experts_op if is_quantized or is_traced(tokens) else run_reference
        experts, precision = operands.experts, operands.precision
        return run(ReferenceOperands(tokens, topk_weights, experts, permutation, batch_invariant, precision))
    rows = Rows.of(permutation, reserved_sms=reserved_sms, batch_invariant=batch_invariant)
    return fused_experts_op(operands._replace(topk_weights=topk_weights.float().contiguous(), rows=rows)).out


def compute_chosen(
    tokens: Tensor,  # [T, D]
    topk_experts: Tensor,  # [T, K] int32 or int64
    topk_weights: Tensor,  # [T, K] float32
    weights: ExpertWeights,
    *,
    batch_invariant: bool = False,
    implementation: str | None = None,
    **settings: Any,
) -> Tensor:  # [T, D]
    """Sort the slots and compute `fused_experts`. With the Triton kernels, one op does both steps."""
    if choose("fused_experts", implementation, tokens) == "reference":
        permutation = sort_by_expert(topk_experts, weights.w_up.shape[0], implementation=implementation)
        options = {"batch_invariant": batch_invariant, "implementation": implementation}
        return compute_experts(tokens, topk_weights, permutation, weights, **options, **settings)
    _check_formats(weights)
    check_dtype("fused_experts", "topk_weights", topk_weights, torch.float32, torch.float64)
    operands = make_operands(
        tokens,
        weights,
        topk_weights=topk_weights.float().contiguous(),
        topk_experts=topk_experts.contiguous(),
        batch_invariant=batch_invariant,
        **settings,
    )
    return fused_experts_op(operands).out


class RoutedExperts(NamedTuple):
    """The experts' output and the routing. Most callers need only `out`, so properties return the routing on demand."""

    out: Tensor  # [T, D]
    buffer: Tensor  # see `SortedSlots`
    operands: ExpertOperands

    @property
    def topk_experts(self) -> Tensor:  # [T, K] int32
        """Return the chosen experts. If `buffer` holds the experts, return a copy, so that `buffer` can be freed."""
        if self.operands.topk_experts is not None:
            return self.operands.topk_experts
        return self.operands.slots_in(self.buffer).choice(self.out.shape[0])[1].clone()

    @property
    def offsets(self) -> Tensor:  # [E] int32
        """Return the end row of each expert."""
        return self.buffer.view(-1)[: self.operands.num_experts]


def compute_routed(
    tokens: Tensor,  # [T, D]
    router: LinearRouter,
    weights: ExpertWeights,
    **settings: Any,
) -> RoutedExperts:
    """Route by `linear_routing`, sort the slots and compute `fused_experts` with the Triton kernels. The weights must
    contain every expert that the router can choose. One op does all steps, except under `torch.compile`. Compiled code
    routes by a separate op, so that checkpointing can keep the chosen experts: see `save_routing`."""
    _check_formats(weights)
    if torch.compiler.is_dynamo_compiling():
        topk_weights, topk_experts, _ = linear_routing_op(tokens, router)
        operands = make_operands(tokens, weights, topk_weights=topk_weights, topk_experts=topk_experts, **settings)
    else:
        operands = make_operands(tokens, weights, router=router, **settings)
    made = fused_experts_op(operands)
    assert made.buffer is not None
    return RoutedExperts(made.out, made.buffer, operands)


def make_operands(
    tokens: Tensor,  # [T, D]
    weights: ExpertWeights,
    *,
    adapters: ExpertAdapters | None = None,
    activation: Activation = _SWIGLU,
    weight_on_input: bool = False,
    recompute: str | None = None,
    precision: str | None = None,
    **others: Any,
) -> ExpertOperands:
    """Return the operands of `fused_experts_op`. Check only the settings and the adapters. `others` are further fields
    of `ExpertOperands`.

    Raises:
        ValueError, NotImplementedError: a setting or an adapter is invalid; `fused_experts` lists the cases.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"fused_experts: recompute must be one of {RECOMPUTE}, got {recompute!r}")
    if adapters is not None:
        _check_adapters(adapters, weights.w_up, weights.w_down)
    if precision is not None:
        _check_precision(precision, weights, adapters)
    if others.get("adds_to_main_grad"):
        _check_main_grad(tokens, weights)
    experts = Experts.of(weights, activation, adapters=adapters, weight_on_input=weight_on_input, dtype=tokens.dtype)
    # If gradients are disabled, no backward follows, so the pre-activations are not saved.
    recomputes = recompute == "up" or not torch.is_grad_enabled()
    return ExpertOperands(tokens, experts, recompute=recomputes, precision=precision, **others)


def _check_main_grad(tokens: Tensor, weights: ExpertWeights) -> None:
    if is_traced(tokens):
        raise NotImplementedError("fused_experts: adds_to_main_grad works without torch.compile and other tracers only")
    for name, weight in (("w_up", weights.w_up), ("w_down", weights.w_down)):
        if isinstance(weight, Tensor) and not weight.is_leaf:
            raise ValueError(
                f"fused_experts: with adds_to_main_grad {name} must be a parameter itself, got a tensor computed from "
                "one; omit autocast and expert parallelism by DTensors, or turn adds_to_main_grad off"
            )


def _check_precision(precision: str, weights: ExpertWeights, adapters: ExpertAdapters | None) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"fused_experts: precision must be one of {PRECISIONS}, got {precision!r}")
    if isinstance(weights.w_up, QuantizedWeight):
        raise ValueError(
            f"fused_experts: precision={precision!r} quantises weights that are trained, got stored "
            f"{weights.w_up.format}; dequantise them first"
        )
    if adapters is not None:
        raise NotImplementedError(f"fused_experts: precision={precision!r} takes no adapters; merge them first")
    check_fp8_sizes("fused_experts", *weights.w_down.shape[1:])


def check_fp8_sizes(op: str, d_model: int, d_ff: int) -> None:
    """Raise ValueError unless D and F are multiples of 16. TMA needs e4m3 rows whose size is a multiple of 16 bytes."""
    if d_model % 16 or d_ff % 16:
        raise ValueError(f"{op}: precision='fp8' needs multiples of 16, got d_model={d_model} and d_ff={d_ff}")


def _check_formats(weights: ExpertWeights) -> None:
    if not (isinstance(weights.w_up, QuantizedWeight) or isinstance(weights.w_down, QuantizedWeight)):
        return
    formats = [str(weight.format) if isinstance(weight, QuantizedWeight) else "a tensor" for weight in weights[:2]]
    if formats[0] != formats[1]:
        raise ValueError(f"fused_experts: w_up and w_down must be of one format, got {formats[0]} and {formats[1]}")
    for name, weight in (("w_up", weights.w_up), ("w_down", weights.w_down)):
        assert isinstance(weight, QuantizedWeight)
        check_quantized("fused_experts", name, weight)


def _check_adapters(adapters: ExpertAdapters, w_up: Weight, w_down: Weight) -> None:
    if not isinstance(adapters, ExpertAdapters):
        raise ValueError(f"fused_experts: adapters must be ExpertAdapters, got {type(adapters).__name__}")
    up_a, up_b, down_a, down_b, _ = adapters
    for a, b, weight, names in ((up_a, up_b, w_up, ("up_a", "up_b")), (down_a, down_b, w_down, ("down_a", "down_b"))):
        if (a is None) != (b is None):
            raise ValueError(f"fused_experts: adapters must have {names[0]} and {names[1]} or neither, got one of them")
        if a is not None and b is not None:
            num_experts, size_out, size_in = weight.shape
            rank = a.shape[1] if a.dim() == 3 else 0
            _check_factor(names[0], a, (num_experts, rank, size_in), weight.device)
            _check_factor(names[1], b, (num_experts, size_out, rank), weight.device)


def _check_factor(name: str, factor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    # All experts may share the outer factors: up_a multiplies tokens, and down_b makes outputs. If shared, E is 1.
    allowed = [[1, *shape[1:]], list(shape)] if name in ("up_a", "down_b") else [list(shape)]
    if 0 in shape[1:] or list(factor.shape) not in allowed:
        wanted = " or ".join(map(str, allowed))
        raise ValueError(f"fused_experts: {name} must be {wanted} with a rank of at least 1, got {list(factor.shape)}")
    if factor.device != device or not factor.is_floating_point():
        raise ValueError(
            f"fused_experts: {name} must be of floating point on {device}, got {factor.dtype} on {factor.device}"
        )
