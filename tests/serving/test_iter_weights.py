"""`iter_weights` of transformers models: names and values of `save_pretrained`, and what an engine makes of them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from moe_layers.serving import iter_weights
from moe_layers.serving.engines import _ENGINES
from moe_layers.serving.streaming import _check_all_here

from ..layers import moe_layer
from ..processes import gloo_group
from ..tiers import default_tier

transformers = pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is needed")

from moe_layers.integrations.transformers import enable  # noqa: E402

from ..integrations import test_mxfp4, test_quantized_models  # noqa: E402
from ..integrations.models import build, config_of, experts_of, initialise, skip_old  # noqa: E402
from ..integrations.peft_models import WARNINGS, adapt, lora, peft  # noqa: E402
from .engine_loaders import load  # noqa: E402
from .test_layers import adapted  # noqa: E402

KEPT = ["qwen3_moe", "mixtral", "gpt_oss", "gemma4_text"]


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name
        assert actual[name].is_contiguous()


@pytest.mark.parametrize(
    "model_type", default_tier([*KEPT, "nemotron_h", "granitemoe", "dbrx", "deepseek_v3", "lfm2_moe"], KEPT)
)
def test_names_and_values_are_those_of_save_pretrained(model_type, tmp_path):
    skip_old(model_type)
    model = build(model_type)
    pairs = list(iter_weights(model))
    assert len(dict(pairs)) == len(pairs)
    expected = saved(model, tmp_path)
    assert_same(dict(pairs), expected)
    assert_same(dict(iter_weights(type(model).from_pretrained(tmp_path))), expected)


def test_layers_may_have_different_numbers_of_experts():
    values = {"model_type": "hunyuan_v1_moe", "num_experts": [4, 2], "intermediate_size": 8, "moe_topk": 1}
    config = SimpleNamespace(model_type="hunyuan_v1_moe", to_dict=lambda: values)
    for layer, number in enumerate(values["num_experts"]):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        _check_all_here(name, torch.empty(number, 8, 8), config)
        with pytest.raises(ValueError, match=rf"layers.{layer}\S* must hold all {number} experts, got {number - 1}"):
            _check_all_here(name, torch.empty(number - 1, 8, 8), config)


def whole(model_type):
    """Return a model that the engines have a class for."""
    if model_type != "llama4":
        return build(model_type)
    text = config_of("llama4_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 4, "patch_size": 2, "vision_output_dim": 16, "projector_input_dim": 16}
    config = transformers.Llama4Config(text_config=text, vision_config={**vision, "projector_output_dim": 16})
    return initialise(transformers.Llama4ForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("engine", "model_type"),
    default_tier(
        [(engine, model_type) for engine, known in _ENGINES.items() for model_type in known],
        [(engine, kept) for engine in _ENGINES for kept in ("mixtral", "gpt_oss", "qwen3_vl_moe_text", "nemotron_h")],
    ),
)
def test_the_engine_gets_each_expert(engine, model_type):
    skip_old(model_type)
    model = whole(model_type)
    experts = [module for _, module in experts_of(model)]
    if not experts:
        pytest.skip(f"transformers {transformers.__version__} has no module of the experts of {model_type}")
    enable(model, implementation="reference")
    plain = model_type == "nemotron_h"
    num_experts = experts[0].num_experts
    parameters, others = load(iter_weights(model, engine), model_type, num_experts, plain)
    prefixes = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
    expected = {}
    for prefix, module in zip(prefixes, experts, strict=True):
        if model_type == "dbrx":
            gate, up, down = (w.unflatten(0, (num_experts, -1)) for w in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
            up, down = torch.cat([gate, up], dim=1), down.transpose(1, 2)
        else:
            up, down = module.up_proj if plain else module.gate_up_proj, module.down_proj
        if model_type in ("gpt_oss", "llama4", "llama4_text"):
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if model_type == "gpt_oss":
            expected |= {f"{prefix}.w13_bias": module.gate_up_proj_bias, f"{prefix}.w2_bias": module.down_proj_bias}
        expected |= {f"{prefix}.w13_weight": up, f"{prefix}.w2_weight": down}
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
    assert not any(".experts." in name for name in others)


@pytest.mark.parametrize("mark", ["two adapters", "switched off", "merged"])
def test_adapters_are_added_and_stay(mark, tmp_path):
    head = {"modules_to_save": ["lm_head"]}
    model = adapt(build("qwen3_moe", dtype=torch.float64), lora(target_modules=["q_proj"], **head))
    if mark == "two adapters":
        model.add_adapter("second", lora(r=2, target_modules=["q_proj"]))
        model.base_model.set_adapter(["default", "second"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name and ".second." in name:
                    parameter.normal_()
    enable(model, implementation="reference")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if mark == "switched off":
        with model.disable_adapter():
            actual = dict(iter_weights(model))
        expected = saved(copy.deepcopy(model).unload(), tmp_path)
    elif mark == "merged":
        expected = saved(copy.deepcopy(model).merge_and_unload(), tmp_path)
        model.merge_adapter()
        actual = {name: tensor.clone() for name, tensor in iter_weights(model)}
        model.unmerge_adapter()
    else:
        actual = dict(iter_weights(model))
        expected = saved(copy.deepcopy(model).merge_and_unload(), tmp_path)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), before, rtol=1e-12, atol=1e-12)


def test_adapters_on_a_mesh_of_one_rank_are_added_once(tmp_path):
    """The whole tensor of a parameter is then the memory of the parameter itself."""
    model = adapt(build("qwen3_moe"), lora())
    layer = adapted(moe_layer(8, 4, 3, 2))
    expected = dict(iter_weights(model)), dict(iter_weights(layer))
    with gloo_group(tmp_path):
        for module in (model, layer):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        for _ in range(2):
            assert_same(dict(iter_weights(model)), expected[0])
            assert_same(dict(iter_weights(layer)), expected[1])


def test_an_adapted_parameter_of_two_axes(tmp_path):
    """PEFT's wrapper of parameters then computes B A, as for a linear layer: here of the router."""
    model = adapt(build("qwen3_moe", dtype=torch.float64), lora(targets=["mlp.gate.weight"]))
    expected = saved(copy.deepcopy(model).merge_and_unload(), tmp_path)
    for name, tensor in iter_weights(model):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_bfloat16_sums_are_rounded_once():
    model = adapt(build("qwen3_moe", dtype=torch.bfloat16), lora())
    wide = copy.deepcopy(model).double().merge_and_unload()
    expected = dict(iter_weights(wide))
    for name, tensor in iter_weights(model):
        torch.testing.assert_close(tensor.double(), expected[name], rtol=2**-8, atol=2**-20, msg=name)


def test_dora_is_refused():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(build("qwen3_moe"), config)
    with pytest.raises(ValueError, match=r"adapter 'default' of model.layers.0.self_attn.q_proj must be plain LoRA"):
        list(iter_weights(model))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_on_one_of_two_tied_weights_is_refused():
    model = build("qwen3_moe", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    tied = r"tied weights must have the same adapters, got model\.embed_tokens\.weight and lm_head\.weight"
    with pytest.raises(ValueError, match=tied):
        list(iter_weights(adapted))
    with adapted.disable_adapter():
        assert "lm_head.weight" not in dict(iter_weights(adapted))


def test_a_linear_layer_in_two_places_has_its_adapter_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Identity())
    model[2] = model[0]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    adapted.base_model.model[2] = adapted.base_model.model[0]
    (weight,) = dict(iter_weights(adapted)).values()
    assert torch.equal(weight, adapted.merge_and_unload()[0].weight)


def test_fp8_is_dequantised_or_kept():
    stored, plain = test_quantized_models.pair()
    assert_same(dict(iter_weights(stored, "vllm")), dict(iter_weights(plain, "vllm")))
    kept = iter_weights(stored, "vllm", keep_quantized=True)
    parameters, _ = load(kept, "qwen3_moe", stored.config.num_experts)
    for name, experts in experts_of(stored):
        for key, target in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight")):
            assert torch.equal(
                parameters[f"{name}.{target}"].view(torch.uint8), getattr(experts, key).view(torch.uint8)
            )
            assert torch.equal(parameters[f"{name}.{target}_scale_inv"], getattr(experts, f"{key}_scale_inv"))


def test_mxfp4_is_dequantised_or_kept(tmp_path):
    stored, plain = test_mxfp4.pair(reorder=False)
    assert_same(dict(iter_weights(stored, "vllm")), dict(iter_weights(plain, "vllm")))
    assert_same(dict(iter_weights(stored, keep_quantized=True)), saved(stored, tmp_path))


def test_bitsandbytes_is_dequantised():
    replace = pytest.importorskip("bitsandbytes.nn.parametrize").replace_parameter_4bit
    import bitsandbytes

    model = build("qwen3_moe")
    layer = model.model.layers[0]
    replace(layer.mlp.experts, "down_proj")
    linear = layer.self_attn.o_proj
    four = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    four.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    layer.self_attn.o_proj = four.to("cpu")
    found = dict(iter_weights(model, "sglang"))
    assert torch.equal(found["model.layers.0.mlp.experts.1.down_proj.weight"], layer.mlp.experts.down_proj[1])
    weight = found["model.layers.0.self_attn.o_proj.weight"]
    assert weight.shape == linear.weight.shape and 0 < (weight - linear.weight).norm() < 0.2 * linear.weight.norm()
    with pytest.raises(ValueError, match="keep_quantized needs FP8 or MXFP4 without adapters"):
        list(iter_weights(model, keep_quantized=True))


def test_wrappers_do_not_change_names():
    model = build("qwen3_moe")
    expected = dict(iter_weights(model))
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert_same(dict(iter_weights(torch.compile(model))), expected)


def test_bad_input():
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match=r"iter_weights: layout must be one of .*'vllm'.*, got 'trt'"):
        iter_weights(model, "trt")
    for model_type, engine in (("jamba", "sglang"), ("llama4_text", "sglang"), ("dots1", "vllm")):
        rule = rf"layout '{engine}' must be one that the architecture has.*'{model_type}'"
        with pytest.raises(ValueError, match=rule):
            iter_weights(build(model_type), engine)
    with pytest.raises(ValueError, match="the model must be the Qwen3MoeForCausalLM itself, which is 'policy'"):
        iter_weights(nn.ModuleDict({"policy": model}))
    with pytest.raises(ValueError, match="model must be a Module"):
        iter_weights("model")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj[:2].detach())
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.down_proj must hold all \d experts, got 2"):
        list(iter_weights(model))
    model.model.norm.to("meta")
    model.model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match=r"tensors must have memory, got model.norm.weight on meta"):
        list(iter_weights(model))
    model = build("qwen3_moe")
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"lm_head.weight must be plain, FP8 with scales"):
        list(iter_weights(model))


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_parameters_that_other_ranks_hold_in_part_are_refused(tmp_path):
    """FSDP1 flattens parameters, and DeepSpeed empties them."""
    model = build("qwen3_moe")
    with gloo_group(tmp_path):
        for options in ({}, {"use_orig_params": True}):
            model.model.layers[1] = FullyShardedDataParallel(
                model.model.layers[1], device_id=torch.device("cpu"), **options
            )
            with pytest.raises(ValueError, match=r"got FullyShardedDataParallel as model\.layers\.1; use fully_shard"):
                iter_weights(model, "vllm")
            model.model.layers[1] = build("qwen3_moe").model.layers[1]
    down = model.model.layers[0].mlp.experts.down_proj
    down.ds_shape, down.data = down.shape, torch.empty(0)
    with pytest.raises(
        ValueError, match=r"got layers\.0\.mlp\.experts\.down_proj partitioned by DeepSpeed; .*Gathered"
    ):
        iter_weights(model.model)
    down.data = torch.empty(down.ds_shape)
    assert list(iter_weights(model.model))


pytestmark = WARNINGS
