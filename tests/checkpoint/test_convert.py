import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_layers import MoEFeedForward
from moe_layers.checkpoint.__main__ import main
from moe_layers.checkpoint.model.convert import convert

from .golden import CASES, GOLDEN, Golden
from .test_from_checkpoint import copy_case, same_state
from .tiny_models import LAYER, save_model


def read_model(directory):
    """Return all tensors, from however many files."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors = {}
    for file in set(weight_map.values()):
        tensors |= load_file(directory / file)
    assert set(tensors) == set(weight_map)
    return tensors


def write_model(tensors, directory):
    """Write all tensors to one file, in place of the model's files."""
    for path in directory.glob("model*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def save_unknown(model, directory):
    directory.mkdir(exist_ok=True)
    save_file(model, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "something_new"}')


def same(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "llama4", "gpt_oss", "dbrx", "granitemoe", "deepseek_v3"])
def test_through_all_layouts_and_back_is_bit_exact(case, tmp_path):
    golden = Golden(case)
    original = golden.tensors("model")
    published = {"mixtral": "per_expert_w123", "llama4": "transposed", "gpt_oss": "interleaved", "dbrx": "flat"}
    published |= {"granitemoe": "linear"}
    directory = golden.directory
    for number, layout in enumerate(["per_expert", "fused", "transposed", "interleaved"]):
        convert(directory, tmp_path / str(number), layout, max_shard_bytes=60_000)
        directory = tmp_path / str(number)
    assert "moe_layers_layout" in json.loads((directory / "config.json").read_text())
    convert(directory, tmp_path / "back", published.get(case, "per_expert"))
    assert same(read_model(tmp_path / "back"), original)


@pytest.mark.filterwarnings("ignore")
class TestZeroExperts:
    """transformers writes gates and ups for the zero experts of LongCat-Flash; nothing reads them."""

    @pytest.mark.parametrize("layout", ["per_expert", "fused", "transposed", "stacked", "flat"])
    @pytest.mark.parametrize("save_original_format", [True, False])
    def test_they_are_left_out(self, save_original_format, layout, tmp_path):
        pytest.importorskip("transformers")
        save_model("longcat_flash", tmp_path / "model", save_original_format=save_original_format)
        convert(tmp_path / "model", tmp_path / "out", layout)
        convert(tmp_path / "out", tmp_path / "back", "per_expert")
        layer, out, back = (MoEFeedForward.from_checkpoint(tmp_path / n, LAYER) for n in ("model", "out", "back"))
        assert out.num_zero_experts == 3 and same_state(out, layer) and same_state(back, layer)

    def test_missing_and_left_over_experts_are_named(self, tmp_path):
        pytest.importorskip("transformers")
        save_model("longcat_flash", tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        config = json.loads(path.read_text())
        last = f"model.layers.0.mlp.experts.{config['n_routed_experts'] - 1}.down_proj.weight"
        path.write_text(json.dumps({**config, "zero_expert_num": config["zero_expert_num"] + 1}))
        with pytest.raises(ValueError, match=f"left over: {re.escape(last)}"):
            convert(tmp_path / "model", tmp_path / "out", "fused")
        path.write_text(json.dumps(config))
        tensors = read_model(tmp_path / "model")
        del tensors[last]
        write_model(tensors, tmp_path / "model")
        with pytest.raises(ValueError, match=f"missing: {re.escape(last)}"):
            convert(tmp_path / "model", tmp_path / "out", "fused")


def test_shards_stay_below_the_limit(tmp_path):
    convert(GOLDEN / "qwen3_moe", tmp_path / "out", "per_expert", max_shard_bytes=50_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= 50_000  # noqa: SIM118
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in read_model(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total


def test_quantised_weights_are_dequantised(tmp_path):
    golden = Golden("gpt_oss_mxfp4")
    convert(golden.directory, tmp_path / "out", "interleaved", dtype=torch.float32)
    converted = read_model(tmp_path / "out")
    for name, tensor in golden.tensors("dequant").items():
        assert torch.equal(converted[name], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_float8_outside_of_the_experts_is_dequantised_too(tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"

    def quantise(model):
        model[name] = model[name].to(torch.float8_e4m3fn)
        model[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)

    copy_case("qwen3_moe", tmp_path, quantise)
    convert(tmp_path, tmp_path / "out", "fused")
    converted = read_model(tmp_path / "out")
    assert torch.equal(converted[name], (read_model(tmp_path)[name].float() * 0.5).bfloat16())
    assert f"{name}_scale_inv" not in converted


def test_composite_model(tmp_path):
    """The quantisation may apply to the language model alone; other parts may have names like those of scales."""
    model = Golden("gpt_oss_mxfp4").tensors("model")
    model["vision.position_blocks"] = torch.arange(4.0)
    save_file(model, tmp_path / "model.safetensors")
    text = Golden("gpt_oss_mxfp4").config
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vlm", "text_config": text}))
    convert(tmp_path, tmp_path / "out", "interleaved")
    assert torch.equal(read_model(tmp_path / "out")["vision.position_blocks"], torch.arange(4.0))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"] == {name: value for name, value in text.items() if name != "quantization_config"}


def test_target_must_be_empty(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(ValueError, match="must be an empty directory"):
        convert(GOLDEN / "qwen3_moe", tmp_path, "fused")


def test_interrupted_run_leaves_nothing_to_load(tmp_path):
    def stop_early(outputs):
        yield from outputs[: len(outputs) // 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(GOLDEN / "qwen3_moe", tmp_path / "out", "fused", max_shard_bytes=10_000, progress=stop_early)
    assert not list((tmp_path / "out").glob("*.safetensors*"))


@pytest.mark.parametrize(
    ("case", "name"),
    [("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"), ("gpt_oss", "experts.down_proj_bias")],
)
def test_mixed_dtypes_are_refused(case, name, tmp_path):
    name = next(held for held in Golden(case).tensors("model") if held.endswith(name))
    copy_case(case, tmp_path, lambda model: model.update({name: model[name].bfloat16()}))
    with pytest.raises(ValueError, match="must have one dtype"):
        convert(tmp_path, tmp_path / "out", "fused")


GATE = "model.layers.1.mlp.gate.weight"


def two_rows_more(model):
    model[GATE] = torch.cat([model[GATE], model[GATE][:2]])


def half_of_the_experts(model):
    for name in [name for name in model if any(f".experts.{e}." in name for e in range(4, 8))]:
        del model[name]


def half_of_the_router(model):
    half_of_the_experts(model)
    model[GATE] = model[GATE][:4].clone()


def half_of_the_width(model):
    for name in [name for name in model if ".experts." in name]:
        model[name] = (model[name][:, :24] if "down_proj" in name else model[name][:24]).clone()


@pytest.mark.parametrize("layout", ["fused", "flat"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_rows_more, "must have a row for each expert, got 10 rows and tensors of 8 experts"),
        (half_of_the_experts, "got 8 rows and tensors of 4 experts; join the files of all ranks"),
        (half_of_the_router, r"gives block model\.layers\.1\.mlp\. 8 experts with d_ff 48, .* are of 4 with d_ff 48"),
        (half_of_the_width, r"gives block model\.layers\.1\.mlp\. 8 experts with d_ff 48, .* are of 8 with d_ff 24"),
    ],
)
def test_parts_of_a_model_are_refused(change, message, layout, tmp_path):
    """Ranks of expert or tensor parallelism write such parts. An unknown architecture has no sizes to compare."""
    model = Golden("qwen3_moe").tensors("model")
    change(model)
    save_unknown(model, tmp_path / "unknown")
    shutil.copytree(tmp_path / "unknown", tmp_path / "known")
    shutil.copy(GOLDEN / "qwen3_moe" / "config.json", tmp_path / "known" / "config.json")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "known", tmp_path / "out", layout)
    if "gives block" in message:
        convert(tmp_path / "unknown", tmp_path / "out", layout)
    else:
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "unknown", tmp_path / "out", layout)


def with_tensor(name):
    return lambda model: model.update({f"model.layers.1.mlp.{name}": torch.ones(2)})


def with_integers(model):
    model |= {name: tensor.to(torch.int8) for name, tensor in model.items() if ".experts." in name}


NO_PLACE = "place in the layout, got .*"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_tensor("experts.0.up_proj.weight_scale"), rf"{NO_PLACE}\.experts\.0\.up_proj\.weight_scale"),
        (with_tensor("experts.0.up_proj.lora_A.weight"), rf"{NO_PLACE}\.up_proj\.lora_A\.weight"),
        (with_tensor("experts.down_proj"), rf"{NO_PLACE}\.experts\.down_proj"),
        (with_tensor("experts.0.up_proj.bias"), r"do not fit it:\n  missing: .*\.gate_proj\.bias"),
        (with_integers, r"experts must be floating point or known to be quantised, got .*\.weight"),
    ],
)
def test_tensors_that_would_lose_their_meaning_are_refused(change, message, tmp_path):
    model = Golden("qwen3_moe").tensors("model")
    change(model)
    save_unknown(model, tmp_path / "in")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "in", tmp_path / "out", "fused")
    assert not (tmp_path / "out").exists()


def test_blocks_beside_the_model_have_sizes_of_their_own(tmp_path):
    model, beside = (Golden("qwen3_moe").tensors("model") for _ in range(2))
    half_of_the_router(beside)
    model |= {f"talker.{name}": tensor for name, tensor in beside.items()}
    save_unknown(model, tmp_path / "in")
    shutil.copy(GOLDEN / "qwen3_moe" / "config.json", tmp_path / "in" / "config.json")
    convert(tmp_path / "in", tmp_path / "out", "fused")
    convert(tmp_path / "out", tmp_path / "back", "per_expert")
    assert same(read_model(tmp_path / "back"), model)


class TestLayerThatIsTheBlockItself:
    """In some models the experts are stored next to the attention, without a block name."""

    def save(self, directory):
        model = {name.replace(".mlp.", "."): tensor for name, tensor in Golden("qwen3_moe").tensors("model").items()}
        save_unknown(model, directory)
        return model

    @pytest.mark.parametrize("layout", ["fused", "per_expert_w123", "flat", "stacked_w13"])
    def test_converts(self, layout, tmp_path):
        model = self.save(tmp_path / "in")
        convert(tmp_path / "in", tmp_path / "out", layout)
        convert(tmp_path / "out", tmp_path / "back", "per_expert")
        assert same(read_model(tmp_path / "back"), model)

    @pytest.mark.parametrize("layout", ["stacked", "linear"])
    def test_names_that_could_not_be_found_again(self, layout, tmp_path):
        self.save(tmp_path / "in")
        message = rf"'{layout}' has no names for experts that lie below model\.layers\.1\. itself"
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "in", tmp_path / "out", layout)
        assert not (tmp_path / "out").exists()


def test_command_converts_a_directory_of_checkpoints(tmp_path, capsys):
    assert main(["convert", str(GOLDEN), str(tmp_path / "out"), "--layout", "fused"]) == 0
    assert "tensor" in capsys.readouterr().err  # the progress bar
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == CASES
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("fused (D)") == len(CASES) + 2  # two of the models have two blocks


def test_command_converts_one_checkpoint(tmp_path):
    assert main(["convert", str(GOLDEN / "olmoe"), str(tmp_path / "out"), "--layout", "transposed"]) == 0
    assert (tmp_path / "out" / "meta.json").is_file()
    assert read_model(tmp_path / "out")["model.layers.0.mlp.experts.down_proj"].shape == (8, 48, 64)


def test_command_inspects(capsys):
    assert main(["inspect", str(GOLDEN)]) == 0
    out = capsys.readouterr().out
    assert out.count("MoE blocks") == len(CASES)
    row = next(line.split() for line in out.splitlines() if "mxfp4 (F)" in line)
    assert row[:8] == ["0", "model.layers.0.mlp", "mxfp4", "(F)", "4", "64", "96", "bfloat16/uint8"]
    assert "flat (H)  8        64       48    float32  none" in out


def test_command_inspects_an_unknown_architecture(tmp_path, capsys):
    save_unknown(Golden("llama4").tensors("model"), tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "transposed (E) or interleaved (F)" in capsys.readouterr().out
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--layout", "fused"]) == 1
    assert "ambiguous, it may be transposed or interleaved" in capsys.readouterr().err


def test_command_reports_errors(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "must hold config.json" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "layout"),
    [("qwen3_moe", "fused"), ("mixtral", "fused"), ("gpt_oss", "interleaved"), ("llama4", "transposed")],
)
def test_transformers_loads_what_was_converted(case, layout, tmp_path):
    """Convert to another layout and back to that of transformers' modules: the logits do not change."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    golden = Golden(case)
    convert(golden.directory, tmp_path / "between", "per_expert")
    convert(tmp_path / "between", tmp_path / "out", layout, max_shard_bytes=100_000)
    model_class = getattr(transformers, golden.config["architectures"][0])
    if case == "gpt_oss" and not hasattr(transformers.GptOssConfig(), "swiglu_limit"):
        pytest.skip(f"transformers {transformers.__version__} does not read the limit of gpt-oss's activation")
    model, info = model_class.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    expected = golden.tensors("golden")
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=2e-6)
