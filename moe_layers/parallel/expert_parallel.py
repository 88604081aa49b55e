"""Expert parallelism: the experts of a layer are sharded over the ranks of a mesh.

Experts become DTensors sharded along their first axis. Router, shared expert and everything else stay replicated. The
gradients of replicated parameters are averaged like those of the rest of the model, for instance by FSDP2:

    mesh = init_device_mesh("cuda", (num_processes // 8, 8), mesh_dim_names=("efsdp", "ep"))
    parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})
    for layer in model.layers:
        fully_shard(layer.moe.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=all_processes)
    fully_shard(model, mesh=all_processes)

Each of n ranks has its own part of the batch, and averaging divides the summed gradients by n. The gradient of an
expert is already a sum over the P ranks of its mesh, so FSDP2 divides it only by n / P. The layer divides it by P, so
that all parameters get the gradient of the ranks' mean loss.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..checks import check_choice, check_positive
from ..experts.dispatcher import LocalDispatcher
from ..experts.grouped import GroupedExperts
from ..experts.lora.adapters import ExpertLoRA
from .allgather import AllGatherDispatcher, PaddedAllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .collectives import Ranks
from .overlapped import OverlappedDispatcher, check_overlaps
from .rank_dispatcher import RankDispatcher

DISPATCHERS = ("auto", "allgather", "alltoall", "overlapped")


class ExpertParallel(ParallelStyle):
    """Plan for PyTorch's `parallelize_module` that shards the experts of a `MoEFeedForward` over a mesh.

    If the layer holds all experts, each rank keeps its share. By default all ranks take the parameters of the first
    rank, including router and shared experts. With `parallelize_module(..., src_data_rank=None)` each rank keeps its
    own values, without communication. If `keep_local_experts` has already reduced the layer to exactly this share, the
    layer keeps its experts. Parameters that two layers share become two parameters. Adapters are sharded like their
    experts. Adapter factors that all experts share are replicated, and backward sums the gradients of these factors
    over the ranks. A later `reset_parameters` draws the router from each rank's own random state, so seed all ranks
    equally. On GPUs each rank draws different experts. On CPUs all ranks draw equal experts, and PyTorch warns.

    The layer synchronises the host only in the cases stated below. All ranks of the mesh must call the layer equally
    often, in forward and backward. Tokens, routing weights and experts must need gradients on all ranks or on none.
    Under `fully_shard` with mixed precision, the experts need `cast_forward_inputs=False`, so that routing weights stay
    float32.

    Args:
        dispatcher: "alltoall" sends each token to the ranks of its experts, with one host synchronisation per forward.
            "allgather" sends all tokens to all ranks, and all ranks must have equally many tokens. The host waits for a
            row count while the tokens are in flight. "auto", the default, chooses "allgather" if P, the number of
            ranks, is at most top_k, because "allgather" then sends no more data than "alltoall". "overlapped" is
            "allgather" with some communication overlapped with computation. For "overlapped", the GPUs must be in one
            host, and each GPU saves all ranks' tokens for backward: see `OverlappedDispatcher`.
        average_gradients: pass True (default) if the caller averages gradients over the ranks, as FSDP2 does. Pass
            False if the caller sums gradients.
        max_rows_factor: limit on the rows that a rank computes, as a multiple of its even share of each chunk's rows.
            Buffers have the size of this limit. More rows are an error. If all ranks have equally many tokens,
            sequences and pairs (`TokenExpertPairs`), a factor of P always suffices. "alltoall" requires these equal
            numbers. With "alltoall", a rank sends each other rank at most max_rows_factor * T * top_k / P rows. With a
            capacity or `TokenExpertPairs`, each chunk has room for the undropped slots of all chunks, because one chunk
            may hold all these slots. With a limit the host does not synchronise, and CUDA graphs can capture the layer.
            Default: no limit.
        chunks: number of parts into which tokens are split; one part is sent while another is computed. More chunks
            read the weights more often, and the experts' gradient is a sum over chunks. "overlapped" needs no sum, and
            has a smaller first chunk. Default: 2 for "overlapped" on at least 4 ranks, otherwise 1.
        reserved_sms: number of SMs that the experts' GEMMs leave to communication. Results stay bitwise equal. Default:
            0, or 2 for "overlapped".

    Raises:
        NotImplementedError: "overlapped" is used with `weight_on_input`, `recompute`, `batch_invariant`, a `precision`
            or quantised weights. The error is raised when the plan is applied, or when the layer is called.
        ValueError: the dispatcher is unknown, `max_rows_factor` is less than 1, `chunks` is not positive, or
            `reserved_sms` is negative. When the plan is applied: the module has no experts, the experts are sharded
            already, the mesh has several dimensions, or the mesh's size does not divide the number of experts. When the
            layer is called: a plain tensor has replaced a parameter of the experts, or ranks need different gradients
            (on GPUs an assertion may fail instead).
    """

    def __init__(
        self,
        dispatcher: str = "auto",
        *,
        average_gradients: bool = True,
        max_rows_factor: float | None = None,
        chunks: int | None = None,
        reserved_sms: int | None = None,
    ):
        check_choice("ExpertParallel", "dispatcher", dispatcher, DISPATCHERS)
        if max_rows_factor is not None and not 1 <= max_rows_factor < math.inf:
            raise ValueError(f"ExpertParallel: max_rows_factor must be at least 1, or None, got {max_rows_factor}")
        if chunks is not None:
            check_positive("ExpertParallel", chunks=chunks)
        if reserved_sms is not None and reserved_sms < 0:
            raise ValueError(f"ExpertParallel: reserved_sms must not be negative, got {reserved_sms}")
        self.dispatcher = dispatcher
        self.average_gradients = average_gradients
        self.max_rows_factor = max_rows_factor
        self.chunks = chunks
        self.reserved_sms = reserved_sms

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        experts = getattr(module, "experts", None)
        if not isinstance(experts, GroupedExperts):
            raise ValueError(f"ExpertParallel: the module must be a MoEFeedForward, got {type(module).__name__}")
        share = expert_share("ExpertParallel", device_mesh, module.num_experts)
        _check_held(module, share)
        experts.check_divisible("ExpertParallel")
        chosen = self.choose(device_mesh.size(), module.router.top_k)
        if chosen == "overlapped":
            check_overlaps(experts)
        if self.src_data_rank is not None:
            _broadcast_replicated(module, device_mesh, self.src_data_rank)
        for name, parameter in list(experts.named_parameters()):
            owner, _, factor = name.rpartition(".")
            adapter, held = experts.get_submodule(owner), parameter.detach()
            if isinstance(adapter, ExpertLoRA) and adapter.is_shared(factor):
                tensor = distribute_tensor(held, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            elif len(held) == len(share):
                tensor = as_shard(held, device_mesh)
            elif self.src_data_rank is None:
                tensor = kept_share(held, device_mesh, share)
            else:
                tensor = distribute_tensor(held, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            sharded = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            vars(sharded).update(vars(parameter))  # keep attributes that other code has set
            experts.replace_parameter(name, sharded)
        experts.num_experts = module.num_experts
        experts.local_share = local_share
        experts.reserved_sms = self.sms_of(chosen)
        module.dispatcher = self.make_dispatcher(chosen, Ranks.of(device_mesh.get_group()))
        return module

    def choose(self, num_ranks: int, top_k: int) -> str:
        """Return the dispatcher's name, with "auto" resolved."""
        by_traffic = "allgather" if num_ranks <= top_k else "alltoall"
        return by_traffic if self.dispatcher == "auto" else self.dispatcher

    def make_dispatcher(
        self, chosen: str, ranks: Ranks, *, any_lengths: bool = False, name: str = "ExpertParallel"
    ) -> RankDispatcher:
        """Return the dispatcher with the name `chosen` and this plan's options.

        Args:
            any_lengths: let "allgather" accept any number of tokens on each rank, unless `max_rows_factor` is set.
                Default: False.
            name: name of the layer in errors.
        """
        kind = _DISPATCHERS[chosen]
        if any_lengths and kind is AllGatherDispatcher and self.max_rows_factor is None:
            kind = PaddedAllGatherDispatcher
        chunks = 2 if chosen == "overlapped" and ranks.size >= 4 else 1
        return kind(
            ranks,
            max_rows_factor=self.max_rows_factor,
            chunks=chunks if self.chunks is None else self.chunks,
            gradient_scale=1 / ranks.size if self.average_gradients else 1.0,
            name=name,
        )

    def sms_of(self, chosen: str) -> int:
        """Return the number of SMs that the experts' GEMMs leave to communication."""
        return (2 if chosen == "overlapped" else 0) if self.reserved_sms is None else self.reserved_sms


def _broadcast_replicated(module: Any, mesh: DeviceMesh, source: int) -> None:
    """Broadcast the source rank's router and shared experts to all ranks. With different routers the ranks would train
    different models. Tensors that another plan has sharded are skipped."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if not (name.startswith("experts.") or isinstance(tensor, DTensor) or tensor.is_meta):
            held = tensor.detach()
            sent = held.to(mesh.device_type).contiguous()
            distributed.broadcast(sent, group=mesh.get_group(), group_src=source)
            held.copy_(sent)


_DISPATCHERS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher, "overlapped": OverlappedDispatcher}


def kept_share(
    whole: Tensor,  # [E, ...]
    mesh: DeviceMesh,
    share: range,
) -> DTensor:
    """Return a DTensor that represents the whole tensor. Each rank holds only its own experts' part."""
    # Clone the part, so that the memory of the other experts is freed.
    return as_shard(whole[share.start : share.stop].clone(), mesh)


def as_shard(part: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


def expert_share(op: str, mesh: DeviceMesh, num_experts: int) -> range:
    """Return the experts that this rank holds. Raise ValueError if the mesh has several dimensions or lacks this rank,
    or if the mesh's size does not divide `num_experts`."""
    if mesh.ndim != 1:
        raise ValueError(
            f'{op}: the mesh must have one dimension, as mesh["ep"] has, got {mesh.mesh_dim_names} {list(mesh.shape)}'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{op}: this rank must be in the mesh, got {mesh}")
    if num_experts % mesh.size():
        raise ValueError(f"{op}: num_experts must be a multiple of the mesh's {mesh.size()} ranks, got {num_experts}")
    num_local = num_experts // mesh.size()
    first = mesh.get_local_rank() * num_local
    return range(first, first + num_local)


def _check_held(module: Any, share: range) -> None:
    """Raise ValueError unless the layer holds all experts or exactly those in `share`, as plain parameters."""
    experts = module.experts
    if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
        raise ValueError(
            "ExpertParallel: experts must be plain parameters, got DTensors: apply it once, before fully_shard"
        )
    first = module.dispatcher.first_expert if isinstance(module.dispatcher, LocalDispatcher) else 0
    held = range(first, first + len(experts.w_up))
    if held not in (range(module.num_experts), share):
        raise ValueError(f"ExpertParallel: the layer must hold all experts or those of this rank, {share}, got {held}")


def local_share(name: str, parameter: Tensor) -> Tensor:
    """Return this rank's part of a sharded parameter. A parameter that all experts share is returned whole.

    FSDP2 gathers only over its own mesh axis, so a gathered parameter is still a DTensor over the axis of expert
    parallelism. Raise ValueError for a plain tensor.
    """
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"ExpertParallel: {name} must be a DTensor, got {type(parameter).__name__} {list(parameter.shape)}; "
            "load_state_dict(..., assign=True) of plain tensors replaces sharded parameters; instead, fill them by "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict with full_state_dict=True"
        )
    if parameter.placements == (Replicate(),):  # all experts share the parameter, so sum gradients over ranks
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return parameter.to_local()
