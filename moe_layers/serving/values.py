"""Reads the tensors of a model one by one: gathers ranks' shares, merges adapters, and omits wrappers from names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.files.stored_weights import dequantize_float8
from ..checks import is_dtensor
from ..feed_forward import MoEFeedForward

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")  # attribute names of wrappers, left out of tensor names
SCALES = "_scale_inv"
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")


class LowRank(NamedTuple):
    """An active adapter of PEFT on one weight: PEFT's wrapper module, and the adapter's name."""

    wrapper: Any
    adapter: str


class Value(NamedTuple):
    """A tensor of the model. The tensor is gathered or computed only when `read` is called.

    Attributes:
        experts: the experts module of a transformers model if the tensor holds all experts, else None.
    """

    name: str
    read: Callable[[], Tensor]
    experts: Any = None


_Seen = dict[int, tuple[str, list[LowRank]]]  # id of a tensor -> (first name, adapters under this name)


class LayerValue(NamedTuple):
    """A `MoEFeedForward` layer. All tensors of the layer are read together."""

    name: str
    layer: MoEFeedForward


class Reader(NamedTuple):
    """Reads the tensors of a model.

    Attributes:
        keep_quantized: whether to yield FP8 and MXFP4 weights as stored: quantised numbers and scales.
        dtype: dtype of dequantised FP8 weights.
    """

    keep_quantized: bool
    dtype: torch.dtype

    def values(self, model: nn.Module) -> Iterator[Value | LayerValue]:
        """Yield a `LayerValue` for each `MoEFeedForward` layer, and a `Value` for each other persistent tensor. Tied
        tensors are yielded once."""
        yield from self._walk(model, "", {}, {})

    def _walk(
        self, module: Any, path: str, changes: Mapping[str, list[LowRank]], seen: _Seen
    ) -> Iterator[Value | LayerValue]:
        if isinstance(module, MoEFeedForward):
            yield LayerValue(path, module)
        elif peft_class(module) is not None and (hasattr(module, "base_layer") or hasattr(module, "original_module")):
            inner, added = _unwrapped(module, path)
            merged = {name: [*changes.get(name, ()), *adapters] for name, adapters in added.items()}
            yield from self._walk(inner, path, {**changes, **merged}, seen)
        else:
            yield from self._own(module, path, changes, seen)
            for name, child in module.named_children():
                if name != "parametrizations":
                    yield from self._walk(child, path if name in _TRANSPARENT else _join(path, name), {}, seen)

    def _own(
        self, module: Any, path: str, changes: Mapping[str, list[LowRank]], seen: _Seen
    ) -> Iterator[Value | LayerValue]:
        """Yield a module's own parameters and persistent buffers, without those of its child modules."""
        held = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        temporary = module._non_persistent_buffers_set
        held |= {n: b for n, b in module._buffers.items() if b is not None and n not in temporary}
        computed: Any = getattr(module, "parametrizations", {})
        for name, chain in computed.items():
            yield from self._parametrised(module, _join(path, name), name, chain, changes.get(name, []))
        down = held.get("down_proj")
        experts = module if "down_proj" in computed or (down is not None and down.dim() == 3) else None
        for name, tensor in held.items():
            full, added = _join(path, name), changes.get(name, [])
            if id(tensor) in seen:
                first, of_first = seen[id(tensor)]
                if of_first != added:  # only the adapters of the first name would be added
                    raise ValueError(
                        f"iter_weights: tied weights must have the same adapters, got {first} and {full} with others; "
                        "untie them"
                    )
                continue
            seen[id(tensor)] = full, added
            if name.endswith(SCALES) and name.removesuffix(SCALES) in held and not self.keep_quantized:
                continue
            read = partial(self._plain, full, tensor)
            if (scales := held.get(name + SCALES)) is not None and not self.keep_quantized:
                read = partial(self._dequantized, full, tensor, scales, getattr(module, "block_size", None))
            holder = experts if name.removesuffix(SCALES).removesuffix("_bias") in _EXPERTS else None
            yield _changed(full, read, added, holder, tensor)

    def _parametrised(self, module: Any, full: str, name: str, chain: Any, added: list[LowRank]) -> Iterator[Value]:
        if not self.keep_quantized:
            yield _changed(full, lambda: gathered(full, getattr(module, name)), added, module, next(chain.parameters()))
            return
        if len(chain) != 1 or type(chain[0]).__name__ != "StoredMxfp4" or added:
            raise ValueError(
                f"iter_weights: keep_quantized needs FP8 or MXFP4 without adapters, got {full}; omit keep_quantized"
            )
        yield Value(f"{full}_blocks", partial(gathered, full, chain.original))
        yield Value(f"{full}_scales", partial(gathered, full, chain[0].scales))

    def _plain(self, name: str, tensor: Any) -> Tensor:
        if type(tensor).__name__ == "Params4bit" and not self.keep_quantized:
            from bitsandbytes.functional import dequantize_4bit

            return dequantize_4bit(tensor.data, tensor.quant_state)
        tensor = gathered(name, tensor)
        is_foreign = type(tensor).__module__.partition(".")[0] != "torch"
        if is_foreign or (tensor.element_size() == 1 and not self.keep_quantized):
            raise ValueError(
                f"iter_weights: {name} must be plain, FP8 with scales, MXFP4 or bitsandbytes' 4 bits, got "
                f"{type(tensor).__name__} of {tensor.dtype}; dequantise the model first"
            )
        return tensor

    def _dequantized(self, full: str, numbers: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
        if block is None or numbers.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"iter_weights: {full} must be float8_e4m3fn with scales of blocks, got {numbers.dtype} with "
                f"block_size={block}; pass keep_quantized=True"
            )
        numbers, scales = gathered(full, numbers), gathered(full, scales)
        out = torch.empty_like(numbers, dtype=self.dtype)
        by_expert = zip(*(t if t.dim() == 3 else t.unsqueeze(0) for t in (out, numbers, scales)), strict=True)
        # Dequantise expert by expert, because a float32 copy of all experts would be larger than the result.
        for matrix, stored, scale in by_expert:
            matrix.copy_(dequantize_float8(stored, scale, block, full))
        return out


def _changed(name: str, read: Callable[[], Tensor], added: list[LowRank], experts: Any, held: Tensor) -> Value:
    if not added:
        return Value(name, read, experts)
    return Value(name, lambda: _add(name, own_memory(read(), held), added), experts)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def gathered(name: str, tensor: Any) -> Tensor:
    """Return the full tensor. All ranks must call this function in the same order.

    If `active_adapters` gets this function as `local_share`, it returns the factors of all ranks' experts.
    """
    tensor = tensor.detach()
    if is_dtensor(tensor):
        from ..parallel.collectives import full_tensor

        tensor = full_tensor(tensor)
    if tensor.is_meta:
        raise ValueError(f"iter_weights: tensors must have memory, got {name} on meta; load offloaded weights first")
    return tensor


def peft_class(module: nn.Module) -> str | None:
    """Return the name of a module's PEFT class, or None. Base classes also count, because FSDP2 derives a new class."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("peft.")), None)


def _unwrapped(module: Any, path: str) -> tuple[nn.Module, dict[str, list[LowRank]]]:
    """Return the module inside a PEFT wrapper, and a dictionary from weight name to active adapters. Raise ValueError
    unless the wrapper adds plain LoRA to a weight or is a ModulesToSaveWrapper."""
    kind = peft_class(module)
    if hasattr(module, "original_module"):
        if kind != "ModulesToSaveWrapper":
            raise ValueError(f"iter_weights: {path} must be plain LoRA, got {kind}; call merge_and_unload first")
        used = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
        return (module.modules_to_save[used[0]] if used else module.original_module), {}
    name = module.parameter_name if kind == "ParamWrapper" else "weight"
    layer = module.get_base_layer()
    if kind != "ParamWrapper" and not isinstance(layer, nn.Linear):
        raise ValueError(f"iter_weights: {path} must be a linear layer or experts with LoRA, got {kind}")
    adapters = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.lora_A]
    adapters = [adapter for adapter in adapters if adapter not in module.merged_adapters]
    for adapter in adapters:
        variant = adapter in getattr(module, "lora_variant", ()) or module.use_dora.get(adapter, False)
        if variant or module.lora_B[adapter].bias is not None or getattr(module, "fan_in_fan_out", False):
            raise ValueError(
                f"iter_weights: adapter {adapter!r} of {path} must be plain LoRA, got a variant, a bias or transposed "
                "weights; call merge_and_unload first"
            )
    return module.base_layer, {name: [LowRank(module, adapter) for adapter in adapters]}


def own_memory(tensor: Tensor, held: Any) -> Tensor:
    """Return a writable tensor: a copy if `tensor` shares memory with the parameter `held`, else `tensor`."""
    local = held.to_local() if is_dtensor(held) else held
    return tensor.clone() if tensor.data_ptr() == local.data_ptr() else tensor


def _add(name: str, weight: Tensor, changes: list[LowRank]) -> Tensor:
    """Add adapters to a weight in place. The sum is float32, or float64 for a float64 weight, and is rounded once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    factors = [(*_factors(name, change), change.wrapper.scaling[change.adapter]) for change in changes]
    matrices = weight if weight.dim() == 3 else weight.unsqueeze(0)
    for number, matrix in enumerate(matrices):
        total = matrix.to(dtype)
        for left, right, scale in factors:
            total = total + scale * (left[number].to(dtype) @ right[number].to(dtype))
        matrix.copy_(total)
    return weight


def _factors(name: str, change: LowRank) -> tuple[Tensor, Tensor]:  # [E, rows, r] and [E, r, columns]
    wrapper, adapter = change
    a, b = (gathered(name, factor[adapter].weight) for factor in (wrapper.lora_A, wrapper.lora_B))
    if peft_class(wrapper) != "ParamWrapper" or wrapper.num_experts == 1:
        return b.unsqueeze(0), a.unsqueeze(0)
    a = a.unflatten(0, (wrapper.num_experts, -1))  # [E, r, in]
    b = b.unflatten(1, (-1, wrapper.num_experts)).permute(2, 0, 1)  # [E, out, r]
    swapped = getattr(wrapper, "_did_swap_in_out_features", False)
    return (b, a) if swapped else (a.transpose(1, 2), b.transpose(1, 2))
