"""Yields a model's weights under the names that an inference engine loads. Memory holds one layer at a time."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import ARCHITECTURES, read_config
from ..checkpoint.files.blocks import Block, check_names, find_blocks, layer_number, matching_layouts
from ..checkpoint.files.layouts import Layout, find_layout
from ..checkpoint.layer.save import layer_tensors, layout_to_write
from ..checks import check_choice, check_kind
from ..experts.lora.adapters import active_adapters, joined
from ..experts.lora.merging import add_adapters
from ..experts.stored import QuantizedExperts, stored
from .engines import LAYOUTS, engine_layout
from .values import SCALES, LayerValue, Reader, Value, gathered, own_memory, peft_class

# Matches a name up to its first number (the layer's number), or the whole name if the name has no number.
_LAYER = re.compile(r"(?:.*?\.)?\d+\.|.*\.|")


def iter_weights(
    model: nn.Module, layout: str = "huggingface", *, keep_quantized: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each weight, for `load_weights` of an inference engine.

    `model` is a transformers model, enabled by `enable` or not, or any module with `MoEFeedForward` layers. FSDP2 or
    expert parallelism may shard the model. All ranks must then iterate together, and each rank gets whole tensors.
    Active LoRA adapters are added in float32, and each sum is rounded once. The model keeps its adapters. Weights in
    FP8, MXFP4 or 4 bits are dequantised by default. Tied weights are yielded once.

    In addition to the model, memory holds at most one layer. Tensors that are views of parameters need no further
    memory. A tensor is valid until the model changes. If the engine loads asynchronously, copy the tensors, for
    instance with `pack`.

    Args:
        layout: "huggingface" (default) yields the names that `save_pretrained` writes. "vllm" and "sglang" yield the
            same names, after a check that the engine reads this architecture's layout: per expert (most models) or
            packed. For engines, the matrices of Qwen3-VL-MoE are transposed, as in its published checkpoints.
        keep_quantized: yield FP8 and MXFP4 weights as stored, as quantised numbers and scales. The engine's
            configuration must name this quantisation. Default: False.

    Raises:
        ValueError: the layout is unknown, or the engine has no loader for this architecture; `model` is an
            unknown wrapper of a transformers model; experts or tensors are missing on this rank, or sharded by FSDP1 or
            DeepSpeed; an adapter is not plain LoRA; or a weight is in an unsupported quantised format.
    """
    check_kind("iter_weights", "model", model, nn.Module)
    check_choice("iter_weights", "layout", layout, LAYOUTS)
    root: Any = _unwrapped(model)
    _check_whole(root)
    config = _config_of(root)
    expected = None
    if layout != "huggingface" and config is not None:
        expected = engine_layout(layout, config.model_type, root.config.model_type)
    return _Stream(root, config, layout, expected, Reader(keep_quantized, _dtype_of(root))).tensors()


class _Stream:
    def __init__(self, root: Any, config: Any, layout: str, expected: str | None, reader: Reader):
        self.root, self.config, self.layout, self.expected, self.reader = root, config, layout, expected, reader
        self.names = None if config is None else _naming(root)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        ignored = tuple(map(re.compile, getattr(self.root, "_keys_to_ignore_on_save", None) or ()))
        values = (v for v in self.reader.values(self.root) if not any(pattern.search(v.name) for pattern in ignored))
        for _, group in itertools.groupby(values, lambda value: _LAYER.match(f"{value.name}.")[0]):  # pyright: ignore[reportOptionalSubscript]  # every string matches
            layers, plain = [], []
            for value in group:
                (layers if isinstance(value, LayerValue) else plain).append(value)
            for name, tensor in itertools.chain(self._of_model(plain), *map(self._of_layer, layers)):
                yield name, tensor.contiguous()

    def _of_model(self, values: list[Value]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one decoder layer, except those of the `MoEFeedForward` in it."""
        held: dict[str, Tensor] = {value.name: value.read() for value in values if value.experts is None}
        if self.config is None:
            yield from held.items()
            return
        experts = {value.name: value for value in values if value.experts is not None}
        # Meta tensors represent the experts, because renaming needs all names of a layer but no values.
        for name in experts:
            if not name.endswith(SCALES):
                held[name] = torch.empty((1, 4) if name.endswith("_bias") else (1, 4, 4), device="meta")
        disk = self._renamed(held)
        del held
        names = {name for name, tensor in disk.items() if tensor.is_meta}
        blocks = [b for b in find_blocks(disk) if any(full in names for full, _ in b.weights.values())]
        yield from ((name, tensor) for name, tensor in disk.items() if name not in names)
        for prefix, own in itertools.groupby(experts.values(), lambda value: value.name.rpartition(".")[0]):
            yield from self._of_experts(prefix, list(own), blocks)

    def _of_experts(self, prefix: str, values: list[Value], blocks: list[Block]) -> Iterator[tuple[str, Tensor]]:
        layouts = matching_layouts(blocks[0]) if len(blocks) == 1 else []
        names = [layout.name for layout in layouts]
        if self.expected not in (None, *names):
            raise ValueError(
                f"iter_weights: {self.layout} reads experts of this architecture in the layout {self.expected!r}, but "
                f"this version of transformers writes {prefix} as {names or 'an unknown layout'}"
            )
        for value in values:
            tensor = value.read()
            _check_all_here(value.name, tensor, self.config)
            if len(layouts) == 1 and layouts[0].keys[0].per_expert:
                yield from _per_expert(blocks[0], layouts[0], value, tensor)
            else:
                # transformers writes Qwen3-VL-MoE's experts as [E, out, in]. Engines read [E, in, out], as published.
                is_turned = self.expected == "transposed" and not getattr(value.experts, "is_transposed", True)
                for disk_name, held in self._renamed({value.name: tensor}).items():
                    yield disk_name, held.transpose(1, 2) if is_turned else held

    def _renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.names, tensors)  # pyright: ignore[reportArgumentType]  # only these attributes are read

    def _of_layer(self, value: LayerValue) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a `MoEFeedForward` layer under their names in a checkpoint."""
        layer: Any = value.layer
        source, chosen = layer.checkpoint_source, None
        if self.layout != "huggingface":
            config = self.config if source is None else read_config(source.config, source.layer)
            chosen = engine_layout(self.layout, None if config is None else config.model_type)
        state = _LayerState(value.name, layer, self.reader.keep_quantized)
        is_kept = self.reader.keep_quantized and isinstance(layer.experts.w_up, QuantizedExperts)
        target = layout_to_write(layer, chosen, layer.experts.w_up if is_kept else None)
        own = f"{value.name}." if value.name else ""
        prefix = own if source is None else source.prefix
        check_names(prefix, target)
        yield from layer_tensors(layer, state, target, prefix)


def _naming(root: Any) -> SimpleNamespace:
    """Return the attributes of a model from which transformers derives the names of the model's weights on disk.

    A quantiser's conversions are left out, because `iter_weights` yields weights dequantised or as stored.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = getattr(root, "_weight_conversions", None)
    operations = [op for conversion in conversions or () for op in getattr(conversion, "operations", ())]
    if conversions is None or any(type(op).__module__.startswith("transformers.integrations") for op in operations):
        prefixes = [conversion for conversion in conversions or () if isinstance(conversion, PrefixChange)]
        own = get_model_conversion_mapping(root, add_legacy=False)
        conversions = prefixes + [conversion for conversion in own if not isinstance(conversion, PrefixChange)]
    return SimpleNamespace(config=root.config, get_parameter=root.get_parameter, _weight_conversions=conversions)


def _per_expert(block: Block, layout: Layout, value: Value, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices, biases or scales of each expert as views of a parameter that holds all experts."""
    experts, leaf = value.experts, value.name.rpartition(".")[2]
    suffix = SCALES if leaf.endswith(SCALES) else ""
    memory = find_layout(_memory_layout(experts), gated=layout.gated, bias=False)
    held = next(key for key in memory.keys if key.name == f"experts.{leaf.removesuffix(suffix)}")
    if suffix and tensor.shape[1] % len(held.parts):
        raise ValueError(f"iter_weights: {value.name} must have scales of whole blocks of gate and of up")
    targets = [key for key in layout.keys if key.bias == held.bias and set(key.parts) <= set(held.parts)]
    for expert, matrix in enumerate(tensor):
        parts = held.disk_parts(matrix)  # [parts, rows, columns]
        for key in targets:
            assert len(key.parts) == 1 and key.is_in_order
            part = parts[held.parts.index(key.parts[0])]
            name = block.prefix + key.name_of(expert) + suffix
            yield name, part.squeeze(-1) if key.bias else part


def _memory_layout(experts: Any) -> str:
    if not getattr(experts, "is_concatenated", True):
        return "interleaved"
    return "transposed" if getattr(experts, "is_transposed", False) else "fused"


class _LayerState(dict[str, Any]):
    """Maps names to whole tensors of a layer. Expert weights are read on request. Only the last expert weight that was
    read stays in memory."""

    def __init__(self, name: str, layer: Any, keep_quantized: bool):
        self.experts, self.keep_quantized = layer.experts, keep_quantized
        if (held := len(stored(self.experts.w_down))) != layer.config.num_experts:
            raise ValueError(
                f"iter_weights: {name} must hold all {layer.config.num_experts} experts, got {held}; share them by "
                "ExpertParallel, whose experts are gathered, instead of keep_local_experts"
            )
        self.adapters = joined([factors for factors, _ in active_adapters(self.experts.lora, gathered)])
        if keep_quantized and self.adapters is not None and isinstance(self.experts.w_down, QuantizedExperts):
            raise ValueError(
                f"iter_weights: keep_quantized takes no adapters, got some in {name}; merge_lora(requantize=True) "
                "adds them to the stored weights"
            )
        read_later = ("experts.w_", "experts.lora.")
        state = {n: tensor for n, tensor in layer.state_dict().items() if not n.startswith(read_later)}
        super().__init__((n, gathered(n, tensor)) for n, tensor in state.items())
        self.last: tuple[str, Any] = "", None

    def __missing__(self, name: str) -> Any:
        if self.last[0] != name:
            self.last = "", None  # free the last weight before the next read
            self.last = name, self._read(name)
        return self.last[1]

    def _read(self, name: str) -> Any:
        """Return a weight of the experts, with the active adapters added."""
        projection = name.removeprefix("experts.w_")
        weight = getattr(self.experts, f"w_{projection}")
        tensor: Any
        if isinstance(weight, QuantizedExperts):
            whole = QuantizedExperts(weight.weight(gathered, name), weight.dtype)
            tensor = whole if self.keep_quantized else whole.dequantize()
        else:
            tensor = gathered(name, weight)
        if self.adapters is not None and getattr(self.adapters, f"{projection}_a") is not None:
            tensor = own_memory(tensor, stored(weight))
            add_adapters(tensor, self.adapters, projection)
        return tensor


def _check_all_here(name: str, tensor: Tensor, config: Any) -> None:
    """Raise ValueError if a parameter holds fewer experts than the model's configuration requires."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return
    expected, _ = architecture.expert_sizes(read_config(config.to_dict(), layer_number(name)))
    if len(tensor) < expected:
        raise ValueError(
            f"iter_weights: {name} must hold all {expected} experts, got {len(tensor)}; those of other ranks must be "
            "gathered first, or be DTensors as transformers' DistributedConfig makes them"
        )


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside PEFT, torch.compile and DistributedDataParallel."""
    while True:
        if peft_class(model) is not None:
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def _check_whole(root: nn.Module) -> None:
    """Raise ValueError if FSDP1 wraps modules or DeepSpeed partitions parameters."""
    for name, module in root.named_modules():
        if hasattr(module, "_fsdp_wrapped_module"):
            kind = type(module).__name__
            raise ValueError(
                f"iter_weights: ranks must share by FSDP2, got {kind} as {name or 'model'}; use fully_shard"
            )
    for name, parameter in root.named_parameters():
        if getattr(parameter, "ds_shape", parameter.shape) != parameter.shape:
            raise ValueError(
                f"iter_weights: parameters must be whole, got {name} partitioned by DeepSpeed; enter "
                "deepspeed.zero.GatheredParameters(model.parameters()) first"
            )


def _config_of(root: Any) -> Any:
    """Return the text configuration of a transformers model, or None for a module without a transformers model."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    if isinstance(root, transformers.PreTrainedModel):
        return root.config.get_text_config()
    for name, module in root.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            raise ValueError(f"iter_weights: the model must be the {type(module).__name__} itself, which is {name!r}")
    return None


def _dtype_of(root: nn.Module) -> torch.dtype:
    wide = (p.dtype for p in root.parameters() if p.is_floating_point() and p.element_size() > 1 and p.dim() > 1)
    return next(wide, torch.bfloat16)
