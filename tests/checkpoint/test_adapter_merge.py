"""Adapters of experts, merged into a checkpoint; the commands for adapter files."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layers import MoEFeedForward
from moe_layers.checkpoint.__main__ import main
from moe_layers.checkpoint.adapters.merge import merge_adapter
from moe_layers.checkpoint.files.recognition import block_of_module

from .golden import Golden
from .test_adapter_files import EXPERTS, NAMES, RANK, import_peft, join_adapters, make_adapter, write_config
from .test_convert import read_model, same
from .test_from_checkpoint import copy_case


def sizes_of(golden):
    config = MoEFeedForward.from_checkpoint(golden.directory, golden.layer).config
    return {"d_model": config.d_model, "d_ff": config.d_ff, "num_experts": config.num_experts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_merge_adds_the_product_and_rounds_once(case, dtype, tmp_path):
    golden = Golden(case)
    base = {name: tensor.to(dtype) for name, tensor in golden.tensors("model").items()}
    copy_case(case, tmp_path / "base", lambda tensors: tensors.update(base))
    number = golden.layer
    wanted = make_adapter(tmp_path / "adapter", **sizes_of(golden), layers=(number,))
    report = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", max_shard_bytes=60_000)
    assert len(report.used) == 2
    merged = read_model(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in merged.items()} == {name: t.dtype for name, t in base.items()}
    untouched = {name for name in base if f"layers.{number}." not in name or ".experts." not in name}
    untouched |= {name for name in base if "bias" in name or "shared" in name}
    assert same({name: merged[name] for name in untouched}, {name: base[name] for name in untouched})
    before, after = (MoEFeedForward.from_checkpoint(d, number) for d in (tmp_path / "base", tmp_path / "out"))
    for name, parameter in (("gate_up_proj", "w_up"), ("down_proj", "w_down")):
        change = wanted[number, name]
        if case == "gpt_oss" and name == "gate_up_proj":
            change = torch.cat([change[:, 0::2], change[:, 1::2]], 1)
        old, new = getattr(before.experts, parameter), getattr(after.experts, parameter)
        exact = old.double() + change
        error = (new.double() - exact).abs()
        half_step = exact.abs() * torch.finfo(new.dtype).eps / 2
        assert (error <= half_step + 1e-6 * exact.abs().max()).all()


def test_merge_refuses_what_does_not_fit(tmp_path):
    golden = Golden("qwen3_moe")
    sizes = sizes_of(golden)
    make_adapter(tmp_path / "far", **sizes, layers=(golden.layer, 77))
    message = r"layers\.77\.mlp\.experts must have the stack of layers and the number of one MoE block"
    with pytest.raises(ValueError, match=message):
        merge_adapter(golden.directory, tmp_path / "far", tmp_path / "out")
    make_adapter(tmp_path / "wide", **{**sizes, "d_ff": sizes["d_ff"] + 1}, layers=(golden.layer,))
    with pytest.raises(ValueError, match="must be of up weights"):
        merge_adapter(golden.directory, tmp_path / "wide", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def make_model(directory, stacks, num_experts=4, d_model=10, d_ff=7):
    """Write layer 2 of several stacks of layers, as a model of another name."""
    directory.mkdir()
    matrices = {"gate_proj": (d_ff, d_model), "up_proj": (d_ff, d_model), "down_proj": (d_model, d_ff)}
    shapes = {f"experts.{e}.{name}": shape for e in range(num_experts) for name, shape in matrices.items()}
    tensors = {"lm_head.weight": torch.randn(6, d_model)}
    for stack in stacks:
        tensors[f"{stack}.1.self_attn.q_proj.weight"] = torch.randn(12, d_model)
        tensors[f"{stack}.2.mlp.gate.weight"] = torch.randn(num_experts, d_model)
        tensors |= {f"{stack}.2.mlp.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_size": d_model, "moe_intermediate_size": d_ff}
    (directory / "config.json").write_text(json.dumps(config | {"num_experts": num_experts, "num_experts_per_tok": 2}))
    return tensors


def add_linear(directory, module, size_out, **factors):
    """Add the factors of a linear layer to an adapter file, and return the change of its weight."""
    path = directory / "adapter_model.safetensors"
    a, b = torch.randn(RANK, 10), torch.randn(size_out, RANK)
    key = f"base_model.model.{module}.lora_"
    save_file({**load_file(path), f"{key}A.weight": a, f"{key}B.weight": b, **factors}, path)
    return 2 * b @ a


THINKER, TALKER, INNER = "thinker.model.layers", "talker.model.layers", "model.language_model.layers"


@pytest.mark.parametrize(
    "stored, adapted, changed",
    [
        (["model.layers", "mtp.layers"], "model.layers", "model.layers"),
        (["model.layers", "mtp.layers"], "mtp.layers", "mtp.layers"),
        ([THINKER, TALKER], TALKER, TALKER),
        ([INNER, "mtp.layers"], "model.layers", INNER),
        (["language_model.model.layers", "vision.layers"], INNER, "language_model.model.layers"),
        ([THINKER, TALKER], "model.layers", None),
        ([THINKER], TALKER, None),
        (["model.layers"], "mtp.layers", None),
        (["mtp.layers"], "model.layers", None),
        (["encoder.layers", "decoder.layers"], "model.layers", None),
        (["model.layers"], "model.visual.blocks", None),
        (["layers", "mtp"], "model.layers", "layers"),
        (["model.encoder.layers", "model.decoder.layers"], "decoder.block", "model.decoder.layers"),
    ],
)
def test_merge_changes_one_stack_of_layers(stored, adapted, changed, tmp_path):
    before = make_model(tmp_path / "model", stored)
    experts = make_adapter(tmp_path / "adapter", 10, 7, stack=adapted, layers=(2,))
    wanted = {"lm_head.weight": add_linear(tmp_path / "adapter", "lm_head", 6)}
    q_proj = "1.self_attn.q_proj"
    wanted[f"{changed}.{q_proj}.weight"] = add_linear(tmp_path / "adapter", f"{adapted}.{q_proj}", 12)
    for expert in range(4):
        names = [f"{changed}.2.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down")]
        changes = *experts[2, "gate_up_proj"][expert].chunk(2), experts[2, "down_proj"][expert]
        wanted |= dict(zip(names, changes, strict=True))
    if changed is None:
        with pytest.raises(ValueError, match=f"{adapted}.2.mlp.experts must have the stack of layers and the number"):
            merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
        return
    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    for name, tensor in read_model(tmp_path / "out").items():
        exact = before.pop(name) + wanted.pop(name, 0)
        torch.testing.assert_close(tensor, exact.to(tensor), rtol=1e-6, atol=1e-5)
    assert not before and not wanted


@pytest.mark.parametrize(
    "prefix, module",
    [
        ("towers.0.layers.5.mlp.", "towers.0.layers.3.mlp.experts"),
        ("towers.0.layers.5.mlp.", "other.0.layers.3.mlp.experts"),
        ("model.layers.0.mlp.", "experts"),
        ("mlp.", "model.layers.0.mlp.experts"),
    ],
)
def test_all_numbers_of_a_name_count(prefix, module):
    with pytest.raises(ValueError, match=rf"{module} must have .* got a checkpoint with {prefix}"):
        block_of_module([prefix], module)
    module = module.replace("3", "5")
    block = module.replace("mlp", "block_sparse_moe").removesuffix("experts")
    assert block_of_module([block], module) == block


@pytest.mark.parametrize("layers", [(2, 2), (3, 2)], ids=["one block", "one stack"])
def test_merge_refuses_stacks_that_would_become_one(layers, tmp_path):
    tensors = make_model(tmp_path / "model", [INNER])
    tensors |= {name.replace(f"{INNER}.2", "blocks.3"): tensor + 1 for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model/model.safetensors")
    for stack, layer in zip(("model.layers", INNER if layers[0] == 2 else "model.layers"), layers, strict=True):
        make_adapter(tmp_path / f"{stack}.{layer}", 10, 7, stack=stack, layers=(layer,))
    directory, other = sorted(tmp_path.glob("*layers.*"))
    join_adapters(directory, other)
    with pytest.raises(ValueError, match=r"a block must have the adapters of one module"):
        merge_adapter(tmp_path / "model", directory, tmp_path / "out")


Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


def both(module, size_out):
    return {f"{module}.lora_A.weight": (3, 10), f"{module}.lora_B.weight": (size_out, 3)}


@pytest.mark.parametrize(
    "factors, changes, message",
    [
        ({f"{Q_PROJ}.lora_magnitude_vector": (12,)}, {}, "merge, got .*lora_magnitude_vector"),
        ({f"{Q_PROJ}.lora_B.bias": (12,)}, {}, r"merge, got .*lora_B\.bias"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (3, 6)}, {}, "merge, got .*lora_embedding_A"),
        ({"base_model.model.score.weight": (6, 10)}, {}, r"merge, got .*score\.weight"),
        ({Q_PROJ.replace("q_proj", "k_proj") + ".lora_A.weight": (3, 10)}, {}, "merge, got .*k_proj"),
        ({}, {"target_parameters": [*NAMES, "q_proj.other"]}, "merge, got .*q_proj"),
        ({}, {"rank_pattern": {"q_proj": 2}}, r"q_proj must be \[2, in\] and \[out, 2\], got \[3, 10\]"),
        ({f"{Q_PROJ}.lora_B.weight": (12, 3, 1)}, {}, r"must be \[3, in\] and \[out, 3\], got .* \[12, 3, 1\]"),
        ({f"{Q_PROJ}.lora_B.weight": (13, 3)}, {}, r"q_proj\.weight \[12, 10\] is of \[13, 10\]"),
        (both(f"{EXPERTS.format(2)}.1.up_proj", 7), {}, r"one adapter, got several of .*\.1\.up_proj"),
        (both("model.layers.1.self_attn.q_proj", 12), {}, "one adapter, got .* and another"),
        (both(f"{Q_PROJ}s", 12), {}, "got no .*q_projs"),
        ({}, {"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({}, {"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({}, {"use_dora": True}, "plain LoRA, got LORA with .*use_dora"),
        ({}, {"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ],
)  # fmt: skip
def test_merge_refuses_other_adapters(factors, changes, message, tmp_path):
    make_model(tmp_path / "model", ["model.layers"])
    make_adapter(tmp_path / "adapter", 10, 7, layers=(2,))
    write_config(tmp_path / "adapter", **{"targets": [*NAMES], **changes})
    others = {name: torch.ones(shape) for name, shape in factors.items()}
    add_linear(tmp_path / "adapter", "model.layers.1.self_attn.q_proj", 12, **others)
    with pytest.raises(ValueError, match=message):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merge_refuses_integers(tmp_path):
    """bitsandbytes, for instance, stores int8 weights in the shape of plain ones."""
    tensors = make_model(tmp_path / "model", ["model.layers"])
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, tmp_path / "model/model.safetensors")
    make_adapter(tmp_path / "adapter", 10, 7, layers=(2,))
    add_linear(tmp_path / "adapter", "model.layers.1.self_attn.q_proj", 12)
    with pytest.raises(ValueError, match=r"must not be quantised, got .*q_proj\.weight in torch\.int8"):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")


def test_commands(tmp_path, capsys):
    golden = Golden("qwen3_moe")
    make_adapter(tmp_path / "in", **sizes_of(golden), layers=(golden.layer,))
    assert main(["lora", "inspect", str(tmp_path / "in")]) == 0
    text = capsys.readouterr().out
    assert "adapters of 2 expert parameters in orientation 0.19 (told by shapes), 4 tensors used once each" in text
    assert f"model.layers.{golden.layer}.mlp.experts.down_proj" in text and "rank 3" in text
    assert main(["lora", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--layout", "per_expert"]) == 0
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert f"{EXPERTS.format(golden.layer)}.0.up_proj.lora_A.weight" in written
    assert main(["lora", "merge", str(golden.directory), str(tmp_path / "in"), str(tmp_path / "merged")]) == 0
    assert read_model(tmp_path / "merged").keys() == golden.tensors("model").keys()
    assert main(["lora", "inspect", str(tmp_path / "merged")]) == 1
    assert "must hold adapter_config.json" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_merge_equals_that_of_peft(model_type, rslora, tmp_path):
    """The adapters of experts, attention and the router's parameter have ranks and scales of their own."""
    peft, build = import_peft()
    router = ["mlp.gate.weight"] if model_type == "qwen3_moe" else []  # its file has another name for the router
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=rslora,
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=[*NAMES, *router],
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 4, "mlp.gate.weight": 2, "mlp.gate": 6},
        alpha_pattern={"v_proj": 7, "layers.0.self_attn.v_proj": 9, "mlp.gate.weight": 11},
        init_lora_weights=False,
    )
    build(model_type).save_pretrained(tmp_path / "model")
    peft.get_peft_model(build(model_type), config).save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(build(model_type), tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "ours")
    before, theirs, ours = (read_model(tmp_path / name) for name in ("model", "theirs", "ours"))
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if not torch.equal(ours[name], before[name])}
    assert changed == {name for name in ours if re.search(r"[qvo]_proj|experts" + r"|mlp\.gate" * len(router), name)}
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6)
