"""Lets ranks exchange messages through the store of the default process group, without collectives.

An exchange is called a meeting. If a rank does not take part in a meeting, the other ranks get an error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import ProcessGroup

from moe_kernels.runtime.pytorch import default_store

from ..checks import first_three

# Maximum wait for other ranks. Errors are due within 20 s. The other 5 s are for stores that exceed their timeout.
SECONDS = 15.0
_turns: Counter[str] = Counter()  # `_topic(op, ranks)` -> number of past meetings, including timed-out ones
_OUTCOME, _MET, _LEFT = "outcome", "met", "left"
_KNOWN = "_moe_layers_known"  # attribute that marks an error as known to all ranks; the value is the op


def meet(op: str, group: ProcessGroup, message: str, seconds: float) -> list[str]:
    """Send this rank's message to all ranks, and return all ranks' messages in the order of the ranks in the group.

    Raise ValueError if some ranks have not called `meet` within `seconds`. A later call on all ranks works again.
    """
    ranks, store = distributed.get_process_group_ranks(group), default_store()
    topic = _topic(op, ranks)
    while True:
        place = _place(topic)
        keys = [f"{place}/{rank}" for rank in ranks]
        store.set(f"{place}/{distributed.get_rank()}", message)
        missing = _missing(store, keys, seconds)
        # The first rank that writes the outcome decides for all whether the meeting took place.
        outcome = store.compare_set(f"{place}/{_OUTCOME}", "", _LEFT if missing else _MET).decode()
        _turns[topic] += 1
        if outcome == _MET:
            return [store.get(key).decode() for key in keys]
        if missing:
            raise ValueError(
                f"{op}: all ranks of the group must call it, got no call within {seconds:g} seconds from "
                f"rank {first_three([ranks[index] for index in missing])}; let slower ranks catch up by "
                "torch.distributed.barrier() before it"
            )
        # This rank was too late, and the other ranks have left. Join the meeting of their next call.


def _missing(store: Any, keys: list[str], seconds: float) -> list[int]:
    """Return the indices of the keys that no rank has set within `seconds`."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # base class of all timeout errors, whose type depends on the store
        return [index for index, key in enumerate(keys) if not store.check([key])]
    return []


def _tell(op: str, group: ProcessGroup, message: str) -> None:
    """Write this rank's message for the next meeting, without waiting for the meeting."""
    topic = _topic(op, distributed.get_process_group_ranks(group))
    default_store().set(f"{_place(topic)}/{distributed.get_rank()}", message)
    _turns[topic] += 1


@contextmanager
def together(op: str, group: ProcessGroup, seconds: float) -> Iterator[None]:
    """Run the body of the context, then meet all ranks. If the body raises on one rank, that rank raises its own error
    at once, and the other ranks raise ValueError.

    If a nested `together` of the same op has raised the error, all ranks know the error already. The error is then
    raised unchanged.
    """
    try:
        yield
    except BaseException as error:  # includes KeyboardInterrupt
        if getattr(error, _KNOWN, None) == op:
            raise
        problem = str(error).removeprefix(f"{op}: ")
        if not isinstance(error, ValueError):
            _tell(op, group, f"{type(error).__name__}: {problem}")
            setattr(error, _KNOWN, op)
            raise
        _tell(op, group, problem)
        raise _known(op, [_of_rank(distributed.get_rank(), problem)]) from error
    problems = meet(op, group, "", seconds)
    ranks = distributed.get_process_group_ranks(group)
    if found := [_of_rank(rank, text) for rank, text in zip(ranks, problems, strict=True) if text]:
        raise _known(op, found)


def _known(op: str, problems: list[str]) -> ValueError:
    error = ValueError(f"{op}: {first_three(problems)}")
    setattr(error, _KNOWN, op)
    return error


def _of_rank(rank: int, problem: str) -> str:
    return problem if problem.startswith("rank ") else f"rank {rank}: {problem}"


def agree(op: str, group: ProcessGroup, facts: dict[str, str], seconds: float) -> None:
    """Raise ValueError on all ranks if `facts` differs between ranks, or if a rank does not call `agree` in time."""
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


def _place(topic: str) -> str:
    """Return the prefix of the next meeting's keys in the store. Skip meetings that other ranks have left."""
    store = default_store()
    while True:
        place = f"{topic}/{_turns[topic]}"
        outcome = f"{place}/{_OUTCOME}"
        if not (store.check([outcome]) and store.get(outcome).decode() == _LEFT):
            return place
        _turns[topic] += 1


def _topic(op: str, ranks: list[int]) -> str:
    return f"moe_layers/{op}/{ranks}"
