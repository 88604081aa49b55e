"""The steps of the expert feed-forward and of its backward on the rows of one chunk of tokens. `fused_op.py` derives
the formulas. In `fused_experts`, one chunk holds all tokens. `ExpertsInParts` runs the forward and the first step of
backward chunk by chunk. Each function allocates its results and frees everything else that the function allocates."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..activation.ops import Destination, launch_weighted_activation_backward
from ..permutation.permute import launch_slot_products
from ..specs import Activation
from ..types import ExpertAdapters, ExpertWeights, ScaledForms, ScaledRows, ScaledWeight, Weight
from .expert_bias import launch_segment_sum
from .router_gradient import launch_combine_with_router
from .row_products import Rows

_activation = functools.cache(Activation)


class Adapters(NamedTuple):
    """`ExpertAdapters` converted for the kernels. Every expert has its own factors, in the weights' dtype. Ranks are
    zero-padded to multiples of 8. The scale is multiplied into `up_b` and `down_b`."""

    up_a: Tensor | None = None  # [E, r, D]
    up_b: Tensor | None = None  # [E, 2F or F, r]
    down_a: Tensor | None = None  # [E, r, F]
    down_b: Tensor | None = None  # [E, D, r]

    @classmethod
    def of(cls, adapters: ExpertAdapters, weights: ExpertWeights, dtype: torch.dtype | None = None) -> Adapters:
        """Convert adapters to the dtype of the weights, or to `dtype` if the weights are quantised. Autograd
        differentiates the conversion."""
        up_a, up_b, down_a, down_b, scale = adapters
        dtype = weights.w_up.dtype if isinstance(weights.w_up, Tensor) else dtype
        assert dtype is not None
        shape = weights.w_up.shape[0], dtype
        return cls(
            None if up_a is None else _factor(up_a, 1, 1.0, *shape),
            None if up_b is None else _factor(up_b, 2, scale, *shape),
            None if down_a is None else _factor(down_a, 1, 1.0, *shape),
            None if down_b is None else _factor(down_b, 2, scale, *shape),
        )


def _factor(factor: Tensor, rank_axis: int, scale: float, num_experts: int, dtype: torch.dtype) -> Tensor:
    factor = (factor if scale == 1.0 else factor * scale).to(dtype)
    if padding := -factor.shape[rank_axis] % 8:
        factor = functional.pad(factor, (0, padding) if rank_axis == 2 else (0, 0, 0, padding))
    return factor.expand(num_experts, -1, -1).contiguous()


_NO_ADAPTERS = Adapters()


class Experts(NamedTuple):
    """Weights and settings of the experts, which are the same for all chunks of tokens."""

    weights: ExpertWeights  # biases are contiguous
    adapters: Adapters
    activation: str
    limit: float | None
    alpha: float | None
    interleaved: bool
    weight_on_input: bool = False

    @classmethod
    def of(
        cls,
        weights: ExpertWeights,
        activation: Activation,
        *,
        adapters: ExpertAdapters | None = None,
        weight_on_input: bool = False,
        dtype: torch.dtype | None = None,  # dtype of the tokens; needed for adapters of quantised weights
    ) -> Experts:
        w_up, w_down, b_up, b_down = weights
        if b_up is not None or b_down is not None:
            b_up = None if b_up is None else b_up.contiguous()
            b_down = None if b_down is None else b_down.contiguous()
            weights = ExpertWeights(w_up, w_down, b_up, b_down)
        factors = _NO_ADAPTERS if adapters is None else Adapters.of(adapters, weights, dtype)
        settings = activation.name, activation.limit, activation.alpha, activation.interleaved
        return cls(weights, factors, *settings, weight_on_input)

    def scaled(self, forms: ScaledForms) -> Experts:
        """Return the experts with each weight as a `ScaledWeight`: the trained weight and its e4m3 `forms`."""
        (w_up, w_down, *_), f = self.weights, forms
        assert isinstance(w_up, Tensor) and isinstance(w_down, Tensor)
        up = ScaledWeight(w_up, f.up, f.up_scales, f.up_turned, f.up_turned_scales)
        down = ScaledWeight(w_down, f.down, f.down_scales, f.down_turned, f.down_turned_scales)
        return self._replace(weights=self.weights._replace(w_up=up, w_down=down))

    def kind(self) -> Activation:
        return _activation(self.activation, self.limit, self.alpha, self.interleaved)

    def input_weights(self, topk_weights: Tensor | None) -> Tensor | None:
        """Return the routing weights if they multiply the tokens, else None."""
        return topk_weights if self.weight_on_input else None

    def output_weights(self, topk_weights: Tensor) -> Tensor | None:
        """Return the routing weights if they multiply the experts' outputs, else None."""
        return None if self.weight_on_input else topk_weights


class Activated(NamedTuple):
    preactivation: Tensor  # H [R, 2F or F], for backward
    activated: Tensor | ScaledRows  # A [R, F]; in e4m3 if the weights are in e4m3
    low: Tensor | None  # gather(tokens) @ up_a^T [R, r], for backward; None without an adapter of w_up


def activate(
    experts: Experts,
    rows: Rows,
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor | None = None,  # [T, K]; needed only if `weight_on_input` is set
) -> Activated:
    """Return H = gather(tokens) @ w_up^T and A = activation(H)."""
    weights, (up_a, up_b, _, _), activation = experts.weights, experts.adapters, experts.kind()
    copy = experts.weight_on_input or rows.choose_copies(tokens, weights).tokens_forward
    rows_in = rows.permute(tokens, experts.input_weights(topk_weights)) if copy else tokens
    low = extra = None
    if up_a is not None and up_b is not None:
        scaled = experts.weight_on_input
        low = rows.gemm(rows_in if scaled else tokens.contiguous(), up_a.transpose(1, 2), gather=not scaled)
        extra = low, up_b.transpose(1, 2)
    w_up = rows.matrices(weights.w_up, tokens.dtype, transposed=True)
    hidden = rows.activated_gemm(rows_in, w_up, activation, weights.b_up, gather=not copy, extra=extra)
    return Activated(*hidden, low)


def down(experts: Experts, rows: Rows, activated: Tensor | ScaledRows) -> Tensor:  # [R, F] -> [R, D]
    """Return Y = A @ w_down^T."""
    weights, (_, _, down_a, down_b) = experts.weights, experts.adapters
    extra = None
    if down_a is not None and down_b is not None:
        extra = rows.gemm(activated, down_a.transpose(1, 2)), down_b.transpose(1, 2)
    w_down = rows.matrices(weights.w_down, activated.dtype, transposed=True)
    return rows.gemm(activated, w_down, bias=weights.b_down, extra=extra)


class HiddenGradients(NamedTuple):
    """Tensors from which backward computes the gradients of tokens and weights, without reading H again."""

    dpreactivation: Tensor  # dH [R, 2F or F]
    weighted: Tensor  # A_w [R, F]: A times routing weights, or A with weight_on_input; dA' if a `Destination` gets A_w
    dtopk_weights: Tensor  # [T, K] float32; invalid with weight_on_input: use the gradient in `UpGradients`
    drows: Tensor | None  # [R, D]: dout copied to rows; None if GEMMs gather dout, or if w_down needs no gradient
    down_low: Tensor | None  # gather(dout) @ down_b [R, r]; None without an adapter of w_down
    up_low: Tensor | None  # dH @ up_b [R, r]; None without an adapter of w_up, or if a `Destination` gets dH
    scaled: Tensor | None = None  # dH in e4m3 [R, 2F or F], if dX is computed from e4m3 operands
    scaled_scales: Tensor | None = None  # [R, 2F / 128 or F / 128]


def hidden_gradients(
    experts: Experts,
    rows: Rows,
    dout: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K]
    preactivation: Tensor,  # H [R, 2F or F]
    *,
    destination: Destination | None = None,
    overwrite: bool = False,
    needs_topk_weights: bool = True,
    scaled: ScaledRows | None = None,  # [R, 2F or F]
) -> HiddenGradients:
    """Return dH, A_w and the gradient of the routing weights. With `overwrite`, dH overwrites H, so H must not be a
    saved tensor. With a `destination`, dH and A_w are written to its tensors. If `scaled` is given, dH is also written
    to `scaled` in e4m3. This second copy requires `can_scale_gradient`."""
    b_down, (_, up_b, down_a, down_b) = experts.weights.b_down, experts.adapters
    of_other_rows = destination is not None  # dH then lacks the row order of `rows`, so `rows.gemm` cannot read dH
    drows = copy_dout(experts, rows, dout)
    down_low = None if down_b is None else rows.gemm(dout.contiguous(), down_b, gather=True)
    extra = None if down_low is None or down_a is None else (down_low, down_a)
    given = dout.contiguous() if drows is None else drows
    dpreactivation, weighted, dtopk_weights = _differentiate(
        experts,
        rows,
        given,
        torch.ones_like(topk_weights) if experts.weight_on_input else topk_weights,
        preactivation,
        gather=drows is None,
        extra=extra,
        destination=destination,
        overwrite=overwrite,
        scaled=scaled,
    )
    if b_down is not None and needs_topk_weights and not experts.weight_on_input:
        dtopk_weights += launch_slot_products(dout, b_down, rows.slot_experts())
    up_low = None if up_b is None or of_other_rows else rows.gemm(dpreactivation, up_b)
    return HiddenGradients(dpreactivation, weighted, dtopk_weights, drows, down_low, up_low)


def _differentiate(
    experts: Experts,
    rows: Rows,
    given: Tensor,  # [R, D], or [T, D] if `gather` is set
    topk_weights: Tensor,  # [T, K]
    preactivation: Tensor,  # H [R, 2F or F]
    *,
    gather: bool,
    extra: tuple[Tensor, Tensor] | None,
    destination: Destination | None,
    overwrite: bool,
    scaled: ScaledRows | None,
) -> tuple[Tensor, Tensor, Tensor]:  # dH, A_w, dtopk_weights
    """Return dH, A_w and dtopk_weights. A_w is the activation times the routing weight, and dA' = given @ w_down is the
    gradient of A_w. If a fused kernel is faster, one GEMM computes all results. Otherwise a GEMM computes dA', and a
    second kernel computes the results and stores A_w in the memory of dA'. With a `destination`, the second kernel
    writes dH and A_w to `destination`, and the second result is dA'."""
    activation, b_up = experts.kind(), experts.weights.b_up
    w_down = rows.matrices(experts.weights.w_down, given.dtype)  # [E, D, F]
    if b_up is None and extra is None and destination is None and scaled is None:
        options = {"gather": gather, "overwrite": overwrite}
        made = rows.activation_gradient(given, w_down, activation, topk_weights, preactivation, **options)
        if made is not None:
            return made
    dactivated = rows.gemm(given, w_down, gather=gather, extra=extra)  # dA' [R, F]
    del w_down  # free w_down, which may be a dequantised copy
    if overwrite:
        destination = Destination(preactivation, dactivated, rows.slot_to_row)
    dpreactivation, dtopk_weights = launch_weighted_activation_backward(
        preactivation,
        dactivated,
        topk_weights,
        rows.slot_to_row,
        activation,
        rows.row_bias(b_up),
        row_to_token=rows.row_to_token,
        destination=destination,
        scaled=scaled,
    )
    return dpreactivation, dactivated, dtopk_weights


def copies_dout(experts: Experts, rows: Rows, dout: Tensor) -> bool:
    """Return True if `dout` is copied to rows, and False if GEMMs gather the rows of `dout`. Traced tensors give True,
    because no kernel is selected for them."""
    return type(dout) is not Tensor or rows.choose_copies(dout, experts.weights).dout


def copy_dout(experts: Experts, rows: Rows, dout: Tensor) -> Tensor | None:  # [R, D]
    """Copy each token's dout to the token's rows. Return None if a gather inside the GEMMs is faster."""
    return rows.permute(dout) if rows.choose_copies(dout, experts.weights).dout else None


def w_down_gradient(
    experts: Experts,
    rows: Rows,
    dout: Tensor,  # [T, D]
    drows: Tensor | None,  # [R, D]: each token's dout, copied to the token's rows; None if the GEMM gathers
    weighted: Tensor,  # A_w [R, F]
    main_grad: Tensor | None = None,  # [E, D, F]
) -> Tensor:  # [E, D, F]
    """Return gather(dout)^T @ A_w. If `main_grad` is given, add the product to it and return `main_grad`."""
    a = dout.contiguous() if drows is None else drows
    if _is_transposed(experts.weights.w_down):
        return rows.wgrad(weighted, a, gather_dout=drows is None, add_to=_transposed(main_grad)).transpose(1, 2)
    return rows.wgrad(a, weighted, gather_a=drows is None, add_to=main_grad)


def w_up_gradient(
    experts: Experts,
    rows: Rows,
    tokens: Tensor,  # [T, D]
    dpreactivation: Tensor,  # dH [R, 2F or F]
    topk_weights: Tensor | None = None,  # [T, K]; needed only if `weight_on_input` is set
    main_grad: Tensor | None = None,  # [E, 2F or F, D]
) -> Tensor:  # [E, 2F or F, D]
    """Return dH^T @ gather(tokens). If `main_grad` is given, add the product to it and return `main_grad`."""
    copy = experts.weight_on_input or rows.choose_copies(tokens, experts.weights).tokens_backward
    rows_in = rows.permute(tokens, experts.input_weights(topk_weights)) if copy else tokens
    if _is_transposed(experts.weights.w_up):
        made = rows.wgrad(rows_in, dpreactivation, gather_a=not copy, add_to=_transposed(main_grad))
        return made.transpose(1, 2)
    return rows.wgrad(dpreactivation, rows_in, gather_dout=not copy, add_to=main_grad)


def _transposed(main_grad: Tensor | None) -> Tensor | None:
    return None if main_grad is None else main_grad.transpose(1, 2)


def _is_transposed(weight: Weight) -> bool:
    """Return whether a weight [E, out, in] is a view of [E, in, out]. The gradient of such a weight gets the weight's
    strides. Otherwise autograd would copy the gradient into the parameter's layout."""
    assert isinstance(weight, Tensor)  # a quantised weight has no gradient
    return weight.stride(1) == 1 != weight.stride(2)


def up_adapter_gradients(
    experts: Experts,
    rows: Rows,
    tokens: Tensor,  # [T, D]
    dpreactivation: Tensor,  # dH [R, 2F or F]
    low: Tensor,  # gather(tokens) @ up_a^T [R, r]
    up_low: Tensor,  # dH @ up_b [R, r]
    topk_weights: Tensor | None = None,  # [T, K]; needed only if `weight_on_input` is set
) -> tuple[Tensor, Tensor]:  # dup_a [E, r, D], dup_b transposed [E, r, 2F or F]
    """Return the gradient of up_a, (dH @ up_b)^T @ gather(tokens), and the transposed gradient of up_b,
    (gather(tokens) @ up_a^T)^T @ dH. Memory bandwidth bounds these narrow products. Without `weight_on_input`, the GEMM
    for up_a gathers the tokens, because tokens [T, D] fit the L2 cache better than rows [R, D]."""
    if experts.weight_on_input:
        dup_a = rows.wgrad(up_low, rows.permute(tokens, topk_weights))
    else:
        dup_a = rows.wgrad(up_low, tokens.contiguous(), gather_dout=True)
    return dup_a, rows.wgrad(low, dpreactivation)


def down_adapter_gradients(
    experts: Experts,
    rows: Rows,
    dout: Tensor,  # [T, D]
    weighted: Tensor,  # A_w [R, F]: A times routing weights, or A with weight_on_input
    down_low: Tensor,  # gather(dout) @ down_b [R, r]
) -> tuple[Tensor, Tensor]:  # ddown_a [E, r, F], ddown_b transposed [E, r, D]
    """Return ddown_a = (gather(dout) @ down_b)^T @ A_w, and ddown_b^T = (A_w @ down_a^T)^T @ gather(dout)."""
    down_a = experts.adapters.down_a
    assert down_a is not None
    low = rows.gemm(weighted, down_a.transpose(1, 2))
    return rows.wgrad(down_low, weighted), rows.wgrad(low, dout.contiguous(), gather_dout=True)


def up_input_gradient(
    experts: Experts,
    rows: Rows,
    dpreactivation: Tensor | ScaledRows,  # dH [R, 2F or F]
    up_low: Tensor | None,  # dH @ up_b [R, r]; None without an adapter of w_up
) -> Tensor:  # [R, D]
    """Return dX = dH @ w_up."""
    up_a = experts.adapters.up_a
    extra = None if up_low is None or up_a is None else (up_low, up_a)
    return rows.gemm(dpreactivation, rows.matrices(experts.weights.w_up, dpreactivation.dtype), extra=extra)


def tokens_gradient(
    experts: Experts,
    rows: Rows,
    dup_input: Tensor,  # dX [R, D]
    topk_weights: Tensor,  # [T, K]
    dtopk_weights: Tensor | None = None,  # [T, K]; needed only if `w_router` is given
    w_router: Tensor | None = None,  # [E, D]
) -> Tensor:  # [T, D]
    """Return the sum of each token's rows of dX. With `w_router`, add the gradient through the routing weights."""
    if w_router is None:
        return rows.combine(dup_input, experts.input_weights(topk_weights))
    assert dtopk_weights is not None
    bounds = rows.table.bounds
    return launch_combine_with_router(dup_input, topk_weights, dtopk_weights, rows.slot_to_row, bounds, w_router)


def b_up_gradient(experts: Experts, rows: Rows, dpreactivation: Tensor) -> Tensor:  # [E, 2F or F]
    assert experts.weights.b_up is not None
    return launch_segment_sum(dpreactivation, rows.table.bounds).to(experts.weights.b_up.dtype)


def b_down_gradient(
    experts: Experts,
    rows: Rows,
    dout: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K]
) -> Tensor:  # [E, D]
    """Return the sum of dout over each expert's rows. Without `weight_on_input`, each row is multiplied by its routing
    weight."""
    assert experts.weights.b_down is not None
    weights = experts.output_weights(topk_weights)
    row_weights = None if weights is None else rows.permute(weights.new_ones(len(dout), 1), weights)
    sums = launch_segment_sum(dout, rows.table.bounds, rows.row_to_token, row_weights)
    return sums.to(experts.weights.b_down.dtype)
