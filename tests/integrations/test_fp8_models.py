"""`enable(model, precision="fp8")`: the experts of transformers models with e4m3 operands."""

import copy

import pytest
import torch

from moe_layers.integrations.transformers import disable, enable
from moe_layers.integrations.transformers.experts.experts_forward import FORMS

from .models import build, draw_tokens, step
from .test_experts_of_models import draw_routing, experts_of

SIZES = {"hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 16}


def run(experts, tokens, ids, weights):
    tokens = tokens.detach().clone().requires_grad_()
    experts.zero_grad()
    out = experts(tokens, ids, weights)
    out.square().sum().backward()
    return [out.detach(), tokens.grad, *(p.grad for p in experts.parameters() if p.grad is not None)]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_differ_by_the_rounding_of_e4m3(model_type, implementation, device):
    model = build(model_type, device, **SIZES)
    exact = copy.deepcopy(model)
    enable(exact, implementation=implementation)
    enable(model, implementation=implementation, precision="fp8")
    operands = draw_routing(experts_of(model), torch.float32)
    results = list(zip(run(experts_of(model), *operands), run(experts_of(exact), *operands), strict=True))
    assert len(results) >= 4
    for actual, expected in results:
        assert 0.003 < (actual - expected).norm() / expected.norm() < 0.2


def test_forms_are_kept_and_follow_the_weights(device):
    model = build("gpt_oss", device, **SIZES)
    enable(model, implementation="triton", precision="fp8")
    experts = experts_of(model)
    operands = draw_routing(experts, torch.float32)
    first = run(experts, *operands)
    assert len(getattr(experts, FORMS)._kept) == 2
    assert all(map(torch.equal, run(experts, *operands), first))
    experts.down_proj.data[:, 3] += 1.0  # one row, by a change that PyTorch's version counter misses
    changed = run(experts, *operands)
    assert not torch.equal(changed[0], first[0])
    again = copy.deepcopy(model)
    assert not getattr(experts_of(again), FORMS)._kept
    assert all(map(torch.equal, run(experts_of(again), *operands), changed))
    disable(model)
    assert not hasattr(experts, FORMS)


def test_whole_model(device):
    model = build("qwen3_moe", device, **SIZES)
    tokens = draw_tokens(model, batch=1, length=5)
    plain = step(copy.deepcopy(model), tokens)
    enable(model, implementation="reference", precision="fp8")
    actual = step(model, tokens)
    assert 0.001 < (actual[0] - plain[0]).norm() / plain[0].norm() < 0.2
    enable(model, implementation="reference")
    torch.testing.assert_close(step(model, tokens)[0], plain[0])


def test_bad_input():
    model = build("qwen3_moe", moe_intermediate_size=20)
    with pytest.raises(ValueError, match=r"enable: precision='fp8' needs multiples of 16, got .* d_ff=20"):
        enable(model, precision="fp8")
    with pytest.raises(ValueError, match="enable: precision must be one of"):
        enable(model, precision="int8")
    with pytest.raises(ValueError, match="needs plain weights and no norm, got a norm"):
        enable(build("muse_spark_text"), precision="fp8")
    enable(model)
