"""gpt-oss with its published MXFP4 blocks: loading, inference, adapters over the stored bytes, and saving."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from moe_layers.integrations.transformers import disable, enable
from moe_layers.integrations.transformers.experts.mxfp4 import _taken, keep_mxfp4

from ..checkpoint.golden import Golden
from ..checkpoint.test_from_checkpoint import copy_case
from ..tiers import slow
from .models import assert_same_bits, build, draw_tokens, enabled_logits, logits_of, step

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT warns about its use of transformers
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # PEFT 0.18 warns
]
CASE = "gpt_oss_mxfp4"
KEYS = ("gate_up_proj", "down_proj")
NAME = "model.layers.0.mlp.experts"


def load_stored(directory=None, **options):
    directory = directory or Golden(CASE).directory
    config = keep_mxfp4(transformers.AutoConfig.from_pretrained(directory))
    return transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, **options)


def pair(dtype=torch.float32, device="cpu", *, reorder=True):
    """Return a model with MXFP4 experts, and one that transformers dequantised. Their expert weights are frozen.

    Args:
        reorder: give the plain weights the memory order of the stored ones, because sums in a GEMM depend on the order.
    """
    stored = load_stored(dtype=dtype).to(device)
    dequantised = transformers.Mxfp4Config(dequantize=True)
    auto = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(Golden(CASE).directory, dtype=dtype, quantization_config=dequantised).to(device)
    for key in KEYS:
        parameter = getattr(plain.get_submodule(NAME), key).requires_grad_(False)
        parameter.data = parameter.data.to(dtype)  # bfloat16 in transformers 5.7
        if reorder:
            parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
    return stored, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_are_those_that_transformers_dequantises(dtype):
    """transformers' own experts read the parameters before `enable`, and after `disable`."""
    stored, plain = pair(dtype, reorder=False)
    for key in KEYS:
        ours, theirs = (getattr(model.get_submodule(NAME), key) for model in (stored, plain))
        assert torch.equal(ours, theirs) and ours.dtype == dtype
    expected = logits_of(plain)
    assert torch.equal(logits_of(stored), expected)
    enable(stored, implementation="reference")
    disable(stored)
    assert torch.equal(logits_of(stored), expected)


def test_outputs_and_gradients_are_those_of_the_dequantised_model():
    stored, plain = pair()
    report = enable(stored, implementation="reference")
    enable(plain, implementation="reference")
    disk = Golden(CASE).tensors("model")
    assert report.quantized == {"mxfp4 (1x32)": sum(t.numel() for t in disk.values() if t.dtype == torch.uint8)}
    assert "1 GptOssExperts (gpt_oss(" in str(report)
    tokens = draw_tokens(stored)
    actual = step(stored, tokens)
    assert_same_bits(actual, step(plain, tokens))
    assert actual[0].any() and f"{NAME}.down_proj_bias" in actual[2]


@slow  # the interpreter takes seconds
def test_kernels_decode_what_is_stored(device):
    torch.testing.assert_close(*enabled_logits(pair(device=device), "triton"))


@slow
def test_by_name_without_enable():
    stored, plain = pair()
    for model in (stored, plain):
        model.set_experts_implementation("moe_layers")
    torch.testing.assert_close(logits_of(stored), logits_of(plain))


def test_nothing_is_copied():
    stored = load_stored()
    enable(stored, implementation="reference")
    experts = stored.get_submodule(NAME)
    weight = experts._moe_layers_experts.w_down(experts)
    held = experts.parametrizations.down_proj
    assert weight.values.data_ptr() == held.original.data_ptr() and weight.scales is held[0].scales
    assert torch.equal(weight.values, Golden(CASE).tensors("model")[f"{NAME}.down_proj_blocks"])


def test_saved_as_published(tmp_path):
    stored = load_stored()
    enable(stored, implementation="reference")
    expected = logits_of(stored)
    stored.save_pretrained(tmp_path)
    disk, written = Golden(CASE).tensors("model"), load_file(tmp_path / "model.safetensors")
    assert_same_bits(written, disk)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == Golden(CASE).config["quantization_config"]
    again = load_stored(tmp_path)
    enable(again, implementation="reference")
    assert torch.equal(logits_of(again), expected)


@pytest.fixture
def peft_models():
    return pytest.importorskip("tests.integrations.peft_models")


def lora(peft_models):
    return peft_models.lora(targets=[f"{NAME}.{key}" for key in KEYS])


@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_adapters_of_peft(order, peft_models):
    peft_models.assert_adapted_as_by_peft(*pair(), order, lora(peft_models), num_adapted=2)


def test_targets_of_peft_need_full_names(peft_models):
    with pytest.raises(ValueError, match="target_parameters"):
        peft_models.adapt(load_stored(), peft_models.lora())


@pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning")  # PEFT warns
def test_short_names_of_peft_are_told(peft_models):
    adapted = peft_models.adapt(load_stored(), peft_models.lora(target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match=rf"does not train {NAME}\.\w+, {NAME}\.\w+: PEFT.*full names"):
        enable(adapted, implementation="reference")


def test_merging_by_peft_does_not_reach_the_bytes(peft_models):
    stored = load_stored(dtype=torch.float32)
    base = logits_of(stored)
    adapted = peft_models.adapt(stored, lora(peft_models))
    enable(adapted, implementation="reference")
    assert not torch.allclose(logits_of(adapted), base)
    adapted.merge_adapter()
    torch.testing.assert_close(logits_of(adapted), base)
    held = stored.get_submodule(f"{NAME}.base_layer.base_layer.parametrizations.down_proj").original
    assert torch.equal(held, Golden(CASE).tensors("model")[f"{NAME}.down_proj_blocks"])


class Twice(nn.Module):
    def forward(self, parameter):
        return 2 * parameter


def test_a_parameter_that_is_changed_later_is_read_as_a_tensor():
    stored, plain = pair(reorder=False)
    for model in (stored, plain):
        enable(model, implementation="reference")
        experts = model.get_submodule(NAME)
        parametrize.register_parametrization(experts, "down_proj", Twice(), unsafe=True)
    assert torch.equal(logits_of(stored), logits_of(plain))


def test_another_parametrization_is_refused():
    stored = load_stored()
    parametrize.register_parametrization(stored.get_submodule(NAME), "down_proj", Twice(), unsafe=True)
    with pytest.raises(ValueError, match=rf"down_proj of {NAME} must have one parametrization, got several"):
        enable(stored, implementation="reference")


def test_experts_in_the_order_of_other_kernels_are_refused():
    model = build("gpt_oss")
    experts = transformers.integrations.mxfp4.Mxfp4GptOssExperts(model.config)
    model.set_submodule(NAME, experts)
    with pytest.raises(ValueError, match=r"unsupported Mxfp4GptOssExperts \(they hold.*with keep_mxfp4"):
        enable(model, implementation="reference")


def quantised(model_type="gpt_oss", method="mxfp4"):
    return transformers.AutoConfig.for_model(model_type, quantization_config={"quant_method": method})


@pytest.mark.parametrize(
    "config",
    [quantised("qwen3_moe"), quantised(method="fp8"), transformers.GptOssConfig()],
    ids=["qwen3_moe", "fp8", "plain"],
)
def test_other_configurations_are_refused(config):
    with pytest.raises(ValueError, match="config must have model_type 'gpt_oss' and quant_method 'mxfp4', got"):
        keep_mxfp4(config)


def test_the_given_configuration_does_not_change():
    config = transformers.AutoConfig.from_pretrained(Golden(CASE).directory)
    keep_mxfp4(config)
    assert config.quantization_config["quant_method"] == "mxfp4"


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_a_missing_tensor_is_named(part, tmp_path):
    copy_case(CASE, tmp_path, lambda tensors: tensors.pop(f"{NAME}.down_proj_{part}"))
    with pytest.raises(ValueError, match=rf"the checkpoint must hold {NAME}\.down_proj_{part}, which is missing"):
        load_stored(tmp_path)


def test_sizes_must_be_whole_blocks(tmp_path):
    copy_case(CASE, tmp_path, lambda _: None, {"intermediate_size": 48})
    with pytest.raises(ValueError, match="inputs of down_proj must be whole blocks of 32, got 48"):
        load_stored(tmp_path)


def test_ranks_that_share_experts_are_refused(monkeypatch):
    monkeypatch.setattr(transformers.GptOssForCausalLM, "_tp_size", 2)
    with pytest.raises(ValueError, match="each rank must hold all experts, got tensor or expert parallelism"):
        load_stored()


@pytest.mark.parametrize("state", ["sharded", "offloaded"])
def test_experts_that_are_not_whole_are_refused(state):
    """transformers shards parameters (DTensor) and offloads them (meta) before they are taken."""
    parameter = nn.Parameter(torch.empty(1, device="meta" if state == "offloaded" else "cpu"))
    parameter._is_hf_initialized = True
    if state == "sharded":
        parameter.device_mesh = None
    experts = nn.Module()
    experts.register_parameter("down_proj_blocks", parameter)
    with pytest.raises(ValueError, match=r"whole and in memory, got experts\.down_proj_blocks sharded or offloaded"):
        _taken("experts", experts, "down_proj_blocks")
