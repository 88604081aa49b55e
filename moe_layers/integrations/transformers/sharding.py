"""Expert parallelism inside an enabled transformers model: the ranks of a mesh share its experts.

    enable(model)
    report = shard_experts(model, mesh["ep"])

The experts' parameters become DTensors that keep their names, and calls of the experts go through the dispatchers of
`moe_layers.parallel`. Everything else of the model stays as it is, for DDP, FSDP2 or a loop of one's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_kernels.types import QuantizedWeight

from ...checks import check_kind, first_three, is_dtensor
from ...parallel.collectives import Ranks
from ...parallel.expert_parallel import ExpertParallel, expert_share, kept_share
from ...parallel.meeting import meet, raise_together
from ...parallel.overlapped import check_overlaps
from .enabling import STATE
from .experts_forward import ATTRIBUTE, SHARING, ExpertsSpec, check_weights
from .experts_of_rank import ExpertsOfModule, Sharing, count_experts
from .peft_adapters import replace_forwards, report_wrappers

_OP = "shard_experts"
_SECONDS = 300.0  # for a rank that still loads its model


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """Summary of what `shard_experts` did.

    Attributes:
        experts: the sharded modules by name, for instance to wrap them in FSDP2 over another axis of the mesh.
        num_local: experts that this rank holds of each.
        num_ranks: ranks that share the experts.
        dispatcher: as given.
        kept_bytes: of this rank's experts.
        freed_bytes: of other ranks' experts.
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
    share: range


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "auto",
    average_gradients: bool = True,
    max_rows_factor: float | None = None,
    chunks: int | None = None,
    reserved_sms: int | None = None,
) -> ShardReport:
    """Share the experts of an enabled model among the ranks of a mesh. Each rank keeps its own experts and their names.

    Every rank must hold the same values before, and keeps its slice of them without communication. Each rank then has
    its own tokens, any number of them, and all ranks must call the model equally often, in forward and backward. Apply
    it before FSDP2, DDP and the optimizer. PEFT's adapters of experts stay whole on every rank; they may be added
    before or after. The model cannot be disabled afterwards; `save_sharded` writes it.

    A checkpointed layer must choose the same experts again: use `context_fn=save_communication`, which also sends
    nothing again.

    Args:
        model: given to `enable` before.
        mesh: of one dimension, such as `mesh["ep"]`. Its size divides the number of experts.
        dispatcher: see `ExpertParallel`. In contrast to it, "allgather" takes any number of tokens on each rank, unless
            there is a `max_rows_factor`.
        average_gradients: see `ExpertParallel`.
        max_rows_factor: see `ExpertParallel`.
        chunks: see `ExpertParallel`.
        reserved_sms: see `ExpertParallel`.

    Raises:
        ValueError: on all ranks, before anything changes: the model is not enabled or sharded already, its parameters
            are DTensors or those of DeepSpeed's ZeRO-3, the mesh does not suit it, experts cannot be divided, an
            adapter is computed by PEFT itself, the ranks disagree, or a rank does not call.
        NotImplementedError: "overlapped" with experts that it does not support.
    """
    style = ExpertParallel(
        dispatcher,
        average_gradients=average_gradients,
        max_rows_factor=max_rows_factor,
        chunks=chunks,
        reserved_sms=reserved_sms,
    )
    check_kind(_OP, "model", model, nn.Module)
    check_kind(_OP, "mesh", mesh, DeviceMesh)
    expert_share(_OP, mesh, mesh.size())  # raises unless the mesh has one dimension, with this rank
    parts, problem = [], ""
    try:
        parts = _parts(model, mesh)
    except ValueError as error:
        problem = str(error).removeprefix(f"{_OP}: ")
    raise_together(_OP, mesh.get_group(), problem, _SECONDS)
    _agree(mesh, _facts(model, parts, style))
    ranks = Ranks.of(mesh.get_group())
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
        setattr(part.experts, ATTRIBUTE, part.spec.of_rank(mesh.size()))
        setattr(part.experts, SHARING, sharing)
    for place in getattr(model, STATE).places:
        replace_forwards(place)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and _holds(module, parts):
            module.save_pretrained = partial(_refuse_to_save, type(module).__name__)
    return ShardReport(
        {part.name: part.experts for part in parts},
        {part.name: len(part.share) for part in parts},
        mesh.size(),
        dispatcher,
        bytes_of["kept"],
        bytes_of["freed"],
    )


def sharded_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules that ranks share, by name in `model`."""
    return {name: module for name, module in model.named_modules() if SHARING in vars(module)}


def ignore_in_ddp(model: nn.Module) -> None:
    """Let DistributedDataParallel leave the experts alone that `shard_experts` sharded. Their gradients are complete.

    All ranks must share the experts. Where several ranks hold copies of an expert, FSDP2 averages these.

    Args:
        model: the module that DistributedDataParallel will wrap, with PEFT the PeftModel.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def _parts(model: Any, mesh: DeviceMesh) -> list[_Part]:
    """Return what is to be sharded.

    Raises:
        ValueError: the model cannot be sharded.
    """
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
    left = report_wrappers(state.places)[1]
    if left:
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
        weights = (*spec.up_parameters(experts), spec.w_down(experts), *spec.biases(experts))
    check_weights(name, weights)
    num_experts = count_experts(experts, spec)
    for weight in weights:
        if isinstance(weight, QuantizedWeight) and weight.values.shape[0] != num_experts:
            raise ValueError(
                f"each expert must hold an equal part of every tensor, got {weight.format} of {name}, whose blocks are "
                "those of all experts together"
            )
    for tensor_name, tensor in spec.tensors(experts).items():
        if tensor.dim() == 0 or tensor.shape[0] % num_experts:
            raise ValueError(
                f"each expert must hold an equal part of every tensor, got {tensor_name} {list(tensor.shape)} of "
                f"{name} for {num_experts} experts"
            )
    return _Part(name, experts, spec, num_experts, expert_share(name, mesh, num_experts))


def _facts(model: Any, parts: list[_Part], style: ExpertParallel) -> dict[str, str]:
    """Return what must be equal on all ranks, by what it belongs to."""
    config = getattr(model, "config", None)
    settings = config.to_dict() if isinstance(config, transformers.PreTrainedConfig) else {}
    facts = {f"config.{key}": repr(value) for key, value in settings.items() if "top_k" in key or "per_tok" in key}
    for part in parts:
        tensors = part.spec.tensors(part.experts).items()
        held = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        facts[part.name] = f"{part.num_experts} experts, {', '.join(held)}, {part.spec}"
    options = ("dispatcher", "average_gradients", "max_rows_factor", "chunks", "reserved_sms")
    return facts | {"arguments": str({name: getattr(style, name) for name in options})}


def _agree(mesh: DeviceMesh, facts: dict[str, str]) -> None:
    """Raise ValueError on all ranks unless their facts are equal."""
    everyones = [json.loads(text) for text in meet(f"{_OP} facts", mesh.get_group(), json.dumps(facts), _SECONDS)]
    for rank, others in enumerate(everyones):
        for name in {**everyones[0], **others}:
            first, other = everyones[0].get(name, "nothing"), others.get(name, "nothing")
            if first != other:
                raise ValueError(
                    f"{_OP}: all ranks must agree about {name}, got {first} on the mesh's rank 0 and {other} on "
                    f"rank {rank}"
                )


def _replace(experts: nn.Module, name: str, tensor: Tensor, mesh: DeviceMesh, share: range) -> DTensor:
    """Replace a parameter or buffer of the experts by this rank's part of it."""
    owner, _, leaf = name.rpartition(".")
    holder = experts.get_submodule(owner)
    rows = tensor.shape[0] // (len(share) * mesh.size())  # of one expert
    sharded = kept_share(tensor.detach(), mesh, range(share.start * rows, share.stop * rows))
    if not isinstance(tensor, nn.Parameter):
        holder._buffers[leaf] = sharded
        return sharded
    parameter = nn.Parameter(sharded, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # keep attributes set by others
    holder._parameters[leaf] = parameter
    return sharded


def _holds(model: nn.Module, parts: list[_Part]) -> bool:
    inside = set(model.modules())
    return any(part.experts in inside for part in parts)


def _refuse_to_save(kind: str, *args: object, **kwargs: object) -> NoReturn:
    raise ValueError(
        f"save_pretrained: the model must be whole, got {kind}, whose experts the ranks share; call "
        "moe_layers.integrations.transformers.save_sharded(model, directory) on all ranks"
    )
