"""Experts that bitsandbytes quantised to 4 bits: inference and adapters over the stored bytes."""

import copy

import pytest
import torch

from moe_layers.checkpoint.adapters.adapter_files import read_peft_adapter, write_adapter
from moe_layers.integrations.transformers import disable, enable

from ..tiers import slow
from .models import assert_same_bits, build, draw_tokens, enabled_logits, experts_of, logits_of, skip_old, step

pytestmark = [
    slow,  # importing bitsandbytes takes seconds
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT warns about its use of transformers
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # PEFT 0.18 warns
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning"),  # PEFT warns if it finds no parameter
]
KEYS = ("gate_up_proj", "down_proj")
# The smallest, the usual and the largest block size of bitsandbytes. The matrices are no whole blocks.
OPTIONS = {
    "nf4 (1x64)": {},
    "nf4 (1x64, scales in blocks of 256)": {"compress_statistics": True},
    "nf4 (1x32)": {"blocksize": 32},
    "nf4 (1x4096, scales in blocks of 256)": {"blocksize": 4096, "compress_statistics": True},
}


@pytest.fixture(scope="module")
def replace_parameter_4bit():
    return pytest.importorskip("bitsandbytes.nn.parametrize").replace_parameter_4bit


@pytest.fixture
def peft_models():
    return pytest.importorskip("tests.integrations.peft_models")


def pair(replace, device="cpu", dtype=torch.float32, **options):
    """Return a model with quantised experts, and one with their dequantised values."""
    stored, plain = build("qwen3_moe", device, dtype), build("qwen3_moe", device, dtype)
    for (_, experts), (_, target) in zip(experts_of(stored), experts_of(plain), strict=True):
        for key in KEYS:
            replace(experts, key, **options)
            getattr(target, key).data.copy_(getattr(experts, key))
        target.requires_grad_(False)
    return stored, plain


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_are_those_of_the_dequantised_model(name, replace_parameter_4bit):
    stored, plain = pair(replace_parameter_4bit, **OPTIONS[name])
    report = enable(stored, implementation="reference")
    enable(plain, implementation="reference")
    assert list(report.quantized) == [name]
    assert list(report.kinds) == [("Qwen3MoeExperts", "swiglu", "experts interface")]
    values = sum(p.numel() for _, experts in experts_of(stored) for p in experts.parameters())
    assert values < report.quantized[name] < 1.35 * values  # the rest: scales, and tables of 256 numbers
    tokens = draw_tokens(stored)
    actual = step(stored, tokens)
    assert_same_bits(actual, step(plain, tokens))
    assert actual[0].any() and len(actual[2]) == len(list(plain.named_parameters())) - 4


def test_bfloat16(replace_parameter_4bit):
    assert torch.equal(*enabled_logits(pair(replace_parameter_4bit, dtype=torch.bfloat16)))


def test_kernels_decode_what_is_stored(replace_parameter_4bit, device):
    models = pair(replace_parameter_4bit, device, compress_statistics=True)
    torch.testing.assert_close(*enabled_logits(models, "triton"))


def test_nothing_is_copied(replace_parameter_4bit):
    stored, _ = pair(replace_parameter_4bit, compress_statistics=True)
    enable(stored, implementation="reference")
    (_, experts), *_ = experts_of(stored)
    held, state = experts.parametrizations.down_proj.original, experts.parametrizations.down_proj[0].quant_state
    weight = experts._moe_layers_experts.w_down(experts)
    assert weight.values.data_ptr() == held.data_ptr() and weight.scales is state.absmax
    assert weight.nested_scales is state.state2.absmax and weight.codes is state.code


def test_disable_copies_and_state_dicts(replace_parameter_4bit):
    stored, _ = pair(replace_parameter_4bit)
    own, before = logits_of(stored), stored.state_dict()
    enable(stored, implementation="reference")
    assert torch.equal(logits_of(copy.deepcopy(stored)), logits_of(stored))
    after = stored.state_dict()
    assert before.keys() == after.keys() and "model.layers.0.mlp.experts.down_proj.absmax" in after
    disable(stored)
    assert torch.equal(logits_of(stored), own)


@pytest.mark.parametrize(
    ("model_type", "replaced", "options", "error", "message"),
    [
        (
            "qwen3_moe",
            KEYS,
            {"quant_type": "fp4"},
            NotImplementedError,
            r"Qwen3MoeExperts\.gate_up_proj, quantised by bitsandbytes: the format 'fp4' is not supported",
        ),
        (
            "qwen3_moe",
            KEYS[:1],
            {},
            ValueError,
            r"must hold either no parameter or exactly gate_up_proj, down_proj in 4 bits",
        ),
        ("gpt_oss", KEYS, {}, ValueError, r"\(GptOssExperts\) must be stored as \[E, out, in\] if it is in 4 bits"),
        ("llama4_text", KEYS, {}, ValueError, r"\(Llama4TextExperts\) must be stored as \[E, out, in\] if"),
        ("longcat_flash", KEYS, {}, ValueError, "the weights of LongcatFlashExperts must be plain"),
        ("dbrx", ("w1", "v1", "w2"), {}, ValueError, r"DbrxExperts must be plain.*got mlp\.v1, mlp\.w1, mlp\.w2 of"),
    ],
)
def test_what_cannot_be_read_is_refused(model_type, replaced, options, error, message, replace_parameter_4bit):
    skip_old(model_type)
    model = build(model_type)
    _, experts = experts_of(model)[-1]
    for key in replaced:
        replace_parameter_4bit(experts.mlp if model_type == "dbrx" else experts, key, **options)
    with pytest.raises(error, match=message):
        enable(model, implementation="reference")
    assert not any(hasattr(module, "_moe_layers_experts") for module in model.modules())


def test_two_block_sizes_in_a_block_are_refused(replace_parameter_4bit):
    model = build("qwen3_moe")
    _, experts = experts_of(model)[-1]
    for key, blocksize in zip(KEYS, (64, 128), strict=True):
        replace_parameter_4bit(experts, key, blocksize=blocksize)
    with pytest.raises(ValueError, match=r"must have one format, got nf4 \(1x128\), nf4 \(1x64\)"):
        enable(model, implementation="reference")


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_stay_plain_when_transformers_quantises_a_model(bits, tmp_path, replace_parameter_4bit):
    import transformers

    build("qwen3_moe").save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    assert enable(model, implementation="reference").quantized == {}
    disable(model)
    for _, experts in experts_of(model):
        for key in KEYS:
            replace_parameter_4bit(experts, key)
    assert list(enable(model, implementation="reference").quantized) == ["nf4 (1x64)"]


def lora(model, peft_models):
    return peft_models.lora(targets=[f"{name}.{key}" for name, _ in experts_of(model) for key in KEYS])


def adapted_and_enabled(model, peft_models):
    model = peft_models.adapt(model, lora(model, peft_models))
    enable(model, implementation="reference")
    return model


@pytest.mark.parametrize("order", ["enabled", "adapted"])
def test_adapters_of_peft(order, replace_parameter_4bit, peft_models):
    stored, plain = pair(replace_parameter_4bit, compress_statistics=True)
    peft_models.assert_adapted_as_by_peft(stored, plain, order, lora(stored, peft_models), num_adapted=4)


def test_a_training_step_decodes_no_parameter_for_pefts_sake(replace_parameter_4bit, monkeypatch, peft_models):
    stored = adapted_and_enabled(pair(replace_parameter_4bit)[0], peft_models)
    functional = pytest.importorskip("bitsandbytes").functional
    monkeypatch.setattr(functional, "dequantize_4bit", None)
    assert len(step(stored, draw_tokens(stored))[2]) == 8


def with_short_names(model, peft_models, **options):
    return peft_models.adapt(model, peft_models.lora(targets=[f"mlp.experts.{key}" for key in KEYS], **options))


NOT_TRAINED = (
    r"adapter 'default' of PEFT does not train model\.layers\.0\.mlp\.experts\.(down|gate_up)_proj, .*, .* and 1 more.*"
    r"use full names in target_parameters, such as 'model\.layers\.0\.mlp\.experts\."
)


@pytest.mark.parametrize("order", ["enabled", "copied", "adapted"])
def test_short_names_that_train_attention_alone_are_told(order, replace_parameter_4bit, peft_models):
    stored, _ = pair(replace_parameter_4bit)
    tokens = draw_tokens(stored)
    if order != "adapted":
        enable(stored, implementation="reference")
        stored(tokens)
        stored = copy.deepcopy(stored) if order == "copied" else stored
    adapted = with_short_names(stored, peft_models, target_modules=["q_proj"])
    with pytest.warns(UserWarning, match=NOT_TRAINED) as told:
        _ = adapted(tokens) if order != "adapted" else enable(adapted, implementation="reference")
    assert len([warning for warning in told if "does not train" in str(warning.message)]) == 1
    assert not [name for name in step(adapted, tokens)[2] if "experts" in name]  # without a second warning


def test_one_stored_layer_among_plain_ones_is_told(replace_parameter_4bit, peft_models):
    """PEFT adapts the plain layers, and gives no warning."""
    model = build("qwen3_moe")
    for key in KEYS:
        replace_parameter_4bit(model.model.layers[1].mlp.experts, key)
    adapted = with_short_names(model, peft_models)
    told = r"does not train model\.layers\.1\.mlp\.experts\.\w+, [\w.]+1\.mlp\.[\w.]+: PEFT"
    with pytest.warns(UserWarning, match=told):
        assert len(enable(adapted, implementation="reference").adapted) == 2


def test_merging_by_peft_does_not_reach_the_bytes(replace_parameter_4bit, peft_models):
    stored, _ = pair(replace_parameter_4bit)
    base = logits_of(stored)
    stored = adapted_and_enabled(stored, peft_models)
    assert not torch.allclose(logits_of(stored), base)
    stored.merge_adapter()
    torch.testing.assert_close(logits_of(stored), base)


def test_adapter_files(replace_parameter_4bit, tmp_path, peft_models):
    """PEFT reads adapter files into another model in 4 bits. Converted files fit the model with plain weights."""
    stored, plain = pair(replace_parameter_4bit)
    stored = adapted_and_enabled(stored, peft_models)
    expected = logits_of(stored)
    stored.save_pretrained(tmp_path / "own")
    write_adapter(read_peft_adapter(tmp_path / "own"), tmp_path / "converted")
    again, _ = pair(replace_parameter_4bit)
    for model, name in ((again, "own"), (plain, "converted")):
        loaded = peft_models.peft.PeftModel.from_pretrained(model, tmp_path / name)
        enable(loaded, implementation="reference")
        torch.testing.assert_close(logits_of(loaded), expected, rtol=1e-4, atol=1e-5)


def test_scales_on_another_device_are_named(replace_parameter_4bit):
    stored, _ = pair(replace_parameter_4bit)
    state = experts_of(stored)[0][1].parametrizations.gate_up_proj[0].quant_state
    state.absmax = state.absmax.to("meta")
    with pytest.raises(ValueError, match=r"the scales of the up-projection of .*experts must be on cpu, got meta"):
        enable(stored, implementation="reference")
