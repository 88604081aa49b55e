"""Adapter files of experts: reading, and writing in other layouts."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layers.checkpoint.adapters.adapter_files import read_peft_adapter, write_adapter

from .test_convert import same

EXPERTS = "base_model.model.model.layers.{}.mlp.experts"
ATTENTION = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
SIZES = {"own": (10, 7), "2F = D": (10, 5), "F = D": (10, 10)}  # D, F
NAMES = ("gate_up_proj", "down_proj")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK = 3


def write_config(directory, targets=TARGETS, **changes):
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": []}
    config["target_parameters"] = targets
    (directory / "adapter_config.json").write_text(json.dumps({**config, **changes}, indent=2, sort_keys=True))


def make_adapter(
    directory,
    d_model,
    d_ff,
    orientation="0.19",
    names=NAMES,
    num_experts=4,
    layers=(0, 1),
    stack="model.layers",
    **config,
):
    """Write an adapter file, and return the changes of the parameters by layer and name, by PEFT's formula."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(len(stack))
    tensors, deltas = {}, {}
    rows = {"gate_up_proj": 2 * d_ff, "up_proj": d_ff, "down_proj": d_model}
    for layer in layers:
        for depth, name in enumerate(reversed(names)):
            size_out, size_in = rows[name], d_ff if name == "down_proj" else d_model
            of_a, of_b = (size_in, size_out) if orientation == "0.19" else (size_out, size_in)
            a = torch.randn(num_experts * RANK, of_a, generator=generator)
            b = torch.randn(of_b, RANK * num_experts, generator=generator)
            key = f"base_model.model.{stack}.{layer}.mlp.experts" + ".base_layer" * depth
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            formula = "ore, eri -> eoi" if orientation == "0.19" else "ore, eri -> eio"
            parts = b.view(of_b, RANK, num_experts).double(), a.view(num_experts, RANK, of_a).double()
            deltas[layer, name] = torch.einsum(formula, *parts) * 2  # alpha / r
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    write_config(directory, [f"mlp.experts.{name}" for name in names], **config)
    return deltas


def write_out(adapter, directory, *layout):
    """Write the adapter, and return the tensors and the configuration of its files."""
    write_adapter(adapter, directory / "out", *layout)
    tensors = load_file(directory / "out/adapter_model.safetensors")
    return tensors, json.loads((directory / "out/adapter_config.json").read_text())


def delta(adapters, name):
    a, b = (adapters.down_a, adapters.down_b) if name == "down_proj" else (adapters.up_a, adapters.up_b)
    return adapters.scale * b.double() @ a.double()


def assert_deltas(loaded, wanted, stack="model.layers"):
    for (layer, name), value in wanted.items():
        torch.testing.assert_close(delta(loaded.layers[f"base_model.model.{stack}.{layer}.mlp.experts"], name), value)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("orientation", ["0.19", "0.18"])
@pytest.mark.parametrize("names", [NAMES, NAMES[::-1]], ids=["usual", "4 bits"])
def test_order_and_orientation_are_told_by_the_shapes(names, orientation, sizes, tmp_path):
    """`names` begins with the innermost parameter."""
    wanted = make_adapter(tmp_path / "in", *SIZES[sizes], orientation, names)
    loaded = read_peft_adapter(tmp_path / "in")
    assert (loaded.report.orientation, loaded.report.told_by) == (orientation, "shapes")
    assert_deltas(loaded, wanted)
    other = {"0.19": "0.18", "0.18": "0.19"}[orientation]
    with pytest.raises(ValueError, match=f"the shapes say orientation '{orientation}', got '{other}'"):
        read_peft_adapter(tmp_path / "in", orientation=other)


@pytest.mark.parametrize("names", [("gate_up_proj",), ("down_proj",), ("up_proj", "down_proj")])
@pytest.mark.parametrize("orientation", ["0.19", "0.18"])
def test_an_ambiguous_orientation_must_be_told(orientation, names, tmp_path):
    wanted = make_adapter(tmp_path / "in", 8, 8, orientation, names)
    with pytest.raises(ValueError, match="the shapes do not tell the orientation, nor does peft_version None"):
        read_peft_adapter(tmp_path / "in")
    assert_deltas(read_peft_adapter(tmp_path / "in", orientation=orientation), wanted)


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
    assert_deltas(loaded, wanted)


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
    write_config(tmp_path / "in", target_modules=["q_proj"])
    loaded = read_peft_adapter(tmp_path / "in")
    assert set(loaded.report.others) == set(others)
    written, config = write_out(loaded, tmp_path, "per_expert")
    assert len(written) == 2 * 4 * 3 * 2 + 2
    assert same({name: written[name] for name in others}, others)
    for (layer, name), value in wanted.items():
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
        for expert in range(4):
            keys = [f"{EXPERTS.format(layer)}.{expert}.{n}.lora_{{}}.weight" for n in names]
            products = [2 * written[key.format("B")].double() @ written[key.format("A")].double() for key in keys]
            torch.testing.assert_close(torch.cat(products), value[expert])
    assert config["target_modules"] == ["q_proj", "gate_proj", "up_proj", "down_proj"]
    assert config["target_parameters"] is None


@pytest.mark.parametrize("targets", [r".*self_attn\.(q|k)_proj|lm_head", "all-linear", "ALL-LINEAR"])
def test_per_expert_keeps_an_expression_of_modules(targets, tmp_path):
    """PEFT matches one string with whole names, and each entry of a list with the end of a name."""
    make_adapter(tmp_path / "in", 10, 7, target_modules=targets)
    _, config = write_out(read_peft_adapter(tmp_path / "in"), tmp_path, "per_expert")
    written = config["target_modules"]
    if targets.lower() == "all-linear":
        assert written == targets
        return
    for name in ("model.layers.0.self_attn.q_proj", "lm_head", "model.layers.0.mlp.experts.1.up_proj"):
        assert re.fullmatch(written, name)
    for name in ("model.layers.0.self_attn.v_proj", "model.lm_head", "model.layers.0.mlp.experts"):
        assert not re.fullmatch(written, name)


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
        assert_deltas(loaded, deltas, stack)
    written, _ = write_out(loaded, tmp_path, layout)
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
    written, _ = write_out(loaded, tmp_path, "per_expert")
    assert {name.split(".")[-3] for name in written if ".a.layers" in name} == {"up_proj", "down_proj"}
    assert {name.split(".")[-3] for name in written if ".b.layers" in name} == {"gate_proj", "up_proj", "down_proj"}
    make_adapter(tmp_path / "c", 10, 7, "0.18", stack="c.layers", layers=(0,))
    join_adapters(tmp_path / "c", tmp_path / "b")
    with pytest.raises(ValueError, match=r"must have one orientation, got 0\.19: .*b\.layers.* and 0\.18: .*c\.layers"):
        read_peft_adapter(tmp_path / "c")


@pytest.mark.parametrize(
    "targets",
    [[*NAMES], ["experts.down_proj", "gate_up_proj"], [*NAMES, "gate.weight"]],
)
def test_target_parameters_may_have_no_module(targets, tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7)
    write_config(tmp_path / "in", targets)
    loaded = read_peft_adapter(tmp_path / "in")
    assert_deltas(loaded, wanted)
    _, config = write_out(loaded, tmp_path, "per_expert")
    assert config["target_parameters"] == (["gate.weight"] if "gate.weight" in targets else None)


def test_vllm_reads_three_axes_from_the_layout_of_recent_peft(tmp_path):
    wanted = make_adapter(tmp_path / "in", 10, 7, "0.18")
    written, _ = write_out(read_peft_adapter(tmp_path / "in"), tmp_path, "vllm_3d")
    for name, inner in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
        key = f"{EXPERTS.format(0)}{inner}.lora_{{}}.weight"
        a, b = written[key.format("A")].double(), written[key.format("B")].double()
        a = a.reshape(4, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, 4).permute(2, 0, 1)
        torch.testing.assert_close(2 * b @ a, wanted[0, name])
    make_adapter(tmp_path / "half", 10, 7, names=("down_proj",), peft_version="0.19.1")
    with pytest.raises(ValueError, match=r"'vllm_3d' needs adapters of both weights, .*\.0\.mlp\.experts has one"):
        write_adapter(read_peft_adapter(tmp_path / "half"), tmp_path / "none", "vllm_3d")


def test_a_missing_tensor_is_named(tmp_path):
    make_adapter(tmp_path / "in", 10, 7)
    path = tmp_path / "in/adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[f"{EXPERTS.format(1)}.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.lora_B\.weight is missing"):
        read_peft_adapter(tmp_path / "in")


TOO_MANY = r"one wrapper for each of \['down_proj'\], which target_parameters .* names, got 2"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"targets": TARGETS[1:]}, ValueError, TOO_MANY),
        ({"r": 5}, ValueError, r"must be \[E r, n\] with r = 5"),
        ({"targets": [TARGETS[0], f"{TARGETS[1]}_bias"]}, NotImplementedError, "down_proj_bias"),
        ({"alpha_pattern": {"experts.down_proj": 1}}, NotImplementedError, "must have one scale"),
    ],
)
def test_configurations_that_do_not_fit_the_tensors_are_refused(config, error, message, tmp_path):
    make_adapter(tmp_path / "in", 10, 7)
    write_config(tmp_path / "in", **config)
    with pytest.raises(error, match=message):
        read_peft_adapter(tmp_path / "in")


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
