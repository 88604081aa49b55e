"""Cases of `fused_experts` and the sort before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_kernels import Activation, Permutation, fused_experts, reference, sort_by_expert
from moe_kernels.testing import make_logits

from .case import Case, hold, sums_decide, with_upstream
from .tensors import Random, lay_out

OPERANDS = ("tokens", "topk_weights", "w_up", "w_down", "b_up", "b_down")


@dataclass(frozen=True)
class Experts(Case):
    num_tokens: int
    num_experts: int
    top_k: int
    d_model: int
    d_ff: int
    dtype: str
    routing: str
    dropped: float  # share of the slots that reach no expert
    max_rows: int | None
    activation: str
    limit: float | None  # the activation's limit; None for the published one
    bias: bool
    weight_on_input: bool
    recompute: str | None
    frozen: tuple[str, ...]
    layouts: tuple[str, ...]  # for tokens, topk_weights, w_up, w_down, the upstream gradient
    seed: int

    @property
    def spec(self) -> Activation:
        return Activation(self.activation, limit=self.limit)

    def draw(self, device: str, seed: int) -> tuple[Tensor, ...]:
        """Return tokens, topk_weights, topk_experts, w_up, w_down [, b_up, b_down]; unrouted tokens hold NaN."""
        multiples = sums_decide(self.limit, self.dtype)
        random = self.random(device, seed, multiples=multiples)
        sizes = self.num_tokens, self.num_experts
        logits = make_logits(*sizes, self.routing, device, random.generator)
        _, weights, _ = reference.topk_routing(logits, self.top_k)
        weights = 2.0 ** -(4 * weights).round() if self.integers else weights
        experts = choose(logits, self.top_k, self.dropped, random)
        d_up = (1 + self.spec.gated) * self.d_ff
        tokens = random.values(self.num_tokens, self.d_model)
        reached = self.sort(reference.sort_by_expert, experts).slot_to_row >= 0
        tokens[~reached.any(1)] = torch.nan
        w_up = random.values(self.num_experts, d_up, self.d_model, scale=self.d_model**-0.5)
        w_down = random.values(self.num_experts, self.d_model, self.d_ff, scale=self.d_ff**-0.5)
        operands = (tokens, weights.to(random.wide), w_up, w_down)
        operands = [lay_out(tensor, layout) for tensor, layout in zip(operands, self.layouts[:4], strict=True)]
        biases = [random.values(self.num_experts, size) for size in (d_up, self.d_model)] if self.bias else []
        return *operands[:2], experts, *operands[2:], *biases

    def sort(self, op, experts: Tensor) -> Permutation:
        return op(experts, self.num_experts, max_rows=self.max_rows)

    def run(self, op, sort, tokens, topk_weights, experts, w_up, w_down, b_up=None, b_down=None) -> Tensor:
        options = {"b_up": b_up, "b_down": b_down, "activation": self.spec, "weight_on_input": self.weight_on_input}
        out = op(tokens, topk_weights, self.sort(sort, experts), w_up, w_down, **options)
        return with_upstream(out, partial(lay_out, layout=self.layouts[4]), integers=self.integers)

    def formula(self, tokens, topk_weights, experts, w_up, w_down, b_up=None, b_down=None) -> Tensor:
        kept = sort_slots(experts, self.num_experts, self.max_rows) >= 0
        tokens = torch.where(kept.any(1, keepdim=True), tokens, 0.0)
        out = torch.zeros_like(tokens)
        for e in range(self.num_experts):
            t, k = (kept & (experts == e)).nonzero(as_tuple=True)
            weight = topk_weights[t, k, None]
            h = (weight * tokens[t] if self.weight_on_input else tokens[t]) @ w_up[e].T
            h = h if b_up is None else h + b_up[e]
            y = reference.apply_activation(h, self.spec) @ w_down[e].T
            y = y if b_down is None else y + b_down[e]
            out = out.index_add(0, t, y if self.weight_on_input else weight * y)
        return out

    def check(self, device: str) -> None:
        op = partial(fused_experts, recompute=self.recompute, implementation=self.implementation)
        hold(
            partial(self.run, op, partial(sort_by_expert, implementation=self.implementation)),
            partial(self.run, reference.fused_experts, reference.sort_by_expert),
            self.formula,
            partial(self.draw, device),
            OPERANDS if self.bias else OPERANDS[:4],
            self.frozen,
        )


def choose(logits: Tensor, top_k: int, dropped: float, random: Random) -> Tensor:  # [T, K] int32
    """Return the top-k, with a share of the slots sent to ids below the first or past the last expert."""
    experts = reference.topk_routing(logits, top_k).topk_experts
    nowhere = torch.where(random.chance(*experts.shape, of=0.5), -1, logits.shape[1]).int()
    return torch.where(random.chance(*experts.shape, of=dropped), nowhere, experts)


def sort_slots(
    experts: Tensor,  # [T, K]
    num_experts: int,
    max_rows: int | None = None,
) -> Tensor:  # [T, K] int32; -1 for none
    """Return the row of each slot in (expert, slot) order; beyond the limit, the last slots get none."""
    flat = experts.flatten().tolist()
    order = [slot for e, slot in sorted((e, slot) for slot, e in enumerate(flat)) if 0 <= e < num_experts]
    rows = [-1] * len(flat)
    for row, slot in enumerate(order[:max_rows]):
        rows[slot] = row
    return torch.tensor(rows, dtype=torch.int32, device=experts.device).view(experts.shape)
