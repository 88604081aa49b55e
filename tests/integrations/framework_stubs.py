"""Stand-ins for training frameworks, made from their documented interfaces. Tests prefer an installed framework."""

import importlib
import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace


def axolotl():
    class BasePlugin:
        def pre_model_load(self, cfg): ...

        def post_model_load(self, cfg, model): ...

    return {"axolotl.integrations.base": {"BasePlugin": BasePlugin}}


def llama_factory():
    registry = defaultdict(dict)

    class KernelPlugin:
        def __init__(self, name):
            self.name = name

        def register(self, method_name="__call__"):
            return lambda function: registry[self.name].setdefault(method_name, function)

        def __getitem__(self, method_name):
            return registry[self.name][method_name]

        def __call__(self, *arguments, **options):
            return self["__call__"](*arguments, **options)

    def main():
        command = sys.argv.pop(1)
        assert command == "sft"
        importlib.import_module("llamafactory.v1.trainers.sft_trainer").run_sft()

    return {
        "llamafactory.v1.plugins.model_plugins.kernels.interface": {"KernelPlugin": KernelPlugin},
        "llamafactory.v1.launcher": {"main": main},
    }


def veomni():
    @dataclass(frozen=True)
    class HardwareRequirement:
        device_type: str

    @dataclass(frozen=True)
    class KernelSpec:
        name: str
        op_name: str
        variant: str
        factory: object
        hardware: HardwareRequirement

    class Registry:
        def __init__(self):
            self.specs = {}

        def register(self, spec):
            key = spec.op_name, spec.variant, spec.name
            if key in self.specs:
                raise ValueError(f"Duplicate kernel registration: {key}")
            self.specs[key] = spec

        def resolve(self, op_name, variant, impl_name):
            return self.specs[op_name, variant, impl_name].factory()

    def apply_veomni_fused_moe_patch(fused_moe_kernel="triton"):
        if fused_moe_kernel not in ("triton", "quack", "npu"):
            raise ValueError(f"Invalid fused_moe_kernel: {fused_moe_kernel!r}")

    bound = []
    moe = ModuleType("veomni.ops.kernels.moe")
    moe._fused_moe_forward, moe.apply_veomni_fused_moe_patch = None, apply_veomni_fused_moe_patch
    registry = {"KERNEL_REGISTRY": Registry(), "HardwareRequirement": HardwareRequirement, "KernelSpec": KernelSpec}
    state = SimpleNamespace(ep_enabled=False)
    return {
        "veomni.distributed.parallel_state": {"get_parallel_state": lambda: state},
        "veomni.lora.ops": {"bind_lora_moe_kernels": bound.append, "bound": bound},
        "veomni.ops.kernel_registry": registry,
        "veomni.ops.kernels": {"moe": moe},
    }


# By the name of our module: the distribution, its tested version, the package, and the stand-in.
FRAMEWORKS = {
    "axolotl": ("axolotl", "0.19.0", "axolotl", axolotl),
    "llama_factory": ("llamafactory", "0.9.5", "llamafactory", llama_factory),
    "ms_swift": ("ms-swift", "4.6.0", "swift", lambda: {"swift": {}}),
    "verl": ("verl", "0.9.1", "verl", lambda: {"verl": {}}),
    "veomni": ("veomni", "0.1.12", "veomni", veomni),
}


def install(name, monkeypatch, version=None):
    """Import our module for a framework. A missing framework gets a stand-in until the end of the test.

    Args:
        version: version of a stand-in, which then replaces an installed framework, too. Default: the tested version.
    """
    distribution, tested, package, stub = FRAMEWORKS[name]
    ours = f"moe_layers.integrations.{name}"
    if version is None and importlib.util.find_spec(package) is not None:
        return importlib.import_module(ours)
    for module, contents in stub().items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            made = ModuleType(".".join(parts[:end]))
            made.__path__ = []
            if end == len(parts):
                vars(made).update(contents)
            if end == len(parts) or not isinstance(sys.modules.get(made.__name__), ModuleType):
                monkeypatch.setitem(sys.modules, made.__name__, made)
    known = importlib.import_module("moe_layers.integrations.versions")
    monkeypatch.setattr(known, "version", {distribution: version or tested}.__getitem__)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    module = importlib.import_module(ours)
    monkeypatch.setitem(sys.modules, ours, module)  # so that monkeypatch removes it after the test
    return module
