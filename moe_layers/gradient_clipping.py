"""Clipping gradients of a model whose parameters are sharded over different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:  # scalar
    """`torch.nn.utils.clip_grad_norm_`, which refuses parameters of different meshes, for any of them together.

    The norm is that of the whole model, the same in every process: of a sharded gradient all shards count, of a
    replicated one a single copy. Gradients must be averaged already. All processes must call it, with parameters in
    the same order. Does not wait for the GPU, unless `error_if_nonfinite`.

    Returns:
        the norm before clipping.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [
        _whole(get_total_norm([parameter.grad for parameter in group], norm_type, foreach=foreach))
        for group in by_mesh.values()
    ]
    if not norms:
        return torch.tensor(0.0)
    total = (
        torch.stack(norms).max() if math.isinf(norm_type) else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    )
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients must be finite, got {total}"
        )
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
