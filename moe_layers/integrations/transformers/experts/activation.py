"""Recognises the activation of another library's experts module by computed results instead of by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels import Activation, apply_activation
from moe_kernels.specs import ACTIVATION_KINDS

from ....checks import first_three

# constant of an activation -> attributes of an experts module that may hold the constant
_NUMBERS = {
    "limit": ("limit", "swiglu_limit", "act_fn.up_softcap.softcap"),
    "alpha": ("alpha", "swiglu_alpha", "act_fn.gate_softcap.softcap"),
}
_NUM_COLUMNS = 3  # number of gate columns; one column could not distinguish interleaved from concatenated


def recognise_gated(experts: nn.Module, apply_gate: Callable[[Tensor], Tensor], *, interleaved: bool) -> Activation:
    """Return the gated activation that gives the results of `apply_gate` on test values.

    Args:
        experts: the module that holds the activation's constants, such as a limit. Errors name the module's class.
        apply_gate: function of values [n, 2F], in which the gate columns precede the up columns.
        interleaved: whether `apply_gate` takes alternating columns instead: gate 0, up 0, gate 1, ...

    Raises:
        ValueError: no activation of this package equals `apply_gate`.
    """
    values = _probe(experts)
    gate, up = (grid.reshape(-1, 1).repeat(1, _NUM_COLUMNS) for grid in torch.meshgrid(values, values, indexing="ij"))
    gate[:, 1:] *= 0.5
    columns = torch.stack([gate, up], 2).flatten(1) if interleaved else torch.cat([gate, up], 1)
    with torch.no_grad():
        wanted = apply_gate(columns)
    candidates = [replace(activation, interleaved=interleaved) for activation in _candidates(experts, gated=True)]
    return _match(experts, wanted, columns, candidates, (1 + gate.abs()) * (1 + up.abs()))


def recognise_plain(experts: nn.Module, activation: Callable[[Tensor], Tensor]) -> Activation:
    """Return the plain activation that gives the results of `activation` on test values. Raise ValueError if no
    activation of this package does."""
    values = _probe(experts)[:, None]
    with torch.no_grad():
        wanted = activation(values)
    return _match(experts, wanted, values, _candidates(experts, gated=False), 1 + values.square())


def _probe(experts: nn.Module) -> Tensor:  # [n] float64, on both sides of zero and of every known clamp
    sizes = [0.0, 0.03, 0.3, 0.7, 1.1, 1.7, 2.6, 4.1, 6.3, 9.7, 30.0, 1e3]
    limit = _number(experts, "limit")
    if limit is not None and math.isfinite(limit):
        sizes += [0.9 * limit, 1.1 * limit, 3.0 * limit]
    return torch.tensor([sign * size for sign in (-1, 1) for size in sizes], dtype=torch.float64, device="cpu")


def _number(experts: nn.Module, kind: str) -> float | None:
    values = (reduce(lambda part, name: getattr(part, name, None), path.split("."), experts) for path in _NUMBERS[kind])
    return next((float(value) for value in values if value is not None), None)


def _candidates(experts: nn.Module, *, gated: bool) -> list[Activation]:
    found = []
    for published in map(Activation, ACTIVATION_KINDS):
        asked = [kind for kind in _NUMBERS if getattr(published, kind) is not None]
        numbers: dict[str, Any] = {
            kind: value for kind in asked if (value := _number(experts, kind)) is not None and value > 0
        }
        if published.gated == gated:
            found.append(Activation(published.name, **numbers))
    return found


def _match(
    experts: nn.Module, wanted: Tensor, inputs: Tensor, candidates: list[Activation], scale: Tensor
) -> Activation:
    for activation in candidates:
        values = apply_activation(inputs, activation, implementation="reference")
        # The tolerance lies between two differences. Float32 operations in `wanted` cause errors of 1e-7 of `scale`.
        # The two most similar activations, GELU by tanh and by erf, differ by 1e-4 of `scale`.
        if wanted.shape == values.shape and ((wanted.double() - values).abs() <= 2e-6 * scale).all():
            return activation
    function = getattr(experts, "act_fn", None)
    known, numbers = first_three(ACTIVATION_KINDS), first_three(name for names in _NUMBERS.values() for name in names)
    raise ValueError(
        f"moe_layers: the activation of {type(experts).__name__} must be one of {known} with its numbers in {numbers}, "
        f"got act_fn={function!r} and another result"
    )
