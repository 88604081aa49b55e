"""Statistics of a layer's routing over many forwards: summed on the device, read on request."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from moe_kernels.routing.routers import selection_keys

from ..routing.activation_checkpointing import add_once, minimum_once
from ..routing.model_routers import AttachedRouter
from ..routing.result import LayerRouting, spread_slots
from ..routing.router import TopKRouter

TILE_ROWS = 128  # tile height of a permutation's tile table


class RoutingStatistics(NamedTuple):
    """Statistics of all forwards since the last reset. Padding counts only in `num_padding_tokens`."""

    num_calls: int
    num_tokens: int
    num_padding_tokens: int
    tokens_per_expert: Tensor  # [E] int64
    dropped_per_expert: Tensor  # [E] int64: slots beyond the expert's capacity
    dead_experts: tuple[int, ...]  # experts that got no token
    entropy: float  # of the softmax over all experts: mean over tokens, in nats; ln E is the maximum
    margin: float  # from the last chosen expert to the best other one: mean over tokens
    smallest_margin: float  # 0 is a tie; negative, apart from rounding, only for a replayed choice
    max_violation: float  # relative excess of the most chosen expert over the mean; 0 is perfect balance
    max_call_violation: float  # the same per call, averaged over calls
    wasted_rows: int  # padding rows of each expert's last tile, with tiles of 128 rows
    aux_loss: float  # weighted sum of the auxiliary losses: mean over the forwards with gradients; 0 without any

    @property
    def num_dropped(self) -> int:
        return int(self.dropped_per_expert.sum())


class RoutingObserver:
    """Sums statistics over a layer's forwards. Only reading synchronises the host. Recomputations do not count.

    A margin is a difference between selection keys: logits or scores with their bias, within the selectable groups. It
    is infinite if no expert remains or none was chosen, and means little with an assignment other than top-k.
    Violations count slots before capacities.

    Args:
        router: the layer's router, on its final device; of a transformers model, what attaches its router.
        num_experts: number of experts with parameters, which precede the zero experts.
    """

    def __init__(self, router: TopKRouter | AttachedRouter, num_experts: int):
        self.router = router
        self.num_experts = num_experts
        device = router.weight.device
        self._counts = torch.zeros(2 * router.num_experts + 4, dtype=torch.int64, device=device)
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._smallest = torch.full((1,), math.inf, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Forget all forwards."""
        self._counts.zero_()
        self._sums.zero_()
        self._smallest.fill_(math.inf)

    @torch.no_grad()
    def add(
        self,
        routing: LayerRouting,
        aux_loss: Tensor | None = None,  # scalar
        keys: Tensor | None = None,  # [T, E]
    ) -> None:
        """Add one forward, with its auxiliary loss if it has one. The layer calls this method.

        Args:
            keys: selection keys. The default None computes them by the settings of the layer's `TopKRouter`.
        """
        tokens, chosen = routing.tokens_per_expert, routing.choices_per_expert
        is_token = routing.token_mask  # [T]
        if is_token is None:
            is_token = torch.ones(len(routing.logits), dtype=torch.bool, device=chosen.device)
        scalars = [chosen.new_ones(1), is_token.sum()[None], chosen.new_full((1,), len(routing.logits))]
        wasted = (-tokens[: self.num_experts] % TILE_ROWS).sum()[None]
        add_once(self._counts, torch.cat([tokens, chosen, *scalars, wasted]))
        margins = self._margins(routing, keys)
        entropies = torch.special.entr(routing.logits.double().softmax(-1)).sum(-1)  # [T]
        # The mean is chosen.sum() / len(chosen).
        violation = (chosen.max() * len(chosen) - chosen.sum()).double() / chosen.sum().clamp(min=1)
        sums = [torch.where(is_token, values, 0.0).sum() for values in (entropies, margins)]
        has_loss = violation.new_full((), aux_loss is not None)
        loss = torch.zeros_like(violation) if aux_loss is None else aux_loss.double()
        add_once(self._sums, torch.stack([*sums, violation, loss, has_loss]))
        infinite = margins.new_full((1,), math.inf)  # for calls without tokens
        minimum_once(self._smallest, torch.cat([torch.where(is_token, margins, math.inf), infinite]).min()[None])

    def _margins(self, routing: LayerRouting, keys: Tensor | None) -> Tensor:  # [T] float64
        if keys is None:
            router = self.router
            assert isinstance(router, TopKRouter)  # others pass keys
            keys = selection_keys(routing.logits, router.spec, selection_bias=router.selection_bias)
        keys = keys.double()
        is_chosen = spread_slots(routing.choices, 1, keys.shape[1]).bool()
        last = torch.where(is_chosen, keys, math.inf).amin(1)
        best = torch.where(is_chosen, -math.inf, keys).amax(1)
        return torch.where(last == best, 0.0, last - best)  # in excluded groups all keys may be -inf

    def read(self, *, group: ProcessGroup | None = None) -> RoutingStatistics:
        """Return the statistics so far, on the CPU. Synchronises with the GPU.

        Args:
            group: sum over all its ranks. Every rank must call; each rank's calls count, and `wasted_rows` refers to
                tiles that hold one rank's tokens. Default None: this rank alone.
        """
        counts, sums, smallest = self._counts, self._sums, self._smallest
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
            dead_experts=tuple((tokens == 0).nonzero().flatten().tolist()),
            entropy=entropy / max(num_tokens, 1),
            margin=margin / max(num_tokens, 1),
            smallest_margin=smallest.item(),
            max_violation=(int(chosen.max()) * num_choices - int(chosen.sum())) / total,
            max_call_violation=violations / max(num_calls, 1),
            wasted_rows=wasted_rows,
            aux_loss=aux_loss / max(num_losses, 1),
        )
