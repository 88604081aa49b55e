"""Activation functions of expert feed-forwards, by name, with their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class ActivationKind(NamedTuple):
    """Settings of a named activation. Numbers are the published ones; None means the activation has no such number."""

    gated: bool
    limit: float | None = None
    alpha: float | None = None


ACTIVATION_KINDS = {
    "swiglu": ActivationKind(gated=True),
    "geglu": ActivationKind(gated=True),
    "geglu_tanh": ActivationKind(gated=True),
    "reglu": ActivationKind(gated=True),
    "clamped_swiglu": ActivationKind(gated=True, limit=10.0),
    "swiglu_clamped_after": ActivationKind(gated=True, limit=7.0),
    "clamped_geglu": ActivationKind(gated=True, limit=10.0),
    "softcapped_swiglu": ActivationKind(gated=True, limit=25.0, alpha=4.0),
    "gpt_oss": ActivationKind(gated=True, limit=7.0, alpha=1.702),
    "relu_squared": ActivationKind(gated=False),
    "relu": ActivationKind(gated=False),
    "gelu": ActivationKind(gated=False),
    "gelu_tanh": ActivationKind(gated=False),
    "silu": ActivationKind(gated=False),
}


@dataclass(frozen=True)
class Activation:
    """An activation and its numbers. Every `activation` argument also accepts a name, meaning the published numbers.

    Gated, with a gate g and an up value u:

        swiglu                silu(g) * u
        geglu, geglu_tanh     gelu(g) * u, exact (by erf) or by tanh
        reglu                 relu(g) * u
        clamped_swiglu        silu(min(g, limit)) * clamp(u, -limit, limit)             (DeepSeek-V4, GLM-5)
        swiglu_clamped_after  min(silu(g), limit) * clamp(u, -limit, limit)             (Step 3.7)
        clamped_geglu         gelu(min(g, limit)) * clamp(u, -limit, limit)             (DeepSeek-V4 with GELU)
        softcapped_swiglu     alpha tanh(g / alpha) * sigmoid(g) * limit tanh(u / limit)   (Inkling 2)
        gpt_oss               with g and u clamped as in clamped_swiglu: (u + 1) * g * sigmoid(alpha * g)

    Plain, with one value: relu_squared, relu, gelu, gelu_tanh, silu. Such an expert has no gate: w_up is [E, F, D].

    Args:
        interleaved: gate and up alternate: gate 0, up 0, gate 1, ... (GPT-OSS). By default all gates come first. Holds
            for the columns of the pre-activation, and so for the rows of w_up and b_up.

    Raises:
        ValueError: the name is unknown, the activation has no such number, the number is not positive, or a plain
            activation is interleaved.
    """

    name: str
    limit: float | None = None
    alpha: float | None = None
    interleaved: bool = False
    gated: bool = field(init=False, repr=False, compare=False)
    published: bool = field(init=False, repr=False, compare=False)  # the numbers are the published ones

    def __post_init__(self):
        if self.name not in ACTIVATION_KINDS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATION_KINDS)}, got {self.name!r}")
        kind = ACTIVATION_KINDS[self.name]
        for number in ("limit", "alpha"):
            value, published = getattr(self, number), getattr(kind, number)
            if value is None:
                object.__setattr__(self, number, published)
            elif published is None:
                raise ValueError(f"activation {self.name!r} has no {number}, got {value}")
            elif not value > 0:
                raise ValueError(f"{number} of an activation must be positive, got {value}")
        if self.interleaved and not kind.gated:
            raise ValueError(f"activation {self.name!r} has no gate, got interleaved=True")
        object.__setattr__(self, "gated", kind.gated)
        object.__setattr__(self, "published", (self.limit, self.alpha) == (kind.limit, kind.alpha))

    def __str__(self) -> str:
        numbers = [f"{name}={value}" for name in ("limit", "alpha") if (value := getattr(self, name)) is not None]
        settings = [*([] if self.published else numbers), *(["interleaved"] if self.interleaved else [])]
        return f"{self.name}({', '.join(settings)})" if settings else self.name


def is_gated(name: str | None) -> bool:
    """Return whether `name` is the name of a gated activation."""
    return name is not None and ACTIVATION_KINDS[name].gated


def as_activation(op: str, activation: str | Activation) -> Activation:
    """Return the activation of a name. An `Activation` is returned unchanged.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATION_KINDS:
        raise ValueError(f"{op}: activation must be one of {sorted(ACTIVATION_KINDS)}, got {activation!r}")
    return Activation(activation)
