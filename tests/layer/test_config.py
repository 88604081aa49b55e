"""`MoEConfig`: it round-trips through JSON and through the layer, and reads the configurations of published models."""

import copy
import inspect
import json
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import Activation, RouterSpec
from moe_layers import BalanceLosses, CapacityFactor, ExpertChoice, MoEConfig, MoEFeedForward, RouterNoise

from ..checkpoint.golden import CASES, Golden

SIZES = {"d_model": 8, "d_ff": 4, "num_experts": 6, "top_k": 2}
# One or more values of every field that has a default.
SETTINGS = {
    "activation": ["geglu", "relu_squared", Activation("gpt_oss", limit=2.0, alpha=1.5)],
    "router": [
        RouterSpec.softmax(normalize=False),
        RouterSpec.deepseek_v3(3, 2, scale=2.5),
        RouterSpec.gemma4(1e-6),
        RouterSpec.llama4(),
        RouterSpec.phimoe(0.01),
    ],
    "bias": [True],
    "shared_d_ff": [5],
    "shared_gate": [True],
    "shared_activation": ["relu", Activation("clamped_swiglu", limit=3.0)],
    "num_zero_experts": [2],
    "latent_dim": [3],
    "capacity": [7, CapacityFactor(1.25), CapacityFactor(2, by="weight")],
    "recompute": ["up"],
    "precision": ["fp8"],
    "balance_losses": [BalanceLosses(switch=0.01, z=1e-3), BalanceLosses(sequence=0.1, score="sigmoid")],
    "separate_router_input": [True],
    "batch_invariant": [True],
    "init_std": [0.0, 0.5],
}
NEEDED = {
    "shared_gate": {"shared_d_ff": 5},
    "shared_activation": {"shared_d_ff": 5},
    "precision": {"d_model": 32, "d_ff": 16},
}


def make_config(**options):
    return MoEConfig(**{**SIZES, **options})


CONFIGS = [
    make_config(),
    *(make_config(**{name: value}, **NEEDED.get(name, {})) for name, values in SETTINGS.items() for value in values),
]


def test_every_field_has_a_value_here():
    assert {field.name for field in fields(MoEConfig)} == SIZES.keys() | SETTINGS.keys()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_round_trips(config):
    """JSON, a copy and a layer keep the configuration. A layer of that configuration starts with equal values."""
    plain = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert plain == config.to_dict()
    assert MoEConfig.from_dict(plain) == copy.deepcopy(config) == config
    torch.manual_seed(0)
    layer = MoEFeedForward.from_config(config, dtype=torch.float64)
    assert layer.config == config
    torch.manual_seed(0)
    again = MoEFeedForward.from_config(layer.config, dtype=torch.float64)
    states = layer.state_dict(), again.state_dict()
    assert repr(layer) == repr(again) and states[0].keys() == states[1].keys()
    assert all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_numbers_of_parameters_are_those_of_the_layer(config):
    layer = MoEFeedForward.from_config(config)
    assert layer.num_parameters() == sum(parameter.numel() for parameter in layer.parameters())
    unused = sum(parameter[config.top_k :].numel() for parameter in layer.experts.parameters())
    assert layer.num_parameters(active=True) == layer.num_parameters() - unused
    assert config.num_parameters() == layer.num_parameters() and config.flops_per_token() == layer.flops_per_token()
    layer.keep_local_experts(range(1, 2))
    assert layer.num_parameters() == config.num_parameters()


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "relu"}, {"shared_d_ff": 5, "shared_gate": True}, {"latent_dim": 3}, {"top_k": 1}],
    ids=str,
)
def test_flops_are_those_that_pytorch_counts(options):
    config = make_config(**options)
    layer, x = MoEFeedForward.from_config(config, implementation="reference"), torch.randn(13, config.d_model)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 13 * config.flops_per_token() > 0


def test_sizes_of_a_published_layer():
    config = MoEConfig.qwen3_30b_a3b()
    router, expert = 128 * 2048, 3 * 768 * 2048
    assert config.num_parameters() == 604_241_920 == router + 128 * expert
    assert config.num_parameters(active=True) == 38_010_880 == router + 8 * expert
    assert config.flops_per_token() == 76_021_760 == 2 * (router + 8 * expert)


def test_the_constructor_and_a_config_build_the_same_layer():
    config = make_config(
        activation="geglu",
        router=RouterSpec.softmax(normalize=False),
        bias=True,
        shared_d_ff=5,
        capacity=CapacityFactor(1.5),
        recompute="up",
        balance_losses=BalanceLosses(importance=0.1),
    )
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    parameters = inspect.signature(MoEFeedForward).parameters
    layer = MoEFeedForward(**{name: value for name, value in options.items() if name in parameters})
    assert layer.config == config
    assert MoEFeedForward(*SIZES.values()).config == make_config()


def test_the_constructor_takes_four_sizes_and_at_most_thirteen_keywords():
    parameters = list(inspect.signature(MoEFeedForward).parameters.values())
    keywords = [parameter for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
    assert [parameter.name for parameter in parameters[:4]] == list(SIZES)
    assert len(parameters) - len(keywords) == 4 and len(keywords) <= 13


def test_arguments_that_describe_no_layer():
    noise, assignment = RouterNoise(0.1), ExpertChoice()
    config = make_config()
    layer = MoEFeedForward.from_config(
        config, assignment=assignment, noise=noise, implementation="reference", device="meta", dtype=torch.float16
    )
    assert layer.config == config
    assert layer.router.noise is noise and layer.router.assignment is assignment
    assert layer.experts.implementation == layer.router.implementation == "reference"
    assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.float16, "meta")}


def test_the_config_of_a_layer_has_the_settings_that_were_changed_since():
    layer = MoEFeedForward.from_config(make_config(shared_d_ff=5))
    layer.batch_invariant = True
    layer.experts.recompute = "up"
    assert layer.config == make_config(shared_d_ff=5, batch_invariant=True, recompute="up")
    layer.batch_invariant = False
    layer.capacity, layer.balance_losses = 3, BalanceLosses(z=1.0)
    assert layer.config == make_config(shared_d_ff=5, recompute="up", capacity=3, balance_losses=BalanceLosses(z=1.0))


def test_a_config_is_an_immutable_value():
    config = make_config(activation="swiglu")
    assert config == make_config(activation=Activation("swiglu")) and hash(config) == hash(make_config())
    with pytest.raises(FrozenInstanceError):
        config.top_k = 3
    assert replace(config, top_k=3) == make_config(top_k=3)


def test_a_process_group_is_no_part_of_the_dict():
    losses = BalanceLosses(global_batch=0.1, group=SimpleNamespace())
    config = make_config(balance_losses=losses)
    assert MoEConfig.from_dict(config.to_dict()) == make_config(balance_losses=BalanceLosses(global_batch=0.1))
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_save_checkpoint_keeps_the_configuration(config, tmp_path):
    MoEFeedForward.from_config(config).save_checkpoint(tmp_path / "layer")
    written = json.loads((tmp_path / "layer" / "config.json").read_text())
    assert written == {"model_type": "moe_layers", **config.to_dict(), "moe_layers_layout": "per_expert"}
    assert MoEConfig.from_hf(written) == config
    assert MoEFeedForward.from_checkpoint(tmp_path / "layer").config == config


@pytest.mark.parametrize("case", CASES)
def test_from_hf_describes_what_from_checkpoint_builds(case):
    golden = Golden(case)
    layer, report = MoEFeedForward.from_checkpoint(golden.directory, golden.layer, return_report=True)
    hf_config = SimpleNamespace(to_dict=lambda: golden.config)  # as a configuration object of transformers has it
    assert layer.config == report.config == MoEConfig.from_hf(golden.config, golden.layer)
    assert layer.config == MoEConfig.from_hf(hf_config, layer=golden.layer)
    state = MoEFeedForward.from_config(layer.config, device="meta").state_dict()
    shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    assert {name: tensor.shape for name, tensor in state.items()} == shapes


MIXTRAL = {"model_type": "mixtral", "hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL |= {"hidden_size": 4, "intermediate_size": 4}
# By preset, the entries of the published config.json that describe the MoE block.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_configurations(preset):
    assert getattr(MoEConfig, preset)() == MoEConfig.from_hf(PUBLISHED[preset])


def test_every_preset_is_tested():
    methods = {name for name, value in vars(MoEConfig).items() if isinstance(value, classmethod)}
    assert methods - {"from_dict", "from_hf"} == PUBLISHED.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 0}, f"{name} must be a positive integer, got 0") for name in SIZES),
        ({"top_k": True}, "top_k must be a positive integer, got True"),
        ({"top_k": 7}, "top_k must be in [1, num_experts=6], got 7"),
        ({"activation": "swish"}, "activation must be one of 'swiglu', 'geglu', 'geglu_tanh', and 11 more (all"),
        ({"activation": None}, "activation must be one of"),
        ({"shared_d_ff": 5, "shared_activation": ["relu"]}, "shared_activation must be one of"),
        ({"router": "softmax"}, "router must be a RouterSpec, got str 'softmax'"),
        ({"router": RouterSpec.deepseek_v3(4, 2)}, "num_experts must be a multiple of num_groups=4, got 6"),
        ({"bias": 1}, "bias must be a bool, got int 1"),
        ({"shared_gate": None}, "shared_gate must be a bool, got NoneType None"),
        ({"batch_invariant": "yes"}, "batch_invariant must be a bool, got str 'yes'"),
        ({"shared_d_ff": 0}, "shared_d_ff must be a positive integer, got 0"),
        ({"shared_gate": True}, "shared_gate and shared_activation need a shared_d_ff, got True and None"),
        ({"shared_activation": "relu"}, "shared_gate and shared_activation need a shared_d_ff, got False and relu"),
        ({"num_zero_experts": -1}, "num_zero_experts must be a positive integer, got -1"),
        ({"latent_dim": 2.0}, "latent_dim must be a positive integer, got 2.0"),
        ({"latent_dim": 4, "num_zero_experts": 1}, "num_zero_experts and latent_dim exclude each other"),
        ({"capacity": 2, "batch_invariant": True}, "batch_invariant must have no capacity, got 2"),
        ({"recompute": "down"}, "recompute must be one of"),
        ({"balance_losses": 0.1}, "balance_losses must be a BalanceLosses, got float 0.1"),
        ({"init_std": float("nan")}, "init_std must be finite and not negative, got nan"),
        ({"init_std": "0.1"}, "init_std must be finite and not negative, got '0.1'"),
    ],
    ids=str,
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=re.escape(f"MoEConfig: {message}")):
        make_config(**options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "values must be a Mapping, got NoneType None"),
        ({"d_model": 8}, "the four sizes must be given, got no d_ff, num_experts, top_k"),
        ({**SIZES, "normalize": True}, "fields must be among d_model, d_ff, num_experts, and "),
        ({**SIZES, "router": {"normalise": True}}, "router must hold the fields of a RouterSpec, got {'normalise'"),
        ({**SIZES, "router": {"score": "tanh"}}, "router must hold the fields of a RouterSpec, got {'score': 'tanh'}"),
        ({**SIZES, "activation": {"limit": 2.0}}, "activation must hold the fields of a Activation, got {'limit'"),
        ({**SIZES, "capacity": {"factor": -1}}, "capacity must hold the fields of a CapacityFactor, got {'factor'"),
        ({**SIZES, "bias": {}}, "bias must be a bool, got dict {}"),
    ],
    ids=str,
)
def test_bad_dicts(values, message):
    with pytest.raises(ValueError, match=re.escape(f"MoEConfig: {message}")):
        MoEConfig.from_dict(values)


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        ("config.json", "hf_config must be a dict or a configuration of transformers, got str 'config.json'"),
        ({}, "model_type must be one of afmoe, "),
        ({"model_type": "llama"}, "model_type must be one of afmoe, "),
        ({"model_type": "jetmoe"}, "model_type 'jetmoe' is not supported: the block adds a bias to its output"),
        (
            {k: v for k, v in MIXTRAL.items() if k != "intermediate_size"},
            "config.json must hold intermediate_size, got none",
        ),
        ({**MIXTRAL, "hidden_size": 0}, "hidden_size in config.json must be an integer >= 1, got 0"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "top_k must be in [1, num_experts=8], got 9"),
        ({"model_type": "moe_layers", **SIZES, "noise": 0.1}, "fields must be among d_model, "),
    ],
    ids=str,
)
def test_bad_models(hf_config, message):
    with pytest.raises(ValueError, match=re.escape(f"MoEConfig: {message}")):
        MoEConfig.from_hf(hf_config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": SIZES}, "config must be a MoEConfig, got dict"),
        ({"implementation": "cuda"}, "implementation must be one of"),
        ({"noise": 0.1}, "noise must be a RouterNoise, got float 0.1"),
    ],
    ids=str,
)
def test_bad_arguments_of_from_config(options, message):
    with pytest.raises(ValueError, match=re.escape(f"MoEFeedForward: {message}")):
        MoEFeedForward.from_config(**{"config": make_config(), **options})


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["name", "factor", "switch", "scale", "score", "limit"]), st.floats() | st.text()),
    st.sampled_from([config.to_dict()[name] for config in CONFIGS for name in SETTINGS]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(values=st.dictionaries(st.sampled_from([field.name for field in fields(MoEConfig)]), VALUES, max_size=4))
def test_any_dict_is_a_config_or_refused(values):
    try:
        config = MoEConfig.from_dict({**SIZES, **values})
    except ValueError as error:
        assert str(error).startswith("MoEConfig: ")
    else:
        assert MoEConfig.from_dict(config.to_dict()) == config
