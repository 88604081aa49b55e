"""Loads gpt-oss with its published MXFP4 blocks, for `enable` and for LoRA.

    config = keep_mxfp4(AutoConfig.from_pretrained("openai/gpt-oss-20b"))
    model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", config=config)
    print(enable(model))

transformers' own MXFP4 experts reorder the bytes for the kernels of the GPU's architecture. With `keep_mxfp4`, the
experts remain `GptOssExperts`. A parametrization computes each weight from the stored blocks, so other code reads the
dequantised weight. `save_pretrained` writes the published names and bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ....checks import is_dtensor
from .parametrized import StoredMxfp4

__all__ = ["keep_mxfp4"]

_METHOD = "moe_layers_mxfp4"
_PUBLISHED = "mxfp4"
_WEIGHTS = ("gate_up_proj", "down_proj")


def keep_mxfp4(config: Any) -> Any:
    """Return a copy of gpt-oss's configuration with which `from_pretrained` keeps the experts in MXFP4.

    Raises:
        ValueError: the configuration does not describe a gpt-oss model in MXFP4.
    """
    quantization = getattr(config, "quantization_config", None)
    quantization = quantization if isinstance(quantization, dict) else {}
    method, model_type = quantization.get("quant_method"), getattr(config, "model_type", None)
    if model_type != "gpt_oss" or method != _PUBLISHED:
        raise ValueError(
            f"keep_mxfp4: config must have model_type 'gpt_oss' and quant_method {_PUBLISHED!r}, "
            f"got {model_type!r} and {method!r}"
        )
    config = copy.deepcopy(config)
    config.quantization_config = {**quantization, "quant_method": _METHOD}
    return config


@register_quantization_config(_METHOD)
class _KeepMxfp4Config(QuantizationConfigMixin):
    """The quantisation settings of a published gpt-oss. `to_dict` returns the published settings."""

    def __init__(self, **settings: Any):
        self.settings = {**settings, "quant_method": _PUBLISHED}
        self.quant_method = _METHOD  # pyright: ignore[reportAttributeAccessIssue]  # transformers expects an enum

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.settings)


@register_quantizer(_METHOD)
class _KeepMxfp4Quantizer(HfQuantizer):
    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **options: Any) -> None:
        """Replace weights by empty parameters named as in the files. transformers then loads the bytes unconverted."""
        for _, experts in _experts_of(model):
            for name in _WEIGHTS:
                num_experts, size_in, size_out = getattr(experts, name).shape
                if size_in % 32:
                    raise ValueError(f"keep_mxfp4: inputs of {name} must be whole blocks of 32, got {size_in}")
                delattr(experts, name)
                for part, shape in (("blocks", (size_in // 32, 16)), ("scales", (size_in // 32,))):
                    empty = torch.empty(num_experts, size_out, *shape, dtype=torch.uint8, device="meta")
                    experts.register_parameter(f"{name}_{part}", nn.Parameter(empty, requires_grad=False))
            experts._is_hf_initialized = True  # skip `_init_weights`, which reads the deleted weights

    def _process_model_after_weight_loading(self, model: nn.Module, **options: Any) -> None:
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise ValueError("keep_mxfp4: each rank must hold all experts, got tensor or expert parallelism")
        for path, experts in _experts_of(model):
            for name in _WEIGHTS:
                blocks, scales = (_taken(path, experts, f"{name}_{part}") for part in ("blocks", "scales"))
                experts.register_parameter(name, nn.Parameter(blocks, requires_grad=False))
                stored = StoredMxfp4(scales, getattr(experts, f"{name}_bias").dtype)
                parametrize.register_parametrization(experts, name, stored, unsafe=True)  # unsafe: the shape changes

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = model.state_dict()
        for path, _ in _experts_of(model):
            for name in _WEIGHTS:
                held = f"{path}.parametrizations.{name}"
                state[f"{path}.{name}_blocks"] = state.pop(f"{held}.original")
                state[f"{path}.{name}_scales"] = state.pop(f"{held}.0.scales")
        return state, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:  # adapters can be trained, as can all parameters except the experts' weights
        return True


def _experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in list(model.named_modules()):
        if parametrize.type_before_parametrizations(module).__name__ == "GptOssExperts":
            yield path, module


def _taken(path: str, experts: nn.Module, name: str) -> Tensor:
    """Remove a parameter from the experts, and return it."""
    parameter = experts.get_parameter(name)
    if not getattr(parameter, "_is_hf_initialized", False):
        raise ValueError(f"keep_mxfp4: the checkpoint must hold {path}.{name}, which is missing")
    if is_dtensor(parameter) or parameter.is_meta:
        raise ValueError(f"keep_mxfp4: the experts must be whole and in memory, got {path}.{name} sharded or offloaded")
    delattr(experts, name)
    return parameter.detach()
