"""Adapters that PEFT's own wrappers compute, or that are refused, and the report that names them."""

import threading

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_layers import observe
from moe_layers.integrations.transformers import disable, enable

from .models import build, draw_tokens, logits_of, skip_old, step
from .peft_models import TARGETS, WARNINGS, adapt, assert_equal_steps, compare_steps, float64_pair, lora, peft

pytestmark = WARNINGS
EXPERTS = "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer"


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")


def test_adapters_of_experts_with_a_norm_are_left_to_peft():
    golden, ours = float64_pair("muse_spark_text", lora())
    report = enable(ours, implementation="reference")
    assert set(report.adapted_by_wrapper.values()) == {"a norm follows its experts"} and not report.adapted
    compare_steps(ours, golden)


@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_adapters_inside_a_replaced_block_are_refused(order):
    """JetMoE's block reads the matrices of its linear modules. It would read them without the adapters."""
    skip_old("jetmoe")
    model, refusal = build("jetmoe"), "input_linear of JetMoeMoE must be JetMoeParallelExperts, got ParamWrapper"
    targets = lora(targets=["mlp.input_linear.weight"])
    if order == "adapted":
        with pytest.raises(ValueError, match=refusal):
            enable(adapt(model, targets))
    else:
        enable(model, implementation="reference")
        with pytest.raises(ValueError, match=refusal):
            adapt(model, targets)(draw_tokens(model))


def test_another_experts_implementation_is_left_to_peft():
    golden, ours = float64_pair()
    tokens = draw_tokens(golden)
    enable(ours, implementation="reference")
    ours.base_model.model.set_experts_implementation("eager")
    assert torch.equal(step(ours, tokens)[0], step(golden, tokens)[0])


def test_report_names_parameters():
    model = adapt(build("qwen3_moe"), lora())
    report = enable(model)
    experts = [f"base_model.model.model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    assert list(report.adapted) == [f"{name}.{key}" for name in experts for key in ("down_proj", "gate_up_proj")]
    assert report.adapted_by_wrapper == {}
    assert str(report).endswith("(swiglu, experts interface); with them PEFT's adapters of 4 parameters")


def test_adapters_of_other_parameters_are_left_to_peft():
    golden, ours = float64_pair("gpt_oss", lora(targets=[*TARGETS, "mlp.experts.down_proj_bias"]))
    report = enable(ours, implementation="reference")
    name = "base_model.model.model.layers.{}.mlp.experts.down_proj_bias"
    assert report.adapted_by_wrapper == dict.fromkeys(map(name.format, (0, 1)), "it is not a weight of the experts")
    assert f"their wrappers compute the adapters of {name.format(0)} (it is not a weight" in str(report)
    compare_steps(ours, golden)


def test_a_later_adapter_that_is_left_to_peft_is_told():
    model = build("gpt_oss", dtype=torch.float64)
    enable(model, implementation="reference")
    name = r"model\.layers\.\d\.mlp\.experts\.down_proj_bias"
    with pytest.warns(UserWarning, match=rf"PEFT computes the adapter of {name}, because it is") as told:
        model = adapt(model, lora(targets=["mlp.experts.down_proj_bias"]))
    assert len([warning for warning in told if "PEFT computes" in str(warning.message)]) == 2  # one per layer
    model(input_ids=draw_tokens(model))


def test_a_hook_around_a_later_adapter_calls_the_kernels(hooks, monkeypatch):
    down = lora(targets=TARGETS[1:])
    golden, ours = float64_pair(config=down)
    plain = ours.unload()
    enable(plain, implementation="reference")
    ours = adapt(plain, down)
    wrapper = plain.model.layers[0].mlp.experts
    hooks.add_hook_to_module(wrapper, hooks.ModelHook())
    with monkeypatch.context() as patch:
        patch.delattr(type(wrapper), "forward")  # the forward of PEFT's wrapper
        step(ours, draw_tokens(ours))
    compare_steps(ours, golden)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda wrapper: wrapper.use_dora.update(default=True), "adapter 'default' is a variant of LoRA"),
        (lambda wrapper: wrapper.lora_dropout.update({"default": nn.Dropout(0.5)}), "adapter 'default' has dropout"),
        (
            lambda wrapper: wrapper.lora_A.update({"default": nn.Sequential(wrapper.lora_A["default"])}),
            "a factor of adapter 'default' is not a Linear without bias",
        ),
        (
            lambda wrapper: wrapper.r.update(default=wrapper.r["default"] + 1),
            "the factors of adapter 'default' must be",
        ),
        (
            lambda wrapper: setattr(wrapper, "forward", wrapper.base_layer.forward),
            "another forward was put in its place",
        ),
        pytest.param(
            lambda wrapper: vars(wrapper).pop("_did_swap_in_out_features"),
            "this version of PEFT does not state the order of its axes",
            marks=pytest.mark.skipif(
                Version(peft.__version__) < Version("0.19"), reason="this peft never swaps the axes"
            ),
        ),
    ],
)
def test_unknown_states_are_left_to_peft(change, reason):
    model = adapt(build("qwen3_moe"), lora())
    wrapper = model.base_model.model.model.layers[1].mlp.experts
    change(wrapper)
    report = enable(model)
    assert len(report.adapted) == 3
    ((name, given),) = report.adapted_by_wrapper.items()
    assert name.endswith("layers.1.mlp.experts.down_proj") and given.startswith(reason)


def test_other_wrappers_are_named():
    class Around(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, *args):
            return self.base_layer(*args)

    golden, ours = float64_pair()
    block = ours.base_model.model.model.layers[0].mlp
    block.experts = Around(block.experts)
    report = enable(ours, implementation="reference")
    assert report.adapted_by_wrapper == {
        "base_model.model.model.layers.0.mlp.experts": "Around is not a ParamWrapper of PEFT's LoRA"
    }
    assert len(report.adapted) == 4
    tokens = draw_tokens(golden)
    torch.testing.assert_close(step(ours, tokens)[0], step(golden, tokens)[0], rtol=0, atol=1e-10)


def test_dropout_is_refused_by_peft():
    """If PEFT allows dropout one day, the experts' op must not ignore it."""
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        adapt(build("qwen3_moe"), lora(lora_dropout=0.1))


def test_hooks_around_the_forward_of_wrappers(hooks):
    """accelerate wraps the forward that `enable` put there. The experts still compute the adapters, until `disable`."""
    golden, ours = float64_pair()
    tokens = draw_tokens(golden)
    expected = step(golden, tokens)
    enable(ours, implementation="reference")
    wanted = step(ours, tokens)
    hooked = [module for module in ours.modules() if "forward" in vars(module)]
    for wrapper in hooked:
        hooks.add_hook_to_module(wrapper, hooks.ModelHook())
    report = enable(ours, implementation="reference")
    assert len(report.adapted) == len(hooked) == 4 and not report.adapted_by_wrapper
    assert_equal_steps(step(ours, tokens), wanted)
    disable(ours)
    assert torch.equal(step(ours, tokens)[0], expected[0])
    assert all(hasattr(wrapper, "_hf_hook") and "forward" in vars(wrapper) for wrapper in hooked)


def test_experts_with_a_hook_keep_their_adapters_with_another_implementation(hooks):
    golden, ours = float64_pair()
    enable(ours, implementation="reference")
    for experts in [m for m in ours.modules() if type(m).__name__ == "Qwen3MoeExperts"]:
        hooks.add_hook_to_module(experts, hooks.ModelHook())
    ours.base_model.model.set_experts_implementation("eager")
    compare_steps(ours, golden)


def test_threads_have_adapters_of_their_own():
    """A forward in a second thread runs while the first thread is inside PEFT's wrappers."""
    _, model = float64_pair()
    enable(model, implementation="reference")
    expected, others = logits_of(model), []

    def run_another(*_):
        hook.remove()
        thread = threading.Thread(target=lambda: others.append(logits_of(model)))
        thread.start()
        thread.join()

    hook = model.get_submodule(EXPERTS).register_forward_pre_hook(run_another)
    assert torch.equal(logits_of(model), expected)
    assert torch.equal(others[0], expected)


@pytest.mark.parametrize("wrapped", ["experts", "inner wrapper"])
def test_a_wrapper_of_others_between_adapters_and_experts(wrapped):
    """PEFT then computes the adapters. The forward of PEFT's wrapper refuses experts inside another wrapper."""
    golden, ours = float64_pair()
    tokens = draw_tokens(golden)
    enable(ours, implementation="reference")
    for layer in ours.base_model.model.model.layers:
        outer = layer.mlp.experts
        holder = outer.base_layer if wrapped == "experts" else outer
        holder.base_layer = checkpoint_wrapper(holder.base_layer)
    if wrapped == "experts":
        with pytest.raises(ValueError, match="does not have a parameter"):
            ours(input_ids=tokens)
    else:
        expected = golden(input_ids=tokens).logits
        torch.testing.assert_close(ours(input_ids=tokens).logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["mixed", "tuner", "wrapper"])
def test_every_wrapper_of_peft_is_enabled_and_disabled(kind):
    model = peft.get_peft_model(build("qwen3_moe"), lora(), mixed=kind == "mixed")
    part = {"mixed": model, "tuner": model.base_model}.get(kind, model.base_model.model.model.layers[0].mlp.experts)
    assert enable(part, implementation="reference").blocks == (1 if kind == "wrapper" else 2)
    disable(part)
    assert not any(name.startswith("_moe_layers") for module in model.modules() for name in vars(module))


def test_a_router_among_modules_to_save():
    model = adapt(build("qwen3_moe"), lora(modules_to_save=["gate"]))
    enable(model, implementation="reference")
    with pytest.raises(ValueError, match=r"got ModulesToSaveWrapper: .* adapt the router by target_parameters"):
        observe(model)
