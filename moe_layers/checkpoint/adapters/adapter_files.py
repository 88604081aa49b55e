"""Reads LoRA adapters of experts from PEFT's files, and writes files for PEFT or for inference engines.

PEFT wraps an experts module once per adapted parameter [E, out, in]. Each wrapper stores `lora_A.weight` and
`lora_B.weight`, whose names contain one `base_layer` per enclosing wrapper. The innermost wrapper adapts the parameter
that the module declares first. If parametrisations store the parameters in 4 bits, the innermost wrapper adapts the
parameter whose name is alphabetically first. A file does not say which rule PEFT applied. For gated experts,
the widths of lora_A and lora_B show which parameter each wrapper adapts.

The order of the axes of lora_A and lora_B is called orientation. Each orientation is named after a version of PEFT:

    orientation "0.19"      lora_A [E * r, in]                        lora_B [out, r * E]
    orientation "0.18"      lora_A [E * r, out]                       lora_B [in, r * E]

E is the number of experts, and r is the rank. For i < r, row e * r + i of lora_A and column i * E + e of lora_B belong
to expert e, in both orientations.

PEFT writes orientation "0.19" from version 0.19 on. Earlier versions write "0.18", or "0.19" if a parameter is stored
as [E, in, out]. Files do not name the orientation.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_kernels import ExpertAdapters

from ...checks import first_three
from ..files.directory import read_json
from .peft_config import check_plain, rank_and_scale, targets, targets_below

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ORIENTATIONS = ("0.19", "0.18")
ADAPTER_LAYOUTS = ("peft", "vllm_3d", "per_expert")

ROOT = "base_model.model."  # prefix of PEFT's keys
_WRAPPED = re.compile(r"(?P<prefix>(?:.*\.)?experts)(?P<inner>(\.base_layer)*)\.lora_[AB]\.weight")
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")  # parameter names in the order in which modules declare them


@dataclass(frozen=True)
class AdapterReport:
    """Lists the used tensors of an adapter file, and the parameters that they adapt. `str()` returns a summary.

    Attributes:
        orientation: order of the axes of lora_A and lora_B, "0.19" or "0.18": see the module's docstring.
        told_by: source of the orientation: "argument", "shapes" or "peft_version".
        used: for each adapted parameter, the names of its lora_A and its lora_B in the file. Each tensor is used once.
        others: names of tensors that adapt modules other than experts.
    """

    directory: str
    orientation: str
    told_by: str
    used: dict[str, tuple[str, str]]
    others: tuple[str, ...]
    shapes: dict[str, tuple[int, int, int, int]]  # parameter -> (experts, rank, out, in)

    def __str__(self) -> str:
        lines = [
            f"{self.directory}: adapters of {len(self.used)} expert parameters in orientation {self.orientation} "
            f"(told by {self.told_by}), {2 * len(self.used)} tensors used once each, "
            f"{len(self.others)} of other modules"
        ]
        for name, (num_experts, rank, size_out, size_in) in self.shapes.items():
            lines.append(f"  {name} [{num_experts}, {size_out}, {size_in}] rank {rank}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PeftAdapter:
    """The content of an adapter file.

    Attributes:
        layers: maps each experts module's full name, as in PEFT's keys, to its adapters. Gate rows precede up rows.
        gated: the names in `layers` whose up parameter holds gate and up rows.
        others: tensors that adapt modules other than experts, by name.
        config: the values of adapter_config.json.
    """

    layers: dict[str, ExpertAdapters]
    gated: frozenset[str]
    others: dict[str, Tensor]
    config: dict
    report: AdapterReport


@dataclass(frozen=True)
class _Pair:
    """lora_A and lora_B of one parameter, as the file stores them."""

    prefix: str
    parameter: str
    names: tuple[str, str]
    a: Tensor
    b: Tensor
    rank: int
    scale: float

    @property
    def full_name(self) -> str:
        return f"{self.prefix.removeprefix(ROOT)}.{self.parameter}"


def read_peft_adapter(
    directory: str | os.PathLike[str], *, orientation: str | None = None, interleaved: bool = False
) -> PeftAdapter:
    """Read the adapters of a model's experts. The factors keep every bit of the file's tensors.

    If both parameters of gated experts are adapted, the factors' shapes determine the orientation. Otherwise the
    orientation is "0.19" if `peft_version` in the configuration is 0.19 or later.

    Args:
        orientation: "0.19", "0.18", or None (default) to determine the orientation as described above.
        interleaved: whether rows of the up parameter are gate 0, up 0, gate 1, ..., as in gpt-oss. Default: False.

    Raises:
        ValueError: a file is missing or incomplete, the adapter is not plain LoRA, or the orientation is ambiguous or
            contradicts the shapes.
        NotImplementedError: biases have adapters, or a layer's parameters have different scales.
    """
    if orientation not in (None, *ORIENTATIONS):
        raise ValueError(f"lora: orientation must be one of {ORIENTATIONS} or None, got {orientation!r}")
    config, file = read_json(Path(directory, ADAPTER_CONFIG)), Path(directory, ADAPTER_FILE)
    if not file.is_file():
        raise ValueError(f"lora: {file.parent} must hold {ADAPTER_FILE}, which is missing")
    check_plain(config)
    tensors = load_file(file)
    pairs = _pairs(tensors, config)
    found, told_by = _orientation(pairs, config, orientation)
    layers, shapes = {}, {}
    for prefix, of_layer in _by_prefix(pairs).items():
        layers[prefix] = _adapters(of_layer, found, interleaved)
        for pair in of_layer:
            a, b = _read(pair, found)
            shapes[pair.full_name] = (*a.shape[:2], b.shape[1], a.shape[2])
    used = {pair.full_name: pair.names for pair in pairs}
    known = {name for pair in pairs for name in pair.names}
    others = {name: tensor for name, tensor in tensors.items() if name not in known}
    report = AdapterReport(str(directory), found, told_by, used, tuple(others), shapes)
    gated = frozenset(pair.prefix for pair in pairs if pair.parameter == "gate_up_proj")
    return PeftAdapter(layers, gated, others, config, report)


def _pairs(tensors: dict[str, Tensor], config: dict) -> list[_Pair]:
    depths: dict[str, set[int]] = {}
    for name in tensors:
        if match := _WRAPPED.fullmatch(name):
            depths.setdefault(match["prefix"], set()).add(match["inner"].count(".base_layer"))
    if not depths:
        raise ValueError("lora: the file must hold adapters of expert parameters, got none")
    pairs = []
    for prefix, found in sorted(depths.items(), key=lambda item: _numbers_in_order(item[0])):
        parameters = _parameters(prefix.removeprefix(ROOT), config)
        if found != set(range(len(parameters))):
            raise ValueError(
                f"lora: {prefix} must have one wrapper for each of {parameters}, which target_parameters in "
                f"{ADAPTER_CONFIG} names, got {len(found)}"
            )
        for depth, parameter in enumerate(_outermost_first(prefix, parameters, tensors)):
            key = f"{prefix}{'.base_layer' * depth}"
            names = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
            if missing := [name for name in names if name not in tensors]:
                raise ValueError(f"lora: {missing[0]} is missing")
            rank, scale = rank_and_scale(config, f"{prefix.removeprefix(ROOT)}.{parameter}")
            a, b = (tensors[name] for name in names)
            if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or len(a) % rank:
                raise ValueError(
                    f"lora: {names[0]} must be [E r, n] with r = {rank} and {names[1]} [m, r E], "
                    f"got {list(a.shape)} and {list(b.shape)}"
                )
            pairs.append(_Pair(prefix, parameter, names, a, b, rank, scale))
    return pairs


def _numbers_in_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    return [(len(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _by_prefix(pairs: list[_Pair]) -> dict[str, list[_Pair]]:
    return {prefix: list(group) for prefix, group in groupby(pairs, key=lambda pair: pair.prefix)}


def _parameters(experts: str, config: dict) -> list[str]:
    """Return the names of the adapted parameters of experts in the module's order: up before down."""
    if unknown := sorted(targets_below(experts, config) - {*_PARAMETERS}):
        raise NotImplementedError(
            f"lora: adapters of {first_three(unknown)} are not read, only those of expert weights"
        )
    return [name for name in _PARAMETERS if targets(f"{experts}.{name}", config)]


def _outermost_first(prefix: str, parameters: list[str], tensors: dict[str, Tensor]) -> list[str]:
    """Return the adapted parameters in the order of their wrappers, outermost first."""
    usual = parameters[::-1]
    if usual != ["down_proj", "gate_up_proj"]:
        return usual
    keys = prefix, f"{prefix}.base_layer"
    factors = [[tensors.get(f"{key}.lora_{factor}.weight") for factor in "AB"] for key in keys]
    widths = [(a.shape[1], len(b)) for a, b in factors if a is not None and b is not None and a.dim() == b.dim() == 2]
    # At most one order of the two wrappers fits: if both fitted, a width would equal 2 or 4 times itself.
    is_swapped = len(widths) == 2 and _fitting_orientation(widths[0], widths[1]) is not None
    return parameters if is_swapped else usual


def _orientation(pairs: list[_Pair], config: dict, asked: str | None) -> tuple[str, str]:
    by_shapes = _orientation_by_shapes(pairs)
    if asked is not None:
        if by_shapes not in (None, asked):
            raise ValueError(f"lora: the shapes say orientation {by_shapes!r}, got {asked!r}")
        return asked, "argument"
    if by_shapes is not None:
        return by_shapes, "shapes"
    version = config.get("peft_version")
    if not version or tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 19):
        raise ValueError(
            f"lora: the shapes do not tell the orientation, nor does peft_version {version!r}, because PEFT before "
            f"0.19 writes both; pass orientation, one of {ORIENTATIONS}"
        )
    return "0.19", "peft_version"


def _orientation_by_shapes(pairs: list[_Pair]) -> str | None:
    """Return the only orientation that fits the shapes, or None if no layer adapts both parameters of gated experts."""
    told: dict[str, str] = {}  # orientation -> first layer whose shapes fit only this orientation
    for prefix, of_layer in _by_prefix(pairs).items():
        sizes = {pair.parameter: (pair.a.shape[1], len(pair.b)) for pair in of_layer}
        if not {"gate_up_proj", "down_proj"} <= sizes.keys():
            continue
        up, down = sizes["gate_up_proj"], sizes["down_proj"]
        if (found := _fitting_orientation(up, down)) is None:
            raise ValueError(
                f"lora: the adapters of {prefix} must be of weights [E, 2F, D] and [E, D, F], got widths {up[0]}, "
                f"{up[1]} of gate_up_proj and {down[0]}, {down[1]} of down_proj"
            )
        told.setdefault(found, prefix)
    if len(told) > 1:
        raise ValueError(f"lora: a file must have one orientation, got {' and '.join(map(': '.join, told.items()))}")
    return next(iter(told), None)


def _fitting_orientation(up: tuple[int, int], down: tuple[int, int]) -> str | None:
    """Return the orientation in which `up` and `down`, the widths of (lora_A, lora_B), fit gated experts, or None."""
    if up == (down[1], 2 * down[0]):
        return "0.19"
    return "0.18" if up == (2 * down[1], down[0]) else None


def _adapters(pairs: list[_Pair], orientation: str, interleaved: bool) -> ExpertAdapters:
    scales = {pair.scale for pair in pairs}
    if len(scales) > 1:
        raise NotImplementedError(
            f"lora: all parameters of a layer must have one scale, got {first_three(sorted(scales))}"
        )
    factors: dict[str, Tensor] = {}
    for pair in pairs:
        a, b = _read(pair, orientation)
        if interleaved and pair.parameter == "gate_up_proj":
            b = b.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        side = "down" if pair.parameter == "down_proj" else "up"
        factors |= {f"{side}_a": a, f"{side}_b": b}
    return ExpertAdapters(**factors, scale=scales.pop())


def _read(pair: _Pair, orientation: str) -> tuple[Tensor, Tensor]:  # a [E, r, in], b [E, out, r]
    slow = pair.a.unflatten(0, (-1, pair.rank))  # [E, r, in], or [E, r, out] in orientation "0.18"
    fast = pair.b.unflatten(1, (pair.rank, -1)).permute(2, 1, 0)  # [E, r, out], or [E, r, in] in orientation "0.18"
    return (slow, fast.transpose(1, 2)) if orientation == "0.19" else (fast, slow.transpose(1, 2))


def write_adapter(
    adapter: PeftAdapter,
    directory: str | os.PathLike[str],
    layout: str = "peft",
    *,
    orientation: str = "0.19",
    interleaved: bool = False,
) -> None:
    """Write an adapter file with unchanged values. Adapters of modules other than experts are copied.

    Args:
        layout: "peft" (default) is PEFT's own layout. "vllm_3d" has the same tensors, for models whose experts vLLM
            reads as 3-D tensors. "per_expert" is for vLLM's other models, with tensors for each expert such as
            `experts.{e}.gate_proj.lora_A.weight` [r, D]. The last two need adapters of the up and the down parameter.
        orientation: the orientation of layout "peft". Default: "0.19", the only orientation of the other layouts.
        interleaved: whether the rows of the up parameter are written as gate 0, up 0, gate 1, ... Default: False.

    Raises:
        ValueError: an argument is unknown, the directory holds files, or an adapter that the layout needs is missing.
        NotImplementedError: the layout is "per_expert", and the configuration has `rank_pattern` or `alpha_pattern`.
    """
    _check_layout(adapter, layout, orientation)
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"lora: {directory} must be an empty directory or not exist")
    tensors = dict(adapter.others)
    for prefix, adapters in adapter.layers.items():
        gated = prefix in adapter.gated
        if layout == "per_expert":
            tensors |= _per_expert(prefix, adapters, gated)
        else:
            tensors |= _peft(prefix, adapters, orientation, interleaved and gated)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / ADAPTER_FILE, {"format": "pt"}
    )
    config = adapter.config if layout != "per_expert" else _per_expert_config(adapter)
    if orientation != adapter.report.orientation:
        config = {**config, "peft_version": {"0.19": "0.19.0", "0.18": "0.18.0"}[orientation]}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _check_layout(adapter: PeftAdapter, layout: str, orientation: str) -> None:
    if layout not in ADAPTER_LAYOUTS or orientation not in ORIENTATIONS:
        raise ValueError(
            f"lora: layout must be in {ADAPTER_LAYOUTS}, orientation in {ORIENTATIONS}, got {layout!r}, {orientation!r}"
        )
    if layout == "peft":
        return
    if orientation != "0.19":
        raise ValueError(f"lora: layout {layout!r} has orientation '0.19', got {orientation!r}")
    for prefix, adapters in adapter.layers.items():
        if adapters.up_a is None or adapters.down_a is None:
            raise ValueError(f"lora: layout {layout!r} needs adapters of both weights, {prefix} has one")


def _peft(prefix: str, adapters: ExpertAdapters, orientation: str, interleaved: bool) -> dict[str, Tensor]:
    up_a, up_b, down_a, down_b, _ = adapters
    if interleaved and up_b is not None:
        up_b = up_b.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    pairs = [(a, b) for a, b in ((down_a, down_b), (up_a, up_b)) if a is not None and b is not None]
    tensors = {}
    for depth, (a, b) in enumerate(pairs):
        slow, fast = (a, b.transpose(1, 2)) if orientation == "0.19" else (b.transpose(1, 2), a)
        key = f"{prefix}{'.base_layer' * depth}"
        tensors[f"{key}.lora_A.weight"] = slow.flatten(0, 1)  # [E r, n]
        tensors[f"{key}.lora_B.weight"] = fast.permute(2, 1, 0).flatten(1)  # [m, r E]
    return tensors


def _per_expert(prefix: str, adapters: ExpertAdapters, gated: bool) -> dict[str, Tensor]:
    """Return the tensors of layout "per_expert". The gate and the up matrix of an expert have the same lora_A."""
    tensors = {}
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    up_a, up_b, down_a, down_b, _ = adapters
    assert up_a is not None and up_b is not None and down_a is not None and down_b is not None
    for expert in range(len(up_b)):
        parts = zip(names, up_b[expert].chunk(len(names)), strict=True)
        projections = [(name, up_a[expert], b) for name, b in parts]
        for name, a, b in [*projections, ("down_proj", down_a[expert], down_b[expert])]:
            tensors[f"{prefix}.{expert}.{name}.lora_A.weight"] = a.clone()
            tensors[f"{prefix}.{expert}.{name}.lora_B.weight"] = b
    return tensors


def _per_expert_config(adapter: PeftAdapter) -> dict:
    """Return the configuration for adapters of modules instead of parameters. Replace the experts' entries in
    `target_parameters` by the experts' projections in `target_modules`."""
    config = adapter.config
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise NotImplementedError("lora: layout 'per_expert' is not written with rank_pattern or alpha_pattern")
    own = ["gate_proj", "up_proj", "down_proj"] if adapter.gated else ["up_proj", "down_proj"]
    of_experts = [f"{prefix}.{name}" for prefix in adapter.layers for name in _PARAMETERS]
    parameters = [
        t for t in config["target_parameters"] if not any(f".{name}".endswith(f".{t}") for name in of_experts)
    ]
    modules = config.get("target_modules") or []
    if not isinstance(modules, str):
        modules = [*modules, *(name for name in own if name not in modules)]
    elif modules.lower() != "all-linear":  # `modules` is a regular expression that whole names must match
        modules = rf"(?:{modules})|.*\.(?:{'|'.join(own)})"
    return {**config, "target_parameters": parameters or None, "target_modules": modules}
