"""Shards the experts of an enabled transformers model over the ranks of a mesh (expert parallelism).

    enable(model)
    report = shard_experts(model, mesh["ep"])

The experts' parameters become DTensors that keep their names, and calls of the experts go through the dispatchers of
`moe_layers.parallel`. Other parameters do not change, so DDP, FSDP2 or another training loop can handle the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_kernels.types import QuantizedWeight

from ....checks import check_kind, first_three, is_dtensor
from ....parallel.collectives import Ranks
from ....parallel.expert_parallel import ExpertParallel, expert_share, kept_share
from ....parallel.meeting import SECONDS, agree, together
from ....parallel.overlapped import check_overlaps
from ..enabling import STATE
from ..experts.experts_forward import ATTRIBUTE, SHARING, ExpertsSpec, check_weights
from ..experts.peft_adapters import adapt, report_wrappers
from .experts_of_rank import ExpertsOfModule, Sharing

_OP = "shard_experts"


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """Summary of what `shard_experts` did.

    Attributes:
        experts: the sharded modules by name, for instance to wrap them in FSDP2 over another axis of the mesh.
        num_local: number of experts of each module that this rank holds.
        num_ranks: number of ranks over which the experts are sharded.
        dispatcher: the `dispatcher` argument as given, even if it is "auto".
        kept_bytes: bytes of this rank's experts.
        freed_bytes: bytes of the other ranks' experts, which this rank no longer holds.
    """

    experts: dict[str, nn.Module]
    num_local: dict[str, int]
    num_ranks: int
    dispatcher: str
    kept_bytes: int
    freed_bytes: int

    def __str__(self) -> str:
        numbers = first_three(sorted(set(self.num_local.values())))
        return (
            f"moe_layers shares the experts of {len(self.experts)} blocks among {self.num_ranks} ranks "
            f"({self.dispatcher}): {numbers} experts per block here, {self.kept_bytes:,} bytes kept, "
            f"{self.freed_bytes:,} bytes freed"
        )


class _Part(NamedTuple):
    name: str
    experts: nn.Module
    spec: ExpertsSpec
    num_experts: int
    share: range  # ids of this rank's experts


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "auto",
    average_gradients: bool = True,
    max_rows_factor: float | None = None,
    chunks: int | None = None,
    reserved_sms: int | None = None,
    seconds: float = SECONDS,
) -> ShardReport:
    """Shard the experts of an enabled model over the ranks of a mesh. The parameters keep their names.

    All ranks must hold equal parameters before the call. Each rank keeps only its own experts, without communication.
    Afterwards each rank calls the model with its own tokens. The number of tokens may differ between ranks, except with
    "overlapped" or `max_rows_factor`. All ranks must call the model equally often, in forward and backward. Call this
    function before FSDP2, DDP and the optimizer are set up. PEFT's adapters of experts stay whole on every rank, and
    may be added before or after this call. Afterwards `disable` refuses the model; `save_sharded` writes the model.

    The recomputation of a checkpointed layer must choose the same experts as the forward. Use
    `context_fn=save_communication`, which saves the chosen experts. The recomputation then repeats no collective.

    Args:
        model: an enabled model.
        mesh: a mesh of one dimension, such as `mesh["ep"]`. Its size must divide the number of experts.
        dispatcher: see `ExpertParallel`. Default "auto". In this function, "allgather" accepts any number of tokens on
            each rank, unless `max_rows_factor` is given.
        average_gradients: True (default) if the caller averages gradients over the ranks, False if the caller sums.
        max_rows_factor: limit on the rows that a rank computes, as a multiple of its even share of each chunk's rows.
            Default: no limit. `ExpertParallel` states further rules.
        chunks: number of chunks of the tokens. One chunk is sent while another chunk is computed. Default: 1, or 2 for
            "overlapped" with at least 4 ranks.
        reserved_sms: number of SMs that the experts' GEMMs leave to communication. Default: 0, or 2 for "overlapped".
        seconds: how long to wait for ranks that have not called yet. Default 15. If loading takes some ranks longer,
            call `torch.distributed.barrier()` before this function, or give more seconds.

    Raises:
        ValueError: the model is not enabled or is sharded already, or its parameters are DTensors or partitioned by
            DeepSpeed's ZeRO-3. Other causes: an argument is wrong, experts cannot be divided, the kernels cannot
            compute an adapter, the ranks disagree, or a rank does not call this function. All ranks raise within
            `seconds`, before anything changes. A rank with a wrong mesh raises at once. The other ranks then raise as
            if that rank had not called.
        NotImplementedError: the "overlapped" dispatcher does not support the model's experts.
    """
    group = group_of(_OP, mesh)
    with together(_OP, group, seconds):
        style = ExpertParallel(
            dispatcher,
            average_gradients=average_gradients,
            max_rows_factor=max_rows_factor,
            chunks=chunks,
            reserved_sms=reserved_sms,
        )
        check_kind(_OP, "model", model, nn.Module)
        parts = _parts(model, mesh)
    agree(_OP, group, _facts(model, parts, style), seconds)
    ranks = Ranks.of(group)
    sharings = [Sharing(f"{_OP}: {part.name}", part.num_experts, ranks, style) for part in parts]
    if dispatcher == "overlapped":
        for part, sharing in zip(parts, sharings, strict=True):
            check_overlaps(ExpertsOfModule(sharing, part.experts, 0))
            if part.spec.normed:
                raise NotImplementedError(f"{_OP}: the overlapped dispatcher takes no norm, got one in {part.name}")
    bytes_of: Counter[str] = Counter()
    for part, sharing in zip(parts, sharings, strict=True):
        for name, tensor in part.spec.tensors(part.experts).items():
            sharded = _replace(part.experts, name, tensor, mesh, part.share)
            bytes_of["kept"] += sharded.to_local().nbytes
            bytes_of["freed"] += tensor.nbytes - sharded.to_local().nbytes
        setattr(part.experts, SHARING, sharing)
    shared = {part.experts for part in parts}
    for module in model.modules():
        adapt(module)
        if isinstance(module, transformers.PreTrainedModel) and not shared.isdisjoint(module.modules()):
            module.save_pretrained = partial(_refuse_to_save, type(module).__name__)
    return ShardReport(
        {part.name: part.experts for part in parts},
        {part.name: len(part.share) for part in parts},
        mesh.size(),
        dispatcher,
        bytes_of["kept"],
        bytes_of["freed"],
    )


def group_of(op: str, mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of a mesh. Raise ValueError unless the mesh has one dimension and contains this rank."""
    check_kind(op, "mesh", mesh, DeviceMesh)
    expert_share(op, mesh, mesh.size())
    return mesh.get_group()


def ignore_in_ddp(model: nn.Module) -> None:
    """Exclude from DistributedDataParallel the parameters and buffers that `shard_experts` sharded.

    The gradients of these parameters already cover the tokens of all ranks of the mesh. Adapters and norms of experts
    are whole on every rank, and are not excluded.

    The mesh must hold all ranks. If several ranks hold the same expert, use FSDP2, which averages the expert's
    gradients. Put the sharded parameters, which are DTensors, in a parameter group of their own. An optimizer that
    updates a whole group at once (the default on GPUs) refuses a group that mixes DTensors and other tensors.

    Args:
        model: the module that DistributedDataParallel will wrap. With PEFT, pass the PeftModel.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def _parts(model: Any, mesh: DeviceMesh) -> list[_Part]:
    """Return the experts to shard. Raise ValueError if the model cannot be sharded."""
    state = getattr(model, STATE, None)
    if state is None:
        raise ValueError(f"the model must have been given to enable, got {type(model).__name__}")
    for name, module in model.named_modules():
        if SHARING in vars(module):
            raise ValueError(f"experts must be sharded once, got {name}, which is sharded already")
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(f"experts must be whole, got {name}, which transformers' expert parallelism sharded")
    for name, tensor in model.named_parameters():
        if is_dtensor(tensor):
            raise ValueError(
                f"parameters must be plain tensors, got a DTensor {name}; apply it before fully_shard, and without "
                "tensor parallelism"
            )
        if hasattr(tensor, "ds_id"):
            raise ValueError(f"parameters must be plain tensors, got {name} of DeepSpeed's ZeRO-3; use FSDP2 instead")
    if left := report_wrappers(state.places)[1]:
        reasons = first_three(f"{name} ({reason})" for name, reason in left.items())
        raise ValueError(f"adapters must be LoRA that the kernels compute, got those of {reasons}")
    names = {module: name for name, module in model.named_modules()}
    parts = [_part(names[experts], experts, mesh) for experts in state.experts]
    owners: dict[int, str] = {}
    for part in parts:
        for name, tensor in part.spec.tensors(part.experts).items():
            if (owner := owners.setdefault(id(tensor), part.name)) != part.name:
                raise ValueError(f"experts must not share parameters, got {name} of {owner} and {part.name}")
    return parts


def _part(name: str, experts: nn.Module, mesh: DeviceMesh) -> _Part:
    spec: ExpertsSpec = getattr(experts, ATTRIBUTE)
    with torch.no_grad():
        weights, num_experts = spec.weights(experts), spec.w_down(experts).shape[0]
    check_weights(name, weights)
    for weight in weights:
        if isinstance(weight, QuantizedWeight) and weight.values.shape[0] != num_experts:
            raise ValueError(
                f"each expert must hold an equal part of every tensor, got {weight.format} of {name}, whose blocks are "
                "those of all experts together; load the model without quantization, or keep it whole on each rank"
            )
    shapes = {tensor_name: list(tensor.shape) for tensor_name, tensor in spec.tensors(experts).items()}
    sizes = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(sizes) > 1 or max(sizes) % num_experts:
        raise ValueError(
            f"each expert must hold an equal part of every tensor, got {shapes} of {name} for {num_experts} experts; "
            "keep the model whole on each rank, or shard it by FSDP2"
        )
    return _Part(name, experts, spec, num_experts, expert_share(name, mesh, num_experts))


def _facts(model: Any, parts: list[_Part], style: ExpertParallel) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, by name."""
    facts = {}
    for part in parts:
        tensors = part.spec.tensors(part.experts).items()
        held = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        facts[part.name] = f"{part.num_experts} experts, {', '.join(held)}, {part.spec}"
    config = getattr(model, "config", None)
    if isinstance(config, transformers.PreTrainedConfig):
        facts |= _settings("config", json.loads(config.to_json_string()))
    options = ("dispatcher", "average_gradients", "max_rows_factor", "chunks", "reserved_sms")
    return facts | {name: repr(getattr(style, name)) for name in options}


def _settings(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (path of keys, value) of each setting. Folder names are left out, because they may differ between ranks."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not name.endswith("name_or_path"):
                yield from _settings(f"{path}.{name}", inner)
    else:
        yield path, repr(value)


def _replace(experts: nn.Module, name: str, tensor: Tensor, mesh: DeviceMesh, share: range) -> DTensor:
    """Replace a parameter or buffer of the experts by this rank's part."""
    owner, _, leaf = name.rpartition(".")
    holder = experts.get_submodule(owner)
    rows = tensor.shape[0] // (len(share) * mesh.size())  # number of rows per expert
    sharded = kept_share(tensor.detach(), mesh, range(share.start * rows, share.stop * rows))
    if not isinstance(tensor, nn.Parameter):
        holder._buffers[leaf] = sharded
        return sharded
    parameter = nn.Parameter(sharded, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # keep attributes that other code has set
    holder._parameters[leaf] = parameter
    return sharded


def _refuse_to_save(kind: str, *args: object, **kwargs: object) -> NoReturn:
    raise ValueError(
        f"save_pretrained: the model must be whole, got {kind}, whose experts the ranks share; call "
        "moe_layers.integrations.transformers.save_sharded(model, directory) on all ranks"
    )
