"""Hooks the routers of a transformers model for statistics, losses, bias updates and replay.

A router of transformers returns logits [T, E], weights [T, K] and the chosen experts [T, K]. Before transformers 5.21,
Granite's router returns these tensors in reverse order. `HookedRouter` replaces the router's forward. The replacement
calls the original forward, and reads or changes the three tensors. If no statistics, losses, counts, records or replay
are requested, the replacement only calls the original forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_kernels.runtime.pytorch import disable_dynamo, is_in_backward

from ....balance.balancing import BalanceLosses, global_expert_counts
from ....balance.losses import attach_loss, warn_without_scale
from ....balance.routing_statistics import RoutingObserver
from ....input import TokenInfo
from ....routing.model_routers import ReplayedChoice
from ....routing.result import LayerRouting, Slots, layer_routing
from ..experts.experts_forward import ATTRIBUTE
from .model_forward import ModelForward, check_single_loss, current_forward

# These routers return probabilities. The logarithms of probabilities equal the logits up to a constant per token.
PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")
_BIASES = ("e_score_correction_bias", "expert_bias")  # possible names of the attribute that holds a selection bias


class HookedRouter:
    """One router of a transformers model. `AttachedRouter` lists the members that this package's functions use.

    Args:
        name: name of the router in its model, for errors.
        block: the module that holds the router and its experts.
    """

    def __init__(self, name: str, router: nn.Module, block: nn.Module, experts: nn.Module):
        self.name, self.router, self.block, self.experts = name, router, block, experts
        self.num_experts = _num_experts(router)
        self.num_zero_experts = self.num_experts - getattr(experts, "num_routed_experts", self.num_experts)
        self.observer: RoutingObserver | None = None
        self.balance_losses = BalanceLosses()
        self.num_tokens: int | Tensor | None = None  # divisor of the losses; None: the number of tokens of a forward
        self.counts = False  # whether forwards in training mode are counted
        self.aux_loss: Tensor | None = None
        self.aux_loss_scale: Tensor | None = None
        self.accumulated_counts: Tensor | None = None
        self.expert_counts = torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device)
        self.recomputed: ModelForward | None = None  # forward that backward is recomputing, if any
        self._adds: list[Callable[[Tensor], None]] = []
        self._choose: Callable[[int, int], ReplayedChoice] | None = None
        self._inner = vars(router).get("forward")
        self._released = False
        vars(router)["forward"] = self.run

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "recomputed": None, "_adds": [], "_choose": None}

    def release(self) -> None:
        """Restore the router's own forward. Wrappers of other libraries around `run` remain."""
        self._released = True
        if vars(self.router).get("forward") == self.run:
            del vars(self.router)["forward"]
            if self._inner is not None:
                vars(self.router)["forward"] = self._inner

    @property
    def training(self) -> bool:
        return self.router.training

    @property
    def implementation(self) -> str | None:
        return getattr(getattr(self.experts, ATTRIBUTE, None), "implementation", None)

    @property
    def num_slots(self) -> int | None:
        top_k = getattr(self.router, "top_k", None)
        return top_k if isinstance(top_k, int) else None

    @property
    def weight(self) -> Tensor:
        return next(self.router.parameters())

    @property
    def selection_bias(self) -> Tensor | None:  # [E]
        """Return a view of the selection bias, or None without one. In-place changes of the view change the model."""
        for module in (*self.router.modules(), self.block):
            for name in _BIASES:
                if isinstance(bias := getattr(module, name, None), Tensor):
                    return bias.view(-1)
        return None

    def take_counts_to(self, device: torch.device) -> None:
        if self.expert_counts.device != device:
            self.expert_counts = self.expert_counts.to(device)

    def require_counts(self, op: str) -> None:
        if not self.counts:
            raise ValueError(
                f"{op}: forwards of {self.name} must be counted, got none; call "
                "moe_layers.integrations.transformers.balance_routing(model) before training"
            )

    def expert_settings(self, op: str) -> tuple[str | None, Tensor]:
        """Return the experts' implementation and the first parameter of their up-projection."""
        spec = getattr(self.experts, ATTRIBUTE, None)
        if spec is None:
            raise ValueError(f"{op}: the experts must be computed by moe_layers, got others in {self.name}")
        if spec.normed:
            raise NotImplementedError(f"{op}: experts must have no norm behind them, got one behind {self.name}")
        if hasattr(self.block, "self_attn"):
            raise NotImplementedError(f"{op}: router and experts must form a block, got a layer around {self.name}")
        return spec.implementation, spec.up_parameters(self.experts)[0]

    @contextmanager
    def captures(self, add: Callable[[Tensor], None]) -> Iterator[None]:
        """Call `add` with the choice [T, K] int32 of each forward inside the context, except recomputations."""
        self._adds.append(add)
        try:
            yield
        finally:
            self._adds.remove(add)

    @contextmanager
    def replays(self, choose: Callable[[int, int], ReplayedChoice]) -> Iterator[None]:
        """Replace the choice of each forward inside the context by `choose(T, K)`. Recomputations repeat the choice."""
        if self._choose is not None:
            raise ValueError(f"RoutingReplay.replay: {self.name} must replay one record at a time, got a second one")
        self._choose = choose
        try:
            yield
        finally:
            self._choose = None

    @disable_dynamo
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router's forward, and read or change the results. torch.compile breaks the graph at this method."""
        inner = self._inner or type(self.router).forward.__get__(self.router)
        if self._released:
            return inner(*args, **kwargs)
        recomputes = is_in_backward()
        forward = self.recomputed if recomputes else current_forward()
        choose = self._replayed(forward, recomputes)
        if not recomputes:
            self.recomputed = None
            if forward is not None:
                forward.routers.append(self)
        adds = () if recomputes else self._adds
        watches = not recomputes and (self._counts() or self.observer is not None)
        reads = watches or self._has_loss()
        if choose is None and not reads and not adds:
            return inner(*args, **kwargs)
        with _Selection(self.num_experts, choose) as selection:
            out = inner(*args, **kwargs)
        logits, weights, own_choice = self._parts(out)
        chosen = self._chosen(own_choice, selection)
        for add in adds:
            add(chosen.to(torch.int32))
        if reads:
            weights = self._read(logits, weights, chosen, selection.keys, forward, watches)
            out = (out[0], weights, *out[2:])
        return out

    def _replayed(self, forward: ModelForward | None, recomputes: bool) -> Callable[[int, int], ReplayedChoice] | None:
        """Return the function that gives this forward's replayed choice, or None without a replay."""
        if recomputes and forward is not None:
            choice = forward.choices.get(self)
            return None if choice is None else lambda num_tokens, top_k: choice
        if (choose := self._choose) is None:
            return None
        if forward is None or self in forward.choices:
            raise ValueError(
                f"RoutingReplay.replay: {self.name} must run once in each forward of its model, "
                f"got {'a run outside of one' if forward is None else 'a second run'}"
            )

        def remember(num_tokens: int, top_k: int) -> ReplayedChoice:
            forward.choices[self] = choose(num_tokens, top_k)
            return forward.choices[self]

        return remember

    def _parts(self, out: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], weights [T, K] and experts [T, K] from the router's output."""
        if isinstance(out, tuple) and len(out) > 2:
            logits, weights, experts = out[:3] if out[0].is_floating_point() else out[2::-1]
            if logits.shape[-1] == self.num_experts:
                return logits, weights, experts
        raise ValueError(
            f"moe_layers: {type(self.router).__name__} must return logits [T, E={self.num_experts}], weights and "
            f"experts, got another result in {self.name}"
        )

    def _chosen(
        self,
        experts: Tensor,  # [T, K] from the router
        selection: _Selection,
    ) -> Tensor:  # [T, K] int64
        """Return the replayed experts during a replay, else the experts that the router chose."""
        if selection.choose is None:
            return experts
        if selection.num_calls != 1 or selection.chosen is None or experts.data_ptr() != selection.chosen.data_ptr():
            raise ValueError(
                f"RoutingReplay.replay: {type(self.router).__name__} must choose its experts by one top-k of scores "
                f"[T, E], got {selection.num_calls} in {self.name}"
            )
        return selection.chosen

    def _read(
        self,
        logits: Tensor,  # [T, E]
        weights: Tensor,  # [T, K]
        chosen: Tensor,  # [T, K]
        keys: Tensor | None,  # [T, E]: the scores that the router gave to top-k
        forward: ModelForward | None,
        watches: bool,  # False: no counts and no statistics, as in a recomputation
    ) -> Tensor:  # [T, K]
        """Compute losses, counts and statistics. Return the weights with the loss attached to them."""
        if type(self.router).__name__ in PROBABILITIES:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
        token_mask = None if forward is None else forward.token_mask(self.name, len(logits), logits.device)
        counts, loss = watches and self._counts(), None
        if counts or self._has_loss():
            routing = self._routing(logits, weights, chosen, token_mask, forward)
            if self._has_loss():
                loss = self._loss(routing, forward)
                self.aux_loss = loss.detach()
                if weights.requires_grad:
                    warn_without_scale("balance_routing", self, weights.device.type)
                    weights = attach_loss(weights, loss, self.aux_loss_scale)
            if counts:
                self.take_counts_to(routing.choices_per_expert.device)
                self.expert_counts += routing.choices_per_expert
        if watches and self.observer is not None:
            keys = logits if keys is None else keys
            self.observer.add(logits, chosen, token_mask=token_mask, keys=keys, aux_loss=loss)
        return weights

    def _routing(
        self, logits: Tensor, weights: Tensor, chosen: Tensor, token_mask: Tensor | None, forward: ModelForward | None
    ) -> LayerRouting:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lengths = None
        if forward is not None and self.balance_losses.sequence:
            lengths = forward.sequence_lengths(len(logits), logits.device)
        chosen = chosen.to(torch.int32)
        chosen = chosen if token_mask is None else torch.where(token_mask[:, None], chosen, -1)
        info = TokenInfo(logits, logits.shape, token_mask, lengths, self.num_tokens)
        return layer_routing(Slots(chosen, weights, logits), info, None, self.num_experts, self.implementation)

    def _loss(self, routing: LayerRouting, forward: ModelForward | None) -> Tensor:
        losses, counts = self.balance_losses, None
        if forward is not None:
            check_single_loss(forward.owner, forward.arguments)
        if losses.global_batch:
            # Reuse the counts in a recomputation, so that the recomputation does not communicate again.
            kept = {} if forward is None else forward.global_counts
            if self not in kept:
                accumulated = self.accumulated_counts
                kept[self] = global_expert_counts(routing, group=losses.group, accumulated_counts=accumulated)
            counts = kept[self]
        return losses.total(routing, num_tokens=self.num_tokens, global_counts=counts)

    def _has_loss(self) -> bool:
        return self.balance_losses.any and torch.is_grad_enabled()

    def _counts(self) -> bool:
        return self.counts and self.router.training


def _num_experts(router: Any) -> int:
    """Return the number of experts that a router can choose, including zero experts, whose output is the token."""
    config = getattr(router, "config", None)
    for holder, name in ((router, "n_routed_experts"), (router, "num_experts"), (config, "num_experts")):
        if isinstance(value := getattr(holder, name, None), int):
            return value
    return len(next(router.parameters()))


class _Selection(TorchFunctionMode):
    """While active, records the router's top-k of scores [T, E]. If `choose` is not None, `choose(T, K)` replaces the
    chosen experts.

    A replaced top-k returns the new experts with their scores. The router's own code then computes the weights from
    these scores. A top-k of groups, [T, groups] or [T, groups, members], is ignored.
    """

    def __init__(self, num_experts: int, choose: Callable[[int, int], ReplayedChoice] | None):
        super().__init__()
        self.num_experts = num_experts
        self.choose = choose
        self.num_calls = 0
        self.keys: Tensor | None = None  # [T, E]: scores plus selection bias; excluded groups are masked
        self.chosen: Tensor | None = None  # [T, K] int64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or scores.shape[1] != self.num_experts:
            return result
        self.num_calls += 1
        self.keys, self.chosen = scores.detach(), result.indices
        if self.choose is None:
            return result
        experts, is_own = self.choose(*result.indices.shape)
        self.chosen = experts if is_own is None else torch.where(is_own, result.indices, experts)
        # The gradient of gather equals that of top-k, because a token's experts are distinct.
        return torch.return_types.topk((scores.gather(1, self.chosen), self.chosen))
