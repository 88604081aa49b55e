"""The modules for axolotl, LLaMA-Factory, ms-swift, verl and VeOmni, with the frameworks or stand-ins for them.

The lines of configuration are those of `docs/guides/frameworks.md`.
"""

import importlib
import sys
import types
from functools import partial

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from moe_kernels import reference
from moe_layers.integrations.transformers import enable
from moe_layers.integrations.transformers.experts.experts_forward import ATTRIBUTE, NAME

from ..markdown import blocks_of
from ..processes import ROOT
from .framework_stubs import FRAMEWORKS, install
from .models import build, draw_tokens, logits_of
from .peft_models import WARNINGS, adapt, lora

PAGE = ROOT / "docs" / "guides" / "frameworks.md"
pytestmark = WARNINGS


def settings_of(key):
    """Return the settings of the page's YAML block that has a key."""
    blocks = (yaml.safe_load(block.text) for block in blocks_of(PAGE) if block.language == "yaml")
    return next(block for block in blocks if key in block)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_another_version_is_refused_by_name(name, monkeypatch):
    package, tested = FRAMEWORKS[name][:2]
    with pytest.raises(ImportError, match=rf"moe_layers: {package} must be .*, got 99\.0"):
        install(name, monkeypatch, "99.0")
    assert f"| {tested.rpartition('.')[0] if name != 'llama_factory' else tested}" in PAGE.read_text()
    assert len((ROOT / "moe_layers" / "integrations" / f"{name}.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("adapted", [False, True])
def test_axolotl(adapted, monkeypatch):
    install("axolotl", monkeypatch)
    (path,) = settings_of("plugins")["plugins"]
    module, _, kind = path.rpartition(".")
    plugin = getattr(importlib.import_module(module), kind)()
    model = build("qwen3_moe")
    model = adapt(model, lora()) if adapted else model
    expected = model(input_ids=draw_tokens(model.base_model)).logits
    plugin.pre_model_load({"adapter": "lora", "experts_implementation": None})
    plugin.post_model_load({}, model)
    torch.testing.assert_close(model(input_ids=draw_tokens(model.base_model)).logits, expected, rtol=1e-4, atol=1e-4)
    assert sum(hasattr(part, ATTRIBUTE) for part in model.modules() if type(part).__name__.endswith("Experts")) == 2


@pytest.mark.parametrize(
    "setting",
    [
        {"use_scattermoe": True},
        {"use_sonicmoe": True},
        {"expert_backend": "sonicmoe"},
        {"experts_implementation": "grouped_mm"},
        {"expert_parallel_size": 2},
    ],
    ids=str,
)
def test_axolotl_with_other_kernels_is_refused(setting, monkeypatch):
    plugin = install("axolotl", monkeypatch).MoELayersPlugin()
    with pytest.raises(ValueError, match=f"it must compute the experts alone, got .*{next(iter(setting))}"):
        plugin.pre_model_load(setting)


def test_llama_factory(monkeypatch):
    module = install("llama_factory", monkeypatch)
    model = build("qwen3_moe")
    expected = model(input_ids=draw_tokens(model)).logits
    assert module.KernelPlugin(settings_of("kernel_config")["kernel_config"]["name"])(model=model, include_kernels=None)
    assert model.config._experts_implementation == NAME
    torch.testing.assert_close(model(input_ids=draw_tokens(model)).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="must have no include_kernels, got 'auto'"):
        module.enable_experts(model, include_kernels="auto")


def test_the_script_for_llama_factory(monkeypatch):
    """The script trains in a process in which the name is registered."""
    module = install("llama_factory", monkeypatch)
    script = next(block.text for block in blocks_of(PAGE) if block.needs == "llamafactory")
    trained = []

    def run_sft():
        trained.append((sys.argv, module.KernelPlugin("moe_layers")["__call__"]))

    trainer = types.ModuleType("llamafactory.v1.trainers.sft_trainer")
    trainer.run_sft = run_sft
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    monkeypatch.setattr(sys, "argv", ["train.py", "sft", "run.yaml"])
    exec(script, {"__name__": "__main__"})
    assert trained == [(["train.py", "run.yaml"], module.enable_experts)]


@pytest.mark.parametrize("part", ["mlp", "mlp.experts"])
@pytest.mark.parametrize("name", ["llama_factory", "axolotl"])
def test_a_half_enabled_model_is_refused(name, part, monkeypatch):
    """The kernel `cuda_fused_moe` of LLaMA-Factory replaces the forward of experts or of their block."""
    module, model = install(name, monkeypatch), build("qwen3_moe")
    door = module.enable_experts if name == "llama_factory" else partial(module.MoELayersPlugin().post_model_load, {})
    replaced = model.get_submodule(f"model.layers.1.{part}")
    replaced.forward = types.MethodType(lambda self, *arguments: arguments[0], replaced)
    with pytest.raises(ValueError, match=rf"got replaced forwards of model\.layers\.1\.{part};"):
        door(model)
    assert model.config._experts_implementation != NAME
    del replaced.forward
    door(model)
    assert model.config._experts_implementation == NAME


def compare_with_enable(load, tmp_path):
    """Compare a model that was loaded from a folder with an enabled one."""
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.config._experts_implementation == NAME
    enable(model)
    # With `enable`, one op also computes the router.
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-5)


def test_ms_swift(monkeypatch, tmp_path):
    """The string of the command is known to transformers, which loads the model with it."""
    lines = next(block.text for block in blocks_of(PAGE) if "--experts_impl" in block.text)
    words = lines.split()
    name = words[words.index("--experts_impl") + 1]
    imported = install("ms_swift", monkeypatch).__name__
    assert f'echo "import {imported}" > plugin.py' in lines
    compare_with_enable(partial(AutoModelForCausalLM.from_pretrained, experts_implementation=name), tmp_path)


def test_verl(monkeypatch, tmp_path):
    """verl's FSDP engine imports a library, sets attributes of the configuration, and loads the model with it."""
    settings = settings_of("actor_rollout_ref")["actor_rollout_ref"]["model"]
    assert settings["external_lib"] == install("verl", monkeypatch).__name__

    def load(folder):
        config = AutoConfig.from_pretrained(folder)
        for name, value in settings["override_config"].items():
            setattr(config, name, value)
        return AutoModelForCausalLM.from_pretrained(folder, config=config)

    compare_with_enable(load, tmp_path)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_veomni(limit, monkeypatch):
    module = install("veomni", monkeypatch)
    settings = settings_of("model")["model"]["ops_implementation"]["moe_implementation"]
    name = settings.removeprefix("fused_")
    forward = module.KERNEL_REGISTRY.resolve("moe_experts", "standard", name)
    model = build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    if limit is not None:
        experts.limit = limit
    tokens = torch.randn(7, experts.hidden_dim, requires_grad=True)
    ids = torch.rand(7, experts.num_experts).topk(2).indices
    weights = torch.rand(7, 2)
    out = forward(experts, tokens, ids, weights)
    activation = "swiglu" if limit is None else module.Activation("clamped_swiglu", limit=limit)
    permutation = reference.sort_by_expert(ids.int(), experts.num_experts)
    operands = tokens, weights, permutation, experts.gate_up_proj, experts.down_proj
    torch.testing.assert_close(out, reference.fused_experts(*operands, activation=activation))
    out.sum().backward()
    assert experts.gate_up_proj.grad.any() and tokens.grad.any()
    module.moe.apply_veomni_fused_moe_patch(fused_moe_kernel=name)
    assert module.moe._fused_moe_forward is module.fused_moe_forward
    assert module.bind_lora_moe_kernels is not None


def test_veomni_refuses_what_it_cannot_compute(monkeypatch):
    module = install("veomni", monkeypatch)
    tokens, ids, weight = torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.long), torch.randn(1, 3, 4)
    with pytest.raises(ValueError, match="gate and up must be one parameter"):
        module.fused_moe_forward(1, torch.ones(2, 1), ids, tokens, weight, weight, weight.mT)
    with pytest.raises(ValueError, match="Invalid fused_moe_kernel: 'other'"):
        module.moe.apply_veomni_fused_moe_patch("other")
    monkeypatch.setattr(module, "get_parallel_state", lambda: types.SimpleNamespace(ep_enabled=True))
    both = torch.randn(1, 6, 4)
    with pytest.raises(ValueError, match="ep_size must be 1, got expert parallelism"):
        module.fused_moe_forward(1, torch.ones(2, 1), ids, tokens, None, None, weight.mT, both)
    experts = build("qwen3_moe").model.layers[0].mlp.experts
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="the activation must be SiLU, got GELU"):
        module._experts_forward(experts, tokens, ids, torch.ones(2, 1))
