"""The public functions that route tokens, given the logits or the tokens. A `RouterSpec` describes the router.

`softmax.py` has the op for the plain softmax, `scored.py` the op for most other specs, and `linear_op.py` the op that
includes the linear map. For two kinds of specs, every implementation computes experts and weights in plain PyTorch:
SparseMixer, and norms other than the sum.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..gemm.batch_invariance import token_by_token, widened
from ..runtime.checks import can_be_read, check_dtype, check_same_device, check_shapes
from ..runtime.dispatch import choose, without_autocast
from ..specs import RouterSpec
from ..types import Routing
from .linear import check_linear_router
from .linear_op import LinearRouter, linear_routing_op
from .scored import score_settings, scored_routing_op
from .softmax import topk_routing_op

_LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SOFTMAX = RouterSpec()


def topk_routing(
    logits: Tensor,  # [T, E]
    top_k: int,
    spec: RouterSpec | None = None,
    *,
    selection_bias: Tensor | None = None,  # [E]
    implementation: str | None = None,
) -> Routing:
    """Choose each token's `top_k` experts and weigh them, in float32.

    A token's experts are distinct and in descending order of score, selection bias included. The lower id wins ties.
    NaN counts as the highest score, as in torch.topk: ids stay within [0, E), and the token's weights are NaN. The
    returned logits are capped if the spec has a `logit_softcap`. Deterministic. Differentiable in `logits`.

    Shapes: logits [T, E], selection_bias [E]; result topk_experts [T, K] int32, topk_weights [T, K] float32, logits
    [T, E].

    Args:
        spec: the router. Default: `RouterSpec()`, a softmax over the chosen logits. Settings applied before the logits
            (input_norm_epsilon, logit_bias) or after the weights (per_expert_scale, weight_on_input) have no effect.
        selection_bias: required by specs with a selection bias, refused by all other specs.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: wrong shape or dtype, a missing or unwanted selection bias, or `spec` cannot choose `top_k` experts.
    """
    spec = _SOFTMAX if spec is None else spec
    sizes = check_shapes("topk_routing", logits=(logits, "T E"))
    check_dtype("topk_routing", "logits", logits, *_LOGIT_DTYPES)
    _check_bias("topk_routing", "selection_bias", spec.selection_bias is not None, selection_bias, logits, sizes["E"])
    spec.check_sizes("topk_routing", sizes["E"], top_k)
    if choose("topk_routing", implementation, logits) == "reference" or not _in_kernel(spec):
        return reference.topk_routing(logits, top_k, spec, selection_bias)
    logits = reference.shape_logits(logits, spec)
    if spec.is_softmax_of_logits:
        topk_weights, topk_experts = topk_routing_op(logits, top_k, spec.normalize)
    else:
        topk_weights, topk_experts = scored_routing_op(logits, selection_bias, top_k, score_settings(spec))
    return Routing(topk_experts, topk_weights, logits)


def linear_routing(
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    top_k: int,
    spec: RouterSpec | None = None,
    *,
    logit_bias: Tensor | None = None,  # [E]
    selection_bias: Tensor | None = None,  # [E]
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> Routing:
    """Compute float32 logits `tokens @ w_router.T + logit_bias`, then choose and weigh each token's `top_k` experts.

    Experts and weights are those that `topk_routing` gives for these logits. With "triton", the function is one
    autograd node, except for specs with a `logit_softcap`, SparseMixer or a norm other than the sum. The node saves the
    tokens and the choice of experts. The backward pass recomputes the logits if it needs them. No [T, E] tensor is
    saved. The gradient of the logits is float32. If `w_router` is 16-bit, the node may round this gradient to a sum of
    two 16-bit numbers. Both GEMMs that read the gradient accumulate in float32. Deterministic. Differentiable in
    `tokens`, `w_router` and `logit_bias`, through weights and logits.

    Shapes: tokens [T, D], w_router [E, D], logit_bias [E], selection_bias [E]; result topk_experts [T, K] int32,
    topk_weights [T, K] float32, logits [T, E] float32.

    Args:
        w_router: in the dtype of the tokens, or float32, which makes all GEMMs float32.
        spec: the router. Default: `RouterSpec()`, a softmax over the chosen logits. The spec's input_norm_epsilon,
            per_expert_scale and weight_on_input have no effect.
        logit_bias: required by specs with a logit bias, refused by all other specs.
        selection_bias: required by specs with a selection bias, refused by all other specs.
        batch_invariant: whether a token's result and gradient are bit for bit independent of the other tokens. Default:
            False.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, a bias is missing or not wanted by `spec`, or
            `spec` cannot choose `top_k` experts.
    """
    spec = _SOFTMAX if spec is None else spec
    check_linear_router(tokens, w_router)
    num_experts, needs_bias = w_router.shape[0], spec.selection_bias is not None
    _check_bias("linear_routing", "logit_bias", spec.logit_bias, logit_bias, w_router, num_experts)
    _check_bias("linear_routing", "selection_bias", needs_bias, selection_bias, w_router, num_experts)
    spec.check_sizes("linear_routing", num_experts, top_k)
    chosen = choose("linear_routing", implementation, tokens)
    biases = {"logit_bias": logit_bias, "selection_bias": selection_bias}
    with without_autocast(tokens):  # autocast would round the logits
        if chosen == "reference":
            if not batch_invariant:
                return reference.linear_routing(tokens, w_router, top_k, spec, **biases)
            biases["logit_bias"] = None if logit_bias is None else widened(logit_bias)
            route = partial(reference.linear_routing, w_router=widened(w_router), top_k=top_k, spec=spec, **biases)
            return Routing(*token_by_token(route, tokens))
        if not is_one_op(spec):
            plain = linear_router(_SOFTMAX, top_k, w_router, batch_invariant=batch_invariant)
            logits = linear_routing_op(tokens, plain)[2]
            logits = logits if logit_bias is None else logits + logit_bias
            return topk_routing(logits, top_k, spec, selection_bias=selection_bias, implementation="triton")
        router = linear_router(spec, top_k, w_router, **biases, batch_invariant=batch_invariant)
        topk_weights, topk_experts, logits = linear_routing_op(tokens, router)
        return Routing(topk_experts, topk_weights, logits)


def is_one_op(spec: RouterSpec) -> bool:
    """Return whether one op computes the logits, the choice and the weights. The op supports no softcap, no SparseMixer
    and no norm other than the sum."""
    return spec.logit_softcap is None and _in_kernel(spec)


def linear_router(
    spec: RouterSpec,
    top_k: int,
    w_router: Tensor,  # [E, D]
    *,
    logit_bias: Tensor | None = None,  # [E]
    selection_bias: Tensor | None = None,  # [E]
    batch_invariant: bool = False,
) -> LinearRouter:
    """Return the `LinearRouter` that `linear_routing_op` takes. The arguments are not checked."""
    is_softmax = spec.is_softmax_of_logits and logit_bias is None
    settings = score_settings(spec)
    return LinearRouter(w_router, logit_bias, selection_bias, top_k, is_softmax, batch_invariant, settings)


def routing_weights(
    logits: Tensor,  # [T, E]
    topk_experts: Tensor,  # [T, K] int32; -1 means no expert
    spec: RouterSpec,
) -> Tensor:  # [T, K] float32
    """Return a router's weights for any choice of experts. For the router's own choice, the weights are those of
    `topk_routing`.

    An empty slot (-1) has weight 0, and its token's other weights are normalised without it. Runs in plain PyTorch on
    every device. Differentiable in `logits`. The gradient reaches the chosen experts' logits, and other logits only
    through a softmax.

    Shapes: logits [T, E], topk_experts [T, K] int32; result [T, K] float32.

    Args:
        logits: the `logits` of a `Routing`, after the cap if the spec has one.
        topk_experts: ids in [0, E), or -1. A slot with any other id counts as empty, but an id of E or more on the CPU
            raises ValueError. On a GPU, this check would need a host synchronisation.

    Raises:
        ValueError: wrong shape or dtype, `spec` cannot choose K experts, or an id on the CPU is E or more.
    """
    sizes = check_shapes("routing_weights", logits=(logits, "T E"), topk_experts=(topk_experts, "T K"))
    check_dtype("routing_weights", "logits", logits, torch.float32, torch.float64)
    check_dtype("routing_weights", "topk_experts", topk_experts, torch.int32)
    check_same_device("routing_weights", logits=logits, topk_experts=topk_experts)
    spec.check_sizes("routing_weights", sizes["E"], sizes["K"])
    check_experts("routing_weights", topk_experts, sizes["E"])
    return reference.routing_weights(logits, topk_experts, spec)


def check_experts(op: str, topk_experts: Tensor, num_experts: int) -> None:
    """Raise ValueError if an id on the CPU is `num_experts` or more. Negative ids mean no expert."""
    if can_be_read(topk_experts) and (topk_experts >= num_experts).any():
        raise ValueError(
            f"{op}: topk_experts must be below the {num_experts} experts, or -1 for no expert, "
            f"got {int(topk_experts.max())}"
        )


def selection_keys(
    logits: Tensor,  # [T, E]
    spec: RouterSpec,
    *,
    selection_bias: Tensor | None = None,  # [E]
) -> Tensor:  # [T, E]
    """Return the keys by which a router ranks experts: logits or scores, plus the bias, or -inf in excluded groups.

    Runs in plain PyTorch on every device. Not differentiable.

    Raises:
        ValueError: wrong shape or dtype, or a missing or unwanted selection bias.
    """
    sizes = check_shapes("selection_keys", logits=(logits, "T E"))
    check_dtype("selection_keys", "logits", logits, torch.float32, torch.float64)
    _check_bias("selection_keys", "selection_bias", spec.selection_bias is not None, selection_bias, logits, sizes["E"])
    return reference.selection_keys(logits, spec, selection_bias)


def _check_bias(op: str, name: str, wanted: bool, bias: Tensor | None, operand: Tensor, num_experts: int) -> None:
    if (bias is not None) != wanted:
        rule, got = ("given", "none") if wanted else ("omitted", "one")
        raise ValueError(f"{op}: {name} must be {rule} for this spec, got {got}")
    if bias is not None:
        check_shapes(op, {"E": num_experts}, **{name: (bias, "E")})
        check_same_device(op, operand=operand, **{name: bias})


def _in_kernel(spec: RouterSpec) -> bool:
    return spec.sparsemixer_jitter is None and (spec.norm_power == 1.0 or not spec.normalize)
