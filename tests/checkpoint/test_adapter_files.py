"""Adapter files of experts: reading, writing in other layouts, and merging into a checkpoint."""

import json
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layers import MoEFeedForward
from moe_layers.checkpoint.__main__ import main
from moe_layers.checkpoint.adapters.adapter_files import read_peft_adapter, write_adapter
from moe_layers.checkpoint.adapters.merge import merge_adapter
from moe_layers.checkpoint.files.recognition import block_of_module

from .golden import Golden
from .test_convert import read_model, same

EXPERTS = "base_model.model.model.layers.{}.mlp.experts"
ATTENTION = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
SIZES = {"own": (10, 7), "2F = D": (10, 5), "F = D": (10, 10)}  # D, F


def write_config(directory, targets, **changes):
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_parameters": targets, "target_modules": []}
    (directory / "adapter_config.json").write_text(json.dumps({**config, **changes}, indent=2, sort_keys=True))


def make_adapter(
    directory, d_model, d_ff, orientation="0.19", names=("gate_up_proj", "down_proj"), num_experts=4, rank=3, **changes
):
    """Write an adapter file, and return the changes of the parameters by layer and name, by PEFT's formula."""
    directory.mkdir()
    stack = changes.pop("stack", "model.layers")
    generator = torch.Generator().manual_seed(len(stack))
    tensors, deltas = {}, {}
    rows = {"gate_up_proj": 2 * d_ff, "up_proj": d_ff, "down_proj": d_model}
    for layer in changes.pop("layers", (0, 1)):
        for depth, name in enumerate(reversed(names)):
            size_out, size_in = rows[name], d_ff if name == "down_proj" else d_model
            of_a, of_b = (size_in, size_out) if orientation == "0.19" else (size_out, size_in)
            a = torch.randn(num_experts * rank, of_a, generator=generator)
            b = torch.randn(of_b, rank * num_experts, generator=generator)
            key = f"base_model.model.{stack}.{layer}.mlp.experts" + ".base_layer" * depth
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            formula = "ore, eri -> eoi" if orientation == "0.19" else "ore, eri -> eio"
            parts = b.view(of_b, rank, num_experts).double(), a.view(num_experts, rank, of_a).double()
            deltas[layer, name] = torch.einsum(formula, *parts) * 2  # alpha / r
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    write_config(directory, [f"mlp.experts.{name}" for name in names], r=rank, lora_alpha=2 * rank, **changes)
    return deltas


def delta(adapters, name):
    a, b = (adapters.down_a, adapters.down_b) if name == "down_proj" else (adapters.up_a, adapters.up_b)
    return adapters.scale * b.double() @ a.double()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("orientation", ["0.19", "0.18"])
@pytest.mark.parametrize(
    "names", [("gate_up_proj", "down_proj"), ("down_proj", "gate_up_proj")], ids=["usual", "4 bits"]
)
def test_order_and_orientation_are_told_by_the_shapes(names, orientation, sizes, tmp_path):
    """`names` begins with the innermost parameter."""
    wanted = make_adapter(tmp_path / "in", *SIZES[sizes], orientation, names)
    loaded = read_peft_adapter(tmp_path / "in")
    assert (loaded.report.orientation, loaded.report.told_by) == (orientation, "shapes")
    for (layer, name), value in wanted.items():
        torch.testing.assert_close(delta(loaded.layers[EXPERTS.format(layer)], name), value)
    other = {"0.19": "0.18", "0.18": "0.19"}[orientation]
    with pytest.raises(ValueError, match=f"the shapes say orientation '{orientation}', got '{other}'"):
        read_peft_adapter(tmp_path / "in", orientation=other)


@pytest.mark.parametrize("names", [("gate_up_proj",), ("down_proj",), ("up_proj", "down_proj")])
@pytest.mark.parametrize("orientation", ["0.19", "0.18"])
def test_an_ambiguous_orientation_must_be_told(orientation, names, tmp_path):
    wanted = make_adapter(tmp_path / "in", 8, 8, orientation, names)
    with pytest.raises(ValueError, match="the shapes do not tell the orientation, nor does peft_version None"):
        read_peft_adapter(tmp_path / "in")
    loaded = read_peft_adapter(tmp_path / "in", orientation=orientation)
    for (layer, name), value in wanted.items():
        torch.testing.assert_close(delta(loaded.layers[EXPERTS.format(layer)], name), value)


def test_only_recent_versions_tell_the_orientation(tmp_path):
    make_adapter(tmp_path / "new", 8, 8, names=("down_proj",), peft_version="0.19.1")
    report = read_peft_adapter(tmp_path / "new").report
    assert (report.orientation, report.told_by) == ("0.19", "peft_version")
    make_adapter(tmp_path / "old", 8, 8, names=("down_proj",), peft_version="0.18.1")
    with pytest.raises(ValueError, match=r"nor does peft_version '0\.18\.1'"):
        read_peft_adapter(tmp_path / "old")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("orientation", ["0.19", "0.18"])
def test_there_and_back_is_bit_exact(orientation, interleaved, tmp_path):
    make_adapter(tmp_path / "in", 10, 7, orientation, peft_version="0.21.2", extra=[1])
    loaded = read_peft_adapter(tmp_path / "in", interleaved=interleaved)
    write_adapter(loaded, tmp_path / "out", orientation=orientation, interleaved=interleaved)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_the_other_orientation_has_the_same_products(tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7, "0.18")
    write_adapter(read_peft_adapter(tmp_path / "in"), tmp_path / "out")
    loaded = read_peft_adapter(tmp_path / "out")
    assert loaded.report.orientation == "0.19" and loaded.config["peft_version"] == "0.19.0"
    for (layer, name), value in wanted.items():
        torch.testing.assert_close(delta(loaded.layers[EXPERTS.format(layer)], name), value)


def test_interleaved_rows_become_gates_then_ups(tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7)
    adapters = read_peft_adapter(tmp_path / "in", interleaved=True).layers[EXPERTS.format(0)]
    stored = wanted[0, "gate_up_proj"]
    torch.testing.assert_close(delta(adapters, "gate_up_proj"), torch.cat([stored[:, 0::2], stored[:, 1::2]], 1))


def test_per_expert_layout(tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7)
    tensors = load_file(tmp_path / "in/adapter_model.safetensors")
    others = {ATTENTION.format("A"): torch.randn(3, 10), ATTENTION.format("B"): torch.randn(10, 3)}
    save_file({**tensors, **others}, tmp_path / "in/adapter_model.safetensors")
    write_config(tmp_path / "in", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"])
    loaded = read_peft_adapter(tmp_path / "in")
    assert set(loaded.report.others) == set(others)
    write_adapter(loaded, tmp_path / "out", "per_expert")
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert len(written) == 2 * 4 * 3 * 2 + 2
    assert same({name: written[name] for name in others}, others)
    for (layer, name), value in wanted.items():
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
        for expert in range(4):
            keys = [f"{EXPERTS.format(layer)}.{expert}.{n}.lora_{{}}.weight" for n in names]
            products = [2 * written[key.format("B")].double() @ written[key.format("A")].double() for key in keys]
            torch.testing.assert_close(torch.cat(products), value[expert])
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "gate_proj", "up_proj", "down_proj"]
    assert config["target_parameters"] is None


def join_adapters(directory, *others):
    tensors = {}
    for path in (directory, *others):
        tensors |= load_file(path / "adapter_model.safetensors")
    save_file(tensors, directory / "adapter_model.safetensors")


@pytest.mark.parametrize("layout", ["peft", "vllm_3d", "per_expert"])
def test_stacks_of_layers_are_told_apart(layout, tmp_path):
    stacks = ("thinker.model.layers", "talker.model.layers", "mtp.layers")
    wanted = {
        stack: make_adapter(tmp_path / stack, size, size + 3, num_experts=size, stack=stack, layers=(10, 2))
        for size, stack in enumerate(stacks, 7)
    }
    join_adapters(*(tmp_path / stack for stack in stacks))
    loaded = read_peft_adapter(tmp_path / stacks[0])
    assert len(loaded.report.used) == len(loaded.report.shapes) == 12 and not loaded.others
    assert [name.split(".")[-3] for name in loaded.layers] == ["2", "10"] * 3
    for stack, deltas in wanted.items():
        for (layer, name), value in deltas.items():
            torch.testing.assert_close(
                delta(loaded.layers[f"base_model.model.{stack}.{layer}.mlp.experts"], name), value
            )
    write_adapter(loaded, tmp_path / "out", layout)
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    if layout == "per_expert":
        assert len(written) == 2 * 3 * 2 * (7 + 8 + 9)
    else:
        assert same(written, load_file(tmp_path / stacks[0] / "adapter_model.safetensors"))


def test_stacks_that_differ(tmp_path):
    """The widths of one stack tell the orientation of all. Only some experts have a gate."""
    make_adapter(tmp_path / "in", 8, 8, names=("up_proj", "down_proj"), stack="a.layers", layers=(0,))
    make_adapter(tmp_path / "b", 10, 7, stack="b.layers", layers=(0,))
    join_adapters(tmp_path / "in", tmp_path / "b")
    targets = ["a.layers.0.mlp.experts.up_proj", "b.layers.0.mlp.experts.gate_up_proj", "down_proj"]
    write_config(tmp_path / "in", targets)
    loaded = read_peft_adapter(tmp_path / "in")
    assert loaded.report.told_by == "shapes"
    write_adapter(loaded, tmp_path / "out", "per_expert")
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert {name.split(".")[-3] for name in written if ".a.layers" in name} == {"up_proj", "down_proj"}
    assert {name.split(".")[-3] for name in written if ".b.layers" in name} == {"gate_proj", "up_proj", "down_proj"}
    make_adapter(tmp_path / "c", 10, 7, "0.18", stack="c.layers", layers=(0,))
    join_adapters(tmp_path / "c", tmp_path / "b")
    with pytest.raises(ValueError, match=r"must have one orientation, got 0\.19: .*b\.layers.* and 0\.18: .*c\.layers"):
        read_peft_adapter(tmp_path / "c")


@pytest.mark.parametrize(
    "targets",
    [
        ["gate_up_proj", "down_proj"],
        ["experts.down_proj", "gate_up_proj"],
        ["gate_up_proj", "down_proj", "gate.weight"],
    ],
)
def test_target_parameters_may_have_no_module(targets, tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7)
    write_config(tmp_path / "in", targets)
    loaded = read_peft_adapter(tmp_path / "in")
    for (layer, name), value in wanted.items():
        torch.testing.assert_close(delta(loaded.layers[EXPERTS.format(layer)], name), value)
    write_adapter(loaded, tmp_path / "out", "per_expert")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_parameters"] == (["gate.weight"] if "gate.weight" in targets else None)


def test_vllm_reads_three_axes_from_the_layout_of_recent_peft(tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7, "0.18")
    write_adapter(read_peft_adapter(tmp_path / "in"), tmp_path / "out", "vllm_3d")
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    for name, inner in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
        key = f"{EXPERTS.format(0)}{inner}.lora_{{}}.weight"
        a, b = written[key.format("A")].double(), written[key.format("B")].double()
        a = a.reshape(4, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, 4).permute(2, 0, 1)
        torch.testing.assert_close(2 * b @ a, wanted[0, name])
    make_adapter(tmp_path / "half", 10, 7, names=("down_proj",), peft_version="0.19.1")
    with pytest.raises(ValueError, match=r"'vllm_3d' needs adapters of both weights, .*\.0\.mlp\.experts has one"):
        write_adapter(read_peft_adapter(tmp_path / "half"), tmp_path / "none", "vllm_3d")


def test_incomplete_files_are_refused(tmp_path):
    make_adapter(tmp_path / "in", 10, 7)
    path = tmp_path / "in/adapter_model.safetensors"
    tensors = load_file(path)
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("1.mlp.experts.lora_B.weight")}
    save_file(without, path)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.lora_B\.weight is missing"):
        read_peft_adapter(tmp_path / "in")
    save_file(tensors, path)
    write_config(tmp_path / "in", ["mlp.experts.down_proj"])
    with pytest.raises(
        ValueError, match=r"one wrapper for each of \['down_proj'\], which target_parameters .* names, got 2"
    ):
        read_peft_adapter(tmp_path / "in")
    write_config(tmp_path / "in", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], r=5)
    with pytest.raises(ValueError, match=r"must be \[E r, n\] with r = 5"):
        read_peft_adapter(tmp_path / "in")
    write_config(tmp_path / "in", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj_bias"])
    with pytest.raises(NotImplementedError, match="down_proj_bias"):
        read_peft_adapter(tmp_path / "in")
    write_config(
        tmp_path / "in",
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        alpha_pattern={"experts.down_proj": 1},
    )
    with pytest.raises(NotImplementedError, match="must have one scale"):
        read_peft_adapter(tmp_path / "in")


def sizes_of(case, layer):
    config = MoEFeedForward.from_checkpoint(Golden(case).directory, layer).config
    return {"d_model": config.d_model, "d_ff": config.d_ff, "num_experts": config.num_experts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_merge_adds_the_product_and_rounds_once(case, dtype, tmp_path):
    golden = Golden(case)
    base = {name: tensor.to(dtype) for name, tensor in golden.tensors("model").items()}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base/model.safetensors")
    shutil.copy(golden.directory / "config.json", tmp_path / "base")
    number = find_layer(base)
    wanted = make_adapter(tmp_path / "adapter", **sizes_of(case, number), layers=(number,))
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


def find_layer(tensors):
    return min(int(name.split("layers.")[1].split(".")[0]) for name in tensors if ".experts." in name)


def test_merge_refuses_what_does_not_fit(tmp_path):
    directory = Golden("qwen3_moe").directory
    layer = find_layer(Golden("qwen3_moe").tensors("model"))
    sizes = sizes_of("qwen3_moe", layer)
    make_adapter(tmp_path / "far", **sizes, layers=(layer, 77))
    with pytest.raises(
        ValueError, match=r"layers\.77\.mlp\.experts must have the stack of layers and the number of one MoE block"
    ):
        merge_adapter(directory, tmp_path / "far", tmp_path / "out")
    make_adapter(tmp_path / "wide", **{**sizes, "d_ff": sizes["d_ff"] + 1}, layers=(layer,))
    with pytest.raises(ValueError, match="must be of up weights"):
        merge_adapter(directory, tmp_path / "wide", tmp_path / "out")
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


def add_linear(directory, module, size_out, rank=3, **factors):
    """Add the factors of a linear layer to an adapter file, and return the change of its weight."""
    path = directory / "adapter_model.safetensors"
    a, b = torch.randn(rank, 10), torch.randn(size_out, rank)
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
    wanted = {
        f"{changed}.1.self_attn.q_proj.weight": add_linear(tmp_path / "adapter", f"{adapted}.1.self_attn.q_proj", 12)
    }
    wanted["lm_head.weight"] = add_linear(tmp_path / "adapter", "lm_head", 6)
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
    renamed = module.replace("3", "5").replace("mlp", "block_sparse_moe")
    assert block_of_module([renamed.removesuffix("experts")], module.replace("3", "5")) == renamed.removesuffix(
        "experts"
    )


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
        ({}, {"target_parameters": ["gate_up_proj", "down_proj", "q_proj.other"]}, "merge, got .*q_proj"),
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
    write_config(tmp_path / "adapter", **{"targets": ["gate_up_proj", "down_proj"], **changes})
    add_linear(
        tmp_path / "adapter", "model.layers.1.self_attn.q_proj", 12, **{n: torch.ones(s) for n, s in factors.items()}
    )
    with pytest.raises(ValueError, match=message):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merge_refuses_integers(tmp_path):
    """Of bitsandbytes, for instance, whose int8 weights have the shape of plain ones."""
    tensors = make_model(tmp_path / "model", ["model.layers"])
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, tmp_path / "model/model.safetensors")
    make_adapter(tmp_path / "adapter", 10, 7, layers=(2,))
    add_linear(tmp_path / "adapter", "model.layers.1.self_attn.q_proj", 12)
    with pytest.raises(ValueError, match=r"must not be quantised, got .*q_proj\.weight in torch\.int8"):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")


def test_commands(tmp_path, capsys):
    golden = Golden("qwen3_moe")
    layer = find_layer(golden.tensors("model"))
    make_adapter(tmp_path / "in", **sizes_of("qwen3_moe", layer), layers=(layer,))
    assert main(["lora", "inspect", str(tmp_path / "in")]) == 0
    text = capsys.readouterr().out
    assert "adapters of 2 expert parameters in orientation 0.19 (told by shapes), 4 tensors used once each" in text
    assert f"model.layers.{layer}.mlp.experts.down_proj" in text and "rank 3" in text
    assert main(["lora", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--layout", "per_expert"]) == 0
    assert f"{EXPERTS.format(layer)}.0.up_proj.lora_A.weight" in load_file(tmp_path / "out/adapter_model.safetensors")
    assert main(["lora", "merge", str(golden.directory), str(tmp_path / "in"), str(tmp_path / "merged")]) == 0
    assert read_model(tmp_path / "merged").keys() == golden.tensors("model").keys()
    assert main(["lora", "inspect", str(tmp_path / "merged")]) == 1
    assert "must hold adapter_config.json" in capsys.readouterr().err


def import_peft():
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft", reason="peft is not installed")
    from ..integrations.models import build

    return peft, build


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("module", ["mlp.experts.", ""])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_files_of_peft_itself(model_type, module, tmp_path):
    peft, build = import_peft()
    targets = [f"{module}gate_up_proj", f"{module}down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model = peft.get_peft_model(build(model_type), config)
    model.save_pretrained(tmp_path / "in")
    interleaved = model_type == "gpt_oss"
    loaded = read_peft_adapter(tmp_path / "in", interleaved=interleaved)
    assert len(loaded.layers) == 2 and not loaded.others
    for name, adapters in loaded.layers.items():
        down = model.get_submodule(name)
        for wrapper in (down, down.base_layer):
            change = wrapper.get_delta_weight("default").double()
            if interleaved:
                change = change.transpose(1, 2)
                if wrapper is not down:
                    change = torch.cat([change[:, 0::2], change[:, 1::2]], 1)
            torch.testing.assert_close(delta(adapters, wrapper.parameter_name), change, rtol=1e-5, atol=1e-6)
    orientation = loaded.report.orientation
    write_adapter(loaded, tmp_path / "out", orientation=orientation, interleaved=interleaved)
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text()) == loaded.config


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
        target_parameters=["gate_up_proj", "down_proj", *router],
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
