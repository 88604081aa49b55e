"""Gradient clipping for models whose parameters are sharded over different meshes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .collectives import Ranks, wait

Sharding = tuple[DeviceMesh, tuple[int, ...]] | None  # mesh and its sharded dimensions; None: plain tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:  # scalar
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, but also accept parameters on different meshes in one call.

    The norm counts all shards of a sharded gradient, and one copy of a replicated gradient. The norm is bitwise equal
    on all ranks, and has the dtype to which the dtypes of all gradients promote. Gradients must be averaged over ranks.
    All ranks must pass the parameters in the same order. Only `error_if_nonfinite` synchronises the host.

    Returns:
        the norm before clipping.

    Shapes: result scalar.

    Raises:
        ValueError: a gradient is an unreduced sum (`Partial`), or `norm_type` is not positive. PyTorch's function also
            accepts the type 0, which counts tensors with a nonzero gradient.
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive, got {norm_type}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_sharding: dict[Sharding, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_sharding.setdefault(_sharding(parameter.grad), []).append(parameter)
    if not by_sharding:
        return torch.tensor(0.0)
    norms = [_norm(group, sharding, norm_type, foreach) for sharding, group in by_sharding.items()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients must be finite, got {total}"
        )
    for group in by_sharding.values():  # one group at a time, because a foreach op accepts only one mesh
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def _sharding(gradient: Tensor) -> Sharding:
    if not isinstance(gradient, DTensor):
        return None
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"clip_grad_norm_: gradients must be whole sums, got {gradient.placements}")
    sharded = (dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.device_mesh, tuple(sharded)


def _norm(parameters: list[Tensor], sharding: Sharding, norm_type: float, foreach: bool | None) -> Tensor:  # scalar
    """Return the norm of the parameters' gradients, which must all have the given sharding. All shards count."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    held = [shard for shard in shards if shard.numel()]
    norm = get_total_norm(held, norm_type, foreach=foreach) if held else shards[0].new_zeros(())
    # Promote over all shards, also over empty shards, because all ranks must gather norms of the same dtype.
    norm = norm.to(reduce(torch.promote_types, (shard.dtype for shard in shards)))
    if sharding is not None:
        mesh, dims = sharding
        for dim in dims:
            # Gather the norms instead of reducing them, so that all ranks add the norms in the same order.
            norms = wait(Ranks.of(mesh.get_group(dim)).all_gather(norm.view(1)))
            norm = torch.linalg.vector_norm(norms, norm_type)
    return norm
