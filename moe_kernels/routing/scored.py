"""Routers beyond the plain softmax: the facts of a `RouterSpec`, on logits or behind the linear map as one op.

    scores = f(logits)     chosen = top-k of scores [+ bias] in the best groups     w = scale * s / (sum of s + epsilon)

One kernel computes all of it forward and another backward. A SparseMixer and norms other than the sum are plain PyTorch
on the logits, under every implementation.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from .. import reference
from ..gemm.batch_invariance import invariant_product, token_by_token
from ..router_spec import RouterSpec
from ..runtime.checks import check_dtype, check_same_device, check_shapes
from ..runtime.dispatch import choose, without_autocast
from ..runtime.ops import registered_op
from ..types import Routing
from .linear import check_router_dtypes, halves_dtype, router_gradients, router_logits, router_logits_op
from .scored_kernels import Facts, launch_backward, launch_forward
from .softmax import linear_routing

_LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def scored_routing(
    logits: Tensor,  # [T, E]
    top_k: int,
    spec: RouterSpec,
    *,
    selection_bias: Tensor | None = None,  # [E]
    implementation: str | None = None,
) -> Routing:
    """Choose and weigh each token's experts by the facts of a router, in float32.

    The experts of a token are distinct and come by falling score, the selection bias included; on a tie the lower id
    comes first. NaN counts as the highest score, and ids stay within [0, E). Deterministic. Differentiable in `logits`.
    The logits of the result are those that were scored: multiplied and capped.

    Args:
        spec: its facts about the way to the logits (norm of the input, logit bias) and about the expert's weight
            (per_expert_scale, weight_on_input) do not act here.
        selection_bias: for specs that have one, and only then.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: wrong shape or dtype, a missing or unasked selection bias, or a `top_k` that `spec` cannot choose.
    """
    sizes = check_shapes("scored_routing", logits=(logits, "T E"))
    check_dtype("scored_routing", "logits", logits, *_LOGIT_DTYPES)
    _check_bias("scored_routing", "selection_bias", spec.selection_bias is not None, selection_bias, logits)
    spec.check_sizes("scored_routing", sizes["E"], top_k)
    if choose("scored_routing", implementation, logits) == "reference" or not _in_kernel(spec):
        return reference.scored_routing(logits, top_k, spec, selection_bias)
    logits = reference.shape_logits(logits, spec)
    topk_weights, topk_experts = _scored_routing_op(logits, selection_bias, top_k, *_facts(spec))
    return Routing(topk_experts, topk_weights, logits)


def scored_linear_routing(
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    top_k: int,
    spec: RouterSpec,
    *,
    logit_bias: Tensor | None = None,  # [E]
    selection_bias: Tensor | None = None,  # [E]
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> Routing:
    """`scored_routing` of the logits `tokens @ w_router.T + logit_bias`, float32 unless the spec says otherwise.

    Where the logits are float32 and go into the kernel as they are, this is one autograd boundary that saves the
    tokens and the choice, and computes the logits again in backward. The gradient of the logits is float32, and both
    products with it accumulate in float32. Deterministic. Differentiable in `tokens`, `w_router` and `logit_bias`.

    Args:
        w_router: in the dtype of the tokens, or float32; then all products, and the logits, are float32.
        batch_invariant: the other tokens change no bit of what a token gets, nor of its gradient.

    Raises:
        ValueError: a shape, dtype or device disagrees with the signature, a bias is missing or not asked for by
            `spec`, or `spec` cannot choose `top_k`.
    """
    op = "scored_linear_routing"
    sizes = check_shapes(op, tokens=(tokens, "T D"), w_router=(w_router, "E D"))
    check_router_dtypes(op, tokens, w_router)
    check_same_device(op, tokens=tokens, w_router=w_router)
    _check_bias(op, "logit_bias", spec.logit_bias, logit_bias, w_router.t())
    _check_bias(op, "selection_bias", spec.selection_bias is not None, selection_bias, w_router.t())
    spec.check_sizes(op, sizes["E"], top_k)
    chosen = choose(op, implementation, tokens)
    with without_autocast(tokens):  # it would round the logits
        if chosen == "reference":
            operands = {"w_router": w_router, "logit_bias": logit_bias, "selection_bias": selection_bias}
            route = partial(reference.scored_linear_routing, top_k=top_k, spec=spec, **operands)
            return Routing(*token_by_token(route, tokens)) if batch_invariant else route(tokens)
        if spec.logits_in_token_dtype and w_router.dtype != torch.float32:
            logits = _logits_in_token_dtype(tokens, w_router, logit_bias, batch_invariant)
        elif _in_kernel(spec) and spec.logit_multiplier == 1.0 and spec.logit_softcap is None:
            topk_weights, topk_experts, logits = _scored_linear_routing_op(
                tokens, w_router, logit_bias, selection_bias, batch_invariant, top_k, *_facts(spec)
            )
            return Routing(topk_experts, topk_weights, logits)
        else:
            options = {"batch_invariant": batch_invariant, "implementation": "triton"}
            logits = linear_routing(tokens, w_router, top_k, **options).logits
            logits = logits if logit_bias is None else logits + logit_bias
        return scored_routing(logits, top_k, spec, selection_bias=selection_bias, implementation="triton")


def _logits_in_token_dtype(
    tokens: Tensor, w_router: Tensor, logit_bias: Tensor | None, batch_invariant: bool
) -> Tensor:  # [T, E]
    if not batch_invariant:
        return functional.linear(tokens, w_router, None if logit_bias is None else logit_bias.to(tokens.dtype))
    logits = invariant_product(tokens, w_router.t(), torch.float32)
    logits = logits if logit_bias is None else logits + logit_bias.to(tokens.dtype)
    return logits.to(tokens.dtype)


def routing_weights(
    logits: Tensor,  # [T, E]
    topk_experts: Tensor,  # [T, K] int32; -1 for none
    spec: RouterSpec,
) -> Tensor:  # [T, K] float32
    """The weights that a router gives to a choice of experts that need not be its own.

    For its own choice they are those of `scored_routing`. A slot of no expert weighs 0; the others of its token are
    normalised without it. Plain PyTorch, whatever the device. Differentiable in
    `logits`: through the scores of the chosen experts, and of all experts where they share a softmax.

    Args:
        logits: as they were scored, that is, those of a `Routing`.
        topk_experts: ids in [0, E), or -1. Not checked: reading them would wait for the GPU.

    Raises:
        ValueError: wrong shape or dtype, or `spec` cannot choose as many experts.
    """
    sizes = check_shapes("routing_weights", logits=(logits, "T E"), topk_experts=(topk_experts, "T K"))
    check_dtype("routing_weights", "logits", logits, torch.float32, torch.float64)
    check_dtype("routing_weights", "topk_experts", topk_experts, torch.int32)
    check_same_device("routing_weights", logits=logits, topk_experts=topk_experts)
    spec.check_sizes("routing_weights", sizes["E"], sizes["K"])
    return reference.routing_weights(logits, topk_experts, spec)


def selection_keys(
    logits: Tensor,  # [T, E]
    spec: RouterSpec,
    *,
    selection_bias: Tensor | None = None,  # [E]
) -> Tensor:  # [T, E]
    """The numbers whose top-k a router takes: logits or scores, with their bias, less excluded groups. No gradient.

    Plain PyTorch, whatever the device.

    Raises:
        ValueError: wrong shape or dtype, or a missing or unasked selection bias.
    """
    check_shapes("selection_keys", logits=(logits, "T E"))
    check_dtype("selection_keys", "logits", logits, torch.float32, torch.float64)
    _check_bias("selection_keys", "selection_bias", spec.selection_bias is not None, selection_bias, logits)
    return reference.selection_keys(logits, spec, selection_bias)


def _check_bias(op: str, name: str, wanted: bool, bias: Tensor | None, logits: Tensor) -> None:
    if (bias is not None) != wanted:
        raise ValueError(f"{op}: this router has {'a' if wanted else 'no'} {name}, got {'none' if wanted else 'one'}")
    if bias is not None:
        check_shapes(op, logits=(logits, "T E"), **{name: (bias, "E")})
        check_same_device(op, logits=logits, **{name: bias})


def _in_kernel(spec: RouterSpec) -> bool:
    return spec.sparsemixer_jitter is None and (spec.norm_power == 1.0 or not spec.normalize)


def _facts(spec: RouterSpec) -> Facts:
    return Facts(
        spec.chooses_by_logit,
        spec.num_groups,
        spec.topk_groups,
        spec.group_score == "top2_sum",
        spec.excluded_score == 0.0,
        spec.score,
        spec.normalize,
        spec.norm_epsilon,
        spec.norm_minimum,
        spec.scale,
    )


@registered_op("scored_routing")
def _scored_routing_op(
    logits: Tensor,
    selection_bias: Tensor | None,
    top_k: int,
    by_logit: bool,
    num_groups: int,
    topk_groups: int,
    top2_sum: bool,
    excluded_zero: bool,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # weights [T, K], experts [T, K]
    facts = Facts(
        by_logit, num_groups, topk_groups, top2_sum, excluded_zero, score, normalize, norm_epsilon, norm_minimum, scale
    )
    return launch_forward(logits, selection_bias, top_k, facts)


@_scored_routing_op.register_fake
def _(logits, selection_bias, top_k, *facts):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _setup(ctx, inputs, output):
    logits, _, _, *facts = inputs
    ctx.facts = Facts(*facts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _backward(ctx, dweights, _):
    logits, topk_experts = ctx.saved_tensors
    if dweights is None:
        return (None,) * (3 + len(ctx.facts))
    dlogits = _call_backward(dweights, topk_experts, logits, None, ctx.facts, None)
    return dlogits.to(logits.dtype), *(None,) * (2 + len(ctx.facts))


_scored_routing_op.register_autograd(_backward, setup_context=_setup)


@registered_op("scored_linear_routing")
def _scored_linear_routing_op(
    tokens: Tensor,
    w_router: Tensor,
    logit_bias: Tensor | None,
    selection_bias: Tensor | None,
    batch_invariant: bool,
    top_k: int,
    by_logit: bool,
    num_groups: int,
    topk_groups: int,
    top2_sum: bool,
    excluded_zero: bool,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # weights [T, K], experts [T, K], logits [T, E]
    facts = Facts(
        by_logit, num_groups, topk_groups, top2_sum, excluded_zero, score, normalize, norm_epsilon, norm_minimum, scale
    )
    logits = router_logits(tokens, w_router, logit_bias, batch_invariant)
    return *launch_forward(logits, selection_bias, top_k, facts), logits


@_scored_linear_routing_op.register_fake
def _(tokens, w_router, logit_bias, selection_bias, batch_invariant, top_k, *facts):
    shape = (tokens.shape[0], top_k)
    logits = tokens.new_empty(tokens.shape[0], w_router.shape[0], dtype=torch.float32)
    return tokens.new_empty(shape, dtype=torch.float32), tokens.new_empty(shape, dtype=torch.int32), logits


def _linear_setup(ctx, inputs, output):
    tokens, w_router, logit_bias, _, ctx.batch_invariant, _, *facts = inputs
    ctx.facts = Facts(*facts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(tokens, w_router, logit_bias, output[1])


def _linear_backward(ctx, dweights, _, dlogits_direct):
    tokens, w_router, logit_bias, topk_experts = ctx.saved_tensors
    rest = (None,) * (3 + len(ctx.facts))
    if dweights is None and dlogits_direct is None:
        return None, None, None, *rest
    with without_autocast(tokens):
        dlogits = dlogits_direct
        if dweights is not None:
            logits = router_logits_op(tokens, w_router, logit_bias, ctx.batch_invariant)
            split_dtype = halves_dtype(tokens, w_router)
            dlogits = _call_backward(dweights, topk_experts, logits, dlogits_direct, ctx.facts, split_dtype)
        dlogit_bias = None
        if ctx.needs_input_grad[2]:
            dlogit_bias = dlogits.sum(0, dtype=torch.float32).view(-1, len(w_router)).sum(0).to(logit_bias.dtype)
        gradients = router_gradients(dlogits, tokens, w_router, ctx.needs_input_grad[:2], ctx.batch_invariant)
        return *gradients, dlogit_bias, *rest


_scored_linear_routing_op.register_autograd(_linear_backward, setup_context=_linear_setup)


def _call_backward(
    dweights: Tensor,  # [T, K]
    topk_experts: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    dlogits_direct: Tensor | None,  # [T, E]
    facts: Facts,
    split_dtype: torch.dtype | None,
) -> Tensor:
    numbers = facts.score, facts.normalize, facts.norm_epsilon, facts.norm_minimum, facts.scale
    return _scored_routing_backward_op(dweights, topk_experts, logits, dlogits_direct, split_dtype, *numbers)


@registered_op("scored_routing_backward")
def _scored_routing_backward_op(
    dweights: Tensor,
    topk_experts: Tensor,
    logits: Tensor,
    dlogits_direct: Tensor | None,  # a gradient to add
    split_dtype: torch.dtype | None,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> Tensor:  # [T, E] float32; [T, 2E] with a split dtype: [high | low], see `routing._topk_backward_op`
    numbers = score, normalize, norm_epsilon, norm_minimum, scale
    return launch_backward(dweights, topk_experts, logits, dlogits_direct, split_dtype, *numbers)


@_scored_routing_backward_op.register_fake
def _(dweights, topk_experts, logits, dlogits_direct, split_dtype, *facts):
    num_columns = logits.shape[1] if split_dtype is None else 2 * logits.shape[1]
    return dweights.new_empty(logits.shape[0], num_columns, dtype=split_dtype)
