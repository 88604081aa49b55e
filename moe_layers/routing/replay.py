"""Captures a run's expert choices and replays them in another run, for example to train on another model's samples."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.runtime.pytorch import assert_on_device, is_in_backward

from ..checks import first_three
from .activation_checkpointing import kept_choice
from .model_routers import AttachedRouter, ReplayedChoice, model_routers
from .router import TopKRouter, watches_choice


class RoutingReplay:
    """The choices of every router of a model, in the order of the forwards.

        record = RoutingReplay()
        with record.capture(sampler):
            sampler(tokens)
        with record.replay(policy):
            loss(policy(tokens)).backward()

    A replayed router computes its own logits, and weighs the recorded experts by its own scores. Gradients flow to
    those scores as if the router had chosen these experts: see `moe_kernels.routing_weights`.

    `choices` maps each router's name in its model to one [T, K] int32 tensor per forward. The tensor holds the
    choice before padding and capacities are applied. Replay applies both again. The caller may fill, send or save
    `choices`. `from_rollouts` makes a record from the arrays of an inference engine.

    The model may also be a transformers model that was given to `enable`. The keys are then the names of the blocks
    that hold the routers, and the router's own code weighs the replayed experts. In a transformers model, a token with
    a negative expert keeps the router's own choice. In a `MoEFeedForward`, -1 means no expert.

    Capture and replay use hooks. If `torch.compile` has compiled a model, run the model uncompiled in both contexts.

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

    @classmethod
    def from_rollouts(
        cls,
        model: nn.Module,
        rollouts: Iterable[Any],
        *,
        attention_mask: Tensor | None = None,  # [B, S]
        lengths: Sequence[int] | None = None,
    ) -> RoutingReplay:
        """Return the record of one forward of `model` over sequences that an inference engine sampled.

        Padding gets -1. Tokens beyond the end of a sequence's array also get -1, for example the last token, which the
        engine never runs. A transformers model keeps its own choice for -1. If a batch runs in several forwards, make
        one record per forward.

        Shapes: attention_mask [B, S].

        Args:
            rollouts: the engine's expert ids, one array per sequence: integers [sequence, layer, top-k] from the first
                token on. An array has all layers, or only layers with experts. Layers without experts are ignored.
            attention_mask: mask of a batch padded on any side; zero marks padding. Default: None, for a packed batch.
            lengths: lengths of the sequences of a packed batch. Default: the lengths of the arrays.

        Raises:
            ValueError: the model has no router. An array is not [sequence, layer, top-k] integers, has a wrong number
                of layers or experts, or is longer than its sequence. A token has an expert twice or out of range. A
                `MoEFeedForward` would have tokens without experts.
        """
        routers = _routers("from_rollouts", model)
        choices = choices_of_rollouts(model, routers, rollouts, attention_mask, lengths)
        record = cls({name: [choice] for name, choice in choices.items()})
        for name, router in routers.items():
            _check_choices("from_rollouts", name, router, record.choices[name])
            if isinstance(router, TopKRouter) and (choices[name] < 0).any():
                missing = int((choices[name] < 0).any(1).sum())
                raise ValueError(
                    f"RoutingReplay.from_rollouts: {name} must have experts for every token, because a TopKRouter has "
                    f"no choice of its own in a replay, got none for {missing} tokens"
                )
        return record

    def to(self, device: torch.device | str) -> RoutingReplay:
        """Return a record with the same choices on another device."""
        return RoutingReplay({name: [choice.to(device) for choice in kept] for name, kept in self.choices.items()})

    @contextmanager
    def capture(self, model: nn.Module) -> Iterator[None]:
        """Record the choices of all routers of `model` in each forward inside the context, except recomputed forwards.

        Raises:
            ValueError: `model` has no router, or no router ran.
        """
        routers = _routers("capture", model)
        captured = []  # names of the routers that ran

        def add_to(name: str, choice: Tensor) -> None:
            self.choices.setdefault(name, []).append(choice)
            captured.append(name)

        def hook(add: Callable[[Tensor], None]):
            return watches_choice(lambda _, inputs, routed: None if is_in_backward() else add(routed.topk_experts))

        with ExitStack() as stack:
            for name, router in routers.items():
                if isinstance(router, TopKRouter):
                    stack.callback(router.register_forward_hook(hook(partial(add_to, name))).remove)
                else:
                    stack.enter_context(router.captures(partial(add_to, name)))
            yield
        if not captured:
            names = first_three(map(repr, routers))
            raise ValueError(f"RoutingReplay.capture: some router of the model must run, got none of [{names}]")

    @contextmanager
    def replay(self, model: nn.Module) -> Iterator[None]:
        """Replay the record inside the context: each forward of a router of `model` gets the router's next choice.

        A checkpointed region of `MoEFeedForward` layers needs `context_fn=save_routing`, and its backward must also run
        inside the context. A transformers model needs neither `save_routing` nor a backward inside the context.

        Raises:
            ValueError: the model has other routers than the record. A router runs more or less often than in the
                record. A choice does not fit its tokens. An expert is out of range (on a GPU an assertion fails).
        """
        routers = _routers("replay", model)
        missing, unexpected = sorted(set(routers) - set(self.choices)), sorted(set(self.choices) - set(routers))
        if missing or unexpected:
            raise ValueError(
                f"RoutingReplay.replay: the record must hold the model's routers, "
                f"got none of [{first_three(map(repr, missing))}] and unexpected [{first_three(map(repr, unexpected))}]"
            )
        replays = [_Replay(name, router, self.choices[name]) for name, router in routers.items()]
        _prepare(replays)
        with ExitStack() as stack:
            for replay in replays:
                if isinstance(replay.router, TopKRouter):
                    hook = replay.router.register_forward_pre_hook(replay.choose, with_kwargs=True, prepend=True)
                    stack.callback(hook.remove)
                else:
                    stack.enter_context(replay.router.replays(replay.next_replayed))
            yield
        for replay in replays:
            if replay.position < len(replay.choices):
                raise ValueError(
                    f"RoutingReplay.replay: {replay.name} must run {len(replay.choices)} times, as in the record, "
                    f"got {replay.position}"
                )


class _Replay:
    """The choices of one router. Each forward gets the next choice."""

    def __init__(self, name: str, router: TopKRouter | AttachedRouter, choices: list[Tensor]):
        self.name, self.router = name, router
        _check_choices("replay", name, router, choices)
        self.choices = list(choices)
        self.is_own: list[Tensor | None] = [None] * len(choices)  # [T, 1]: True where the router's own choice is kept
        self.position = 0

    def choose(self, router: TopKRouter, inputs: tuple[Tensor, ...], named_inputs: dict[str, Tensor]):
        tokens = inputs[0] if inputs else named_inputs["tokens"]
        if is_in_backward():  # any choice of this length serves, because a checkpointed region uses its saved choice
            choice = next(choice for choice in self.choices if len(choice) == len(tokens))
        else:
            choice = self.next(len(tokens), router.num_slots)
        return inputs, {**named_inputs, "topk_experts": kept_choice(choice, is_replayed=True)}

    def next(self, num_tokens: int, num_slots: int | None) -> Tensor:
        if self.position == len(self.choices):
            raise ValueError(
                f"RoutingReplay.replay: {self.name} must run {self.position} times, as in the record, got one more"
            )
        choice = self.choices[self.position]
        expected = (num_tokens, num_slots)
        # Skip this check if num_slots is None. The router then has a `CustomAssignment`, and refuses any replay.
        if choice.shape != expected and num_slots is not None:
            raise ValueError(
                f"RoutingReplay.replay: choice {self.position} of {self.name} must be {list(expected)}, "
                f"got {list(choice.shape)}"
            )
        self.position += 1
        return choice

    def next_replayed(self, num_tokens: int, num_slots: int | None) -> ReplayedChoice:
        choice = self.next(num_tokens, num_slots)
        return ReplayedChoice(choice, self.is_own[self.position - 1])


def _prepare(replays: list[_Replay]) -> None:
    """Convert all choices to their routers' devices and dtypes. Choices of equal shape and device share the ops."""
    alike: dict[Any, list[tuple[_Replay, int]]] = defaultdict(list)
    for replay in replays:
        router, is_attached = replay.router, not isinstance(replay.router, TopKRouter)
        for index, choice in enumerate(replay.choices):
            form = choice.device, router.weight.device, choice.shape, router.num_experts, is_attached
            alike[form].append((replay, index))
    for (source, device, _, num_experts, is_attached), places in alike.items():
        choices = torch.stack([replay.choices[index] for replay, index in places])  # [N, T, K]
        if source.type == "cuda":
            names = first_three(sorted({replay.name for replay, _ in places}))
            message = f"RoutingReplay.replay: experts of {names} must be below {num_experts}"
            assert_on_device((choices < num_experts).all(), message)
        is_own = None
        if is_attached:
            is_own = (choices < 0).any(2, keepdim=True)
            # An all-false mask becomes None, except on a GPU, where testing the mask would synchronise the host.
            is_own = is_own.to(device) if source.type == "cuda" or is_own.any() else None
            choices = choices.long()
        choices = choices.to(device)
        for n, (replay, index) in enumerate(places):
            replay.choices[index] = choices[n]
            replay.is_own[index] = None if is_own is None else is_own[n]


def _check_choices(op: str, name: str, router: TopKRouter | AttachedRouter, choices: list[Tensor]) -> None:
    """Raise ValueError if the number of experts per token is wrong or, on the CPU, an expert's id is too large."""
    for choice in choices:
        if router.num_slots is not None and choice.shape[1] != router.num_slots:
            raise ValueError(
                f"RoutingReplay.{op}: {name} must have {router.num_slots} experts per token, got {choice.shape[1]}"
            )
        if not choice.is_cuda and not (choice < router.num_experts).all():
            raise ValueError(
                f"RoutingReplay.{op}: experts of {name} must be below {router.num_experts}, got {choice.max()}"
            )


def _routers(op: str, model: nn.Module) -> dict[str, TopKRouter | AttachedRouter]:
    routers = model_routers(model)
    if not routers:
        raise ValueError(
            f"RoutingReplay.{op}: the model must have a TopKRouter or MoE blocks of transformers, got none"
        )
    return routers


def choices_of_rollouts(
    model: nn.Module,
    routers: Mapping[str, Any],
    rollouts: Iterable[Any],
    attention_mask: Tensor | None,  # [B, S]
    lengths: Sequence[int] | None,
) -> dict[str, Tensor]:  # [T, K] int32
    """Return a dictionary from router name to one forward's choices. Arguments: see `RoutingReplay.from_rollouts`."""
    arrays = [_as_choices(index, array) for index, array in enumerate(rollouts)]
    if not arrays:
        raise ValueError("RoutingReplay.from_rollouts: rollouts must hold a sequence, got none")
    layers = _layers_of(model, list(routers), arrays[0].shape[1])
    for index, array in enumerate(arrays):
        if array.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(
                f"RoutingReplay.from_rollouts: every rollout must have {list(arrays[0].shape[1:])} layers and experts, "
                f"got {list(array.shape[1:])} in rollout {index}"
            )
    positions, total = _positions(arrays, attention_mask, lengths)
    batch = torch.full((total, *arrays[0].shape[1:]), -1, dtype=torch.int32)  # [T, L, K]
    for array, rows in zip(arrays, positions, strict=True):
        batch[rows] = array
    choices = {name: batch[:, layer] for name, layer in zip(routers, layers, strict=True)}
    for name, choice in choices.items():
        _check_distinct(name, choice)
    return choices


def _as_choices(index: int, array: Any) -> Tensor:  # [S, L, K] int32
    choices = torch.as_tensor(array)
    if choices.dim() != 3 or choices.is_floating_point() or choices.is_complex() or choices.dtype == torch.bool:
        raise ValueError(
            "RoutingReplay.from_rollouts: a rollout must be integers [sequence, layer, top-k], "
            f"got {list(choices.shape)} {choices.dtype} in rollout {index}"
        )
    return choices.to("cpu", torch.int32)


def _layers_of(model: nn.Module, names: list[str], num_layers: int) -> list[int]:
    """Return each router's index on the arrays' layer axis. If the arrays hold only layers with experts, the index is
    the router's position among the routers. If the arrays hold all layers, the router's name contains the index."""
    if num_layers == len(names):
        return list(range(num_layers))
    numbers = [int(found[1]) for name in names if (found := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))]
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    texts = [config.get_text_config() if hasattr(config, "get_text_config") else config for config in configs]
    all_layers = next((getattr(config, "num_hidden_layers", None) for config in texts), None)
    if num_layers != all_layers or len(set(numbers)) != len(names) or max(numbers) >= num_layers:
        allowed = f"{len(names)} layers with experts" + (f" or {all_layers} layers" if all_layers else "")
        raise ValueError(f"RoutingReplay.from_rollouts: a rollout must have the model's {allowed}, got {num_layers}")
    return numbers


def _positions(
    arrays: list[Tensor], attention_mask: Tensor | None, lengths: Sequence[int] | None
) -> tuple[list[Tensor], int]:
    """Return the indices of each array's tokens in the flattened batch, and the batch's number of tokens."""
    if attention_mask is not None and lengths is not None:
        raise ValueError("RoutingReplay.from_rollouts: one of attention_mask and lengths must be None, got both")
    if attention_mask is not None:
        tokens, total = _of_padded(attention_mask, len(arrays)), attention_mask.numel()
    else:
        wanted = [len(array) for array in arrays] if lengths is None else [int(length) for length in lengths]
        if len(wanted) != len(arrays):
            raise ValueError(f"RoutingReplay.from_rollouts: lengths must be {len(arrays)} numbers, got {len(wanted)}")
        total = sum(wanted)
        tokens = list(torch.arange(total).split(wanted))
    for index, (array, rows) in enumerate(zip(arrays, tokens, strict=True)):
        if len(array) > len(rows):
            raise ValueError(
                f"RoutingReplay.from_rollouts: rollout {index} must have at most the {len(rows)} tokens of its "
                f"sequence, got {len(array)}"
            )
    return [rows[: len(array)] for array, rows in zip(arrays, tokens, strict=True)], total


def _of_padded(attention_mask: Tensor, num_sequences: int) -> list[Tensor]:
    """Return the token indices of each sequence in the flattened batch, without padding."""
    if attention_mask.dim() != 2 or len(attention_mask) != num_sequences:
        raise ValueError(
            f"RoutingReplay.from_rollouts: attention_mask must be [B={num_sequences}, S], "
            f"got {list(attention_mask.shape)}"
        )
    mask = attention_mask.to("cpu").bool()
    return [row.nonzero().flatten() + index * mask.shape[1] for index, row in enumerate(mask)]


def _check_distinct(name: str, choice: Tensor) -> None:
    ordered = choice.sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, :1] >= 0)
    if repeated.any():
        token = int(repeated.any(1).nonzero()[0])
        raise ValueError(
            f"RoutingReplay.from_rollouts: the experts of a token must differ, got {choice[token].tolist()} in {name}"
        )
