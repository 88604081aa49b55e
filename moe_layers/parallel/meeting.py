"""Messages between the ranks of a group without collectives: a rank that stays away is an error, not a wait."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import distributed
from torch.distributed import ProcessGroup

from moe_kernels.runtime.pytorch import default_store

from ..checks import first_three

SECONDS = 15.0  # for ranks in step: stores notice the limit late, and an error should take at most 20 seconds
_turns: Counter[str] = Counter()  # completed meetings by op and ranks


def meet(op: str, group: ProcessGroup, message: str, seconds: float) -> list[str]:
    """Return every rank's message, by rank in the group.

    Raises:
        ValueError: some ranks have not called within `seconds`.
    """
    ranks, store = distributed.get_process_group_ranks(group), default_store()
    keys = _keys(op, ranks)
    own = keys[group.rank()]
    store.set(own, message)
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:  # the kind of a timeout depends on the store
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if missing:
            store.delete_key(own)  # so that a later call of all ranks meets
            raise ValueError(
                f"{op}: all ranks of the group must call it, got no call within {seconds:g} seconds from "
                f"rank {first_three(missing)}; let slower ranks catch up by torch.distributed.barrier() before it"
            ) from error
    _advance(op, ranks)
    return [store.get(key).decode() for key in keys]


def tell(op: str, group: ProcessGroup, message: str) -> None:
    """Leave this rank's message for the next meeting, and stay away from it."""
    ranks = distributed.get_process_group_ranks(group)
    default_store().set(_keys(op, ranks)[group.rank()], message)
    _advance(op, ranks)


@contextmanager
def together(op: str, group: ProcessGroup, seconds: float) -> Iterator[None]:
    """Meet after the body. Raise ValueError on all ranks if the body raises on one rank, or if a rank stays away."""
    problem = ""
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        problem = problem_of(op, error)
        raise
    finally:
        problems = meet(op, group, problem, seconds)
        ranks = distributed.get_process_group_ranks(group)
        found = [f"rank {rank}: {text}" for rank, text in zip(ranks, problems, strict=True) if text]
        if found:
            raise ValueError(f"{op}: {first_three(found)}")


def problem_of(op: str, error: BaseException) -> str:
    return str(error).removeprefix(f"{op}: ") or type(error).__name__


def agree(op: str, group: ProcessGroup, facts: dict[str, str], seconds: float) -> None:
    """Raise ValueError on all ranks unless their facts are equal, or if a rank stays away."""
    everyones = [json.loads(text) for text in meet(op, group, json.dumps(facts), seconds)]
    ranks = distributed.get_process_group_ranks(group)
    for rank, others in zip(ranks, everyones, strict=True):
        for name in {**everyones[0], **others}:
            first, other = everyones[0].get(name, "nothing"), others.get(name, "nothing")
            if first != other:
                raise ValueError(
                    f"{op}: all ranks must agree about {name}, got {first} on rank {ranks[0]} and {other} on "
                    f"rank {rank}"
                )


def _place(op: str, ranks: list[int]) -> str:
    return f"moe_layers/{op}/{ranks}"


def _keys(op: str, ranks: list[int]) -> list[str]:
    place = _place(op, ranks)
    return [f"{place}/{_turns[place]}/{rank}" for rank in ranks]


def _advance(op: str, ranks: list[int]) -> None:
    _turns[_place(op, ranks)] += 1
