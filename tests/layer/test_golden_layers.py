"""Whole layers of published architectures, compared with transformers' own modules on small random models."""

import pytest
import torch

from moe_kernels import Activation, RouterSpec

from ..golden_case import load_case
from ..layers import moe_layer
from ..unit.test_router_presets import GOLDEN


def per_expert(tensors, gate, up, down, prefix="experts."):
    """Return (w_up, w_down) stacked from tensors stored per expert; `gate` is None without one."""
    num_experts = sum(f"{prefix}{e}.{up}.weight" in tensors for e in range(len(tensors)))

    def stack(name):
        return torch.stack([tensors[f"{prefix}{e}.{name}.weight"] for e in range(num_experts)])

    w_up = stack(up) if gate is None else torch.cat([stack(gate), stack(up)], dim=1)
    return {"experts.w_up": w_up, "experts.w_down": stack(down)}


def transposed(tensors):
    """Return (w_up, w_down) of tensors stored as [E, D, 2F] and [E, F, D]."""
    return {"experts.w_up": tensors["experts.gate_up_proj"].mT, "experts.w_down": tensors["experts.down_proj"].mT}


def uninterleave(tensor):
    """Reorder rows g0, u0, g1, u1, ... along the second axis to gate rows, then up rows."""
    return torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)


def gpt_oss(tensors):
    state = transposed(tensors)
    b_up = uninterleave(tensors["experts.gate_up_proj_bias"])
    biases = {"experts.b_up": b_up, "experts.b_down": tensors["experts.down_proj_bias"]}
    return {**state, "experts.w_up": uninterleave(state["experts.w_up"]), **biases}


def dbrx(tensors):
    w1, v1, w2 = (tensors[f"experts.mlp.{name}"].view(8, -1, 64) for name in ("w1", "v1", "w2"))
    return {"experts.w_up": torch.cat([w1, v1], dim=1), "experts.w_down": w2.mT}


def shared(tensors, prefix):
    gate_up = [tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")]
    return {"shared_expert.w_up": torch.cat(gate_up), "shared_expert.w_down": tensors[f"{prefix}down_proj.weight"]}


def hf(tensors):
    return per_expert(tensors, "gate_proj", "up_proj", "down_proj")


# The experts' tensors in our layout, by architecture, and the layer's options besides sizes and router.
STATES = {
    "qwen3_moe": hf,
    "qwen2_moe": lambda t: {
        **hf(t),
        **shared(t, "shared_expert."),
        "shared_expert.w_gate": t["shared_expert_gate.weight"],
    },
    "dbrx": dbrx,
    "gpt_oss": gpt_oss,
    "granitemoe": lambda t: {
        "experts.w_up": t["input_linear.weight"],
        "experts.w_down": t["output_linear.weight"],
    },
    "deepseek_v2": lambda t: {**hf(t), **shared(t, "shared_experts.")},
    "deepseek_v3": lambda t: {**hf(t), **shared(t, "shared_experts.")},
    "ernie4_5_moe": lambda t: {**hf(t), **shared(t, "shared_experts.")},
    "llama4": lambda t: {**transposed(t), **shared(t, "shared_expert.")},
    "phimoe": lambda t: per_expert(t, "w1", "w3", "w2"),
    "switch_transformers": lambda t: per_expert(t, None, "wi", "wo", prefix="experts.expert_"),
}
ROUTERS = {
    **GOLDEN,
    "switch_transformers": (RouterSpec.softmax(normalize=False), 1, "router.classifier.weight", None, None),
}
OPTIONS = {
    "qwen2_moe": {"shared_gate": True},
    "gpt_oss": {"bias": True, "activation": Activation("gpt_oss", limit=1.5)},
    "switch_transformers": {"activation": "relu", "capacity": 3},
}


def router_state(tensors, names):
    keys = ("router.weight", "router.bias", "router.selection_bias")
    state = {key: tensors[name] for key, name in zip(keys, names, strict=True) if name in tensors}
    return {key: tensor if key == "router.weight" else tensor.flatten() for key, tensor in state.items()}


def make_layer(name, case, implementation, device):
    spec, top_k, *names = ROUTERS[name]
    state = {**STATES[name](case.weights), **router_state(case.weights, names)}
    num_experts, d_model, d_ff = state["experts.w_down"].shape
    shared_d_ff = state["shared_expert.w_down"].shape[1] if "shared_expert.w_down" in state else None
    layer = moe_layer(
        d_model,
        d_ff,
        num_experts,
        top_k,
        router=spec,
        shared_d_ff=shared_d_ff,
        implementation=implementation,
        device=device,
        **OPTIONS.get(name, {}),
    )
    layer.load_state_dict(state)
    gradients = {**STATES[name](case.gradients), **router_state(case.gradients, names)}
    return layer, gradients


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", STATES)
def test_layer_matches_golden(name, implementation, device):
    case = load_case(name, device)
    layer, expected = make_layer(name, case, implementation, device)
    x = case.golden["x"].requires_grad_()
    y, routing = layer(x, return_routing=True)
    assert torch.equal(routing.topk_experts.long().sort(-1).values, case.golden["topk_idx"].sort(-1).values)
    rms = case.golden["y"].square().mean().sqrt().clamp(min=1.0)
    assert (y - case.golden["y"]).abs().max() < 2e-5 * rms
    y.backward(case.golden["dy"])
    assert (x.grad - case.golden["grad_x"]).abs().max() < 2e-4
    for key, parameter in layer.named_parameters():
        assert (parameter.grad - expected.pop(key)).abs().max() < 2e-4, key
    assert not expected, f"gradients not compared: {list(expected)}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", STATES)
def test_layer_matches_golden_in_bfloat16(name, device):
    case = load_case(name, device)
    layer, _ = make_layer(name, case, None, device)
    y = layer.to(torch.bfloat16)(case.golden["x"].to(torch.bfloat16))
    error = (y.float() - case.golden["y"]).square().mean().sqrt() / case.golden["y"].square().mean().sqrt()
    assert error < 1.5e-2
