"""Statistics of a layer's routing over many forwards, summed on the device and read on request."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from moe_kernels.routing.routers import selection_keys
from moe_kernels.routing.statistics import TILE_ROWS, RoutedForward, add_routing_statistics
from moe_kernels.runtime.dispatch import runs_kernels
from moe_kernels.runtime.pytorch import is_in_backward

from ..routing.model_routers import AttachedRouter
from ..routing.result import spread_slots
from ..routing.router import TopKRouter


class RoutingStatistics(NamedTuple):
    """Statistics of all forwards since the last reset. Padding counts only in `num_padding_tokens`.

    Attributes:
        num_calls: number of forwards.
        num_tokens: number of tokens without padding.
        num_padding_tokens: number of padding tokens.
        tokens_per_expert: [E] int64, number of tokens that each expert got.
        dropped_per_expert: [E] int64, number of slots beyond each expert's capacity.
        dead_experts: ids of the experts that got no token; empty before the first token.
        entropy: entropy of the softmax over all experts, in nats, averaged over tokens; ln E is the maximum.
        margin: mean over tokens of a token's margin. The margin is the lowest selection key among the chosen experts
            minus the highest key among the other experts.
        smallest_margin: smallest margin of a token. A margin of 0 is a tie. Rounding, Gumbel noise, replay or
            assignments can make a margin negative.
        max_violation: max / mean - 1 of the experts' numbers of slots before capacities; 0 is perfect balance.
        max_call_violation: `max_violation` of each call, averaged over calls.
        wasted_rows: number of unused rows in each expert's last tile of 128 rows, summed over experts and calls.
        aux_loss: weighted sum of the auxiliary losses, averaged over the forwards with gradients; 0 if there are none.
    """

    num_calls: int
    num_tokens: int
    num_padding_tokens: int
    tokens_per_expert: Tensor
    dropped_per_expert: Tensor
    dead_experts: tuple[int, ...]
    entropy: float
    margin: float
    smallest_margin: float
    max_violation: float
    max_call_violation: float
    wasted_rows: int
    aux_loss: float

    @property
    def num_dropped(self) -> int:
        """Return the number of slots beyond capacities."""
        return int(self.dropped_per_expert.sum())


class RoutingObserver:
    """Sums statistics over a layer's forwards, without recomputed forwards. Only `read` synchronises the host.

    A selection key is an expert's logit or score plus its bias, or -inf in a group that cannot be selected. A token's
    margin is infinite if all selectable experts or none were chosen. Margins mean little with an assignment.

    Args:
        router: the layer's router, on its final device; for a transformers model, the `AttachedRouter`.
        num_experts: number of experts with parameters, which precede the zero experts.
    """

    def __init__(self, router: TopKRouter | AttachedRouter, num_experts: int):
        self.router = router
        self.num_experts = num_experts
        device = router.weight.device
        self._counts = torch.zeros(2 * router.num_experts + 4, dtype=torch.int64, device=device)
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget all forwards."""
        self._counts.zero_()
        self._sums.zero_()
        self._sums[5:].fill_(math.inf)

    @torch.no_grad()
    def add(
        self,
        logits: Tensor,  # [T, E]
        choices: Tensor,  # [T, K] integers; negative means no expert
        *,
        kept: Tensor | None = None,  # [T, K] integers
        token_mask: Tensor | None = None,  # [T] bool
        keys: Tensor | None = None,  # [T, E]
        aux_loss: Tensor | None = None,  # scalar
    ) -> None:
        """Add one forward. The layer calls this method.

        Shapes: logits [T, E], choices [T, K] integers, kept [T, K] integers, token_mask [T] bool, keys [T, E], aux_loss
        scalar.

        Args:
            kept: the choices within capacities. Default None: all choices.
            token_mask: False for padding. Default None: no padding.
            keys: selection keys. The default None computes keys by the settings of the layer's `TopKRouter`.
            aux_loss: the forward's auxiliary loss. Default None: the forward has no auxiliary loss.

        Raises:
            ValueError: the layer is on another device than when `observe` was called.
        """
        if logits.device != self._counts.device:
            raise ValueError(
                f"RoutingObserver: the layer must be on {self._counts.device}, as when it was observed, got tokens on "
                f"{logits.device}; call observe again"
            )
        if keys is None:
            router = self.router
            assert isinstance(router, TopKRouter)  # an `AttachedRouter` always passes `keys`
            keys = selection_keys(logits, router.spec, selection_bias=router.selection_bias)
        implementation, totals = self.router.implementation, (self._counts, self._sums)
        add_forward(*totals, logits, keys, choices, kept, token_mask, aux_loss, self.num_experts, implementation)

    def read(self, *, group: ProcessGroup | None = None) -> RoutingStatistics:
        """Return the statistics so far, on the CPU. This call synchronises with the GPU.

        Args:
            group: ranks whose statistics are combined. Every rank in `group` must call `read`. `num_calls` is the sum
                over ranks. `wasted_rows` assumes that a tile holds tokens of one rank. Default None: only this rank.
        """
        counts, sums, smallest = self._counts, self._sums[:5], self._sums[5:]
        if group is not None:
            counts, sums, smallest = (tensor.clone() for tensor in (counts, sums, smallest))
            distributed.all_reduce(counts, group=group)
            distributed.all_reduce(sums, group=group)
            distributed.all_reduce(smallest, distributed.ReduceOp.MIN, group=group)
        num_choices = self.router.num_experts
        tokens, chosen, scalars = counts.to("cpu", copy=True).split([num_choices, num_choices, 4])
        num_calls, num_tokens, num_all, wasted_rows = scalars.tolist()
        entropy, margin, violations, aux_loss, num_losses = sums.tolist()
        total = max(int(chosen.sum()), 1)
        return RoutingStatistics(
            num_calls=num_calls,
            num_tokens=num_tokens,
            num_padding_tokens=num_all - num_tokens,
            tokens_per_expert=tokens,
            dropped_per_expert=chosen - tokens,
            dead_experts=tuple((tokens == 0).nonzero().flatten().tolist()) if num_tokens else (),
            entropy=entropy / max(num_tokens, 1),
            margin=margin / max(num_tokens, 1),
            smallest_margin=smallest.item(),
            max_violation=(int(chosen.max()) * num_choices - int(chosen.sum())) / total,
            max_call_violation=violations / max(num_calls, 1),
            wasted_rows=wasted_rows,
            aux_loss=aux_loss / max(num_losses, 1),
        )


# Use a registered op, so that compiled code checks `is_in_backward` in each run instead of once during tracing.
@torch.library.custom_op("moe_layers::add_forward", mutates_args=("counts", "sums"))
def add_forward(
    counts: Tensor,
    sums: Tensor,
    logits: Tensor,
    keys: Tensor,
    choices: Tensor,
    kept: Tensor | None,
    token_mask: Tensor | None,
    aux_loss: Tensor | None,
    num_experts: int,
    implementation: str | None,
) -> None:
    """Add a forward to the totals, except in a recomputation. On a GPU, `add_routing_statistics` computes the sums."""
    if is_in_backward():
        return
    forward = RoutedForward(logits, keys, choices, kept, token_mask, aux_loss)
    has_kernels = runs_kernels(implementation, logits) and runs_kernels(implementation, keys)
    add = add_routing_statistics if has_kernels else _add_in_plain_pytorch
    add(counts, sums, forward, num_experts)


def _add_in_plain_pytorch(counts: Tensor, sums: Tensor, forward: RoutedForward, num_experts: int) -> None:
    """Add a forward to the totals with PyTorch ops in float64, on any device."""
    logits, keys, choices, kept, token_mask, aux_loss = forward
    num_tokens, num_choices = logits.shape
    is_token = choices.new_ones(num_tokens, dtype=torch.bool) if token_mask is None else token_mask
    slots, kept_slots = (
        None if experts is None else spread_slots(torch.where(is_token[:, None], experts, -1), 1, num_choices)
        for experts in (choices, kept)
    )  # [T, E]
    assert slots is not None
    chosen = slots.sum(0)
    tokens = chosen if kept_slots is None else kept_slots.sum(0)
    wasted = (-tokens[:num_experts] % TILE_ROWS).sum()[None]
    scalars = [chosen.new_ones(1), is_token.sum()[None], chosen.new_full((1,), num_tokens), wasted]
    counts += torch.cat([tokens, chosen, *scalars])
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1)  # [T]
    last = torch.where(slots > 0, keys.double(), math.inf).amin(1)
    best = torch.where(slots > 0, -math.inf, keys.double()).amax(1)
    margins = torch.where(last == best, 0.0, last - best)  # [T]; -inf minus -inf would give NaN
    violation = (chosen.max() * num_choices - chosen.sum()).double() / chosen.sum().clamp(min=1)  # max / mean - 1
    has_loss = violation.new_full((), aux_loss is not None)
    loss = torch.zeros_like(violation) if aux_loss is None else aux_loss.double()
    totals = [torch.where(is_token, values, 0.0).sum() for values in (entropies, margins)]
    sums[:5] += torch.stack([*totals, violation, loss, has_loss])
    sums[5:] = torch.cat([torch.where(is_token, margins, math.inf), sums[5:]]).min()
