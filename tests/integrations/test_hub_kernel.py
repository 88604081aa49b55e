"""The folder for the Hugging Face Hub: its files, and `kernelize` of a Qwen3-MoE from it."""

import ast
import copy
import sys
from unittest import mock

import pytest
import torch

from moe_layers.integrations.hub_kernel import NAME, main, write_kernel

from ..processes import run_python
from .models import assert_close_gradients, build, draw_tokens, logits_of, step

ALLOWED = {"torch", "triton", "einops"}


@pytest.fixture
def kernels():
    return pytest.importorskip("kernels", minversion="0.12", reason="kernels is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_kernel(tmp_path_factory.mktemp("hub") / "kernel", build=True)


def test_files_are_those_of_the_builder(folder):
    assert {path.name for path in folder.iterdir()} == {"build.toml", "CARD.md", "torch-ext", "build"}
    package = folder / "torch-ext" / NAME.replace("-", "_")
    assert {"__init__.py", "layers.py"} < {path.name for path in package.iterdir()}
    settings = (folder / "build.toml").read_text()
    assert f'name = "{NAME}"' in settings and "[torch-noarch]" in settings
    suffixes = {path.suffix.removeprefix(".") for path in package.rglob("*") if path.is_file()}
    assert suffixes == {"py", "c"} and all(f'"{suffix}"' in settings for suffix in suffixes)


def test_the_card_names_repository_and_version(tmp_path, kernels):
    folder = write_kernel(tmp_path / "new", name="our-experts", version=3)
    assert 'name = "our-experts"\nversion = 3\n' in (folder / "build.toml").read_text()
    card = (folder / "CARD.md").read_text()
    lines = [line.removeprefix("    ") for line in card.splitlines() if line.startswith("    ")]
    names = ("LayerRepository", "kernelize", "replace_kernel_forward_from_hub", "use_kernel_mapping")
    with mock.patch.multiple(kernels, **dict.fromkeys(names, mock.DEFAULT)) as mocks:
        exec("\n".join(lines), {"model": None})
    arguments = {"layer_name": "MoEExperts", "version": 3, "trust_remote_code": ["OWNER/our-experts"]}
    mocks["LayerRepository"].assert_called_once_with("OWNER/our-experts", **arguments)


def test_only_dependencies_of_the_hub_are_imported(folder):
    for path in folder.rglob("*.py"):
        # Triton's interpreter computes with NumPy.
        allowed = ALLOWED | sys.stdlib_module_names | ({"numpy"} if path.name == "triton.py" else set())
        source = path.read_text()
        assert "torch.ops.moe_kernels" not in source and '"moe_kernels::' not in source, path
        for node in ast.walk(ast.parse(source, feature_version=(3, 9))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, (path, name)


PROGRAM = """
import importlib.util, sys, torch
def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
module = load(sys.argv[1], "_unique_name")
assert not {name for name in sys.modules if name.split(".")[0] in ("moe_kernels", "moe_layers")}
names = {name for name in torch._C._dispatch_get_all_op_names() if "moe_layers_experts" in name}
assert any(name.split("::")[1].startswith("grouped_gemm") for name in names), names
assert not [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_kernels::")]
import moe_kernels  # beside it
a, b, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([2, 6], dtype=torch.int32)
assert torch.equal(module.grouped_gemm(a, b, offsets), moe_kernels.grouped_gemm(a, b, offsets))
"""


def test_it_is_alone_and_beside_the_package(folder):
    """Nothing of the installed packages is imported, and both may be in one process."""
    run_python(["-c", PROGRAM, folder / "build" / "torch-universal"])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("training", [False, True])
def test_kernelize(model_type, training, folder, kernels, device):
    model = build(model_type, device)
    own = copy.deepcopy(model)
    kind = next(type(module) for module in model.modules() if type(module).__name__.endswith("Experts"))
    before = kind.__dict__["forward"]
    kernels.replace_kernel_forward_from_hub(kind, "MoEExperts")
    repository = kernels.LocalLayerRepository(folder, layer_name="MoEExperts")
    try:
        with kernels.use_kernel_mapping({"MoEExperts": {device: repository}}):
            mode = kernels.Mode.TRAINING if training else kernels.Mode.INFERENCE
            kernels.kernelize(model.train(training), mode=mode, device=device, use_fallback=False)
        replaced = [module for module in model.modules() if type(module) is kind and "forward" in vars(module)]
        assert len(replaced) >= 1
        if training:
            tokens = draw_tokens(model)
            actual, expected = step(model, tokens), step(own.train(), tokens)
            torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-4)
            assert_close_gradients(actual[2], expected[2], 1e-4)
        else:
            torch.testing.assert_close(logits_of(model), logits_of(own), rtol=1e-4, atol=1e-4)
    finally:
        del kind.kernel_layer_name
        kind.forward = before


@pytest.mark.parametrize("called_before", [False, True])
def test_compiled_without_graph_breaks(called_before, folder, kernels, device):
    experts = build("qwen3_moe", device).model.layers[0].mlp.experts
    tokens = torch.randn(6, experts.hidden_dim, device=device, requires_grad=True)
    ids = torch.rand(6, experts.num_experts, device=device).topk(2).indices
    weights = torch.rand(6, 2, device=device)
    expected = experts(tokens, ids, weights)
    layer = kernels.LocalLayerRepository(folder, layer_name="MoEExperts").load()
    experts.forward = layer.forward.__get__(experts)
    if called_before:
        experts(tokens, ids, weights)
    out = torch.compile(experts, backend="aot_eager", fullgraph=True)(tokens, ids, weights)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    out.sum().backward()
    assert tokens.grad.any() and experts.down_proj.grad.any()


def test_bad_input(tmp_path, capsys):
    for arguments in (["--name", "Not-Lower"], ["--version", "0"]):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "new"), *arguments])
        assert "name must be words joined by -" in capsys.readouterr().err
    (tmp_path / "a.txt").touch()
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "must be empty or not exist" in capsys.readouterr().err
    assert main([str(tmp_path / "new")]) == 0 and not (tmp_path / "new" / "build").exists()
