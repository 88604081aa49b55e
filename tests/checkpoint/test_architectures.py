"""Random models built and saved by transformers: the loaded layer computes the same as the original block."""

import copy
import json

import pytest
import torch

from moe_layers import MoEConfig, MoEFeedForward
from moe_layers.architectures import ARCHITECTURES, OWN_MODEL_TYPE, REFUSED

from .golden import FASTEST
from .tiny_models import LAYER, MODELS, config_fields, known_fields, save_model

pytest.importorskip("transformers", reason="transformers builds the models of this test")
# transformers warns about unusual sizes and about its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_at_least_25_architectures():
    assert len(MODELS) >= 25
    # Kimi-K2 uses DeepSeek-V3's module under a name that transformers does not know.
    assert set(ARCHITECTURES) - {OWN_MODEL_TYPE, "kimi_k2"} == set(MODELS)
    assert not set(ARCHITECTURES) & set(REFUSED)


@pytest.mark.parametrize("model_type", MODELS)
def test_equals_the_original_block(model_type, tmp_path, device):
    block = save_model(model_type, tmp_path)
    assert_equals(tmp_path, block, device)


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
    ],
    ids=str,
)
def test_options(model_type, changes, tmp_path, device):
    block = save_model(model_type, tmp_path, **changes)
    assert_equals(tmp_path, block, device)


@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h", "llama4_text", "ernie4_5_moe", "longcat_flash"]
)
def test_saved_in_the_layout_of_transformers(model_type, tmp_path, device):
    """`save_original_format=False` keeps the names and shapes of transformers' modules."""
    block = save_model(model_type, tmp_path, save_original_format=False)
    assert_equals(tmp_path, block, device)


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {OWN_MODEL_TYPE}))
def test_a_missing_field_is_refused_or_has_the_default_of_the_architecture(model_type):
    """Compare with the defaults of transformers' configuration class."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config_class = transformers.CONFIG_MAPPING[model_type]
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
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config_class = transformers.CONFIG_MAPPING[model_type]
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
    block = block.to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, moe.d_model, generator=generator).to(device)
    dy = torch.randn(2, 9, moe.d_model, generator=generator).to(device)
    results = []
    for function in (block, moe):
        inputs = x.clone().requires_grad_()
        y = function(inputs)
        results.append((y.detach(), *torch.autograd.grad(y, inputs, dy)))
    (y, grad_x), (actual, actual_grad_x) = results
    assert (actual - y).abs().max() < 2e-5 * max(1, y.square().mean().sqrt())
    assert (actual_grad_x - grad_x).abs().max() < 2e-4
