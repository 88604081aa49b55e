"""Formatting of error messages."""

from __future__ import annotations

from collections.abc import Iterable


def first_three(items: Iterable[object], separator: str = ", ") -> str:
    """Join at most three items, and add how many more there are. Errors would otherwise list thousands of items."""
    items = [str(item) for item in items]
    return separator.join([*items[:3], *([f"and {len(items) - 3} more"] if len(items) > 3 else [])])
