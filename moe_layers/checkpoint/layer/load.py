"""Builds a layer from an MoE block of a published model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...architectures import RECORD, ModelConfig, read_config
from ...checks import first_three, whole_state
from ...config import MoEConfig
from ...experts.stored import QuantizedExperts
from ..files.directory import CONFIG, INDEX, SINGLE, CheckpointFiles, prefer_huge_pages, read_json
from ..files.layouts import Sizes, copy_expert, published_layouts
from ..files.quantization_config import float8_block
from ..files.recognition import select_block
from .kept import WEIGHTS, fill_stored, keep_stored_weights
from .plan import CheckpointSource, Fill, Plan, Planner
from .report import LoadedTensor, LoadReport

if TYPE_CHECKING:  # at run time, this import would take half as long as importing torch
    from ...parallel.expert_parallel import ExpertParallel

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def load_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a file written by `save_safetensors` into the module's tensors.

    Raises:
        ValueError: tensors are missing, unexpected, or of a wrong shape or dtype (the message names them); `path` is a
            directory or a damaged file; or the state dict is sharded or on the meta device. The module is then
            unchanged.
    """
    state = whole_state("load_safetensors", module)
    if Path(path).is_dir():
        raise ValueError(f"load_safetensors: {os.fspath(path)} must be a file, got a directory")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"load_safetensors: {os.fspath(path)} is damaged or truncated: {error}") from error
    problems = [f"missing: {name} {tuple(state[name].shape)}" for name in state if name not in stored]
    problems += [f"unexpected: {name} {tuple(stored[name].shape)}" for name in stored if name not in state]
    for name in [name for name in state if name in stored]:
        shape, dtype = tuple(state[name].shape), state[name].dtype
        if stored[name].shape != shape:
            problems.append(f"wrong shape: {name} is {tuple(stored[name].shape)} in the file, must be {shape}")
        # Tensors with dtypes in `_DTYPES` are converted. Other dtypes must match, because a conversion may need scales.
        allowed = tuple(_DTYPES.values()) if dtype in _DTYPES.values() else (dtype,)
        if stored[name].dtype not in allowed:
            problems.append(f"wrong dtype: {name} is {stored[name].dtype} in the file, must be one of {allowed}")
    if problems:
        raise ValueError(
            f"load_safetensors: {os.fspath(path)} does not fit the layer:\n  " + first_three(problems, "\n  ")
        )
    module.load_state_dict(stored)


def load_layer(
    layer_class: Any,  # Any, because the module of MoEFeedForward imports this package
    directory: str | os.PathLike[str],
    layer: int | str = 0,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    experts: range | None = None,
    mesh: DeviceMesh | None = None,
    expert_parallel: ExpertParallel | None = None,
    implementation: str | None = None,
    keep_quantized: bool = False,
    return_report: bool = False,
) -> Any:
    """Read a layer of a published model: router, experts and shared experts, in any of the known layouts.

    The directory holds config.json and model.safetensors, or shards with model.safetensors.index.json. Only the shards
    with the block's tensors are needed, and only these shards are downloaded from the hub. All tensors are matched with
    parameters and checked before the first tensor is read. The tensors are then read one by one into the parameters.
    float8 and MXFP4 weights are dequantised by default. Router logits are float32, even if the model rounds them.

    Args:
        layer_class: `MoEFeedForward` or a subclass.
        directory: a directory, or the name "org/model" of a model that huggingface_hub downloads.
        layer: index of the layer in the model (in the encoder of an encoder-decoder). If several blocks have this
            index, pass the prefix of the block's tensor names instead. Default: 0.
        dtype: dtype of the parameters. Default: the experts' dtype on disk, or the model's dtype for quantised experts.
            By default, a router that is stored in float32 stays float32. The default raises ValueError if any other
            weight would be rounded.
        device: device of the parameters. Default: the mesh's device; without a mesh, PyTorch's default device.
        experts: read only these experts (default: all), and sum only their outputs: see `keep_local_experts`.
        mesh: ranks among which the experts are divided. Each rank reads its own experts, without communication.
        expert_parallel: how the ranks of the mesh divide the experts. Default: `ExpertParallel()`.
        implementation: implementation of the layer's ops, as in `MoEFeedForward`. Default: None.
        keep_quantized: keep block-scaled float8 and MXFP4 experts quantised, and freeze them: see `quantize_experts_`.
            Default: False.
        return_report: whether to return (layer, LoadReport). The report names the use of each tensor. Default: False.

    Raises:
        ValueError: the architecture is not supported; a file is damaged or missing, or not on the hub; a tensor is
            missing, left over, ambiguous or of a wrong shape; config.json and the tensors disagree about the number of
            experts; weights would be rounded and `dtype` is None; scales are not finite; `keep_quantized` does not
            support the experts' format; the mesh does not fit the number of experts, or is given together with
            `experts`. The message names the cause, and no layer is returned.
    """
    if (expert_parallel if mesh is None else experts) is not None:
        raise ValueError(
            "from_checkpoint: expert_parallel needs a mesh, which decides experts, "
            f"got mesh={mesh}, experts={experts} and expert_parallel={expert_parallel}"
        )
    if device is None and mesh is not None:
        device = mesh.device_type  # parallelize_module puts the experts on this device
    if dtype not in (None, *_DTYPES.values()):
        raise ValueError(f"from_checkpoint: dtype must be one of {tuple(_DTYPES.values())}, got {dtype!r}")
    is_hub_name = isinstance(directory, str) and _HUB_NAME.fullmatch(directory) and not os.path.exists(directory)
    hub = _HubModel(str(directory)) if is_hub_name else None
    with CheckpointFiles(directory if hub is None else hub.download_names()) as files:
        values = read_json(files.directory / CONFIG)
        block = select_block(files, layer)
        model_config = read_config(values, block.layer, block.prefix)
        config = MoEConfig.from_hf(model_config.values, block.layer)
        experts = _checked_experts(mesh or experts, config)
        _require(block.tensors(experts), files, hub)
        module = layer_class.from_config(config, implementation=implementation, device="meta", dtype=dtype)
        if len(experts) < config.num_experts:
            module.keep_local_experts(experts)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        planner = Planner(files, block, float8_block(values, model_config))
        published = published_layouts(model_config.model_type)
        plan = planner.plan(config, shapes, experts, published=published, recorded=values.get(RECORD))
        if dtype is None:
            _take_stored_dtypes(module, plan, values, model_config)
        dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
        kept = keep_stored_weights(module, plan, files) if keep_quantized else ""
        module.to_empty(device=torch.get_default_device() if device is None else device)
        for parameter in module.parameters():
            prefer_huge_pages(parameter)
        _fill_layer(module, plan, files, config, experts)
    tensors = tuple(
        _loaded_tensor(fill, fill.stored.dtype if kept and fill.parameter in WEIGHTS else dtypes[fill.parameter])
        for fill in plan.fills
    )
    names = str(files.directory), block.prefix, block.layer, model_config.model_type
    layout, others = (plan.layout.name, plan.layout.family), tuple(plan.others)
    report = LoadReport(*names, *layout, config, experts, tensors, others, parameters=shapes, kept_format=kept)
    report.check()
    module.checkpoint_source = CheckpointSource.of(values, block, plan)
    if mesh is not None:
        from torch.distributed.tensor.parallel import parallelize_module

        from ...parallel.expert_parallel import ExpertParallel

        # `src_data_rank=None` omits the broadcast from one rank, because every rank has read the same files.
        parallelize_module(module, mesh, expert_parallel or ExpertParallel(), src_data_rank=None)
    return (module, report) if return_report else module


class _HubModel:
    """A model named "org/model" on the Hugging Face Hub. `download` returns the folder of the local cache."""

    def __init__(self, name: str):
        self.name = name
        self._commit: str | None = None  # commit of the first download; later downloads use the same commit

    def download_names(self) -> Path:
        """Download config.json and the index of the tensors. If there is no index, also download model.safetensors."""
        folder = self.download((CONFIG, INDEX))
        return folder if (folder / INDEX).is_file() else self.download((SINGLE,))

    def download(self, files: Iterable[str]) -> Path:
        """Download the files in `files` that the model has. Return the folder of the local cache."""
        missing = f"from_checkpoint: there is no directory {self.name}"
        try:
            from huggingface_hub import snapshot_download
        except ModuleNotFoundError as error:
            if error.name != "huggingface_hub":
                raise
            raise ValueError(
                f"{missing}. To read a model of this name from the Hugging Face Hub, install huggingface_hub, or "
                f"download it: hf download {self.name} --local-dir DIR"
            ) from error
        try:
            folder = Path(snapshot_download(self.name, revision=self._commit, allow_patterns=sorted(files)))
        except (OSError, ValueError) as error:  # such as a failed connection or an invalid name
            raise ValueError(f"{missing}, and the Hugging Face Hub gives no such model: {error}") from error
        self._commit = folder.name  # the cache names each folder after a commit
        return folder


def _require(tensors: list[str], files: CheckpointFiles, hub: _HubModel | None) -> None:
    """Raise ValueError if files that hold these tensors are missing. If `hub` is given, download the files first. Skip
    tensors that no file is known to hold."""
    needed = [name for name in tensors if name in files.file_of]
    if hub is not None:
        hub.download({files.file_of[name] for name in needed})
    files.require(needed)


def _take_stored_dtypes(module: Any, plan: Plan, values: dict, model_config: ModelConfig) -> None:
    module.to(_stored_dtype(plan, values, model_config))
    plain = [fill for fill in plan.fills if fill.stored.encoding == "plain"]
    in_float32 = {fill.parameter for fill in plain if fill.stored.dtype == torch.float32}
    for name, parameter in module.router.named_parameters():
        if f"router.{name}" in in_float32:  # some models keep the router in float32
            parameter.data = parameter.data.float()
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    rounded = [
        f"{fill.stored.name} of {fill.stored.dtype} to {dtypes[fill.parameter]}"
        for fill in plain
        if torch.promote_types(fill.stored.dtype, dtypes[fill.parameter]) != dtypes[fill.parameter]
    ]
    if rounded:
        raise ValueError(
            f"from_checkpoint: weights of several dtypes need a dtype, because some are rounded: {first_three(rounded)}"
        )


@torch.no_grad()
def _fill_layer(module: nn.Module, plan: Plan, files: CheckpointFiles, config: MoEConfig, experts: range) -> None:
    """Read every weight into its parameter. At most one weight is in memory in addition to the layer."""
    state = module.state_dict()
    for fill in plan.fills:
        weight = module.get_submodule(fill.parameter) if fill.parameter not in state else None
        if isinstance(weight, QuantizedExperts):
            for expert in fill.experts or ():
                place = expert - experts.start
                fill_stored(fill, files, plan.sizes, weight, expert=expert, place=place, gated=config.is_gated)
            continue
        parameter = state[fill.parameter]
        if fill.key is None:
            parameter.copy_(fill.stored.read(files, None, parameter.device).reshape(parameter.shape))
        elif fill.experts is None:
            matrix = fill.stored.read(files, None, parameter.device)
            copy_expert(fill.key, matrix, parameter, gated=config.shared_is_gated)
        else:
            for expert in fill.experts:
                share = parameter[expert - experts.start]
                if not _read_in_place(fill, files, expert, plan.sizes, share, config.is_gated):
                    rows = fill.stored.read(files, fill.key.rows_of_expert(expert, plan.sizes), parameter.device)
                    copy_expert(fill.key, fill.key.without_experts(rows), share, gated=config.is_gated)


def _read_in_place(fill: Fill, files: CheckpointFiles, expert: int, sizes: Sizes, share: Tensor, gated: bool) -> bool:
    """Read an expert's matrix directly into a CPU parameter, if the file has the parameter's dtype and element order.
    Return whether the matrix was read."""
    assert fill.key is not None
    target = fill.key.parameter_parts(share, gated)
    same_bytes = fill.stored.encoding == "plain" and fill.stored.dtype == target.dtype and fill.key.is_in_order
    if not same_bytes or target.device.type != "cpu" or not target.is_contiguous():
        return False
    files.read(fill.stored.names[0], fill.key.rows_of_expert(expert, sizes), into=target)
    return True


def _checked_experts(experts: range | DeviceMesh | None, config: MoEConfig) -> range:
    whole = range(config.num_experts)
    if isinstance(experts, DeviceMesh):
        from ...parallel.expert_parallel import expert_share

        return expert_share("ExpertParallel", experts, config.num_experts)
    if experts is None:
        return whole
    if not isinstance(experts, range) or experts.step != 1 or not experts:
        raise ValueError(f"from_checkpoint: experts must be a range(lo, hi) that is not empty, got {experts!r}")
    if experts.start not in whole or experts.stop > whole.stop:
        raise ValueError(f"from_checkpoint: experts must lie in {whole}, got {experts!r}")
    return experts


def _stored_dtype(plan: Plan, values: dict, model_config: ModelConfig) -> torch.dtype:
    """Return the experts' dtype on disk. For quantised experts, return the configuration's dtype (default bfloat16)."""
    stored = next(fill.stored for fill in plan.fills if fill.experts is not None)
    if stored.encoding == "plain":
        return stored.dtype
    names = ("dtype", "torch_dtype")
    named = next((source[n] for source in (model_config.values, values) for n in names if source.get(n)), "bfloat16")
    if not isinstance(named, str) or named not in _DTYPES:
        raise ValueError(f"checkpoint: dtype in config.json must be one of {tuple(_DTYPES)}, got {named!r}")
    return _DTYPES[named]


def _loaded_tensor(fill: Fill, parameter_dtype: torch.dtype) -> LoadedTensor:
    stored, parts = fill.stored, ("",) if fill.key is None else fill.key.parts
    on_disk = stored.names, stored.shape, stored.dtype, stored.encoding
    return LoadedTensor(*on_disk, fill.parameter, parts, fill.experts, parameter_dtype)
