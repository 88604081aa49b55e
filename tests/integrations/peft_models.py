"""Models with PEFT's adapters on their experts. Skips what imports it if PEFT is not installed."""

import copy
import warnings

import pytest
import torch

from moe_layers.integrations.transformers import enable

from .models import build, draw_tokens, step

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
    """Draw the factors of all adapters, seeded by their names, because PEFT initialises lora_B with zeros."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def adapt(model, config):
    return randomise(peft.get_peft_model(model, config))


def enabled_and_adapted(model, order, config=None, implementation="reference"):
    """Enable and adapt a model. `order` names the first change, "enabled" or "adapted". Return (model, report)."""
    config = config or lora()
    if order == "enabled":
        report = enable(model, implementation=implementation)
        return adapt(model, config), report
    model = adapt(model, config)
    return model, enable(model, implementation=implementation)


def share_factors(ours, theirs):
    """Give two adapted models the same factors. Return pairs, because their names depend on the order of wrappers."""
    wrappers, others = (
        {
            (name.replace(".base_layer", ""), module.parameter_name): module
            for name, module in model.named_modules()
            if hasattr(module, "parameter_name")
        }
        for model in (ours, theirs)
    )
    assert wrappers.keys() == others.keys()
    pairs = [
        tuple(getattr(module, factor)["default"].weight for module in (wrapper, others[place]))
        for place, wrapper in wrappers.items()
        for factor in ("lora_A", "lora_B")
    ]
    with torch.no_grad():
        for own, other in pairs:
            own.copy_(other)
    return pairs


def assert_adapted_as_by_peft(stored, plain, order, config=None, *, num_adapted):
    """Adapt a model with stored weights, and compare two steps with PEFT's own computation over plain weights.

    Args:
        order: see `enabled_and_adapted`.
        num_adapted: number of adapted parameters.
    """
    ours, report = enabled_and_adapted(stored, order, config)
    golden = adapt(plain, config or lora())
    assert len(report.adapted) == (num_adapted if order == "adapted" else 0) and not report.adapted_by_wrapper
    pairs, tokens = share_factors(ours, golden), draw_tokens(golden)
    assert len(pairs) == 2 * num_adapted
    for _ in range(2):
        torch.testing.assert_close(step(ours, tokens)[0], step(golden, tokens)[0], rtol=1e-4, atol=1e-5)
        for own, other in pairs:
            largest = other.grad.abs().max().item()
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-4 * largest)


def assert_equal_steps(actual, expected, tolerance=1e-10):
    assert actual[2].keys() == expected[2].keys()
    pairs = [(actual[0], expected[0]), (actual[1], expected[1])]
    pairs += [(gradient, expected[2][name]) for name, gradient in actual[2].items()]
    for a, e in pairs:
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(1.0, e.abs().max().item() if e.numel() else 0.0))


def compare_steps(ours, golden, **options):
    """Compare a step of two models on the same tokens. Return that of the second model."""
    tokens = draw_tokens(golden)
    expected = step(golden, tokens, **options)
    assert_equal_steps(step(ours, tokens, **options), expected)
    return expected


def float64_pair(model_type="qwen3_moe", config=None):
    """Return the same adapted model twice: for PEFT, and for us."""
    model = adapt(build(model_type, dtype=torch.float64), config or lora())
    return model, copy.deepcopy(model)
