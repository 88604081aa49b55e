"""Copies and pickles of models that are enabled whole or in part, or whose enabling was interrupted."""

import copy
import pickle

import pytest
import torch

from moe_layers.integrations.transformers import disable
from moe_layers.integrations.transformers.experts.experts_forward import ATTRIBUTE

from ..processes import run_python
from ..tiers import slow
from .models import build, draw_tokens, logits_of
from .test_enable import MODELS, assert_same_model, enable, snapshot


def copies(module):
    return copy.deepcopy(module), pickle.loads(pickle.dumps(module))


def test_a_copy_of_an_enabled_model_is_its_own(device):
    model = build("gpt_oss", device)
    own = logits_of(model)
    enable(model)
    ours = logits_of(model)
    twin = copy.deepcopy(model)
    disable(model)
    assert torch.equal(logits_of(model), own)
    assert torch.equal(logits_of(twin), ours)
    disable(twin)
    assert torch.equal(logits_of(twin), own)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_copied_part_of_an_enabled_model(model_type, device):
    """The copy computes the same, by the choice in its own configuration. It can be enabled and disabled by itself."""
    model = build(model_type, device)
    own = logits_of(model)
    enable(model)
    wanted = logits_of(model)
    layers = model.model.layers
    for twin in copies(layers[0]):
        layers[0] = twin
        assert torch.equal(logits_of(model), wanted)
        with pytest.raises(ValueError, match="disable: the model must have been given to enable"):
            disable(twin)
        assert enable(twin).blocks == 1
        assert torch.equal(logits_of(model), wanted)
        disable(twin)
    layers[1] = copy.deepcopy(layers[1])
    enable(layers[1])
    disable(layers[1])
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    assert torch.equal(logits_of(model), own)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_with_an_enabled_part_is_copied(model_type, device):
    model = build(model_type, device)
    own = logits_of(model)
    enable(model.model.layers[0])
    wanted = logits_of(model)
    assert not torch.equal(wanted, own)
    for twin in copies(model):
        assert torch.equal(logits_of(twin), wanted)
        with pytest.raises(ValueError, match="no part of the model may be enabled"):
            enable(twin)
        disable(twin.model.layers[0])
        assert torch.equal(logits_of(twin), own)


@pytest.mark.parametrize("model_type", MODELS)
def test_an_interrupted_enable_changes_nothing(model_type, device, monkeypatch):
    """Copies and pickles of the model are as before, too, and can be enabled."""
    model = build(model_type, device)
    wanted = snapshot(model)
    layers, replaced = model.model.layers, []

    def replace_one(place):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(place)
        assert any(hasattr(part, ATTRIBUTE) for part in layers[1].modules())

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("moe_layers.integrations.transformers.enabling.replace_forwards", replace_one)
        enable(model)
    assert_same_model(snapshot(model), wanted)
    assert not any(module._forward_pre_hooks for module in model.modules())
    for twin in copies(model):
        assert torch.equal(logits_of(twin), wanted[3])
        assert enable(twin).blocks == 2
        assert not torch.equal(logits_of(twin), wanted[3])
    with pytest.raises(ValueError, match="disable: the model must have been given to enable"):
        disable(model)
    assert enable(model).blocks == 2


PICKLED = """
import torch
model, tokens, wanted = torch.load("pickled.pt", weights_only=False)
assert torch.equal(model(input_ids=tokens).logits, wanted)
"""


@slow  # a process that imports transformers; test_a_copy_of_an_enabled_model_is_its_own copies in this one
@pytest.mark.parametrize("part", ["", "model.layers.1"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text"])
def test_an_enabled_model_unpickles_in_a_new_process(model_type, part, tmp_path, device):
    model = build(model_type, device)
    tokens = draw_tokens(model)
    enable(model.get_submodule(part))
    torch.save((model, tokens, model(input_ids=tokens).logits.detach()), tmp_path / "pickled.pt")
    run_python(["-c", PICKLED], cwd=tmp_path, interpret=True)


ADAPTED = """
import peft, torch
block = torch.load("block.pt", weights_only=False)
targets = ["experts.gate_up_proj", "experts.down_proj"]
peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[], target_parameters=targets), block)
wrappers = [module for module in block.modules() if hasattr(module, "parameter_name")]
assert len(wrappers) == 2 and all("_moe_layers_forward" in vars(wrapper) for wrapper in wrappers)
"""


@slow  # a process that imports transformers and PEFT
def test_an_unpickled_block_takes_adapters_in_a_new_process(tmp_path):
    pytest.importorskip("peft", reason="needs peft")
    model = build("qwen3_moe")
    enable(model)
    torch.save(model.model.layers[0].mlp, tmp_path / "block.pt")
    run_python(["-c", ADAPTED], cwd=tmp_path)
