"""Any configuration and any tensor names give a layer, or a ValueError with the reason."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_layers import MoEConfig, MoEFeedForward
from moe_layers.architectures import ARCHITECTURES, REFUSED, ModelConfig, read_config
from moe_layers.checkpoint.files.blocks import find_blocks, matching_layouts
from moe_layers.checkpoint.files.quantization_config import float8_block

from .golden import CASES, Golden
from .test_from_checkpoint import copy_case

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(0, 5), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
FIELDS = sorted(
    {name for case in CASES for name in Golden(case).config} | {"topk_group", "zero_expert_num", "moe_latent_size"}
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    model_type=st.sampled_from([*ARCHITECTURES, *REFUSED, "other"]),
    values=st.dictionaries(st.sampled_from(FIELDS), VALUES),
)
def test_any_configuration(model_type, values):
    values = {**values, "model_type": model_type}
    try:
        config = MoEConfig.from_hf(values, layer=1)
    except ValueError as error:
        assert str(error)
    else:
        assert MoEConfig.from_dict(config.to_dict()) == config
    for source in (values, {"quantization_config": values.get("dtype")}):
        try:
            float8_block(source, read_config(source, 0))
        except ValueError as error:
            assert str(error)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.sampled_from(["deepseek_v3", "gpt_oss", "gpt_oss_mxfp4", "dbrx"]), data=st.data())
def test_one_changed_field_of_a_golden_case(case, data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    golden = Golden(case)
    field, value = data.draw(st.sampled_from(sorted(golden.config))), data.draw(VALUES)
    copy_case(case, directory, config={field: value})
    try:
        layer = MoEFeedForward.from_checkpoint(directory, golden.layer)
    except ValueError as error:
        assert str(error)
    else:
        assert all(parameter.isfinite().all() for parameter in layer.parameters())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), case=st.sampled_from(["mixtral", "llama4", "granitemoe"]))
def test_any_subset_of_tensors(case, data, tmp_path_factory):
    """A layer loads only with all of its tensors."""
    golden = Golden(case)
    names = sorted(name for name in golden.tensors("model") if name.startswith(golden.prefix))
    removed = data.draw(st.sets(st.sampled_from(names), max_size=3))
    directory = tmp_path_factory.mktemp("fuzz")
    copy_case(case, directory, lambda tensors: [tensors.pop(name) for name in removed])
    if not removed:
        MoEFeedForward.from_checkpoint(directory, golden.layer)
        return
    with pytest.raises(ValueError, match=r"missing|no MoE block") as error:
        MoEFeedForward.from_checkpoint(directory, golden.layer)
    if "missing" in str(error.value):
        assert all(name in str(error.value) for name in removed)


SUFFIXES = ("", "_blocks", "_scales", "_scale_inv")
WORDS = ("model", "layers", "mlp", "experts", "gate", "router", "weight", "0", "1", "10", "gate_up_proj", "down_proj")
PARTS = st.sampled_from((*WORDS, "w1", "up_proj", "expert_3", "shared_mlp", "input_linear", "gate_proj", ""))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    names=st.sets(st.lists(PARTS, min_size=1, max_size=6).map(".".join), max_size=12), suffix=st.sampled_from(SUFFIXES)
)
def test_any_names(names, suffix):
    names |= {name + suffix for name in names}
    for block in find_blocks(names):
        assert any(name.startswith(block.prefix) for name in names)
        matching_layouts(block)


@pytest.mark.parametrize("quantization", ["fp8", 3, ["fp8"], True], ids=str)
def test_quantisation_that_is_not_an_object(quantization):
    with pytest.raises(ValueError, match=r"quantization_config in config\.json must hold an object, got"):
        float8_block({"quantization_config": quantization}, ModelConfig({}))


def test_json_that_no_configuration_has():
    assert read_config(json.loads('{"text_config": {"model_type": "x", "text_config": 3}}'), 0).model_type == "x"
    assert torch.Size(float8_block({"quantization_config": None}, ModelConfig({}))) == (128, 128)
