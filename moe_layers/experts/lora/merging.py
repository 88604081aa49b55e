"""Merges low-rank adapters into the experts' weights, and undoes the merge."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels import ExpertAdapters
from moe_kernels.quantization.ops import dequantize
from moe_kernels.quantization.quantize import quantize

from ...checks import first_three
from ..stored import QuantizedExperts, replace_weight
from .adapters import (
    TARGETS,
    ExpertLoRA,
    check_before_fully_shard,
    factors_of,
    joined,
    known_names,
    remove_lora,
)


class Unmerged(NamedTuple):
    """The state of a layer before its adapters were merged."""

    weights: dict[str, Tensor | QuantizedExperts]  # weights by projection, in host memory
    adapters: dict[str, ExpertLoRA]


@torch.no_grad()
def merge_lora(
    layer: nn.Module,
    names: str | Sequence[str] | None = None,
    *,
    keep_base: bool = False,
    requantize: bool = False,
    least_kept: float = 0.5,
) -> dict[str, float]:
    """Add adapters to the experts' weights, and remove the adapters.

    The sum of weight and adapters is computed in float32, expert by expert, and rounded once. The layer then takes the
    time and memory of a layer without adapters, and `save_checkpoint` accepts the layer. Without `requantize`, all
    quantised weights become plain weights in the layer's compute dtype, even weights without an adapter.

    Args:
        names: names of the adapters to merge. Default: the active adapters.
        keep_base: keep the adapters, and a copy of the weights in host memory, for `unmerge_lora`. Default: False.
        requantize: store quantised weights in their format again. A change that is small relative to the steps of the
            format is lost in the rounding. Default: False.
        least_kept: with `requantize`, the share of the change that must survive (see Returns). Default: 0.5. A value
            of 0 accepts any loss.

    Returns:
        with `requantize`, the share of the change that survived, by projection: 1 - |lost|^2 / |change|^2. `change` is
        the sum of the adapters' products, and `lost` is the rounding error. The share is 0 if |lost| > |change|.
        Without `requantize`, the dict is empty.

    Raises:
        NotImplementedError: the experts are quantised and sharded over ranks.
        ValueError: there is no adapter, or a name is unknown; `fully_shard` was applied; `requantize` is set with plain
            weights; or less than `least_kept` survives. The layer is then unchanged.
    """
    experts: Any = layer.experts
    check_before_fully_shard("merge_lora", experts)
    names = _names_to_merge(experts, names)
    _check_format(experts, requantize)
    merged = joined([factors_of(name, experts.lora[name], experts.local_share) for name in names])
    assert merged is not None
    is_quantized = isinstance(experts.w_up, QuantizedExperts)
    becomes_plain = is_quantized and not requantize  # both weights must change: the op cannot mix plain and quantised
    changed = [each for each in TARGETS if becomes_plain or getattr(merged, f"{each}_a") is not None]
    quantized = changed if is_quantized else []
    new = {projection: _merged_quantized(experts, projection, merged, requantize) for projection in quantized}
    kept = {projection: share for projection, (_, share) in new.items()} if requantize else {}
    _check_kept(experts, kept, least_kept)
    experts.unmerged = _keep_base(experts, changed, names) if keep_base else None
    for projection in changed:
        if projection in new:
            replace_weight(experts, f"w_{projection}", new[projection][0])
        else:
            add_adapters(_local_weight(experts, projection), merged, projection)
    remove_lora(layer, names)
    return kept


def _names_to_merge(experts: Any, names: str | Sequence[str] | None) -> list[str]:
    if names is None:
        names = [name for name, adapter in (experts.lora or {}).items() if adapter.is_active]
    names = known_names("merge_lora", experts, names)
    if not names:
        raise ValueError(
            f"merge_lora: there must be an adapter to merge, got [{first_three(map(repr, sorted(experts.lora or {})))}]"
        )
    return names


def _check_kept(experts: Any, kept: dict[str, float], least_kept: float) -> None:
    if kept and min(kept.values()) < least_kept:
        shares = ", ".join(f"{share:.3f} of w_{projection}'s" for projection, share in kept.items())
        raise ValueError(
            f"merge_lora: at least {least_kept} of the change must survive {experts.w_up.format}, got {shares}; merge "
            "without requantize, or pass least_kept=0"
        )


def _check_format(experts: Any, requantize: bool) -> None:
    quantized = isinstance(experts.w_up, QuantizedExperts)
    if quantized and experts.local_share is not None:
        raise NotImplementedError("merge_lora: quantised experts must be merged before ExpertParallel shares them")
    if requantize and not quantized:
        raise ValueError("merge_lora: requantize needs quantised weights, got plain ones")


def _merged_quantized(
    experts: Any, projection: str, merged: ExpertAdapters, requantize: bool
) -> tuple[nn.Parameter | QuantizedExperts, float]:
    """Return the merged weight and the share of the change that survived (1.0 without `requantize`)."""
    base = getattr(experts, f"w_{projection}")
    assert isinstance(base, QuantizedExperts)
    if not requantize:
        weight = base.dequantize()
        if getattr(merged, f"{projection}_a") is not None:
            add_adapters(weight, merged, projection)
        return nn.Parameter(weight, requires_grad=False), 1.0
    before = dequantize(base.weight(), torch.float32)
    wanted = before.clone()
    add_adapters(wanted, merged, projection)
    held = QuantizedExperts(quantize(wanted, base.format), base.dtype)
    change = wanted - before
    lost = wanted - dequantize(held.weight(), torch.float32)
    return held, max(0.0, 1.0 - (lost.norm() / change.norm()).square().item()) if change.any() else 1.0


def _keep_base(experts: Any, projections: list[str], names: list[str]) -> Unmerged:
    """Return the state that `unmerge_lora` restores. After consecutive merges with `keep_base`, this is the state
    before the first merge."""
    kept = experts.unmerged or Unmerged({}, {})
    for projection in projections:
        if projection not in kept.weights:
            weight = getattr(experts, f"w_{projection}")
            if isinstance(weight, QuantizedExperts):
                kept.weights[projection] = copy.deepcopy(weight).cpu()
            else:
                kept.weights[projection] = _local_weight(experts, projection).to("cpu", copy=True)
    kept.adapters.update({name: experts.lora[name] for name in names})
    return kept


@torch.no_grad()
def unmerge_lora(layer: nn.Module) -> None:
    """Undo `merge_lora(keep_base=True)`: restore the adapters, and the exact weights from before the merge.

    Raises:
        ValueError: the last merge did not set `keep_base`, or the weights were sharded or converted after the merge.
    """
    experts: Any = layer.experts
    if experts.unmerged is None:
        raise ValueError("unmerge_lora: adapters must have been merged by merge_lora(keep_base=True)")
    check_before_fully_shard("unmerge_lora", experts)
    bases = experts.unmerged.weights
    restores_format = len(bases) == len(TARGETS) and isinstance(bases["up"], QuantizedExperts)
    for projection, base in bases.items():
        now = getattr(experts, f"w_{projection}")
        target = now if isinstance(now, QuantizedExperts) else _local_weight(experts, projection)
        was, got = ((w.shape, w.dtype, None if restores_format else _format(w)) for w in (base, target))
        if was != got:
            was, got = (f"{_format(weight)} {weight.dtype} {list(weight.shape)}" for weight in (base, target))
            raise ValueError(f"unmerge_lora: w_{projection} must be as it was merged, {was}, got {got}")
    for projection, base in bases.items():
        if isinstance(base, QuantizedExperts):
            replace_weight(experts, f"w_{projection}", base.to(experts.w_up.device))
        else:
            _local_weight(experts, projection).copy_(base)
    held = nn.ModuleDict() if experts.lora is None else experts.lora
    for name, adapter in experts.unmerged.adapters.items():
        held[name] = adapter.to(experts.w_up.device).train(experts.training)
    experts.lora, experts.unmerged = held, None


def _format(weight: Tensor | QuantizedExperts) -> str:
    return str(weight.format) if isinstance(weight, QuantizedExperts) else "plain"


def _local_weight(experts: Any, projection: str) -> Tensor:
    name = f"w_{projection}"
    weight = getattr(experts, name)
    return (weight if experts.local_share is None else experts.local_share(name, weight)).detach()


def add_adapters(weight: Tensor, adapters: ExpertAdapters, projection: str) -> None:
    """Add scale * b @ a to a weight in place. Sum in float32 (or float64), one expert at a time, and round once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    pair = getattr(adapters, f"{projection}_a"), getattr(adapters, f"{projection}_b")
    a, b = (factor.expand(len(weight), -1, -1).to(dtype) for factor in pair)
    for expert, matrix in enumerate(weight):
        matrix.copy_(torch.addmm(matrix.to(dtype), b[expert], a[expert], alpha=adapters.scale))
