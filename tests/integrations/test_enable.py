"""What `enable` and `disable` change in a model, and what they reject."""

import copy
import gc
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from moe_layers.integrations.transformers import disable
from moe_layers.integrations.transformers import enable as enable_with

from ..checkpoint.golden import FASTEST
from ..processes import run_python
from ..tiers import default_tier, slow
from .models import (
    SIZES,
    assert_same_step,
    build,
    check_change,
    config_of,
    draw_tokens,
    logits_of,
    model_class,
    skip_old,
    step,
)

# The interpreter is slow; test_models.py and test_experts_of_models.py run the kernels.
enable = partial(enable_with, implementation=FASTEST)
MODELS = ["qwen3_moe", "gpt_oss", "llama4_text"]


def snapshot(model):
    """Return everything that `disable` must restore, and the model's output."""
    modules = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    config = model.config.to_dict(), model.config._experts_implementation
    return modules, config, model.state_dict(), logits_of(model)


def assert_same_model(actual, expected):
    assert actual[:2] == expected[:2]
    assert actual[2].keys() == expected[2].keys()
    assert all(tensor.data_ptr() == expected[2][name].data_ptr() for name, tensor in actual[2].items())
    assert torch.equal(actual[3], expected[3])


@pytest.mark.parametrize("before", default_tier(["eager", "batched_mm"], ["batched_mm"]))
@pytest.mark.parametrize("model_type", MODELS)
def test_disable_restores_everything(model_type, before, device):
    model = build(model_type, device)
    model.set_experts_implementation(before)
    wanted = snapshot(model)
    enable(model)
    modules, _, state, logits = snapshot(model)
    assert {name: kind for name, (kind, _) in modules.items()} == {name: kind for name, (kind, _) in wanted[0].items()}
    assert state.keys() == wanted[2].keys()
    assert not torch.equal(logits, wanted[3])
    disable(model)
    assert_same_model(snapshot(model), wanted)


def test_enabling_twice_takes_the_last_implementation(device):
    model = build("qwen3_moe", device)
    wanted = snapshot(model)
    results = []
    for implementation in ("triton", "reference", "triton"):
        report = enable(model, implementation=implementation)
        assert report.blocks == 2
        results.append(logits_of(model))
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    disable(model)
    assert_same_model(snapshot(model), wanted)
    with pytest.raises(ValueError, match="disable: the model must have been given to enable, got Qwen3MoeForCausalLM"):
        disable(model)


def test_report_counts_blocks_and_says_how():
    model = build("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    report = enable(model)
    assert report.kinds == {("Qwen3MoeExperts", "swiglu", "experts interface"): 2} and report.blocks == 2
    assert str(report) == ("moe_layers computes the experts of 2 blocks: 2 Qwen3MoeExperts (swiglu, experts interface)")


@pytest.mark.parametrize("model_type", default_tier(MODELS, ["gpt_oss"]))
def test_enabling_a_part_leaves_the_others_alone(model_type, device):
    model = build(model_type, device)
    wanted = snapshot(model)
    part, other = model.model.layers
    before = {name: dict(vars(module)) for name, module in other.named_modules()}
    assert enable(part).blocks == 1
    assert model.config._experts_implementation == "eager"
    assert {name: dict(vars(module)) for name, module in other.named_modules()} == before
    assert not torch.equal(snapshot(model)[3], wanted[3])
    with pytest.raises(ValueError, match="no part of the model may be enabled"):
        enable(model)
    disable(part)
    assert_same_model(snapshot(model), wanted)
    enable(model)
    with pytest.raises(ValueError, match="no part of the model may be enabled"):
        enable(part)


def test_a_saved_model_loads_without_us(tmp_path, device):
    model = build("gpt_oss", device)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    enable(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._experts_implementation != "moe_layers"
    torch.testing.assert_close(loaded.state_dict(), wanted, rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize("frozen", default_tier(["experts", "not experts", "up"], ["up"]))
def test_frozen_parameters(frozen, device):
    model = build("qwen3_moe", device)
    for name, parameter in model.named_parameters():
        in_experts = ".experts." in name
        is_frozen = {"experts": in_experts, "not experts": not in_experts, "up": "gate_up_proj" in name}[frozen]
        parameter.requires_grad_(not is_frozen)
    _, actual, _ = check_change(model, enable)
    assert actual[2].keys() == {name for name, p in model.named_parameters() if p.requires_grad}


# The compiler itself reads gradients of tensors that pass between transformers' graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@slow  # test_experts_of_models.py compiles the experts alone
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text"])
def test_compiled_model_is_the_same(model_type, device):
    model = build(model_type, device)
    tokens = draw_tokens(model)
    baseline, exact = step(model, tokens), step(copy.deepcopy(model).double(), tokens)
    compiled = torch.compile(model, backend="aot_eager")
    enable(model)
    assert_same_step(step(compiled, tokens), baseline, exact)
    disable(model)
    plain = torch.compile(copy.deepcopy(model), backend="aot_eager")
    assert torch.equal(step(compiled, tokens)[0], step(plain, tokens)[0])  # code compiled for ours is not reused


@pytest.mark.filterwarnings("ignore")  # Inductor warns, and transformers under Inductor
def test_training_of_a_compiled_block(device):
    """The default backend, Inductor, compiles the block, on a CPU as well."""
    model = build("qwen3_moe", device, num_hidden_layers=1)
    tokens = draw_tokens(model)
    baseline, exact = step(model, tokens), step(copy.deepcopy(model).double(), tokens)
    enable(model)
    model.model.layers[0].mlp.compile()
    assert_same_step(step(model, tokens), baseline, exact)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.Linear(2, 2), "Linear"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential"),
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), "LlamaForCausalLM"),
    ],
)
def test_a_model_without_experts_is_refused(make, kind):
    with pytest.raises(ValueError, match=f"must have MoE blocks of transformers, got {kind}$"):
        enable(make())


@pytest.mark.parametrize("act", ["quick_gelu", "gelu_10", "relu6"])
def test_an_unknown_activation_is_refused(act, device):
    model = build("qwen3_moe", device, hidden_act=act)
    wanted = snapshot(model)
    with pytest.raises(ValueError, match=r"the activation of Qwen3MoeExperts must be one of .*, got act_fn="):
        enable(model)
    assert_same_model(snapshot(model), wanted)


def test_refusal_leaves_an_enabled_model_as_it_is(device):
    model = build("qwen3_moe", device)
    enable(model)
    wanted = logits_of(model)
    experts = model.model.layers[1].mlp.experts
    experts.act_fn = nn.Mish()
    with pytest.raises(ValueError, match="Mish"):
        enable(model)
    experts.act_fn = nn.SiLU()
    assert torch.equal(logits_of(model), wanted)


def test_blocks_that_we_cannot_compute_are_refused_by_name():
    switch = model_class("switch_transformers")._from_config(config_of("switch_transformers"))
    reason = r"\(each expert is a module of its own, with dropout between its matrices\)"
    names = rf"SwitchTransformersExperts {reason}, SwitchTransformersSparseMLP {reason}"
    with pytest.raises(ValueError, match=f"got unsupported {names}"):
        enable(switch)


def test_jetmoe_of_earlier_transformers_is_refused(monkeypatch):
    model = build("jetmoe")
    monkeypatch.setattr("moe_layers.integrations.transformers.experts.discovery.transformers.__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"got unsupported .*JetMoeMoE"):
        enable(model)


def test_one_unknown_block_among_known_ones_is_refused():
    model = build("qwen3_moe")
    model.model.layers[0].mlp.experts = type("FancyExperts", (nn.Module,), {})()
    with pytest.raises(ValueError, match="got unsupported FancyExperts, Qwen3MoeSparseMoeBlock"):
        enable(model)


def with_unknown_activation(experts):
    experts.act_fn = nn.Mish()


def with_norm_and_bias(experts):
    experts.has_post_expert_norm = experts.has_bias = True


def with_float8(experts):
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)


def with_integers(experts):
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).to(torch.int8), requires_grad=False))


# Changes of experts, and why the experts are then refused. {} is the name of the experts.
UNSUPPORTED = [
    (with_unknown_activation, "the activation of Qwen3MoeExperts must be one of .*Mish"),
    (with_norm_and_bias, "experts with a norm must have no biases, got both in Qwen3MoeExperts"),
    (with_float8, "the weights of {} must have one dtype of .*float8_e4m3fn"),
    (with_integers, "the weights of {} must have one dtype of .*got torch.int8"),
]


@pytest.mark.parametrize(("change", "reason"), UNSUPPORTED)
def test_unsupported_experts_are_refused(change, reason):
    model = build("qwen3_moe")
    change(model.model.layers[1].mlp.experts)
    with pytest.raises(ValueError, match="moe_layers: " + reason.format(r"model\.layers\.1\.mlp\.experts")):
        enable(model)


@pytest.mark.parametrize("first_out", [0, 1])
def test_models_that_share_a_configuration(first_out, device):
    """Each model is enabled and disabled by itself, in any order."""
    models = [build("qwen3_moe", device) for _ in range(2)]
    for module in models[1].modules():
        if hasattr(module, "config"):
            module.config = models[0].config
    own = logits_of(models[0])
    for model in models:
        assert enable(model).blocks == 2
    for model in models:
        assert not torch.equal(logits_of(model), own)
    disable(models[first_out])
    assert not torch.equal(logits_of(models[1 - first_out]), own)
    disable(models[1 - first_out])
    for model in models:
        assert torch.equal(logits_of(model), own)
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_copied_configuration_selects_the_same_experts(device):
    first = build("qwen3_moe", device)
    enable(first)
    second = type(first)(copy.deepcopy(first.config)).eval().to(device)
    second.load_state_dict(first.state_dict())
    tokens = draw_tokens(first, 1, 3)
    own_way = second(input_ids=tokens).logits  # this call recognises the experts
    assert enable(second).blocks == 2
    assert torch.equal(second(input_ids=tokens).logits, first(input_ids=tokens).logits)
    disable(second)
    assert torch.equal(second(input_ids=tokens).logits, own_way)
    disable(first)
    second.set_experts_implementation("eager")
    assert torch.equal(second(input_ids=tokens).logits, first(input_ids=tokens).logits)


def test_the_configuration_of_a_model_that_is_gone_is_free():
    config = config_of("qwen3_moe")
    first, second = (transformers.Qwen3MoeForCausalLM(config) for _ in range(2))
    if first.config is not second.config:
        pytest.skip("this transformers copies the configuration")
    enable(first)
    del first
    gc.collect()
    assert next(iter(enable(second).kinds))[2] == "experts interface"


class Around(nn.Module):
    """Looks up missing attributes in the wrapped model, as peft's models do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def test_a_model_that_was_enabled_inside_can_be_disabled(device):
    model = build("mixtral", device)
    wanted = snapshot(model)
    around = Around(model)
    enable(model)
    disable(around)
    assert_same_model(snapshot(model), wanted)
    enable(model)
    assert enable(around, implementation="reference").blocks == 2
    disable(around)
    assert_same_model(snapshot(model), wanted)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import moe_layers, moe_layers.integrations
assert not any(name.startswith("moe_layers.integrations.") for name in sys.modules)
try:
    import moe_layers.integrations.transformers
except ModuleNotFoundError as error:
    print("refused:", error)
"""


def test_the_package_imports_without_transformers():
    result = run_python(["-c", WITHOUT_TRANSFORMERS])
    assert "refused:" in result.stdout and "transformers" in result.stdout


def test_an_older_transformers_is_refused():
    old = "import transformers; transformers.__version__ = '5.6.2'; import moe_layers.integrations.transformers"
    with pytest.raises(AssertionError, match=r"transformers must be 5\.7 or later, got 5\.6\.2"):
        run_python(["-c", old])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "dbrx", "llama4_text", "jetmoe"])
def test_partitioned_parameters(model_type, device):
    """DeepSpeed's ZeRO-3 leaves parameters without elements between forwards, and marks them."""
    skip_old(model_type)
    model = build(model_type, device, torch.float64)
    tokens = draw_tokens(model)
    expected = step(model, tokens)[0]
    whole = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in whole:
        parameter.data, parameter.ds_id = parameter.data.new_empty(0), 0
    with pytest.raises(ValueError, match=r"needs whole weights, got .* call enable before deepspeed.initialize"):
        enable(model, precision="fp8")
    enable(model)
    for parameter, data in whole.items():
        parameter.data = data
    torch.testing.assert_close(step(model, tokens)[0], expected)
