"""Models with PEFT's adapters on their experts. Skips what imports it if PEFT is not installed."""

import copy
import warnings

import pytest
import torch

from .models import build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="peft is not installed")

WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]  # marks of tests
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(r=3, alpha=5, targets=TARGETS, **options):
    options = {"target_modules": [], **options}
    return peft.LoraConfig(r=r, lora_alpha=alpha, target_parameters=targets, **options)


def randomise(model):
    """Draw all adapters, by name: PEFT begins with zeros in lora_B."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def adapt(model, config):
    return randomise(peft.get_peft_model(model, config))


def assert_equal_steps(actual, expected, tolerance=1e-10):
    assert actual[2].keys() == expected[2].keys()
    pairs = [(actual[0], expected[0]), (actual[1], expected[1])]
    pairs += [(gradient, expected[2][name]) for name, gradient in actual[2].items()]
    for a, e in pairs:
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(1.0, e.abs().max().item() if e.numel() else 0.0))


def float64_pair(model_type="qwen3_moe", config=None, **changes):
    """Return the same adapted model twice: for PEFT, and for us."""
    model = adapt(build(model_type, dtype=torch.float64, **changes), config or lora())
    return model, copy.deepcopy(model)
