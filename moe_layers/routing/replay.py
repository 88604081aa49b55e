"""Capture of a run's expert choices and their replay elsewhere, such as when training on another model's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe_kernels.runtime.pytorch import is_in_backward

from .activation_checkpointing import replayed_choice
from .router import TopKRouter, watches_choice


class RoutingReplay:
    """The choices of every router of a model, in the order of its forwards.

        record = RoutingReplay()
        with record.capture(sampler):
            sampler(tokens)
        with record.replay(policy):
            loss(policy(tokens)).backward()

    A replayed router computes its own logits, and weighs the recorded experts by its own scores. Gradients flow to
    those scores as if the router had chosen these experts: see `moe_kernels.routing_weights`.

    `choices` maps each router's name in its model to one [T, K] int32 tensor per forward. It holds the router's choice
    before padding and capacities, which apply again on replay. It can be filled by hand, sent or saved like any
    tensors.

    Capture and replay use hooks, so models compiled by `torch.compile` must run uncompiled for them.

    Raises:
        ValueError: a choice is not [T, K] int32.
    """

    def __init__(self, choices: Mapping[str, Sequence[Tensor]] | None = None):
        self.choices = {name: list(forwards) for name, forwards in (choices or {}).items()}
        for name, forwards in self.choices.items():
            for choice in forwards:
                if choice.dim() != 2 or choice.dtype != torch.int32:
                    raise ValueError(
                        f"RoutingReplay: choices of {name} must be [T, K] int32, "
                        f"got {list(choice.shape)} {choice.dtype}"
                    )

    def to(self, device: torch.device | str) -> RoutingReplay:
        """Return a record with the same choices on another device."""
        return RoutingReplay({name: [choice.to(device) for choice in kept] for name, kept in self.choices.items()})

    @contextmanager
    def capture(self, model: nn.Module) -> Iterator[None]:
        """Add every forward of a router of `model` inside the context to the record, except recomputed forwards.

        Raises:
            ValueError: `model` has no router, or no router ran.
        """
        routers = _routers("capture", model)
        captured = 0

        def hook(name: str):
            @watches_choice
            def add(router, inputs, routed):
                nonlocal captured
                if not is_in_backward():
                    self.choices.setdefault(name, []).append(routed.topk_experts)
                    captured += 1

            return add

        handles = [router.register_forward_hook(hook(name)) for name, router in routers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if not captured:
            raise ValueError(f"RoutingReplay.capture: some router of the model must run, got none of {list(routers)}")

    @contextmanager
    def replay(self, model: nn.Module) -> Iterator[None]:
        """Replay the record, in its order, in the forwards of each router of `model` inside the context.

        A checkpointed region needs `context_fn=save_routing`, and its backward must also run inside the context.

        Raises:
            ValueError: the model has other routers than the record, a router runs more or less often than in the
                record, or a choice does not fit its tokens.
        """
        routers = _routers("replay", model)
        missing, unexpected = sorted(set(routers) - set(self.choices)), sorted(set(self.choices) - set(routers))
        if missing or unexpected:
            raise ValueError(
                f"RoutingReplay.replay: the record must hold the model's routers, "
                f"got none of {missing} and unexpected {unexpected}"
            )
        replays = [_Replay(name, router, self.choices[name]) for name, router in routers.items()]
        handles = [
            replay.router.register_forward_pre_hook(replay.choose, with_kwargs=True, prepend=True) for replay in replays
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for replay in replays:
            if replay.position < len(replay.choices):
                raise ValueError(
                    f"RoutingReplay.replay: {replay.name} must run {len(replay.choices)} times, as in the record, "
                    f"got {replay.position}"
                )


class _Replay:
    """The choices of one router, returned one per forward."""

    def __init__(self, name: str, router: TopKRouter, choices: list[Tensor]):
        self.name, self.router = name, router
        self.choices = [choice.to(router.weight.device) for choice in choices]
        self.position = 0

    def choose(self, router: TopKRouter, inputs: tuple[Tensor, ...], named_inputs: dict[str, Tensor]):
        tokens = inputs[0] if inputs else named_inputs["tokens"]
        choice = self._of_recomputation(tokens) if is_in_backward() else self._next(tokens)
        return inputs, {**named_inputs, "topk_experts": replayed_choice(choice)}

    def _next(self, tokens: Tensor) -> Tensor:
        if self.position == len(self.choices):
            raise ValueError(
                f"RoutingReplay.replay: {self.name} must run {self.position} times, as in the record, got one more"
            )
        choice = self.choices[self.position]
        expected = (len(tokens), self.router.num_slots)
        if choice.shape != expected and self.router.num_slots is not None:  # None: the router raises
            raise ValueError(
                f"RoutingReplay.replay: choice {self.position} of {self.name} must be {list(expected)}, "
                f"got {list(choice.shape)}"
            )
        self.position += 1
        return choice

    def _of_recomputation(self, tokens: Tensor) -> Tensor:
        """Return any choice of the right shape: the region has saved the choice that is used."""
        return next(choice for choice in self.choices if len(choice) == len(tokens))


def _routers(op: str, model: nn.Module) -> dict[str, TopKRouter]:
    routers = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    if not routers:
        raise ValueError(f"RoutingReplay.{op}: the model must have a TopKRouter, got none")
    return routers
