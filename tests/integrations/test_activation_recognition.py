"""Activations are recognised by their results."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from moe_kernels import Activation
from moe_layers.integrations.transformers.experts.activation import recognise_gated, recognise_plain

GATES = {"swiglu": nn.SiLU(), "geglu": nn.GELU(), "geglu_tanh": nn.GELU("tanh"), "reglu": nn.ReLU()}
PLAIN = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "relu_squared": lambda x: functional.relu(x) ** 2,
}


def experts(**numbers):
    return SimpleNamespace(act_fn="some function", **numbers)


def of_halves(combine):
    """Return the function of columns that combines their halves, gate and up."""
    return lambda columns: combine(*columns.chunk(2, -1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_gated(name, interleaved):
    def apply_gate(columns):
        gate, up = (columns[:, ::2], columns[:, 1::2]) if interleaved else columns.chunk(2, -1)
        return GATES[name](gate) * up

    assert recognise_gated(experts(), apply_gate, interleaved=interleaved) == Activation(name, interleaved=interleaved)
    with pytest.raises(ValueError, match="the activation of SimpleNamespace"):
        recognise_gated(experts(), apply_gate, interleaved=not interleaved)


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_numbers_are_the_modules_own(limit):
    def gpt_oss(columns):
        gate, up = columns.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(1.3 * gate)

    def softcapped(columns):
        gate, up = columns.float().chunk(2, -1)
        value = 1.3 * torch.tanh(gate / 1.3) * torch.sigmoid(gate) * limit * torch.tanh(up / limit)
        return value.to(columns.dtype)

    before = of_halves(lambda gate, up: functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))
    after = of_halves(lambda gate, up: functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit))
    clamped_gelu = of_halves(lambda gate, up: functional.gelu(gate.clamp(max=limit)) * up.clamp(-limit, limit))
    softcaps = SimpleNamespace(up_softcap=SimpleNamespace(softcap=limit), gate_softcap=SimpleNamespace(softcap=1.3))
    for module, apply_gate, expected in (
        (experts(limit=limit, alpha=1.3), gpt_oss, Activation("gpt_oss", limit=limit, alpha=1.3)),
        (experts(swiglu_limit=limit), before, Activation("clamped_swiglu", limit=limit)),
        (experts(limit=limit), after, Activation("swiglu_clamped_after", limit=limit)),
        (experts(limit=limit), clamped_gelu, Activation("clamped_geglu", limit=limit)),
        (SimpleNamespace(act_fn=softcaps), softcapped, Activation("softcapped_swiglu", limit=limit, alpha=1.3)),
    ):
        assert recognise_gated(module, apply_gate, interleaved=False) == expected
    for wrong in (experts(), experts(limit=1.01 * limit, alpha=1.3)):
        with pytest.raises(ValueError, match="must be one of"):
            recognise_gated(wrong, gpt_oss, interleaved=False)


def test_a_clamp_at_infinity_is_none():
    apply_gate = of_halves(lambda gate, up: functional.silu(gate).clamp(max=math.inf) * up)
    assert recognise_gated(experts(limit=math.inf), apply_gate, interleaved=False) == Activation("swiglu")


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name):
    assert recognise_plain(experts(), PLAIN[name]) == Activation(name)


def test_a_float32_step_inside_is_no_other_activation():
    def apply_gate(columns):
        gate, up = columns.float().chunk(2, -1)
        return (functional.gelu(gate) * up).to(columns.dtype)

    assert recognise_gated(experts(), apply_gate, interleaved=False) == Activation("geglu")


@pytest.mark.parametrize("function", [nn.Mish(), nn.ReLU6(), nn.Tanh(), nn.LeakyReLU(1e-3), nn.GELU().forward])
def test_others_are_refused(function):
    with pytest.raises(ValueError, match=r"must be one of .*got act_fn='some function'"):
        recognise_plain(experts(), lambda x: function(x).clamp(max=10))
