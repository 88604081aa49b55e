"""Formatting of error messages."""

from __future__ import annotations

from collections.abc import Iterable


def first_three(items: Iterable[object], separator: str = ", ") -> str:
    """Join the first three items, and append the number of omitted items. Errors could otherwise list thousands."""
    items = [str(item) for item in items]
    return separator.join([*items[:3], *([f"and {len(items) - 3} more"] if len(items) > 3 else [])])
