"""Random models built and saved by transformers: the loaded layer computes the same as the original block."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moe_layers import MoEConfig, MoEFeedForward
from moe_layers.architectures import ARCHITECTURES, OWN_MODEL_TYPE, REFUSED, read_config
from moe_layers.checkpoint.model.convert import convert

from ..tiers import slow
from .golden import FASTEST, replace_by_grads
from .test_convert import read_model, write_model
from .test_from_checkpoint import same_state
from .tiny_models import LAYER, MODELS, config_class_of, config_fields, known_fields, save_model

transformers = pytest.importorskip("transformers", reason="transformers builds the models of this test")
# transformers warns about unusual sizes and about its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_at_least_25_architectures():
    assert len(MODELS) >= 25
    # Kimi-K2 uses DeepSeek-V3's module under a name that transformers does not know.
    assert set(ARCHITECTURES) - {OWN_MODEL_TYPE, "kimi_k2"} == set(MODELS)
    assert not set(ARCHITECTURES) & set(REFUSED)


@slow  # imports the configurations of a hundred models
def test_every_moe_model_of_transformers_is_supported_or_refused_by_name():
    """Find models by the names of their classes. A composite model counts by its language model."""
    from transformers.models.auto import configuration_auto

    @cache
    def has_experts(folder):
        source = "".join(path.read_text() for path in (models / folder).glob("modeling_*.py"))
        return re.search(r"^class \w*(Experts|MoE|Moe|SparseMLP)\(", source, re.MULTILINE)

    models = Path(transformers.__file__).parent / "models"
    found = [
        model_type
        for model_type in configuration_auto.CONFIG_MAPPING_NAMES
        if has_experts(configuration_auto.model_type_to_module_name(model_type)) and not NO_EXPERTS.search(model_type)
    ]
    configs = [transformers.CONFIG_MAPPING[model_type]().to_dict() for model_type in found]
    assert len(found) >= 80
    assert {read_config(config, LAYER).model_type for config in configs} <= {*ARCHITECTURES, *REFUSED}


# Parts of composite models without experts.
NO_EXPERTS = re.compile("vision|audio|code2wav|talker|sam|encoder|code_predictor")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("field", ["mlp_layer_types", "num_hash_layers"])
def test_deepseek_v4_refuses_layers_that_route_by_token_id(field, layer):
    """transformers names the type of each layer, the published file counts the layers."""
    values = {
        **config_fields("deepseek_v4"),
        "model_type": "deepseek_v4",
        "mlp_layer_types": ["hash_moe", "moe"] if field == "mlp_layer_types" else None,
        "num_hash_layers": 1 if field == "num_hash_layers" else None,
    }
    if layer:
        assert MoEConfig.from_hf(values, layer).router.score == "sqrt_softplus"
    else:
        with pytest.raises(ValueError, match="layer 0 of deepseek_v4 is not supported: a table chooses its experts"):
            MoEConfig.from_hf(values, layer)


@pytest.mark.parametrize("model_type", MODELS)
def test_equals_the_original_block(model_type, tmp_path, device):
    block = save_model(model_type, tmp_path / "float32")
    assert_equals(tmp_path / "float32", block, device)
    block.zero_grad()
    assert_equals_in_float64(block, tmp_path)


SAVED_AS_MODULES = ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h", "llama4_text", "ernie4_5_moe", "longcat_flash"]
SAVED_AS_MODULES += ["deepseek_v4", "hy_v4", "kolibri1", "mistral_large4_text"]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("lfm2_moe", {"use_expert_bias": False}),
        ("laguna", {"moe_router_logit_softcapping": 0.0}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
        ("cohere2_moe", {"num_shared_experts": 0}),
        ("nemotron_h", {"moe_latent_size": 20}),
        ("granitemoeshared", {"shared_intermediate_size": 0}),
        ("longcat_flash", {"zero_expert_num": 0}),
        ("hunyuan_v1_moe", {"moe_topk": [1, 3]}),
        ("aria_text", {"hidden_act": "gelu"}),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {}}}),
        ("dots1", {"scoring_func": "noaux_tc"}),
        ("kolibri1", {"norm_topk_prob": False}),
        ("step3p5", {"swiglu_limits": None, "swiglu_limits_shared": None}),
        ("deepseek_v4", {"scoring_func": "sigmoid"}),
        ("unlimited_ocr_text", {"topk_method": "greedy"}),
        # The names and shapes of transformers' modules.
        *((model_type, {"save_original_format": False}) for model_type in SAVED_AS_MODULES),
    ],
    ids=str,
)
def test_options(model_type, changes, tmp_path, device):
    block = save_model(model_type, tmp_path, **changes)
    assert_equals(tmp_path, block, device)


GROUPS_OF_32 = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}


def quantised_as_published(tensors, generator):
    """Return DeepSeek-V4's tensors with packed float4 experts and a float8 shared expert, and their values."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if ".ffn." not in name or "experts" not in name:
            continue
        rows, columns = tensor.shape
        if "shared" in name:
            numbers, grid = tensor.to(torch.float8_e4m3fn), (-(-rows // 128), -(-columns // 128))
        else:
            numbers = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
            grid = rows, columns // 32
        scales = torch.randint(120, 130, grid, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        stored[name], stored[name.replace(".weight", ".scale")] = numbers, scales
        values[name] = Fp8Dequantize(None)._dequantize_one(numbers, scales, output_dtype=torch.float32)
    return stored, values


def test_deepseek_v4_as_published(tmp_path):
    """Dequantised values equal those of transformers, bit for bit."""
    for name in ("stored", "values"):
        save_model("deepseek_v4", tmp_path / name, **GROUPS_OF_32)
    tensors = read_model(tmp_path / "stored")
    stored, values = quantised_as_published(tensors, torch.Generator().manual_seed(0))
    write_model(stored, tmp_path / "stored")
    write_model(values, tmp_path / "values")
    options = {"dtype": torch.float32, "return_report": True}
    layer, report = MoEFeedForward.from_checkpoint(tmp_path / "stored", LAYER, **options)
    expected, _ = MoEFeedForward.from_checkpoint(tmp_path / "values", LAYER, **options)
    assert report.quantization == ("float4", "float8")
    assert same_state(layer, expected)
    convert(tmp_path / "stored", tmp_path / "converted", "fused", dtype=torch.float32)
    assert same_state(MoEFeedForward.from_checkpoint(tmp_path / "converted", LAYER), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: scales.float(), r"w1\.scale, the scales of packed float4, is float32, must be e8m0"),
        (lambda scales: scales[:-1].contiguous(), r"w1\.scale is \(31, 2\), must be \(32, 2\)"),
        (lambda scales: torch.full_like(scales.view(torch.uint8), 255), r"scales of .*w1\.weight must be finite"),
    ],
)
def test_packed_float4_that_does_not_fit_is_named(change, message, tmp_path):
    save_model("deepseek_v4", tmp_path, **GROUPS_OF_32)
    tensors, _ = quantised_as_published(read_model(tmp_path), torch.Generator().manual_seed(0))
    name = next(name for name in tensors if name.endswith("1.ffn.experts.0.w1.scale"))
    tensors[name] = change(tensors[name])
    write_model(tensors, tmp_path)
    with pytest.raises(ValueError, match=message):
        MoEFeedForward.from_checkpoint(tmp_path, LAYER)


@pytest.mark.parametrize("model_type", ["gemma4_text", "hy_v4", "kolibri1", "minimax_m3_vl_text", "step3p5"])
def test_a_layer_is_written_under_the_names_of_its_model(model_type, tmp_path):
    """The models have names outside of the block, a fused shared expert, or stacked experts."""
    save_model(model_type, tmp_path / "model")
    layer, report = MoEFeedForward.from_checkpoint(tmp_path / "model", LAYER, return_report=True)
    layer.save_checkpoint(tmp_path / "layer")
    again, written = MoEFeedForward.from_checkpoint(tmp_path / "layer", LAYER, return_report=True)
    names, written_names = ({n for tensor in each.tensors for n in tensor.names} for each in (report, written))
    assert written_names == names
    assert same_state(layer, again)


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {OWN_MODEL_TYPE}))
def test_a_missing_field_is_refused_or_has_the_default_of_the_architecture(model_type):
    """Compare with the defaults of transformers' configuration class."""
    from huggingface_hub.errors import StrictDataclassError

    config_class = config_class_of(model_type)
    for fields in ({}, known_fields(config_class, config_fields(model_type))):
        values = config_class(**fields).to_dict()
        if not isinstance(block_of(values), MoEConfig):
            continue  # the defaults alone need not describe a block
        for name in values.keys() - {"model_type"}:
            rest = {key: value for key, value in values.items() if key != name}
            try:
                completed = config_class.from_dict(copy.deepcopy(rest)).to_dict()
            except (ValueError, StrictDataclassError):
                continue  # the default does not fit the other fields
            actual = block_of(rest)
            refused = isinstance(actual, str) and name in actual
            assert refused or actual == block_of(completed), name


@pytest.mark.parametrize("model_type", MODELS)
def test_reads_a_configuration_object_as_it_reads_its_file(model_type):
    config_class = config_class_of(model_type)
    hf_config = config_class(**known_fields(config_class, config_fields(model_type)))
    written = json.loads(hf_config.to_json_string(use_diff=False))
    assert MoEConfig.from_hf(hf_config, LAYER) == MoEConfig.from_hf(written, LAYER)


def block_of(values):
    """Return the block that a configuration describes, or the reason why it describes none."""
    try:
        return MoEConfig.from_hf(values, LAYER)
    except ValueError as error:
        return str(error)


def assert_equals(directory, block, device):
    moe = MoEFeedForward.from_checkpoint(directory, LAYER, device=device, implementation=FASTEST)
    (y, *grads), (actual, *actual_grads) = (outputs_and_input_grads(part, moe) for part in (block.to(device), moe))
    assert (actual - y).abs().max() < 2e-5 * max(1, y.square().mean().sqrt())
    for actual_grad, grad in zip(actual_grads, grads, strict=True):
        assert (actual_grad - grad).abs().max() < 2e-4


def assert_equals_in_float64(block, directory):
    """Compare the output and the gradients of the inputs and of all parameters.

    Gradients are saved in place of parameters, as a checkpoint, and read as one.
    """
    block.model[0].to(device="cpu", dtype=torch.float64)
    block.save(directory / "parameters")
    moe = MoEFeedForward.from_checkpoint(directory / "parameters", LAYER, implementation="reference")
    assert moe.experts.w_up.dtype == torch.float64
    with InFloat64():
        results = outputs_and_input_grads(block, moe)
    for actual, expected in zip(outputs_and_input_grads(moe, moe), results, strict=True):
        assert_close(actual, expected)
    replace_by_grads(block)
    block.save(directory / "grads")
    grads = MoEFeedForward.from_checkpoint(directory / "grads", LAYER, implementation="reference", dtype=torch.float64)
    replace_by_grads(moe)
    for name, grad in moe.named_parameters():
        assert_close(grad, grads.get_parameter(name), name)


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in calls, because routers of transformers convert to float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def assert_close(actual, expected, name=""):
    error = (actual - expected).abs().max().item()
    assert error < 1e-11 * max(1.0, expected.abs().max().item()), (name, error)


def outputs_and_input_grads(function, moe):
    """Return the output, and the gradients of x and of the router's input if the block has one."""
    weight = next(function.parameters())
    generator = torch.Generator().manual_seed(1)
    x, router_input, dy = torch.randn(3, 2, 9, moe.d_model, generator=generator).to(weight)
    inputs = [x.requires_grad_()]
    if moe.separate_router_input:
        inputs.append(router_input.requires_grad_())
    y = function(x, **dict(zip(["router_input"], inputs[1:], strict=False)))
    y.backward(dy)
    return y.detach(), *(tensor.grad for tensor in inputs)
