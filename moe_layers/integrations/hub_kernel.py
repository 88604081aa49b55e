"""Writes a kernel for the Hugging Face Hub: `python -m moe_layers.integrations.hub_kernel DIR`.

The folder DIR has the layout of Hugging Face's kernel-builder for kernels without compiled code ("noarch"). The folder
holds a copy of `moe_kernels` and the stateless layer `MoEExperts`. The ops of the copy are registered in a separate
namespace. The forward of `MoEExperts` replaces the forward of experts modules of transformers. With `--build`, the
folder also holds the built variant, which the library `kernels` can load without the Hub.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from moe_kernels import __version__

__all__ = ["write_kernel"]

NAME = "moe-layers-experts"
_KERNELS = Path(__file__).parents[2] / "moe_kernels"
_RECOGNITION = Path(__file__).parent / "transformers" / "experts" / "activation.py"
_LEFT_OUT = ("tools", "__main__.py", "py.typed", "__pycache__")
_NAMESPACE = re.compile(r'"moe_kernels(::|")|(?<=torch\.ops\.)moe_kernels\b')

_BUILD = """[general]
name = "{name}"
version = {version}
edition = 6
license = "Apache-2.0"
backends = ["cuda", "cpu"]
python-depends = ["einops"]

[torch-noarch]
pyext = ["py", "c"]
"""

_INIT = '''"""Experts of Mixture-of-Experts models: grouped GEMMs in Triton, forward and backward."""

from . import layers
from .moe_kernels import fused_experts, grouped_gemm, grouped_gemm_wgrad, sort_by_expert

__all__ = ["fused_experts", "grouped_gemm", "grouped_gemm_wgrad", "layers", "sort_by_expert"]
'''

_LAYERS = '''"""Layers for `kernelize`, without state of their own."""

import torch
from torch import Tensor, nn

from .moe_kernels.experts.fused import compute_chosen
from .moe_kernels.runtime.pytorch import called_while_traced
from .moe_kernels.types import ExpertWeights
from .recognition import recognise_gated, recognise_plain

_ACTIVATION = "_moe_layers_activation"  # attribute of an experts module, from its first call


@called_while_traced
def _recognise_once(experts):
    if hasattr(experts, _ACTIVATION):
        return
    if getattr(experts, "has_post_expert_norm", False):
        raise ValueError("MoEExperts: experts must have no norm behind them, got post_expert_norm")
    if getattr(experts, "has_gate", True):
        interleaved = not getattr(experts, "is_concatenated", True)
        activation = recognise_gated(experts, experts._apply_gate, interleaved=interleaved)
    else:
        activation = recognise_plain(experts, experts.act_fn)
    setattr(experts, _ACTIVATION, activation)


class MoEExperts(nn.Module):
    """The forward of an experts module of transformers. This forward reads `gate_up_proj` or `up_proj`, `down_proj` and
    their biases, and returns each token's weighted sum over its experts."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        top_k_index: Tensor,  # [T, K]
        top_k_weights: Tensor,  # [T, K]
    ) -> Tensor:  # [T, D]
        _recognise_once(self)
        gated = getattr(self, "has_gate", True)
        name = "gate_up_proj" if gated else "up_proj"
        up, down = getattr(self, name), self.down_proj
        if getattr(self, "is_transposed", False):
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        biases = (None, None)
        if getattr(self, "has_bias", False):
            biases = getattr(self, name + "_bias"), self.down_proj_bias
        weights = top_k_weights if top_k_weights.dtype == torch.float64 else top_k_weights.float()
        parts, activation = ExpertWeights(up, down, *biases), getattr(self, _ACTIVATION)
        return compute_chosen(hidden_states, top_k_index, weights, parts, activation=activation)
'''

_CARD = """---
license: apache-2.0
tags: [kernels, mixture-of-experts]
---

# {name}

The routed experts of Mixture-of-Experts models of transformers, in Triton, forward and backward. Made from
`moe_kernels` {release}. The kernel needs PyTorch 2.10, Triton 3.6 and einops. Without a GPU, the kernel computes in
plain PyTorch.

    from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    replace_kernel_forward_from_hub(Qwen3MoeExperts, "MoEExperts")
    name = "OWNER/{name}"
    repository = LayerRepository(name, layer_name="MoEExperts", version={version}, trust_remote_code=[name])
    with use_kernel_mapping({{"MoEExperts": {{"cuda": repository}}}}):
        model = kernelize(model, mode=Mode.TRAINING)
"""


def write_kernel(directory: str | os.PathLike[str], *, name: str = NAME, version: int = 1, build: bool = False) -> Path:
    """Write the folder of the kernel, and return its path.

    Args:
        directory: the folder, which must be empty or not exist.
        name: name of the repository: lower-case words joined by "-". Default "moe-layers-experts".
        version: version of the kernel on the Hub, at least 1. Default 1.
        build: also write the built variant, `build/torch-universal`, as kernel-builder does. Default False.

    Raises:
        ValueError: the folder is not empty, `name` is not lower-case words joined by "-", or `version` is below 1.
    """
    if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) is None or version < 1:
        raise ValueError(f"write_kernel: name must be words joined by -, version positive, got {name!r} and {version}")
    target = Path(directory)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"write_kernel: {target} must be empty or not exist")
    package = name.replace("-", "_")
    files = _sources()
    digest = hashlib.sha256("".join(f"{path}{text}" for path, text in sorted(files.items())).encode()).hexdigest()[:12]
    namespace = f"_{package}_{digest}"  # unique per content, because a process may load several versions
    for path, text in files.items():
        if path.endswith(".py"):
            files[path] = _NAMESPACE.sub(lambda found: found[0].replace("moe_kernels", namespace), text)
    _write(target, {"build.toml": _BUILD.format(name=name, version=version)})
    _write(target, {"CARD.md": _CARD.format(name=name, version=version, release=__version__)})
    _write(target / "torch-ext" / package, files)
    if build:
        variant = target / "build" / "torch-universal"
        shutil.copytree(target / "torch-ext" / package, variant)
        metadata = {"name": name, "id": namespace, "version": version, "license": "Apache-2.0"}
        metadata |= {"python-depends": ["einops"], "backend": {"type": "cpu"}}
        _write(variant, {"metadata.json": json.dumps(metadata, indent=2) + "\n"})
    return target


def _sources() -> dict[str, str]:
    """Return path -> text for the kernel's files. recognition.py imports the kernel's own copy of `moe_kernels`."""
    recognition = _RECOGNITION.read_text(encoding="utf-8")
    for old, new in (("from moe_kernels", "from .moe_kernels"), ("from ....checks", "from .moe_kernels.errors")):
        recognition = recognition.replace(old, new)
    files = {"__init__.py": _INIT, "layers.py": _LAYERS, "recognition.py": recognition}
    for path in sorted(_KERNELS.rglob("*")):
        relative = path.relative_to(_KERNELS)
        if path.is_file() and not set(relative.parts) & set(_LEFT_OUT):
            files[f"moe_kernels/{relative.as_posix()}"] = path.read_text(encoding="utf-8")
    return files


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", metavar="DIR", help="must be empty or not exist")
    parser.add_argument("--name", default=NAME, help="of the repository; default: %(default)s")
    parser.add_argument("--version", type=int, default=1, help="of the kernel on the Hub; default: %(default)s")
    parser.add_argument("--build", action="store_true", help="also write the built variant, for local use")
    options = parser.parse_args(arguments)
    try:
        written = write_kernel(options.directory, name=options.name, version=options.version, build=options.build)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
