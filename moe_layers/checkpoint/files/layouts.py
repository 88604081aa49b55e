"""Defines the layouts of the experts' tensors in published checkpoints: one tuple of keys per layout.

A `Key` names a tensor relative to the MoE block, and maps one expert's matrix in this tensor to rows of a parameter.
`Key.disk_parts` returns a view of the matrix on disk. `Key.parameter_parts` returns a view of the parameter. Both views
have the same shape, so one `copy_` between the views reads or writes the matrix without changing a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...config import MoEConfig


@dataclass(frozen=True)
class Sizes:
    """E experts with hidden size F and model size D."""

    num_experts: int
    d_ff: int
    d_model: int

    @classmethod
    def of(cls, config: MoEConfig) -> Sizes:
        return cls(config.num_experts, config.d_ff, config.latent_dim or config.d_model)


@dataclass(frozen=True)
class Key:
    """Describes how a tensor of the experts is stored on disk.

    Attributes:
        name: name without the block's prefix. "{e}" stands for the expert's number. A tensor without "{e}" in its name
            holds all experts.
        parts: projections in the tensor, in order: "gate", "up" or "down". A bias has the same parts as its matrix.
        transposed: matrices are [in, out] instead of [out, in].
        interleaved: rows of the parts alternate: gate 0, up 0, gate 1, up 1, ...
        flat: the experts' matrices are stacked along their rows, [E * rows, columns].
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    bias: bool = False

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name

    def name_of(self, expert: int | None) -> str:
        return self.name.replace("{e}", str(expert))

    def names(self, num_experts: int) -> Iterator[tuple[int | None, str]]:
        """Yield (expert's number, name) of each tensor. The number is None for a tensor of all experts."""
        for number in range(num_experts) if self.per_expert else (None,):
            yield number, self.name_of(number)

    @property
    def is_in_order(self) -> bool:
        """Return whether the elements of a matrix have the same order on disk as in the layer's parameter."""
        return not (self.transposed or self.interleaved)

    @property
    def parameter(self) -> str:
        """Return the name of the experts' parameter that this tensor fills."""
        return ("b_" if self.bias else "w_") + ("down" if self.parts == ("down",) else "up")

    def matrix_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of one expert's matrix or bias on disk."""
        rows, columns = (sizes.d_model, sizes.d_ff) if self.parts == ("down",) else (sizes.d_ff, sizes.d_model)
        rows *= len(self.parts)
        if self.bias:
            return (rows,)
        return (columns, rows) if self.transposed else (rows, columns)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the tensor on disk."""
        matrix = self.matrix_shape(sizes)
        if self.per_expert:
            return matrix
        return (sizes.num_experts * matrix[0], *matrix[1:]) if self.flat else (sizes.num_experts, *matrix)

    def rows_of_expert(self, expert: int, sizes: Sizes) -> slice | None:
        """Return the range of the tensor's first axis that holds `expert`, or None if the tensor holds one expert."""
        if self.per_expert:
            return None
        step = self.matrix_shape(sizes)[0] if self.flat else 1
        return slice(expert * step, (expert + 1) * step)

    def matrix_of(self, tensor: Tensor, expert: int, sizes: Sizes) -> Tensor:
        """Return one expert's matrix or bias as a view of a tensor with the shape on disk."""
        rows = self.rows_of_expert(expert, sizes)
        return tensor if rows is None else self.without_experts(tensor[rows])

    def without_experts(self, rows: Tensor) -> Tensor:
        """Return one expert's matrix. `rows` is the part of the tensor that `rows_of_expert` selects."""
        return rows if self.per_expert or self.flat else rows[0]

    def disk_parts(
        self,
        matrix: Tensor,  # one expert's matrix or bias, as on disk
    ) -> Tensor:  # [parts, rows, columns], a view
        if self.bias:
            matrix = matrix.unsqueeze(-1)
        if self.transposed:
            matrix = matrix.transpose(-2, -1)
        if self.interleaved:
            return matrix.unflatten(0, (-1, len(self.parts))).transpose(0, 1)
        return matrix.unflatten(0, (len(self.parts), -1))

    def parameter_parts(
        self,
        parameter: Tensor,  # one expert's slice of w_up, w_down, b_up or b_down
        gated: bool,
    ) -> Tensor:  # [parts, rows, columns], a view
        if self.bias:
            parameter = parameter.unsqueeze(-1)
        if self.parts == ("down",):
            return parameter.unsqueeze(0)
        held = ("gate", "up") if gated else ("up",)
        first = held.index(self.parts[0])
        return parameter.unflatten(0, (len(held), -1))[first : first + len(self.parts)]


@dataclass(frozen=True)
class Layout:
    """The keys of one layout. The keys of biases apply only if the experts have biases.

    Attributes:
        name: the name that `save_checkpoint` and `convert` take.
        family: letter of the layout in the table of `docs/guides/load_a_checkpoint.md`.
        gated: experts have a gate projection. A gated and a plain layout may have the same name.
        encoding: "mxfp4" if matrices of this layout exist only in MXFP4, else "".
    """

    name: str
    family: str
    keys: tuple[Key, ...]
    gated: bool = True
    encoding: str = ""

    def select(self, *, bias: bool) -> tuple[Key, ...]:
        return tuple(key for key in self.keys if bias or not key.bias)


def _separate(gate: str, up: str, down: str, *, bias: bool = True) -> tuple[Key, ...]:
    """Return the keys of a layout with one tensor per projection. An empty name means that the projection is absent."""
    parts = {"gate": gate, "up": up, "down": down}
    weights = tuple(Key(f"{name}.weight", (part,)) for part, name in parts.items() if name)
    return weights + tuple(Key(f"{name}.bias", (part,), bias=True) for part, name in parts.items() if name and bias)


def _fused(
    up: str,
    down: str,
    *,
    bias: bool = False,
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
) -> tuple[Key, ...]:
    """Return the keys of a layout with gate and up in one tensor. If not `gated`, this tensor holds only up."""
    parts = ("gate", "up") if gated else ("up",)
    weights = (
        Key(up, parts, transposed=transposed, interleaved=interleaved),
        Key(down, ("down",), transposed=transposed),
    )
    return weights + tuple(
        replace(key, name=f"{key.name}_bias", transposed=False, bias=True) for key in weights if bias
    )


_HF = partial(_fused, "experts.gate_up_proj", "experts.down_proj", bias=True)
_PLAIN = partial(_fused, "experts.up_proj", "experts.down_proj", bias=True, gated=False)

LAYOUTS = (
    Layout("per_expert", "A", _separate("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj")),
    Layout("per_expert_w123", "B", _separate("experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2")),
    Layout("per_expert", "C", _separate("", "experts.{e}.up_proj", "experts.{e}.down_proj"), gated=False),
    Layout("fused", "D", _HF()),
    Layout("fused", "D", _PLAIN(), gated=False),
    Layout("transposed", "E", _HF(transposed=True)),
    Layout("transposed", "E", _PLAIN(transposed=True), gated=False),
    Layout("transposed_fc", "E", _fused("experts.fc1.weight", "experts.fc2.weight", transposed=True)),
    Layout("interleaved", "F", _HF(transposed=True, interleaved=True)),
    Layout("mxfp4", "F", _HF(interleaved=True), encoding="mxfp4"),
    Layout("linear", "G", _fused("input_linear.weight", "output_linear.weight")),
    Layout(
        "flat",
        "H",
        (
            Key("experts.mlp.w1", ("gate",), flat=True),
            Key("experts.mlp.v1", ("up",), flat=True),
            Key("experts.mlp.w2", ("down",), flat=True, transposed=True),
        ),
    ),
    Layout("stacked", "I", _separate("gate_proj", "up_proj", "down_proj", bias=False)),
    Layout("stacked_w13", "I", _fused("experts.w13_weight", "experts.w2_weight", interleaved=True)),
    Layout("named", "J", _separate("", "experts.expert_{e}.wi", "experts.expert_{e}.wo"), gated=False),
    Layout("named_fc", "J", _separate("", "experts.expert_{e}.fc1", "experts.expert_{e}.fc2"), gated=False),
)

# `model_type` -> layouts of published checkpoints whose tensors are named as in "fused". The default is "fused" alone.
# The table is needed because "fused", "transposed" and "interleaved" have equal tensor names and possibly equal shapes.
_PUBLISHED = {
    "gpt_oss": ("interleaved",),
    "llama4_text": ("transposed",),
    "openai_privacy_filter": ("transposed",),
    "qwen3_vl_moe_text": ("transposed", "fused"),
}


def published_layouts(model_type: str) -> tuple[str, ...]:
    """Return the layouts an architecture may use if its tensors are named as in "fused". The usual layout is first."""
    return _PUBLISHED.get(model_type, ("fused",))


def find_layout(name: str, *, gated: bool, bias: bool, encoding: str = "") -> Layout:
    """Return the layout with this name, among the layouts in which experts can be written.

    Args:
        encoding: format of quantised matrices. "mxfp4" also allows layouts that exist only in MXFP4. Default: "", for
            matrices that are not quantised.

    Raises:
        ValueError: the name is unknown, or the layout has no tensors for gated (or plain) experts or for their biases.
    """
    writable = [layout for layout in LAYOUTS if layout.encoding in ("", encoding)]
    names = tuple(dict.fromkeys(layout.name for layout in writable))
    if name not in names:
        raise ValueError(f"checkpoint: layout must be one of {names}, got {name!r}")
    for layout in writable:
        if layout.name == name and layout.gated == gated:
            if bias and not any(key.bias for key in layout.keys):
                raise ValueError(f"checkpoint: layout {name!r} has no tensors for the biases of the experts")
            return layout
    raise ValueError(f"checkpoint: layout {name!r} has no tensors for {'gated' if gated else 'plain'} experts")


@torch.no_grad()
def copy_expert(key: Key, disk: Tensor, parameter: Tensor, *, gated: bool) -> None:
    """Copy one expert's matrix or bias, as on disk, to the expert's slice of a parameter."""
    key.parameter_parts(parameter, gated).copy_(key.disk_parts(disk))
