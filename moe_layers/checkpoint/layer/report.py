"""Reports the use of every tensor of a block, as evidence that a layer was loaded completely."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...config import MoEConfig
from ..files.stored_weights import dtype_name


@dataclass(frozen=True)
class LoadedTensor:
    """One weight of the checkpoint.

    Attributes:
        names: the weight's tensors on disk, which belong to no other weight.
        shape: shape of the weight after decoding; `dtype` is the dtype of its first tensor on disk.
        encoding: "plain", "float8", "float4" or "mxfp4".
        parameter: the parameter that the weight fills, fully or in part; `parts` and `experts` say which part.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    encoding: str
    parameter: str
    parts: tuple[str, ...]
    experts: range | None
    parameter_dtype: torch.dtype

    @property
    def changes_dtype(self) -> bool:
        return self.dtype != self.parameter_dtype


@dataclass(frozen=True)
class LoadReport:
    """Describes how a layer was loaded. `str()` returns a readable summary.

    Attributes:
        prefix: prefix of the block's tensor names.
        layout: name of the experts' layout; `family` is its letter in `docs/guides/load_a_checkpoint.md`.
        tensors: the weights that were read. Each was used exactly once.
        other_experts: names of tensors that were not read, because their experts were not requested or are zero
            experts.
        parameters: shape of every parameter and persistent buffer of the layer. Each was filled exactly once. A weight
            that stays quantised counts as one parameter of the dequantised shape.
        kept_format: format of the experts' weights if they keep their stored bytes; "" if plain or dequantised.
    """

    directory: str
    prefix: str
    layer: int
    model_type: str
    layout: str
    family: str
    config: MoEConfig
    experts: range
    tensors: tuple[LoadedTensor, ...]
    other_experts: tuple[str, ...]
    parameters: dict[str, tuple[int, ...]]
    kept_format: str = ""

    @property
    def quantization(self) -> tuple[str, ...]:
        """Return the encodings of the quantised weights on disk."""
        return tuple(sorted({tensor.encoding for tensor in self.tensors} - {"plain"}))

    @property
    def dtype_changes(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Return name -> (dtype on disk, parameter's dtype) for each weight whose two dtypes differ."""
        return {
            tensor.names[0]: (tensor.dtype, tensor.parameter_dtype) for tensor in self.tensors if tensor.changes_dtype
        }

    def check(self) -> None:
        """Assert that every tensor was used once and every element of every parameter was filled once."""
        names = [name for tensor in self.tensors for name in tensor.names] + list(self.other_experts)
        assert len(set(names)) == len(names), "a tensor was used twice"
        filled: dict[str, list[tuple[int | None, str]]] = {}
        for tensor in self.tensors:
            places = filled.setdefault(tensor.parameter, [])
            places += [(e, part) for e in (tensor.experts or [None]) for part in tensor.parts]
        for parameter in self.parameters:
            places = filled.pop(parameter, [])
            assert len(set(places)) == len(places), f"a part of {parameter} was filled twice"
            assert set(places) == set(self._places(parameter)), f"a part of {parameter} was not filled"
        assert not filled, f"unknown parameters: {sorted(filled)}"

    def _places(self, parameter: str) -> list[tuple[int | None, str]]:
        owner, _, name = parameter.rpartition(".")
        if owner not in ("experts", "shared_expert") or name == "w_gate":
            return [(None, "")]
        gated = self.config.is_gated if owner == "experts" else self.config.shared_is_gated
        up = ("gate", "up") if gated else ("up",)
        parts = ("down",) if name.endswith("_down") else up
        return [(e, part) for e in (self.experts if owner == "experts" else [None]) for part in parts]

    def __str__(self) -> str:
        config = self.config
        text = f", dequantised from {', '.join(self.quantization)}" if self.quantization else ""
        text = f", experts kept as {self.kept_format}" if self.kept_format else text
        lines = [
            f"{self.prefix} of {self.directory}: {self.model_type}, layout {self.layout} (family {self.family}){text}",
            f"{config.num_experts} experts [{self.experts.start}, {self.experts.stop}) loaded, "
            f"d_model {config.d_model}, d_ff {config.d_ff}, top {config.top_k}, {config.activation}",
            f"{sum(len(tensor.names) for tensor in self.tensors)} tensors used once each, "
            f"{len(self.other_experts)} of other experts left unread, nothing left over",
        ]
        for parameter, shape in self.parameters.items():
            tensors = [tensor for tensor in self.tensors if tensor.parameter == parameter]
            dtypes = sorted({dtype_name(tensor.dtype) for tensor in tensors})
            lines.append(
                f"  {parameter} {list(shape)} {dtype_name(tensors[0].parameter_dtype)} "
                f"from {len(tensors)} x {'/'.join(dtypes)}, first {tensors[0].names[0]}"
            )
        return "\n".join(lines)
