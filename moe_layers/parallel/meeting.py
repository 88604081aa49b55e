"""Messages between the ranks of a group without collectives: a rank that stays away is an error, not a wait."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from torch import distributed
from torch.distributed import ProcessGroup

from moe_kernels.runtime.pytorch import default_store

from ..checks import first_three

_turns: Counter[str] = Counter()  # completed meetings by op and ranks


def meet(op: str, group: ProcessGroup, message: str, seconds: float) -> list[str]:
    """Return every rank's message, by rank in the group.

    Raises:
        ValueError: some ranks have not called within `seconds`.
    """
    ranks, store = distributed.get_process_group_ranks(group), default_store()
    place = f"moe_layers/{op}/{ranks}"
    keys = [f"{place}/{_turns[place]}/{rank}" for rank in ranks]
    own = keys[group.rank()]
    store.set(own, message)
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:  # the kind of a timeout depends on the store
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if not missing:
            raise
        store.delete_key(own)  # so that a later call of all ranks meets
        raise ValueError(
            f"{op}: all ranks of the group must call it, got no call within {seconds:g} seconds from "
            f"rank {first_three(missing)}"
        ) from error
    _turns[place] += 1
    return [store.get(key).decode() for key in keys]


def raise_together(op: str, group: ProcessGroup, problem: str, seconds: float) -> None:
    """Raise ValueError on all ranks if one rank has a problem. No problem is an empty string."""
    problems = meet(op, group, problem, seconds)
    ranks = distributed.get_process_group_ranks(group)
    found = [f"rank {rank}: {text}" for rank, text in zip(ranks, problems, strict=True) if text]
    if found:
        raise ValueError(f"{op}: {first_three(found)}")
