import copy
import importlib.machinery
import json
import re
import shutil
import sys
import types
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_kernels.quantization.quantize import quantize
from moe_kernels.types import WeightFormat
from moe_layers import MoEFeedForward
from moe_layers.checkpoint.model.convert import convert

from ..layers import moe_layer
from .golden import FASTEST, GOLDEN, Golden

from_checkpoint = MoEFeedForward.from_checkpoint


def copy_case(case, directory, change=lambda tensors: None, config=None):
    """Write a golden case as one file, changed by `change`, with fields of the configuration replaced."""
    golden = Golden(case)
    tensors = golden.tensors("model")
    change(tensors)
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**golden.config, **(config or {})}))
    return golden


def shard(directory, num_files=3):
    """Distribute the tensors of model.safetensors over files, neighbours into different ones."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % num_files + 1}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def shorten(tensors, *kept):
    """Round the tensors to bfloat16, except those whose names end with one of `kept`."""
    for name in tensors:
        if not name.endswith(kept):
            tensors[name] = tensors[name].bfloat16()


def add_copies(tensors, old, new, added=1):
    """Add the tensors whose names begin with `old` under names that begin with `new`, with `added` added to values."""
    tensors |= {new + name.removeprefix(old): tensors[name] + added for name in tensors if name.startswith(old)}


def add_head(tensors):
    """Add a tensor that is not of the block."""
    tensors["lm_head.weight"] = torch.ones(3)


def test_only_the_shards_of_the_block_are_needed(tmp_path):
    golden = copy_case("mixtral", tmp_path, add_head)
    whole = from_checkpoint(tmp_path, golden.layer)
    weight_map = shard(tmp_path, 99)
    needed = {file for name, file in weight_map.items() if name.startswith(golden.prefix)}
    experts = re.compile(r"experts\.[^01]\.")
    first_two = {weight_map[name] for name in weight_map if name.startswith(golden.prefix) and not experts.search(name)}
    assert first_two < needed < set(weight_map.values())
    for file in set(weight_map.values()) - needed:
        (tmp_path / file).unlink()
    assert same_state(from_checkpoint(tmp_path, golden.layer), whole)
    for file in needed - first_two:
        (tmp_path / file).unlink()
    part = from_checkpoint(tmp_path, golden.layer, experts=range(2))
    assert torch.equal(part.experts.w_up, whole.experts.w_up[:2])
    missing = r"files that do not exist: model-\d+\.safetensors, .*, and 3 more \(for instance for .*experts\.[23]"
    with pytest.raises(ValueError, match=missing):
        from_checkpoint(tmp_path, golden.layer)


class FakeHub(types.ModuleType):
    """A huggingface_hub of one model. Its cache has a folder for each commit."""

    def __init__(self, source, cache):
        super().__init__("huggingface_hub")
        self.__spec__ = importlib.machinery.ModuleSpec("huggingface_hub", None)
        self.source, self.cache, self.commits, self.revisions = source, cache, iter("abc"), []

    def snapshot_download(self, repo_id, *, revision=None, allow_patterns):
        if repo_id != "org/model":
            raise OSError(f"404: {repo_id}")
        self.revisions.append(revision)
        folder = self.cache / (revision or next(self.commits))
        folder.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            if (self.source / pattern).is_file():
                shutil.copy(self.source / pattern, folder)
        return str(folder)


@pytest.mark.parametrize("num_files", [1, 99])
def test_a_model_of_the_hub(num_files, tmp_path, monkeypatch):
    source, cache = tmp_path / "source", tmp_path / "cache"
    cache.mkdir()
    golden = copy_case("mixtral", source, add_head)
    weight_map = shard(source, num_files) if num_files > 1 else {}
    hub = FakeHub(source, cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    layer = from_checkpoint("org/model", golden.layer)
    assert same_state(layer, from_checkpoint(source, golden.layer))
    needed = {file for name, file in weight_map.items() if name.startswith(golden.prefix)}
    names = {"model.safetensors.index.json"} if num_files > 1 else {"model.safetensors"}
    assert {path.name for path in (cache / "a").iterdir()} == {"config.json", *names, *needed}
    assert hub.revisions[0] is None and set(hub.revisions[1:]) == {"a"}
    with pytest.raises(ValueError, match=r"no directory org/other, and the Hugging Face Hub gives no .*404: org/other"):
        from_checkpoint("org/other")


def test_a_name_of_the_hub_without_its_client(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="install huggingface_hub, or download it: hf download org/model --local-dir"):
        from_checkpoint("org/model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    copy_case("mixtral", tmp_path / "org" / "model")
    from_checkpoint("org/model", Golden("mixtral").layer)  # a directory comes first


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "llama4"])
def test_another_number_of_experts_in_the_configuration(case, tmp_path):
    golden = Golden(case)
    name = "num_local_experts" if "num_local_experts" in golden.config else "num_experts"
    held = golden.config[name]
    for wrong in (held - 1, 2 * held):
        copy_case(case, tmp_path, config={name: wrong})
        message = rf"gives block {golden.prefix} {wrong} experts, but its .* of {held}: model"
        with pytest.raises(ValueError, match=message):
            from_checkpoint(tmp_path, golden.layer)


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_dtype(dtype, expected, device):
    golden = Golden("deepseek_v3")
    layer, report = from_checkpoint(golden.directory, golden.layer, dtype=dtype, device=device, return_report=True)
    assert {parameter.dtype for parameter in layer.parameters()} == {expected}
    assert {parameter.device.type for parameter in layer.parameters()} == {device}
    assert layer.router.selection_bias.dtype == torch.float32
    assert bool(report.dtype_changes) == (dtype is not None)
    if dtype is not None:
        name = f"{golden.prefix}experts.3.up_proj.weight"
        assert report.dtype_changes[name] == (torch.float32, torch.bfloat16)
        assert torch.equal(layer.experts.w_up[3, 24:].cpu(), golden.tensors("model")[name].bfloat16())


def test_a_router_stays_float32_beside_shorter_experts(tmp_path):
    """The router computes in float32 and is saved in float32, like ERNIE-4.5's."""
    golden = copy_case("deepseek_v3", tmp_path / "source", lambda t: shorten(t, "gate.weight", "correction_bias"))
    gate = golden.tensors("model")[f"{golden.prefix}gate.weight"]
    layer, report = from_checkpoint(tmp_path / "source", golden.layer, return_report=True)
    assert not report.dtype_changes
    assert layer.experts.w_up.dtype == layer.shared_expert.w_up.dtype == torch.bfloat16
    assert not torch.equal(gate, gate.bfloat16().float()) and torch.equal(layer.router.weight, gate)
    x = torch.randn(50, layer.d_model).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    assert torch.equal(layer.router(x).logits, x.float() @ gate.t())
    layer.save_checkpoint(tmp_path / "copy")
    assert same_state(from_checkpoint(tmp_path / "copy", golden.layer), layer)
    rounded, report = from_checkpoint(tmp_path / "source", golden.layer, dtype=torch.bfloat16, return_report=True)
    assert rounded.router.weight.dtype == torch.bfloat16
    assert list(report.dtype_changes) == [f"{golden.prefix}gate.weight"]


@pytest.mark.parametrize(
    "name", ["experts.2.up_proj.weight", "shared_experts.down_proj.weight", "experts.7.down_proj.weight"]
)
def test_no_weight_is_rounded_unasked(name, tmp_path):
    golden = Golden("deepseek_v3")
    copy_case("deepseek_v3", tmp_path, lambda tensors: shorten(tensors, golden.prefix + name, "correction_bias"))
    with pytest.raises(ValueError, match=rf"need a dtype, .*: {re.escape(golden.prefix + name)} of torch.float32 to"):
        from_checkpoint(tmp_path, golden.layer)
    for dtype in (torch.float32, torch.bfloat16):
        assert from_checkpoint(tmp_path, golden.layer, dtype=dtype).experts.w_up.dtype == dtype


@pytest.mark.parametrize("in_float32", [("weight", "bias"), ("bias",), ("weight",)], ids=str)
def test_parts_of_a_router_stay_float32(in_float32, tmp_path):
    kept = [f"router.{part}" for part in in_float32]
    golden = copy_case("gpt_oss", tmp_path, lambda tensors: shorten(tensors, *kept))
    layer = from_checkpoint(tmp_path, golden.layer)
    assert layer.experts.w_up.dtype == torch.bfloat16
    for name in ("weight", "bias"):
        expected = golden.tensors("model")[f"{golden.prefix}router.{name}"]
        assert torch.equal(getattr(layer.router, name), expected if name in in_float32 else expected.bfloat16())
    assert layer(torch.randn(3, layer.d_model).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["fused", "transposed"])
@pytest.mark.parametrize(("d_ff", "ambiguous"), [(12, True), (28, True), (20, False), (16, False)])
def test_scales_of_gate_and_up_together_or_of_each(d_ff, ambiguous, layout, tmp_path):
    """transformers saves scales of each half. The number of scales fits both readings only where a half of the weight
    ends in the second half of a block."""
    prefix, (num_experts, d_model), block = "model.layers.0.mlp.", (4, 32), 16
    tensors = {f"{prefix}gate.weight": torch.randn(num_experts, d_model)}
    for name, shape in (("gate_up_proj", (2 * d_ff, d_model)), ("down_proj", (d_model, d_ff))):
        weight = quantize(torch.randn(num_experts, *shape), WeightFormat("fp8", (block, block)))
        for suffix, part in (("", weight.values), ("_scale_inv", weight.scales)):
            tensors[f"{prefix}experts.{name}{suffix}"] = part if layout == "fused" else part.mT.contiguous()
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}
    config = {"model_type": "qwen3_moe", "hidden_size": d_model, "moe_intermediate_size": d_ff, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "quantization_config": quantization, "moe_layers_layout": layout}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    if ambiguous:
        message = rf"ambiguous: the scales of {prefix}experts.gate_up_proj .* may be of gate and up together or of each"
        with pytest.raises(ValueError, match=message):
            from_checkpoint(tmp_path)
        with pytest.raises(ValueError, match=message):
            convert(tmp_path, tmp_path / "out", "per_expert")
    else:
        convert(tmp_path, tmp_path / "out", "per_expert", dtype=torch.float32)
        expected = from_checkpoint(tmp_path, dtype=torch.float32)
        assert same_state(from_checkpoint(tmp_path / "out"), expected)


def test_a_quantised_router_is_of_the_models_dtype(tmp_path):
    def quantise(tensors):
        shorten(tensors, "correction_bias")
        for name in [name for name in tensors if name.endswith("gate.weight")]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    golden = copy_case("deepseek_v3", tmp_path, quantise, {"quantization_config": quantization})
    layer = from_checkpoint(tmp_path, golden.layer)
    assert layer.router.weight.dtype == layer.experts.w_up.dtype == torch.bfloat16


def test_mxfp4_is_dequantised_bit_for_bit(device):
    golden = Golden("gpt_oss_mxfp4")
    layer, report = from_checkpoint(golden.directory, 0, dtype=torch.float32, device=device, return_report=True)
    expected = golden.tensors("dequant")
    fused = expected[f"{golden.prefix}experts.gate_up_proj"]  # [E, D, 2F]
    up = torch.cat([fused[..., ::2], fused[..., 1::2]], dim=-1).mT
    assert torch.equal(layer.experts.w_up.cpu(), up)
    assert torch.equal(layer.experts.w_down.cpu(), expected[f"{golden.prefix}experts.down_proj"].mT)
    assert report.quantization == ("mxfp4",) and report.family == "F"


@pytest.mark.parametrize(("d_model", "d_ff"), [(64, 24), (130, 129)])
@pytest.mark.parametrize("block", [[128, 128], [16, 32]])
def test_float8_blocks(d_model, d_ff, block, tmp_path, device):
    generator = torch.Generator().manual_seed(0)
    prefix = "model.layers.1.mlp."
    tensors, expected = {}, {}
    for e in range(16):
        for name in ("gate", "up", "down"):
            shape = (d_model, d_ff) if name == "down" else (d_ff, d_model)
            key = f"{prefix}experts.{e}.{name}_proj.weight"
            tensors[key] = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), generator=generator)
            tensors[f"{key}_scale_inv"] = scale
            rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
            expected[e, name] = tensors[key].float() * scale[rows][:, columns]
    tensors[f"{prefix}gate.weight"] = torch.randn(16, d_model, generator=generator).bfloat16()
    tensors[f"{prefix}gate.e_score_correction_bias"] = torch.randn(16, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors")
    shard(tmp_path, 5)
    config = {**Golden("deepseek_v3").config, "hidden_size": d_model, "moe_intermediate_size": d_ff}
    config |= {"model_type": "mimo_v2_flash"}  # DeepSeek-V3 without a shared expert
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    layer, report = from_checkpoint(tmp_path, 1, dtype=torch.float32, device=device, return_report=True)
    for e in range(16):
        assert torch.equal(layer.experts.w_up[e, :d_ff].cpu(), expected[e, "gate"])
        assert torch.equal(layer.experts.w_up[e, d_ff:].cpu(), expected[e, "up"])
        assert torch.equal(layer.experts.w_down[e].cpu(), expected[e, "down"])
    assert report.quantization == ("float8",)
    half = from_checkpoint(tmp_path, 1, experts=range(3, 5))
    assert torch.equal(half.experts.w_down, layer.experts.w_down[3:5].cpu())


@pytest.mark.parametrize("case", ["mixtral", "llama4", "gpt_oss", "dbrx", "gpt_oss_mxfp4", "deepseek_v3", "qwen2_moe"])
def test_a_range_of_experts(case, device):
    """Each rank's layer holds only its experts, and the ranks' outputs sum to the whole layer's."""
    golden = Golden(case)
    options = {"dtype": torch.float32, "device": device, "implementation": FASTEST}
    whole = from_checkpoint(golden.directory, golden.layer, **options)
    x = golden.tensors("golden")["x"].to(device)
    num_experts = whole.num_experts
    total = 0
    for experts in (range(0, 1), range(1, 3), range(3, num_experts)):
        part, report = from_checkpoint(golden.directory, golden.layer, experts=experts, return_report=True, **options)
        assert torch.equal(part.experts.w_up, whole.experts.w_up[experts.start : experts.stop])
        assert torch.equal(part.experts.w_down, whole.experts.w_down[experts.start : experts.stop])
        assert report.experts == experts
        y = part(x)
        part.shared_expert = None
        total = total + part(x)
    if whole.shared_expert is not None:
        total = total + (y - part(x))
    torch.testing.assert_close(total, whole(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "experts", [range(0), range(2, 2), range(0, 9), range(-1, 2), range(0, 4, 2), [0, 1], slice(0, 2)]
)
def test_bad_ranges(experts):
    with pytest.raises(ValueError, match="experts must"):
        from_checkpoint(GOLDEN / "qwen3_moe", 1, experts=experts)


def test_layer_by_prefix():
    """In an encoder-decoder, a number means an encoder layer; a prefix selects the decoder's."""
    golden = Golden("switch_transformers")
    model = golden.tensors("model")
    encoder, decoder = "encoder.block.0.layer.1.mlp.", "decoder.block.0.layer.2.mlp."
    for layer, prefix in [(0, encoder), (decoder, decoder), (decoder.rstrip("."), decoder)]:
        moe, report = from_checkpoint(golden.directory, layer, return_report=True)
        assert report.prefix == prefix
        assert torch.equal(moe.router.weight, model[f"{prefix}router.classifier.weight"])


def test_layers_beside_the_model_are_told_apart(tmp_path):
    """Layers for multi-token prediction have experts, too."""

    def add_mtp(tensors):
        add_copies(tensors, "model.layers.1.mlp.", "mtp.layers.1.mlp.")
        add_copies(tensors, "model.layers.1.mlp.", "model.layers.2.mlp.", 2)

    golden = copy_case("deepseek_v3", tmp_path, add_mtp)
    layer = from_checkpoint(tmp_path, 1)
    assert same_state(layer, from_checkpoint(golden.directory, 1))


@pytest.mark.parametrize("stack", ["mtp.layers", "mtp", "model.visual.blocks"])
def test_a_number_means_no_layer_of_another_stack(stack, tmp_path):
    """Layer 0 of this model has no experts, that of the other stack has."""
    copy_case("qwen3_next", tmp_path, partial(add_copies, old="model.layers.1.mlp.", new=f"{stack}.0.mlp."))
    with pytest.raises(ValueError, match=rf"no MoE block in layer 0; its MoE blocks: {stack}\.0\.mlp\., model"):
        from_checkpoint(tmp_path, 0)
    layer = from_checkpoint(tmp_path, f"{stack}.0.mlp")
    layer.save_checkpoint(tmp_path / "saved")
    assert same_state(layer, from_checkpoint(tmp_path / "saved", 0))


def test_each_part_of_a_model_has_its_own_configuration(tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensor = tensors.pop(name)
            tensors |= {f"thinker.{name}": tensor, f"talker.{name}": tensor + 1}

    golden = copy_case("qwen3_moe", tmp_path, rename)
    texts = {part: {**golden.config, "num_experts_per_tok": top_k} for part, top_k in (("thinker", 2), ("talker", 3))}
    config = {f"{part}_config": {"model_type": f"omni_{part}", "text_config": text} for part, text in texts.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "omni", **config}))
    for layer, prefix, top_k in [(1, "thinker", 2), ("talker.model.layers.1.mlp", "talker", 3)]:
        loaded, report = from_checkpoint(tmp_path, layer, return_report=True)
        assert report.prefix == f"{prefix}.model.layers.1.mlp." and loaded.config.top_k == top_k
        loaded.save_checkpoint(tmp_path / prefix)
        again = from_checkpoint(tmp_path / prefix, 1)
        assert again.config == loaded.config and same_state(again, loaded)


def test_parameters_are_aligned_and_contiguous():
    layer = from_checkpoint(GOLDEN / "llama4", 1)
    assert all(parameter.is_contiguous() and parameter.data_ptr() % 16 == 0 for parameter in layer.parameters())
    assert all(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_composite_models(prefix, tmp_path):
    """Load the language model of a vision-language model, with old and new prefixes."""

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)

    golden = copy_case("llama4", tmp_path, rename)
    config = {"model_type": "llama4", "text_config": golden.config, "vision_config": {"model_type": "vit"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = from_checkpoint(tmp_path, 1)
    assert same_state(layer, from_checkpoint(golden.directory, 1))


def test_single_file_wins_over_a_stale_index(tmp_path):
    copy_case("qwen3_moe", tmp_path)
    shutil.copy(tmp_path / "config.json", tmp_path / "model.safetensors.index.json")
    from_checkpoint(tmp_path, 1)


@pytest.mark.parametrize("options", [{}, {"num_zero_experts": 2}, {"capacity": 3, "top_k": 1}], ids=str)
def test_parts_know_the_routing_of_all_experts(options, device):
    """Gradients of the parts also add up to those of the whole layer. Experts are kept once."""
    torch.manual_seed(0)
    options = {"d_model": 8, "d_ff": 4, "num_experts": 6, "top_k": 2, "init_std": 0.5, **options}
    whole = moe_layer(**options, device=device, implementation=FASTEST)
    x = torch.randn(2, 9, 8, device=device, requires_grad=True)
    y, routing = whole(x, return_routing=True)
    gradients = torch.autograd.grad(y.sin().sum(), [x, *whole.experts.parameters()])
    parts = [copy.deepcopy(whole) for _ in range(2)]
    with pytest.raises(ValueError, match=r"must lie in range\(0, 6\)"):
        parts[0].keep_local_experts(range(5, 7))
    for part, experts in zip(parts, (range(0, 2), range(2, 6)), strict=True):
        part.keep_local_experts(experts)
        with pytest.raises(ValueError, match="all still here"):
            part.keep_local_experts(range(0, 1))
    outputs = []
    for part in parts:
        out, part_routing = part(x, return_routing=True)
        assert torch.equal(part_routing.tokens_per_expert, routing.tokens_per_expert)
        outputs.append(out)
    if options.get("num_zero_experts"):
        return  # each part adds the zero experts' share
    total = sum(outputs)
    torch.testing.assert_close(total, y)
    leaves = [x, *parts[0].experts.parameters(), *parts[1].experts.parameters()]
    grad_x, *grads = torch.autograd.grad(total.sin().sum(), leaves)
    torch.testing.assert_close(grad_x, gradients[0], rtol=1e-4, atol=1e-5)
    half = len(grads) // 2
    for first, second, expected in zip(grads[:half], grads[half:], gradients[1:], strict=True):
        torch.testing.assert_close(torch.cat([first, second]), expected, rtol=1e-4, atol=1e-5)
