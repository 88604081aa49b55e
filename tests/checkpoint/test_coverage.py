"""The report proves that a layer is loaded completely; errors name what does not fit."""

import dataclasses
import json
import re
from functools import partial

import pytest
import torch
from safetensors import safe_open

from moe_layers import MoEFeedForward

from .golden import CASES, GOLDEN, Golden
from .test_from_checkpoint import add_copies, copy_case, shard

PREFIX = "model.layers.1.mlp."
FAMILIES = {"dbrx": "H", "deepseek_v2": "A", "gpt_oss": "F", "granitemoe": "G", "llama4": "E", "mixtral": "B"}


def load(directory, layer=1, **options):
    return MoEFeedForward.from_checkpoint(directory, layer, **options)


def refuses(directory, *messages, layer=1, **options):
    with pytest.raises(ValueError) as error:
        load(directory, layer, **options)
    for message in messages:
        assert re.search(message, str(error.value)), (message, str(error.value))
    return str(error.value)


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_of_the_block_is_used_once(case):
    golden = Golden(case)
    layer, report = load(golden.directory, golden.layer, return_report=True)
    used = [name for tensor in report.tensors for name in tensor.names]
    with safe_open(golden.directory / "model.safetensors", framework="pt") as file:
        block = {name for name in file.keys() if name.startswith(golden.prefix)}  # noqa: SIM118
    assert sorted(used) == sorted(block)
    assert report.parameters == {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert not report.other_experts and report.family == FAMILIES.get(case, report.family)
    report.check()
    text = str(report)
    assert golden.prefix in text and report.layout in text and report.model_type in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[:-1], "was not filled"),
        (lambda tensors: (*tensors, tensors[-1]), "used twice"),
        (lambda tensors: (*tensors, dataclasses.replace(tensors[-1], names=("another",))), "filled twice"),
        (lambda tensors: (*tensors, dataclasses.replace(tensors[-1], names=("x",), parameter="y")), "unknown param"),
    ],
)
def test_the_proof_can_fail(change, message):
    _, report = load(GOLDEN / "qwen3_moe", return_report=True)
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(report, tensors=change(report.tensors)).check()


def test_other_experts_are_named_and_not_read(tmp_path):
    copy_case("qwen3_moe", tmp_path)
    _, report = load(tmp_path, experts=range(2, 4), return_report=True)
    assert len(report.other_experts) == 6 * 3
    assert f"{PREFIX}experts.4.up_proj.weight" in report.other_experts
    assert {tensor.experts for tensor in report.tensors if tensor.experts} == {range(2, 3), range(3, 4)}


def test_missing_tensors_are_named(tmp_path):
    names = [f"{PREFIX}experts.{name}.weight" for name in ("3.up_proj", "7.down_proj")]
    copy_case("qwen3_moe", tmp_path, lambda tensors: [tensors.pop(name) for name in names])
    message = refuses(tmp_path, r"missing: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight \(48, 64\)")
    assert "missing: model.layers.1.mlp.experts.7.down_proj.weight (64, 48)" in message
    assert message.count("missing:") == 2


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("deepseek_v3", "gate.e_score_correction_bias"),
        ("deepseek_v3", "shared_experts.up_proj.weight"),
        ("qwen2_moe", "shared_expert_gate.weight"),
        ("gpt_oss", "router.bias"),
        ("gpt_oss", "experts.down_proj_bias"),
        ("gpt_oss_mxfp4", "experts.down_proj_scales"),
        ("gpt_oss_mxfp4", "experts.down_proj_blocks"),
        ("llama4", "experts.down_proj"),
        ("dbrx", "experts.mlp.v1"),
        ("granitemoe", "output_linear.weight"),
        ("switch_transformers", "experts.expert_2.wo.weight"),
    ],
)
def test_any_missing_tensor_is_named(case, name, tmp_path):
    prefix = Golden(case).prefix
    golden = copy_case(case, tmp_path, lambda tensors: tensors.pop(prefix + name))
    message = refuses(tmp_path, "missing", layer=golden.layer)
    weight = re.sub("_(blocks|scales)$", "", prefix + name)
    assert weight in message


def test_all_gates_missing_is_not_taken_for_plain_experts(tmp_path):
    names = [f"{PREFIX}experts.{e}.gate_proj.weight" for e in range(8)]
    copy_case("qwen3_moe", tmp_path, lambda tensors: [tensors.pop(name) for name in names])
    refuses(tmp_path, r"missing: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight")


@pytest.mark.parametrize(
    "name", ["experts.8.up_proj.weight", "experts.0.up_proj.bias", "gate.bias_of_doubt", "shared_expert.up_proj.weight"]
)
def test_left_over_tensors_are_named(name, tmp_path):
    copy_case("qwen3_moe", tmp_path, lambda tensors: tensors.update({PREFIX + name: torch.zeros(3)}))
    refuses(tmp_path, rf"left over: {re.escape(PREFIX + name)} \(3,\)")


def test_two_places_for_one_parameter_are_ambiguous(tmp_path):
    bias = f"{PREFIX}e_score_correction_bias"
    copy_case("deepseek_v3", tmp_path, lambda tensors: tensors.update({bias: torch.zeros(16)}))
    refuses(tmp_path, r"ambiguous: .*gate\.e_score_correction_bias, .*mlp\.e_score_correction_bias")


def test_wrong_shapes_are_named(tmp_path):
    def change(tensors):
        name = f"{PREFIX}experts.3.up_proj.weight"
        tensors[name] = tensors[name].mT.contiguous()
        tensors[f"{PREFIX}gate.weight"] = torch.zeros(8, 60)

    copy_case("qwen3_moe", tmp_path, change)
    refuses(
        tmp_path,
        r"wrong shape: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is \(64, 48\), must be \(48, 64\)",
        r"wrong shape: model\.layers\.1\.mlp\.gate\.weight is \(8, 60\), must be \(8, 64\)",
    )


@pytest.mark.parametrize("field", ["hidden_size", "moe_intermediate_size", "num_local_experts"])
def test_configuration_must_fit_the_tensors(field, tmp_path):
    copy_case("qwen3_moe", tmp_path, config={field: Golden("qwen3_moe").config[field] + 8})
    refuses(tmp_path, "wrong shape|missing|gives block .* 16 experts, but its tensors are of 8")


def test_an_error_lists_three_problems_and_counts_the_others(tmp_path):
    golden = copy_case("deepseek_v3", tmp_path, config={"moe_intermediate_size": 8})
    message = refuses(tmp_path, "wrong shape", layer=golden.layer)
    _, *problems, last = message.split("\n  ")
    assert len(problems) == 3 and re.fullmatch(r"and \d+ more", last)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("muse_spark", "the experts end in an RMSNorm"),
        *((name, "routed and shared experts are normalised") for name in ("inkling_text", "inkling2_text")),
        ("some_new", "must be one of afmoe, .*'some_new'"),
    ],
)
def test_other_architectures_are_refused_by_name(model_type, reason, tmp_path):
    copy_case("qwen3_moe", tmp_path, config={"model_type": model_type})
    refuses(tmp_path, model_type, reason)


def copy_square(directory, size_in, size_out, **config):
    """Write fused tensors with 2F == D, so that the shape of `gate_up_proj` does not tell its orientation."""

    def change(tensors):
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]
        generator = torch.Generator().manual_seed(0)
        tensors[f"{PREFIX}experts.gate_up_proj"] = torch.randn(8, 64, 64, generator=generator)
        tensors[f"{PREFIX}experts.down_proj"] = torch.zeros(8, size_in, size_out)

    copy_case("qwen3_moe", directory, change, {"moe_intermediate_size": 32, **config})


def test_square_in_an_unknown_layout_is_ambiguous(tmp_path):
    """Qwen3-MoE is published as [E, 2F, D]; the other orientation must be stated."""
    copy_square(tmp_path, 32, 64)
    refuses(tmp_path, r"ambiguous, it may be transposed or interleaved", r"experts\.gate_up_proj \(8, 64, 64\)")
    for layout in ("transposed", "interleaved"):
        copy_square(tmp_path, 32, 64, moe_layers_layout=layout)
        _, report = load(tmp_path, return_report=True)
        assert report.layout == layout
    copy_square(tmp_path, 32, 64, moe_layers_layout="flat")
    refuses(tmp_path, "must have the layout of config.json, 'flat'|layout 'flat' for .* have another")


def test_square_in_the_published_layout_is_read_as_published(tmp_path):
    copy_square(tmp_path, 64, 32)
    layer, report = load(tmp_path, return_report=True)
    assert report.layout == "fused"
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert torch.equal(layer.experts.w_up, file.get_tensor(f"{PREFIX}experts.gate_up_proj"))


def test_gpt_oss_is_not_guessed_to_be_concatenated(tmp_path):
    """The rows of gpt-oss alternate in all known checkpoints. The shape [E, 2F, D] alone could mean either order."""
    names = [f"{Golden('gpt_oss').prefix}experts.{name}" for name in ("gate_up_proj", "down_proj")]
    copy_case("gpt_oss", tmp_path, lambda tensors: tensors.update({name: tensors[name].mT for name in names}))
    refuses(tmp_path, "ambiguous, it may be fused", layer=0)


def test_no_such_layer():
    refuses(GOLDEN / "qwen3_moe", r"no MoE block in layer 0; its MoE blocks: model\.layers\.1\.mlp\.", layer=0)
    refuses(GOLDEN / "qwen3_moe", "no MoE block in layer 'model.layers.0.mlp'", layer="model.layers.0.mlp")


def test_two_blocks_in_one_layer_must_be_told_apart(tmp_path):
    copy_case("qwen3_moe", tmp_path, partial(add_copies, old=PREFIX, new="model.layers.1.second_mlp."))
    refuses(tmp_path, r"layer 1 must name one MoE block.*model\.layers\.1\.mlp\., model\.layers\.1\.second_mlp\.")
    load(tmp_path, "model.layers.1.second_mlp")


class TestFiles:
    def test_nothing_there(self, tmp_path):
        refuses(tmp_path, "must hold model.safetensors or model.safetensors.index.json, got neither")

    def test_no_configuration(self, tmp_path):
        copy_case("qwen3_moe", tmp_path)
        (tmp_path / "config.json").unlink()
        refuses(tmp_path, "must hold config.json, which is missing")

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1'])
    def test_malformed_configuration(self, text, tmp_path):
        copy_case("qwen3_moe", tmp_path)
        (tmp_path / "config.json").write_text(text)
        refuses(tmp_path, "config.json")

    @pytest.mark.parametrize("kept", [0, 5, 100, -8])
    def test_truncated_file(self, kept, tmp_path):
        copy_case("qwen3_moe", tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])
        refuses(tmp_path, r"model\.safetensors is damaged or truncated")

    def test_index_that_puts_a_tensor_into_the_wrong_file(self, tmp_path):
        copy_case("qwen3_moe", tmp_path)
        weight_map = shard(tmp_path)
        name = f"{PREFIX}experts.5.up_proj.weight"
        wrong = next(file for file in weight_map.values() if file != weight_map[name])
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {**weight_map, name: wrong}}))
        refuses(tmp_path, rf"index puts {re.escape(name)} into {wrong}, which does not hold it")

    @pytest.mark.parametrize("text", ["", "[1]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
    def test_malformed_index(self, text, tmp_path):
        copy_case("qwen3_moe", tmp_path)
        shard(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text(text)
        refuses(tmp_path, r"model\.safetensors\.index\.json")


class TestQuantised:
    def float8(self, tmp_path, change=lambda tensors: None, **quantization):
        def quantise(tensors):
            for name in list(tensors):
                if ".mlp.experts." in name:
                    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
            change(tensors)

        settings = {"quant_method": "fp8", "weight_block_size": [128, 128], **quantization}
        copy_case("qwen3_moe", tmp_path, quantise, {"quantization_config": settings})

    name = f"{PREFIX}experts.3.up_proj.weight"

    @pytest.mark.parametrize(
        ("suffix", "changed", "messages"),
        [
            ("_scale_inv", None, ["missing: {}_scale_inv, the scales"]),
            ("", None, ["missing: {} ", "left over: {}_scale_inv"]),
            ("_scale_inv", torch.ones(1, 2), [r"wrong shape: {}_scale_inv is \(1, 2\), must be \(1, 1\)"]),
            ("", torch.ones(48, 64), ["wrong dtype: {} is float32"]),
            *(
                ("_scale_inv", torch.full((1, 1), bad), [f"scales of {{}} must be finite, got {bad}"])
                for bad in (float("nan"), float("inf"), float("-inf"))
            ),
        ],
    )
    def test_weight_and_scales_must_fit(self, suffix, changed, messages, tmp_path):
        def change(tensors):
            del tensors[self.name + suffix]
            if changed is not None:
                tensors[self.name + suffix] = changed

        self.float8(tmp_path, change)
        refuses(tmp_path, *(message.format(re.escape(self.name)) for message in messages))

    def test_nan_among_mxfp4_scales(self, tmp_path):
        name = f"{Golden('gpt_oss_mxfp4').prefix}experts.down_proj"
        copy_case("gpt_oss_mxfp4", tmp_path, lambda tensors: tensors[f"{name}_scales"][2, 5].fill_(255))
        refuses(tmp_path, rf"scales of {re.escape(name)} must be finite", layer=0)
        load(tmp_path, 0, experts=range(0, 2))  # other experts' scales are not read

    def test_mxfp4_of_a_wrong_shape(self, tmp_path):
        name = f"{Golden('gpt_oss_mxfp4').prefix}experts.down_proj"
        wrong = {f"{name}_scales": torch.ones(4, 64, 2).byte()}
        copy_case("gpt_oss_mxfp4", tmp_path, lambda tensors: tensors.update(wrong))
        message = rf"wrong shape: {re.escape(name)}_blocks is \(4, 64, 3, 16\) with scales \(4, 64, 2\)"
        refuses(tmp_path, message, layer=0)

    @pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", 3])
    def test_other_methods_are_refused_by_name(self, method, tmp_path):
        self.float8(tmp_path, quant_method=method)
        refuses(tmp_path, f"quant_method must be 'fp8' or 'mxfp4', got {method!r}")

    @pytest.mark.parametrize("block", [[128], "128", [0, 128], [1.5, 2]])
    def test_malformed_block_size(self, block, tmp_path):
        self.float8(tmp_path, weight_block_size=block)
        refuses(tmp_path, "weight_block_size must be two positive integers")


def test_other_dtypes_are_refused(tmp_path):
    name = f"{PREFIX}experts.3.up_proj.weight"
    copy_case("qwen3_moe", tmp_path, lambda tensors: tensors.update({name: torch.zeros(48, 64, dtype=torch.uint16)}))
    refuses(tmp_path, rf"dtype of {re.escape(name)} must be one of .*, got U16")


def test_two_complete_sets_of_experts_are_refused(tmp_path):
    shapes = {"experts.gate_up_proj": (8, 96, 64), "experts.down_proj": (8, 64, 48)}
    shapes |= {"input_linear.weight": (8, 96, 64), "output_linear.weight": (8, 64, 48)}
    others = {PREFIX + name: torch.zeros(shape) for name, shape in shapes.items()}
    copy_case("qwen3_moe", tmp_path, lambda tensors: tensors.update(others))
    refuses(tmp_path, "ambiguous|left over")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "bfloat16", ["bfloat16"]], ids=str)
def test_parameters_must_be_floating_point(dtype):
    message = rf"dtype must be one of \(.*torch\.bfloat16\), got {re.escape(repr(dtype))}$"
    refuses(GOLDEN / "qwen3_moe", message, dtype=dtype)


@pytest.mark.parametrize("name", ["experts.3.up_proj.weight", "gate.weight"])
def test_integers_are_not_taken_for_weights(name, tmp_path):
    name = PREFIX + name
    copy_case("qwen3_moe", tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refuses(tmp_path, rf"wrong dtype: {re.escape(name)} is torch\.int8, must be floating point")


@pytest.mark.parametrize("dtype", ["int8", 3, ["float32"], {"a": 1}], ids=str)
def test_dtype_of_a_quantised_model(dtype, tmp_path):
    copy_case("gpt_oss_mxfp4", tmp_path, config={"dtype": dtype})
    refuses(tmp_path, "dtype in config.json must be one of", layer=0)
