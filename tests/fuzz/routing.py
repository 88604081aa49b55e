"""Cases of routing: from logits through sort, permute and combine back to tokens, without the experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import moe_kernels
from moe_kernels import RouterSpec, reference
from moe_kernels.testing import make_logits

from .case import Case, hold, with_upstream
from .experts import sort_slots
from .tensors import lay_out

# Routers that choose by logit. Other routers' choice among near ties depends on the rounding of scores.
ROUTERS = {
    "topk": None,
    "dbrx": RouterSpec.dbrx(2.0),
    "softmax_scale": RouterSpec.softmax(normalize=False, scale=0.5),
    "llama4": RouterSpec.llama4(),
    "sigmoid_epsilon": RouterSpec.deepseek_v3(norm_epsilon=0.3, selection_bias=None, scale=2.5),
}


@dataclass(frozen=True)
class RoutingAndCombine(Case):
    num_tokens: int
    num_experts: int
    top_k: int
    d_model: int
    dtype: str
    routing: str
    router: str  # a key of ROUTERS
    normalize: bool  # option of "topk"
    weighted: bool  # combine with the routing weights
    dropped: float  # share of the slots that reach no expert
    block_rows: int
    max_rows: int | None  # limit of a sort that is compared integer by integer
    frozen: tuple[str, ...]
    layouts: tuple[str, ...]  # for logits, tokens, the upstream gradient
    seed: int

    def draw(self, device: str, seed: int) -> tuple[Tensor, ...]:
        """Return logits, tokens, selection bias and dropped slots, with NaN in tokens that reach no expert."""
        random = self.random(device, seed)
        logits = make_logits(self.num_tokens, self.num_experts, self.routing, device, random.generator)
        is_dropped = random.chance(self.num_tokens, self.top_k, of=self.dropped)
        tokens = random.values(self.num_tokens, self.d_model)
        tokens[is_dropped.all(1)] = torch.nan
        # An integer tensor has no gradient; a sixteenth of an integer is exact in every dtype.
        bias = random.values(self.num_experts, scale=8.0, most=32).int()
        layouts = self.layouts
        return lay_out(logits.to(random.dtype), layouts[0]), lay_out(tokens, layouts[1]), bias, is_dropped

    def route(self, logits: Tensor, bias: Tensor, *, module, **options) -> reference.Routing:
        """Route by the public ops or the reference's, which have the same names."""
        spec = ROUTERS[self.router] or RouterSpec(normalize=self.normalize)
        selection_bias = None if spec.selection_bias is None else bias.float() / 16
        return module.topk_routing(logits, self.top_k, spec, selection_bias=selection_bias, **options)

    def run(self, module, logits, tokens, bias, is_dropped, **options) -> Tensor:
        routed = self.route(logits, bias, module=module, **options)
        experts = torch.where(is_dropped, -1, routed.topk_experts)
        permutation = module.sort_by_expert(experts, self.num_experts, block_rows=self.block_rows, **options)
        rows = module.permute(tokens, permutation, **options)
        # Scale by a token's experts: with equal rows, normalised weights would have no gradient.
        row = torch.arange(len(rows), device=rows.device)
        rows = rows * (1 + torch.searchsorted(permutation.offsets.long(), row, right=True))[:, None]
        weights = routed.topk_weights if self.weighted else None
        out = module.combine(rows, weights, permutation.slot_to_row, **options)
        if not self.weighted:
            out = out * routed.topk_weights[:, :1].to(out.dtype)
        return with_upstream(out, partial(lay_out, layout=self.layouts[2]), integers=self.integers)

    def formula(self, logits, tokens, bias, is_dropped) -> Tensor:
        """Return each token times the weights and factors of its kept slots."""
        experts, weights, _ = self.route(logits, bias, module=reference)
        kept = torch.where(is_dropped, 0, 1 + experts).to(weights.dtype)
        tokens = torch.where(is_dropped.all(1, keepdim=True), 0.0, tokens)
        total = (weights * kept).sum(1) if self.weighted else weights[:, 0] * kept.sum(1)
        return tokens * total[:, None]

    def check(self, device: str) -> None:
        self.check_integers(device)
        hold(
            partial(self.run, moe_kernels, implementation=self.implementation),
            partial(self.run, reference),
            self.formula,
            partial(self.draw, device),
            ("logits", "tokens"),
            self.frozen,
        )

    def check_integers(self, device: str) -> None:
        """Check that the choice equals the reference's, and that the sort, cut at `max_rows`, is a sort."""
        logits, _, bias, is_dropped = self.draw(device, 0)
        routed = self.route(logits, bias, module=moe_kernels, implementation=self.implementation)
        assert torch.equal(routed.topk_experts, self.route(logits, bias, module=reference).topk_experts), "choice"
        experts = torch.where(is_dropped, self.num_experts, routed.topk_experts)
        options = {"block_rows": self.block_rows, "max_rows": self.max_rows}
        actual = moe_kernels.sort_by_expert(experts, self.num_experts, **options, implementation=self.implementation)
        expected = reference.sort_by_expert(experts, self.num_experts, **options)
        for name in ("offsets", "slot_to_row", "row_to_token"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        for name, a, e in zip(actual.tile_table._fields, actual.tile_table[:4], expected.tile_table[:4], strict=False):
            assert torch.equal(a, e), name
        row = sort_slots(experts, self.num_experts, self.max_rows)
        assert torch.equal(actual.slot_to_row, row), "order of the slots"
        token = (row >= 0).nonzero()[:, 0]
        assert torch.equal(actual.row_to_token[row[row >= 0].long()].long(), token), "token of a slot's row"
