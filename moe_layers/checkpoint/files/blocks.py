"""Finds the MoE blocks of a checkpoint by their tensor names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .layouts import LAYOUTS, Key, Layout
from .stored_weights import Group, group_names

# Names are relative to the block's prefix. "../" means the prefix of the layer that holds the block.
ROUTER_WEIGHT = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "gate.wg.weight",
    "router.classifier.weight",
    "router.proj.weight",
)
OTHER_NAMES = {
    "router.weight": ROUTER_WEIGHT,
    "router.bias": ("router.bias",),
    "router.selection_bias": (
        "gate.e_score_correction_bias",
        "e_score_correction_bias",
        "moe_statics.e_score_correction_bias",
        "gate.moe_statics.e_score_correction_bias",
        "expert_bias",
        "experts.e_score_correction_bias",
        "gate.bias",
        "gate.expert_bias",
        "router.expert_bias",
        "router_bias",
        "router.e_score_correction_bias",
        "../moe.router.expert_bias",
    ),
    "router.input_scale": ("router.scale",),
    "router.per_expert_scale": ("router.per_expert_scale",),
    "shared_expert.w_gate": ("shared_expert_gate.weight",),
    "w_latent_in": ("fc1_latent_proj.weight",),
    "w_latent_out": ("fc2_latent_proj.weight",),
}
_SHARED_AT = (
    "shared_expert.",
    "shared_experts.",
    "shared_mlp.",
    "../shared_expert.",
    "../shared_mlp.",
    "../share_expert.",
)
_NAMES = (*_SHARED_AT, *(name for names in OTHER_NAMES.values() for name in names))
_BESIDE = tuple(name.removeprefix("../") for name in _NAMES if name.startswith("../"))
_GATE, _UP, _DOWN, _BOTH = ("gate",), ("up",), ("down",), ("gate", "up")
_SHARED_KEYS = (  # pairs (whether the shared expert is gated, a `Key` for each of its tensors)
    (True, (Key("gate_proj.weight", _GATE), Key("up_proj.weight", _UP), Key("down_proj.weight", _DOWN))),
    # transformers 5.23 saves HY-V4's shared experts under these names.
    (True, (Key("linear_gate.weight", _GATE), Key("up_proj.weight", _UP), Key("down_proj.weight", _DOWN))),
    (True, (Key("gate_up_proj.weight", _BOTH), Key("down_proj.weight", _DOWN))),
    (True, (Key("w1.weight", _GATE), Key("w3.weight", _UP), Key("w2.weight", _DOWN))),
    (True, (Key("input_linear.weight", _BOTH), Key("output_linear.weight", _DOWN))),
    (False, (Key("up_proj.weight", _UP), Key("down_proj.weight", _DOWN))),
)
# If a block and its layer have the same prefix, only tensors whose names begin with these words belong to the block.
_OWN_NAMES = ("experts.", "router.", "gate.", "shared_experts.")
_EXPERT_NUMBER = re.compile(r"(experts\.(?:expert_)?)(\d+)(?=\.)")


@dataclass(frozen=True)
class Block:
    """An MoE block of a checkpoint: its position in the model, and its weights.

    Attributes:
        prefix: prefix of the block's tensor names, including the last dot.
        layer: number of the block's layer in the model.
        weights: maps the name of each weight, without the prefix, to (full name, (encoding, names of tensors on disk)).
            A name that begins with "../" belongs to the layer that holds the block.
    """

    prefix: str
    layer: int
    weights: dict[str, tuple[str, Group]]

    def patterns(self) -> set[str]:
        """Return the names of the weights with "{e}" in place of the expert's number."""
        return {_EXPERT_NUMBER.sub(r"\g<1>{e}", name) for name in self.weights}

    def tensors(self, experts: range) -> list[str]:
        """Return the full names of the tensors on disk. Omit tensors that hold only an expert outside `experts`."""
        matches = ((_EXPERT_NUMBER.match(name), names) for name, (_, (_, names)) in self.weights.items())
        return [name for match, names in matches if match is None or int(match[2]) in experts for name in names]

    def expert_tensors(self) -> set[str]:
        """Return the names of the experts' weights, relative to the block. A weight may hold one or all experts."""
        stacked = {key.name for layout in LAYOUTS for key in layout.keys if key.name.startswith("experts.")}
        return {name for name in self.weights if name in stacked or _EXPERT_NUMBER.match(name)}

    def expert_numbers(self) -> set[int]:
        found = (_EXPERT_NUMBER.match(name) for name in self.weights)
        return {int(match[2]) for match in found if match}


def shared_keys(*, gated: bool) -> list[tuple[Key, ...]]:
    """Return the known naming schemes of a shared expert, each as a tuple of keys. Names are relative to the block."""
    return [
        tuple(Key(at + key.name, key.parts) for key in keys)
        for at in _SHARED_AT
        for key_gated, keys in _SHARED_KEYS
        if key_gated == gated
    ]


def check_names(prefix: str, layout: Layout) -> None:
    """Raise ValueError if the layout's tensor names would not be recognised as names of the block with this prefix."""
    if not all(_may_hold(prefix, key.name) for key in layout.keys):
        raise ValueError(
            f"checkpoint: layout {layout.name!r} has no names for experts that lie below {prefix or '(top)'} itself, "
            'they must begin with "experts."'
        )


def find_blocks(names: Iterable[str]) -> list[Block]:
    """Return all MoE blocks, in the order of their layers.

    A prefix names a block if the names of a router's weight and of experts' weights begin with the prefix.
    """
    weights = group_names(names)
    prefixes = _prefixes(weights)
    blocks_in: dict[str, list[str]] = defaultdict(list)
    for prefix in prefixes:
        layer = prefix[: prefix.rstrip(".").rfind(".") + 1]
        blocks_in[layer].append(prefix)
    below: dict[str, dict[str, tuple[str, Group]]] = defaultdict(dict)
    for name, group in sorted(weights.items()):
        for prefix, relative in _holders(name, prefixes, blocks_in):
            below[prefix][relative] = (name, group)
    blocks = [Block(prefix, layer_number(prefix), below[prefix]) for prefix in prefixes]
    return sorted(blocks, key=lambda block: (block.layer, block.prefix))


def matching_layouts(block: Block, *, gated: bool | None = None) -> list[Layout]:
    """Return the layouts whose matrices all exist in the block. `gated` selects layouts of gated or of plain experts;
    None (default) selects both. Drop a layout whose names are a proper subset of another matching layout's names."""
    patterns = block.patterns()
    encodings = {group[0] for name, (_, group) in block.weights.items() if name.startswith("experts.")}
    found = [
        layout
        for layout in LAYOUTS
        if gated in (None, layout.gated)
        and {key.name for key in layout.select(bias=False)} <= patterns
        and (layout.encoding == "mxfp4") == ("mxfp4" in encodings)
    ]
    names = [{key.name for key in layout.select(bias=False)} for layout in found]
    return [layout for layout, own in zip(found, names, strict=True) if not any(own < other for other in names)]


def layer_number(name: str) -> int:
    """Return the first number in a name, such as 3 in "encoder.block.3.layer.1.mlp.", or 0 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _prefixes(weights: Iterable[str]) -> set[str]:
    """Return the prefixes below which a router's weight and experts' weights exist."""
    keys = {key.name_of(0) for layout in LAYOUTS for key in layout.keys if not key.bias}
    weights = set(weights)
    routers = {
        name.removesuffix(suffix)
        for name in weights
        if name.endswith(ROUTER_WEIGHT)
        for suffix in ROUTER_WEIGHT
        if name == suffix or name.endswith("." + suffix)
    }
    experts = set()
    for name in weights:
        at = name.find("experts.")
        if at >= 0 and name[:at] not in experts and _EXPERT_NUMBER.match(name, at):
            experts.add(name[:at])
    return {prefix for prefix in routers if prefix in experts or any(prefix + key in weights for key in keys)}


def _holders(name: str, prefixes: set[str], blocks_in: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield (prefix, name below the prefix) for each block that a tensor belongs to."""
    end = 0
    while True:
        prefix, relative = name[:end], name[end:]
        if prefix in prefixes and _may_hold(prefix, relative):
            yield prefix, relative
        if prefix in blocks_in and relative.startswith(_BESIDE):
            for block in blocks_in[prefix]:
                if not name.startswith(block):
                    yield block, "../" + relative
        end = name.find(".", end) + 1
        if not end:
            return


def _may_hold(prefix: str, relative: str) -> bool:
    """Return whether the tensor named `prefix + relative` belongs to the block with this prefix."""
    is_layer = prefix == "" or prefix.rstrip(".").rsplit(".", 1)[-1].isdigit()
    return not is_layer or relative.startswith(_OWN_NAMES)
