"""Checks that the installed version of another package is one that the tests cover."""

from __future__ import annotations

from importlib.metadata import version


def check_version(package: str, tested: str, cure: str) -> None:
    """Raise ImportError unless the installed version is `tested`, or starts with `tested` and a dot (0.19.2 passes for
    0.19). The error text ends with `cure`, which says what to do instead."""
    got = version(package)
    if got != tested and not got.startswith(f"{tested}."):
        raise ImportError(f"moe_layers: {package} must be {tested}, which its tests know, got {got}; {cure}")


ENABLE = "call moe_layers.integrations.transformers.enable(model) after the model is loaded"
