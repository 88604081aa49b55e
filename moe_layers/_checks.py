"""Checks of constructor arguments."""

from __future__ import annotations


def check_positive(owner: str, **sizes: int) -> None:
    """Raises ValueError unless every size is a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive integer, got {size!r}")


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {choices}, got {value!r}")
