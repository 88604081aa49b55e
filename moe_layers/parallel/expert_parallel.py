"""Expert parallelism: the processes of a mesh hold the experts of a layer between them.

Experts become DTensors sharded along their first axis. Router, shared expert and all else stay as they are, replicated,
to be averaged like the rest of the model, by FSDP2 for instance:

    mesh = init_device_mesh("cuda", (num_processes // 8, 8), mesh_dim_names=("efsdp", "ep"))
    parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})
    for layer in model.layers:
        fully_shard(layer.moe.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=all_processes)
    fully_shard(model, mesh=all_processes)

Each process has tokens of its own. With n processes that share a batch, an average over them divides gradients by n.
The gradient of an expert already is a sum over the P processes of its mesh, and FSDP2 divides it by n / P; so the layer
divides it by P, and all parameters have the gradient of the mean of the processes' losses.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..checks import check_choice, check_positive
from ..experts.dispatcher import LocalDispatcher
from ..experts.grouped import GroupedExperts
from .allgather import AllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .collectives import Ranks
from .overlapped import OverlappedDispatcher, check_overlaps

DISPATCHERS = ("auto", "allgather", "alltoall", "overlapped")


class ExpertParallel(ParallelStyle):
    """Shard the experts of a `MoEFeedForward` over a mesh: a plan for PyTorch's `parallelize_module`.

    A layer that holds all experts keeps its share of them; they come from the first process, or with
    `parallelize_module(..., src_data_rank=None)` from every process's own parameters, without communication. A layer
    that was built or loaded with `keep_local_experts` of just this share keeps what it has. Parameters that two layers
    share become two. `reset_parameters` afterwards draws other experts in each process on GPUs, but the same in all on
    CPUs, as PyTorch then warns.

    Inside the layer nothing waits for the GPU but as said below. All processes of the mesh must call the layer equally
    often, in forward and backward. Under `fully_shard` with mixed precision the experts need
    `cast_forward_inputs=False`: routing weights are float32.

    Args:
        dispatcher: "alltoall" sends each token to the processes of its experts; the host waits once per forward.
            "allgather" sends all tokens to all processes, and needs equally many in each; the host waits for a count
            while the tokens are under way. "auto" is the latter while P is at most top_k, where it moves no more.
            "overlapped" is like "allgather", and hides part of the communication behind what is computed; the GPUs
            must be of one host and keep P times their tokens for it, see `OverlappedDispatcher`.
        average_gradients: gradients are averaged over the processes, as FSDP2 does; False where they are summed.
        max_rows_factor: a rank computes at most so many times its even share of each chunk's rows, in buffers of
            that size; more is an error, which P times never is. With "alltoall" it bounds what each process sends to
            each, by so many times T * top_k / P rows, and all must have equally many tokens. Nothing waits for the GPU
            then, and CUDA graphs capture the layer. None for no bound.
        chunks: parts of the tokens, of which one travels while another is computed; with more parts the weights are
            read more often, and but for "overlapped", whose first part is smaller, the gradient of the experts is a sum
            over the parts. None for 1, or for "overlapped" 2 from 4 processes on.
        reserved_sms: of the GPU, that the experts' GEMMs leave to communication. Results stay the same bit by bit.
            None for 0, or for "overlapped" 2.

    Raises:
        NotImplementedError: when applied with "overlapped", or called later: weights on the input, `recompute`,
            `batch_invariant`.
        ValueError: an unknown dispatcher, `max_rows_factor` is less than 1, `chunks` is not positive or `reserved_sms`
            negative. When applied: the module is no layer with experts, the mesh has several dimensions, its size does
            not divide the experts, or they are sharded already. When called: a parameter of the experts was replaced by
            a plain one.
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

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = getattr(module, "experts", None)
        if not isinstance(experts, GroupedExperts):
            raise ValueError(f"ExpertParallel: the module must be a MoEFeedForward, got {type(module).__name__}")
        share = expert_share(device_mesh, module.num_experts)
        _check_held("ExpertParallel", module, share)
        by_traffic = "allgather" if device_mesh.size() <= module.router.top_k else "alltoall"
        chosen = by_traffic if self.dispatcher == "auto" else self.dispatcher
        if chosen == "overlapped":
            check_overlaps(experts)
        for name, parameter in list(experts.named_parameters()):
            sharded = nn.Parameter(self._shard(parameter, device_mesh, share), requires_grad=parameter.requires_grad)
            sharded.__dict__.update(parameter.__dict__)  # what others noted on it
            setattr(experts, name, sharded)
        experts.num_experts = module.num_experts
        experts.local_share = local_share
        chunks, reserved_sms = 1, 0
        if chosen == "overlapped":
            chunks, reserved_sms = 2 if device_mesh.size() >= 4 else 1, 2
        experts.reserved_sms = reserved_sms if self.reserved_sms is None else self.reserved_sms
        module.dispatcher = _DISPATCHERS[chosen](
            Ranks.of(device_mesh.get_group()),
            max_rows_factor=self.max_rows_factor,
            chunks=chunks if self.chunks is None else self.chunks,
            gradient_scale=1 / device_mesh.size() if self.average_gradients else 1.0,
        )
        return module

    def _shard(self, parameter: Tensor, mesh: DeviceMesh, share: range) -> DTensor:
        held = parameter.detach()
        if self.src_data_rank is not None and len(held) > len(share):
            return distribute_tensor(held, mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        if len(held) > len(share):
            held = held[share.start : share.stop].clone()  # which lets go of the others
        return DTensor.from_local(held, mesh, [Shard(0)], run_check=False)


_DISPATCHERS = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "overlapped": OverlappedDispatcher,
}


def expert_share(mesh: DeviceMesh, num_experts: int) -> range:
    """The experts that this process holds.

    Raises:
        ValueError: the mesh has several dimensions or lacks this process, or its size does not divide `num_experts`.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f'ExpertParallel: the mesh must have one dimension, as mesh["ep"] has, got {mesh.mesh_dim_names} '
            f"{list(mesh.shape)}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"ExpertParallel: this process must be in the mesh, got {mesh}")
    if num_experts % mesh.size():
        raise ValueError(
            f"ExpertParallel: num_experts must be a multiple of the mesh's {mesh.size()} processes, got {num_experts}"
        )
    num_local = num_experts // mesh.size()
    first = mesh.get_local_rank() * num_local
    return range(first, first + num_local)


def _check_held(op: str, module: nn.Module, share: range) -> None:
    """Raises ValueError unless the layer holds all experts, or just these."""
    experts = module.experts
    if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
        raise ValueError(f"{op}: experts must be plain parameters, got DTensors: apply it once, before fully_shard")
    first = module.dispatcher.first_expert if isinstance(module.dispatcher, LocalDispatcher) else 0
    held = range(first, first + len(experts.w_up))
    if held not in (range(module.num_experts), share):
        raise ValueError(f"{op}: the layer must hold all experts or those of this process, {share}, got {held}")


def local_share(name: str, parameter: Tensor) -> Tensor:
    """This process's part of a sharded parameter. FSDP2 gathers the experts before their forward, and leaves a DTensor.
    Raises ValueError if the parameter is none."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"ExpertParallel: {name} must be a DTensor, got {type(parameter).__name__} {list(parameter.shape)}; "
            "load_state_dict(..., assign=True) of plain tensors replaces what is sharded, where "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict with full_state_dict=True fills it"
        )
    return parameter.to_local()
