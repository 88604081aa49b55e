"""Text of errors."""

from __future__ import annotations

from collections.abc import Iterable


def first_three(items: Iterable[object], separator: str = ", ") -> str:
    """Join at most three items, then say how many more there are. For errors, which would else list thousands."""
    items = [str(item) for item in items]
    return separator.join([*items[:3], *([f"and {len(items) - 3} more"] if len(items) > 3 else [])])
