"""Imports point one way: between the packages, their folders and their files."""

import ast
from functools import cache

import pytest

import moe_kernels
import moe_layers

from ..processes import ROOT, run_python
from ..tiers import slow

# The floors of each package from the bottom up. A module imports only from floors listed above its own, including
# deferred and type-only imports.
FLOORS = {
    "moe_kernels": [
        ["errors"],
        ["runtime.triton", "specs", "types"],
        ["reference"],
        ["reference_fp8"],
        ["testing", "runtime"],
        ["quantization"],
        ["activation"],
        ["gemm.arguments", "gemm.tile_table"],
        ["gemm.kernel"],
        ["gemm.kernels"],
        ["gemm"],
        ["permutation"],
        ["routing"],
        ["experts"],
        ["tools"],
        ["__init__"],
        ["__main__"],
    ],
    "moe_layers": [
        ["checks"],
        ["autocast", "architectures", "input"],
        ["routing"],
        ["experts", "balance", "memory"],
        ["config"],
        ["parallel"],
        ["integrations.transformers.experts"],
        ["integrations.transformers.routers"],
        ["integrations.transformers.enabling"],
        ["integrations.transformers.sharding"],
        ["integrations"],
        ["checkpoint.files"],
        ["checkpoint.layer"],
        ["checkpoint.model"],
        ["checkpoint.adapters"],
        ["checkpoint"],
        ["feed_forward"],
        ["whole_models", "serving"],
        ["__init__"],
        ["__main__"],
    ],
}

# Internal modules of `moe_kernels` that `moe_layers` may import in addition to the public names.
INTERNAL = {
    "moe_kernels.activation.functions",
    "moe_kernels.errors",
    "moe_kernels.experts.chunked",
    "moe_kernels.experts.fused",
    "moe_kernels.experts.main_grad",
    "moe_kernels.experts.steps",
    "moe_kernels.gemm.batch_invariance",
    "moe_kernels.permutation.partial_sums",
    "moe_kernels.quantization.decode",
    "moe_kernels.quantization.formats",
    "moe_kernels.quantization.fp8_weights",
    "moe_kernels.quantization.ops",
    "moe_kernels.quantization.quantize",
    "moe_kernels.reference",
    "moe_kernels.routing.linear_op",
    "moe_kernels.routing.routers",
    "moe_kernels.routing.scored",
    "moe_kernels.routing.statistics",
    "moe_kernels.runtime.dispatch",
    "moe_kernels.runtime.pytorch",
    "moe_kernels.specs",
    "moe_kernels.types",
}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in FLOORS
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def imports_of(name):
    """Return the dotted names of the modules that a module imports, and imported names that are modules."""
    package, names = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                names.add(full if full in MODULES or f"{full}.__init__" in MODULES else source)
    return names


def floor_of(name):
    """Return the floor of a module: the longest listed name that equals or contains it."""
    package, *rest = name.removesuffix(".__init__").split(".")
    rest = rest or ["__init__"]
    for length in range(len(rest), 0, -1):
        room = ".".join(rest[:length])
        for floor, rooms in enumerate(FLOORS[package]):
            if room in rooms:
                return floor, room
    raise AssertionError(f"{name} lies in no listed room")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    package = name.split(".")[0]
    floor, room = floor_of(name)
    for imported in imports_of(name):
        top = imported.split(".")[0]
        assert top not in {"tests", "benchmarks", "examples"}
        if top == package and imported != package:
            other_floor, other_room = floor_of(imported)
            assert other_floor < floor or other_room == room, f"{name} imports {imported}"
        elif package == "moe_kernels":
            assert top != "moe_layers"
        elif top == "triton":
            raise AssertionError(f"{name} imports {imported}")
        elif top == "moe_kernels":
            assert imported == "moe_kernels" or imported in INTERNAL, f"{name} imports {imported}"


def test_no_import_circles():
    graph = {name: {n if n in MODULES else f"{n}.__init__" for n in imports_of(name)} for name in MODULES}
    # Importing a module first runs its package's __init__, which holds only re-exports.
    graph = {name: others & graph.keys() for name, others in graph.items() if not name.endswith("__init__")}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_layers_import_public_names_alone():
    public = {*moe_kernels.__all__, "__version__"}
    for name, path in MODULES.items():
        if name.startswith("moe_layers"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "moe_kernels":
                    assert {alias.name for alias in node.names} <= public, name


def test_only_the_runtime_knows_triton_versions_and_private_apis():
    for name, path in MODULES.items():
        if not name.startswith("moe_kernels.runtime"):
            text = path.read_text()
            assert "TRITON_VERSION" not in text and "torch._C" not in text, name


def test_reference_imports_only_torch_and_einops():
    """Imports between the modules of facts are those that `test_imports_point_down` allows."""
    facts, everywhere = ("errors", "specs", "types"), {"__future__", "collections", "typing", "torch"}
    for name in ("reference", *facts):
        imported = imports_of(f"moe_kernels.{name}") - {f"moe_kernels.{fact}" for fact in facts}
        others = {"einops"} if name == "reference" else {"dataclasses", "math"}
        assert {module.split(".")[0] for module in imported} <= everywhere | others, name


def test_no_module_is_shadowed_by_a_function_of_its_name():
    for package in (moe_kernels, moe_layers):
        children = {name.split(".")[1] for name in MODULES if name.startswith(package.__name__)}
        assert not children & set(package.__all__)


def test_public_names_are_listed_and_few():
    assert len(moe_kernels.__all__) + len(moe_layers.__all__) <= 60
    for package in (moe_kernels, moe_layers):
        assert len(set(package.__all__)) == len(package.__all__)
        assert all(hasattr(package, name) for name in package.__all__)


WITHOUT_OPTIONAL = """
import importlib.util, sys
OPTIONAL = {"transformers", "peft", "trl", "accelerate", "bitsandbytes", "gguf", "kernels"}
OPTIONAL |= {"axolotl", "llamafactory", "swift", "verl", "veomni", "megatron", "torchtitan"}
class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in OPTIONAL else find_spec(name, package)
sys.meta_path.insert(0, Missing)
"""


@slow  # it imports all modules
def test_packages_without_optional_dependencies_import():
    """Only the modules for other libraries need them, and the error names the missing one."""
    code = f"""{WITHOUT_OPTIONAL}
import importlib
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert name.startswith("moe_layers.integrations."), name
        assert error.name.split(".")[0] in OPTIONAL, error
"""
    run_python(["-c", code, *(name.removesuffix(".__init__") for name in MODULES if "__main__" not in name)])


@slow  # it imports all tests
def test_tests_without_optional_dependencies_are_collected():
    run_python(["-c", f"{WITHOUT_OPTIONAL}\nimport pytest\nsys.exit(pytest.main(['--collect-only', '-q', 'tests']))"])


WITHOUT_TRITON = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
sys.modules["triton"] = None
import torch
from moe_kernels import get_kernels, grouped_gemm
from moe_kernels.quantization.ops import pack_rows, unpack_rows
from moe_layers import MoEFeedForward
layer = MoEFeedForward(8, 4, 3, 2)
layer(torch.randn(5, 8)).sum().backward()
assert all(parameter.grad is not None for parameter in layer.parameters())
assert get_kernels()
values, offsets = torch.zeros(2, 128).to(torch.float8_e4m3fn), torch.tensor([2], dtype=torch.int32)
scales = {"scale_a": torch.ones(2, 1), "scale_b": torch.ones(1, 1, 1)}
grouped_gemm(values, torch.zeros(1, 128, 128).to(values.dtype), offsets, out_dtype=torch.float32, **scales)
assert unpack_rows(pack_rows(torch.ones(3, 200)), 200).eq(1).all()
try:
    grouped_gemm(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.ones(1).int(), implementation="triton")
except NotImplementedError as error:
    print(error)
"""


def test_runs_without_triton():
    assert "Triton is not installed" in run_python(["-c", WITHOUT_TRITON], interpret=True).stdout


def test_importing_the_packages_does_not_import_the_compiler():
    slow = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
    code = f"import moe_layers, sys; print(sorted({slow} & set(sys.modules)))"
    assert run_python(["-c", code], interpret=True).stdout == "[]\n"
