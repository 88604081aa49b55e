"""Specification of the package: every op in plain PyTorch, in pipeline order. Float64 inputs are computed in float64.

    tokens -> logits -> topk_routing -> sort_by_expert -> permute -> grouped_gemm -> activation -> grouped_gemm
           -> combine

Letters: T tokens, D d_model, F d_ff of one expert, E experts, K top_k, R = T * K rows. A *slot* is one (token, k)
choice with the flat index t * K + k; a *row* is a slot moved to expert order. Autograd derives all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from .specs import Activation, RouterSpec, as_activation
from .types import ExpertAdapters, Permutation, Routing, TileTable


def _sqrt_softplus(logits: Tensor) -> Tensor:
    score = functional.softplus(logits)
    is_zero = score == 0  # true for float32 logits below -104; masked, because the gradient of sqrt at 0 is infinite
    return score.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


# name -> function from logits [T, E] to scores, which are never negative
SCORES = {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid, "sqrt_softplus": _sqrt_softplus}


def _rankable(keys: Tensor) -> Tensor:
    """Replace NaN by infinity, so that NaN ranks highest."""
    return keys.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _top(keys: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest keys in descending order. On ties the lower index is first."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def selection_keys(
    logits: Tensor,  # [T, E] at least float32, softcap applied
    spec: RouterSpec,
    selection_bias: Tensor | None = None,  # [E]
) -> Tensor:  # [T, E]
    logits = logits.detach()
    if spec.sparsemixer_jitter is not None:
        return _rankable(logits)
    keys = logits if spec.chooses_by_logit else SCORES[spec.score](logits)
    if selection_bias is not None:
        keys = keys + selection_bias.detach().to(keys.dtype)
    keys = _rankable(keys)
    if spec.num_groups > 1:
        groups = rearrange(keys, "t (g e) -> t g e", g=spec.num_groups)
        best = groups.topk(min(2 if spec.group_score == "top2_sum" else 1, groups.shape[-1])).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, _top(_rankable(best), spec.topk_groups), 1.0).bool()
        keys = torch.where(kept[..., None], groups, -torch.inf).flatten(1)
    return keys


def shape_logits(
    logits: Tensor,  # [T, E]
    spec: RouterSpec,
) -> Tensor:  # [T, E]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    return logits


def topk_routing(
    logits: Tensor,  # [T, E]
    top_k: int,
    spec: RouterSpec | None = None,
    selection_bias: Tensor | None = None,  # [E]
) -> Routing:
    spec = RouterSpec() if spec is None else spec
    logits = shape_logits(logits, spec)
    experts = _top(selection_keys(logits, spec, selection_bias), top_k)
    return Routing(experts.int(), routing_weights(logits, experts, spec), logits)


def _weights_of_choice(
    logits: Tensor,  # [T, E] at least float32, softcap applied
    experts: Tensor,  # [T, K]; -1 means no expert
    spec: RouterSpec,
) -> Tensor:  # [T, K]
    is_chosen = experts >= 0
    if spec.sparsemixer_jitter is not None:
        weights = _sparsemixer_weights(logits, experts, spec.sparsemixer_jitter)
    else:
        weights = torch.where(is_chosen, SCORES[spec.score](logits).gather(1, experts.clamp(min=0)), 0.0)
        if spec.normalize:
            total = weights.pow(spec.norm_power).sum(-1, keepdim=True)
            # The norm of a token without an expert would be 0; use 1.0, to avoid a division by zero.
            norm = torch.where(is_chosen.any(1, keepdim=True), total, 1.0).pow(1 / spec.norm_power)
            weights = weights / (norm + spec.norm_epsilon).clamp(min=spec.norm_minimum)
    return torch.where(is_chosen, weights * spec.scale, 0.0)


def routing_weights(
    logits: Tensor,  # [T, E]
    topk_experts: Tensor,  # [T, K] int32; an id outside [0, E) means no expert
    spec: RouterSpec,
) -> Tensor:  # [T, K]
    experts = torch.where(topk_experts < logits.shape[1], topk_experts, -1).long()
    if not spec.is_softmax_of_chosen:
        return _weights_of_choice(logits, experts, spec)
    # A softmax over the chosen logits, times the scale, equals `_weights_of_choice`. The softmax is also defined if the
    # probabilities of all chosen experts underflow.
    chosen = torch.where(experts >= 0, logits.gather(1, experts.clamp(min=0)), torch.finfo(logits.dtype).min)
    weights = chosen.softmax(-1)
    weights = weights if spec.is_softmax_of_logits else weights * spec.scale
    return torch.where(experts >= 0, weights, 0.0)


def _sparsemixer_weights(
    logits: Tensor,  # [T, E]
    experts: Tensor,  # [T, 2]; -1 means no expert; the weight returned for -1 has no meaning
    jitter: float,
) -> Tensor:  # [T, 2]
    weights, left = [], logits
    for choice in experts.split(1, dim=1):  # [T, 1]
        expert = choice.clamp(min=0)
        highest = left.detach().gather(1, expert)
        distance = (highest - logits.detach()) / logits.detach().abs().clamp(min=highest)
        probabilities = left.masked_fill(distance > 2 * jitter, -torch.inf).softmax(-1)
        weights.append(probabilities.gather(1, expert))
        left = torch.where(choice < 0, left, left.scatter(1, expert, -torch.inf))
    return torch.cat(weights, 1)


def linear_routing(
    tokens: Tensor,  # [T, D]
    w_router: Tensor,  # [E, D]
    top_k: int,
    spec: RouterSpec | None = None,
    logit_bias: Tensor | None = None,  # [E]
    selection_bias: Tensor | None = None,  # [E]
) -> Routing:
    dtype = torch.promote_types(torch.promote_types(tokens.dtype, w_router.dtype), torch.float32)
    bias = None if logit_bias is None else logit_bias.to(dtype)
    logits = functional.linear(tokens.to(dtype), w_router.to(dtype), bias)
    return topk_routing(logits, top_k, spec, selection_bias)


def tile_table(
    offsets: Tensor,  # [G] int32
    num_rows: int,
    block_rows: int,
) -> TileTable:
    ends = offsets.long().clamp(0, num_rows).cummax(0).values
    bounds = functional.pad(ends, (1, 1))
    bounds[-1] = num_rows
    counts = (bounds.diff() + block_rows - 1) // block_rows  # [G + 1]
    # `most` is the maximum number of groups that have rows. `min` handles integers, because Dynamo of PyTorch 2.11
    # refuses `sym_min` of integers.
    most = min(len(counts), num_rows) if isinstance(num_rows, int) else torch.sym_min(len(counts), num_rows)
    entry = torch.arange((num_rows - most) // block_rows + most, device=offsets.device)
    group = torch.searchsorted(counts[:-1].cumsum(0), entry, right=True)
    first = functional.pad(counts.cumsum(0)[:-1], (1, 0))  # [G + 1]
    tiles = torch.stack([group, entry - first[group]], dim=1)
    num_tiles = functional.pad(torch.stack([counts[:-1].sum(), counts.sum()]), (0, 2))
    order = bounds.diff()[:-1].argsort(descending=True, stable=True)
    return TileTable(bounds.int(), tiles.int(), num_tiles.int(), order.int(), block_rows)


def sort_by_expert(
    topk_experts: Tensor,  # [T, K] int32 or int64
    num_experts: int,
    *,
    block_rows: int = 128,
    max_rows: int | None = None,
) -> Permutation:
    experts = topk_experts.flatten().long()
    kept = (experts >= 0) & (experts < num_experts)
    keys = torch.where(kept, experts, num_experts)
    ordered, row_to_slot = keys.sort(stable=True)
    slot_to_row = torch.where(kept, row_to_slot.argsort(), -1).view(topk_experts.shape)
    offsets = torch.searchsorted(ordered, torch.arange(num_experts, device=keys.device), right=True).int()
    row_to_token = row_to_slot // max(topk_experts.shape[1], 1)
    num_rows = keys.numel() if max_rows is None else min(max_rows, keys.numel())
    slot_to_row = torch.where(slot_to_row < num_rows, slot_to_row, -1).int()
    offsets = offsets.clamp(max=num_rows)
    return Permutation(offsets, slot_to_row, row_to_token[:num_rows].int(), tile_table(offsets, num_rows, block_rows))


def permute(
    tokens: Tensor,  # [T, D]
    permutation: Permutation,
) -> Tensor:  # [R, D]
    token = permutation.row_to_token
    row = torch.arange(token.shape[0], device=token.device)
    is_owned = (permutation.slot_to_row.index_select(0, token) == row[:, None]).any(1, keepdim=True)  # [R, 1]
    return tokens.index_select(0, token).masked_fill(~is_owned, 0)


def _split_groups(
    rows: Tensor,  # [R, ...]
    offsets: Tensor,  # [G] int32
) -> tuple[Tensor, ...]:  # G + 1 pieces, the last holds the padding rows
    ends = offsets.long().clamp(0, rows.shape[0]).cummax(0).values
    sizes = functional.pad(ends, (1, 1)).diff()
    sizes[-1] += rows.shape[0]
    # Make rows contiguous, because the sizes of pieces are symbols under a tracer. Tracers cannot compare these symbols
    # with the strides of column-major pieces.
    return rows.contiguous().split(sizes.tolist())


def result_dtype(dtype: torch.dtype, out: Tensor | None = None) -> torch.dtype:
    """Return the dtype of `out`. Without `out`, return `dtype`, or bfloat16 if `dtype` is float8: a float8 result would
    need a scale."""
    if out is not None:
        return out.dtype
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def multiply_groups(
    a: Tensor,  # [R, K]
    b: Tensor,  # [G, K, N]
    offsets: Tensor,  # [G] int32
) -> Tensor:  # [R, N]
    *groups, tail = _split_groups(a, offsets)
    rows = torch.cat([group @ matrix for group, matrix in zip(groups, b.unbind(), strict=True)])
    return functional.pad(rows, (0, 0, 0, tail.shape[0]))


def grouped_gemm(
    a: Tensor,  # [R, K]
    b: Tensor,  # [G, K, N]
    offsets: Tensor,  # [G] int32
    *,
    bias: Tensor | None = None,  # [G, N]
    row_scale: Tensor | None = None,  # [R] float32
    activation: str | None = None,
    scale_a: Tensor | None = None,  # [R] float32
    scale_b: Tensor | None = None,  # [G, N] float32
    out: Tensor | None = None,  # [R, N]; [R, F] with an activation, N = 2F
    out_dtype: torch.dtype | None = None,
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = multiply_groups,
) -> Tensor:
    out_dtype = out_dtype or result_dtype(a.dtype, out)
    is_plain = out_dtype == a.dtype and bias is row_scale is scale_a is scale_b is None
    dtype = a.dtype if is_plain else torch.promote_types(out_dtype, torch.float32)
    rows = multiply(a.to(dtype), b.to(dtype), offsets)
    ends = offsets.clamp(0, a.shape[0]).cummax(0).values
    group = torch.searchsorted(ends, torch.arange(a.shape[0], device=a.device, dtype=ends.dtype), right=True)
    in_group, group = group < len(b), group.clamp(max=len(b) - 1)  # [R]
    if scale_a is not None:
        rows = rows * scale_a[:, None]
    if scale_b is not None:
        rows = rows * scale_b[group]
    if bias is not None:
        rows = rows + bias.to(dtype)[group]
    if row_scale is not None:
        rows = rows * torch.where(in_group, row_scale, 0.0)[:, None]
    rows = torch.where(in_group[:, None], rows, 0.0).to(out_dtype)
    rows = rows if activation is None else apply_activation(rows, activation)
    return rows if out is None else out.copy_(rows)


def grouped_gemm_wgrad(
    a: Tensor,  # [R, K]
    dout: Tensor,  # [R, N]
    offsets: Tensor,  # [G] int32
    *,
    out: Tensor | None = None,  # [G, K, N]
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> Tensor:  # [G, K, N]
    out_dtype = out_dtype or (a.dtype if out is None else out.dtype)
    dtype = torch.promote_types(a.dtype, out_dtype)
    *a_groups, _ = _split_groups(a.to(dtype), offsets)
    *dout_groups, _ = _split_groups(dout.to(dtype), offsets)
    matrices = torch.stack([a_g.T @ dout_g for a_g, dout_g in zip(a_groups, dout_groups, strict=True)])
    matrices = (matrices + out if accumulate and out is not None else matrices).to(out_dtype)
    return matrices if out is None else out.copy_(matrices)


def batched_gemm(
    a: Tensor,  # [M, K] or [L, M, K]
    b: Tensor,  # [K, N] or [L, K, N]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [M, N] or [L, M, N]
    out_dtype = out_dtype or a.dtype
    dtype = torch.promote_types(a.dtype, out_dtype)
    return torch.matmul(a.to(dtype), b.to(dtype)).to(out_dtype)


def grouped_gemm_list(
    a_list: Sequence[Tensor],  # [M, K] each
    b_list: Sequence[Tensor],  # [K, N] each
    *,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:  # [M, N] each
    out_dtype = out_dtype or result_dtype(a_list[0].dtype)
    dtype = out_dtype if out_dtype == a_list[0].dtype else torch.promote_types(out_dtype, torch.float32)
    return [(a.to(dtype) @ b.to(dtype)).to(out_dtype) for a, b in zip(a_list, b_list, strict=True)]


def jagged_gemm(
    a_packed: Tensor,  # [R, K]
    b: Tensor,  # [K, N]
    group_offsets: Tensor,  # [G + 1] int32 or int64
) -> Tensor:  # [R, N]
    # All groups share the matrix, so only the first and the last offset matter.
    ends = group_offsets.clamp(0, a_packed.shape[0]).cummax(0).values
    row = torch.arange(a_packed.shape[0], device=a_packed.device)
    in_group = ((row >= ends[0]) & (row < ends[-1]))[:, None]  # [R, 1]
    dtype = torch.promote_types(a_packed.dtype, b.dtype)
    return torch.where(in_group, torch.where(in_group, a_packed, 0.0).to(dtype) @ b.to(dtype), 0.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _at_most(x: Tensor, limit: float) -> Tensor:
    """Return min(x, limit) with gradient 1 at x = limit. `Tensor.clamp` has gradient 0 there from PyTorch 2.14 on."""
    return torch.where(x > limit, limit, x)


def _clamp(x: Tensor, limit: float) -> Tensor:
    return torch.where(x < -limit, -limit, _at_most(x, limit))


def _softcapped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * limit * torch.tanh(up / limit)


def _gpt_oss(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = _at_most(gate, limit), _clamp(up, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


# name -> function of gate and up if gated, else of one value. Further parameters: none, the limit, or limit and alpha.
_ACTIVATIONS = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: _gelu_tanh(gate) * up,
    "reglu": lambda gate, up: functional.relu(gate) * up,
    "clamped_swiglu": lambda gate, up, limit: functional.silu(_at_most(gate, limit)) * _clamp(up, limit),
    "swiglu_clamped_after": lambda gate, up, limit: _at_most(functional.silu(gate), limit) * _clamp(up, limit),
    "clamped_geglu": lambda gate, up, limit: functional.gelu(_at_most(gate, limit)) * _clamp(up, limit),
    "softcapped_swiglu": _softcapped_swiglu,
    "gpt_oss": _gpt_oss,
    "relu_squared": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": functional.silu,
}


def apply_activation(
    preactivation: Tensor,  # [R, 2F] gate columns, then up columns, or interleaved; [R, F] for a plain activation
    activation: str | Activation = "swiglu",
) -> Tensor:  # [R, F]
    activation = as_activation("apply_activation", activation)
    values = preactivation.to(torch.promote_types(preactivation.dtype, torch.float32))
    columns = "(f parts)" if activation.interleaved else "(parts f)"
    parts = rearrange(values, f"... {columns} -> parts ... f", parts=1 + activation.gated)
    numbers = [number for number in (activation.limit, activation.alpha) if number is not None]
    return _ACTIVATIONS[activation.name](*parts, *numbers).to(preactivation.dtype)


def combine(
    rows: Tensor,  # [R, D] expert order
    topk_weights: Tensor | None,  # [T, K]; None means weight 1 for every slot
    slot_to_row: Tensor,  # [T, K] int32
) -> Tensor:  # [T, D] token order
    dtype = torch.promote_types(rows.dtype, torch.float32)
    padded = functional.pad(rows, (0, 0, 0, 1))  # one row of zeros for the dropped slots
    row = torch.where(slot_to_row < 0, rows.shape[0], slot_to_row).flatten()
    chosen = padded.index_select(0, row).to(dtype).unflatten(0, slot_to_row.shape)  # [T, K, D]
    if topk_weights is not None:
        chosen = chosen * torch.where(slot_to_row < 0, 0.0, topk_weights)[..., None].to(dtype)
    return chosen.sum(1).to(rows.dtype)


def add_bias(
    rows: Tensor,  # [R, N]
    bias: Tensor | None,  # [E, N]
    offsets: Tensor,  # [E] int32
) -> Tensor:  # [R, N]
    if bias is None:
        return rows
    *groups, tail = _split_groups(rows, offsets)
    return torch.cat([*(group + b for group, b in zip(groups, bias.unbind(), strict=True)), tail])


def fused_experts(
    tokens: Tensor,  # [T, D]
    topk_weights: Tensor,  # [T, K] float32
    permutation: Permutation,
    w_up: Tensor,  # [E, 2F, D] gate rows, then up rows, or interleaved; [E, F, D] with a plain activation
    w_down: Tensor,  # [E, D, F]
    *,
    b_up: Tensor | None = None,  # [E, 2F], or [E, F]
    b_down: Tensor | None = None,  # [E, D]
    adapters: ExpertAdapters | None = None,
    activation: str | Activation = "swiglu",
    weight_on_input: bool = False,
) -> Tensor:  # [T, D]
    activation = as_activation("fused_experts", activation)
    up_a, up_b, down_a, down_b, scale = adapters or ExpertAdapters()
    offsets, slot_to_row = permutation.offsets, permutation.slot_to_row
    rows = permute(tokens, permutation)  # [R, D]
    if weight_on_input:
        weights = row_weights(topk_weights, slot_to_row, rows.shape[0])
        rows = (rows.to(weights.dtype) * weights[:, None]).to(tokens.dtype)
    preactivation = _adapted_linear(rows, w_up, up_a, up_b, scale, offsets)  # [R, 2F] or [R, F]
    activated = apply_activation(add_bias(preactivation, b_up, offsets), activation)  # [R, F]
    rows = add_bias(_adapted_linear(activated, w_down, down_a, down_b, scale, offsets), b_down, offsets)  # [R, D]
    return combine(rows, None if weight_on_input else topk_weights, slot_to_row)


def _adapted_linear(
    rows: Tensor,  # [R, in]
    weight: Tensor,  # [E, out, in]
    a: Tensor | None,  # [E or 1, r, in]
    b: Tensor | None,  # [E or 1, out, r]
    scale: float,
    offsets: Tensor,  # [E]
) -> Tensor:  # [R, out]
    product = grouped_gemm(rows, weight.transpose(1, 2), offsets)
    if a is None or b is None:
        return product
    a, b = (factor.to(rows.dtype).expand(len(weight), -1, -1).transpose(1, 2) for factor in (a, b))
    return product + scale * grouped_gemm(grouped_gemm(rows, a, offsets), b, offsets)


def row_weights(
    topk_weights: Tensor,  # [T, K]
    slot_to_row: Tensor,  # [T, K] int32
    num_rows: int,
) -> Tensor:  # [R], zero for padding rows, which follow the last offset
    return functional.pad(topk_weights.flatten(), (0, 1))[row_to_slot(slot_to_row)[:num_rows]]


def row_to_slot(slot_to_row: Tensor) -> Tensor:  # [R]
    """Return the slot of each row, or T * K for a padding row."""
    num_slots = slot_to_row.numel()
    row = torch.where(slot_to_row >= 0, slot_to_row, num_slots).flatten().long()
    slot = torch.arange(num_slots, device=row.device)
    return torch.full((num_slots + 1,), num_slots, device=row.device).scatter(0, row, slot)[:num_slots]
