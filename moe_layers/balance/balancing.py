"""Load balancing: loss coefficients of a layer, expert counts of a global batch, and the selection-bias update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]  # private API

from moe_kernels.reference import SCORES

from ..checks import check_choice, is_dtensor
from ..routing.model_routers import check_found, model_routers
from ..routing.result import LayerRouting
from ..routing.router import TopKRouter
from .losses import (
    COUNTS,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)


@dataclass(frozen=True)
class BalanceLosses:
    """Coefficients of a layer's auxiliary losses. The default 0 disables a loss. `losses.py` compares the losses.

    Args:
        switch: coefficient of `load_balancing_loss`, over the tokens of a call.
        sequence: coefficient of `sequence_load_balancing_loss`. Needs x [..., S, d_model], or `sequence_lengths`.
        global_batch: coefficient of `global_load_balancing_loss`, with the counts of all ranks of `group`.
        importance: coefficient of `importance_loss`.
        z: coefficient of `router_z_loss`.
        score: "softmax" (default), "sigmoid" or "sqrt_softplus". Normalised scores are the probabilities in `switch`,
            `sequence` and `global_batch`.
        group: the ranks that share a global batch. With several ranks, `global_batch` requires a group.
        count: the experts that `sequence` counts. "scores" (default) means the experts with the highest scores.
            "choices" means the experts that the router chose.

    Raises:
        ValueError: a coefficient is negative or not finite, the score or count is unknown, or no loss uses `group`.
    """

    switch: float = 0.0
    sequence: float = 0.0
    global_batch: float = 0.0
    importance: float = 0.0
    z: float = 0.0
    score: str = "softmax"
    group: ProcessGroup | None = None
    count: str = "scores"
    any: bool = field(init=False, repr=False, compare=False)  # whether a loss is enabled

    def __post_init__(self):
        for name, value in self.coefficients.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"BalanceLosses: {name} must be finite and not negative, got {value}")
        check_choice("BalanceLosses", "score", self.score, tuple(SCORES))
        check_choice("BalanceLosses", "count", self.count, COUNTS)
        if self.group is not None and not self.global_batch:
            raise ValueError("BalanceLosses: only global_batch needs a group, got global_batch=0.0")
        object.__setattr__(self, "any", any(self.coefficients.values()))

    def __deepcopy__(self, memo) -> BalanceLosses:
        return self  # the object is frozen, and process groups cannot be copied

    @property
    def coefficients(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("switch", "sequence", "global_batch", "importance", "z")}

    def total(
        self,
        routing: LayerRouting,
        *,
        num_tokens: int | Tensor | None = None,
        accumulated_counts: Tensor | None = None,  # [E]
        global_counts: Tensor | None = None,  # [E]
    ) -> Tensor:  # scalar
        """Return the sum of the losses, weighted by their coefficients.

        Shapes: accumulated_counts [E], global_counts [E]; result scalar.

        Args:
            global_counts: result of `global_expert_counts`. Default None: this method calls `global_expert_counts`.
        """
        loss = routing.logits.new_zeros(())
        by_score = {"num_tokens": num_tokens, "score": self.score}
        if self.switch:
            loss = loss + self.switch * load_balancing_loss(routing, **by_score)
        if self.sequence:
            loss = loss + self.sequence * sequence_load_balancing_loss(routing, count=self.count, **by_score)
        if self.global_batch:
            if global_counts is None:
                global_counts = global_expert_counts(routing, group=self.group, accumulated_counts=accumulated_counts)
            loss = loss + self.global_batch * global_load_balancing_loss(routing, global_counts, **by_score)
        if self.importance:
            loss = loss + self.importance * importance_loss(routing, num_tokens=num_tokens)
        if self.z:
            loss = loss + self.z * router_z_loss(routing, num_tokens=num_tokens)
        return loss


def global_expert_counts(
    routing: LayerRouting,
    *,
    group: ProcessGroup | None = None,
    accumulated_counts: Tensor | None = None,  # [E] integers
) -> Tensor:  # [E] int64
    """Return each expert's number of slots in a global batch: this call plus `accumulated_counts`, summed over `group`.

    The function communicates E integers and no gradient, and needs no host synchronisation.

    Shapes: accumulated_counts [E] integers; result [E] int64.

    Args:
        group: the ranks that share the batch; None for a single rank.
        accumulated_counts: this rank's counts from other calls in the same optimizer step.

    Raises:
        ValueError: `accumulated_counts` is not [E] integers on the device of this call's counts, or there are several
            ranks and no group.
    """
    own = routing.choices_per_expert
    if accumulated_counts is not None:
        _check_counts(accumulated_counts, own)
    check_group("global_expert_counts", group)
    return _global_counts_op(own, accumulated_counts, "" if group is None else group.group_name)


# Use a registered op, because activation checkpointing can save the result of an op. A recomputation then does not
# communicate again, and counts that were accumulated after the forward do not change the recomputed loss.
@torch.library.custom_op("moe_layers::global_expert_counts", mutates_args=())
def _global_counts_op(own: Tensor, accumulated: Tensor | None, group_name: str) -> Tensor:
    total = own.to(torch.int64, copy=True) if accumulated is None else own.to(torch.int64) + accumulated
    if group_name:
        distributed.all_reduce(total, group=_resolve_process_group(group_name))  # pyright: ignore[reportArgumentType]  # GroupName is a str
    return total


@_global_counts_op.register_fake
def _(own, accumulated, group_name):
    return own.new_empty(own.shape, dtype=torch.int64)


@torch.no_grad()
def update_selection_bias(model: nn.Module, *, rate: float = 1e-3, group: ProcessGroup | None = None) -> None:
    """Update the selection biases of a layer or model, to balance experts without a loss. Call once per optimizer step.

    The selection bias of an expert rises by `rate` if the expert was chosen less often than the mean since the last
    call. The bias falls by `rate` if the expert was chosen more often. Forwards in training mode are counted, but
    recomputed forwards are not. Slots beyond a capacity are counted, but padding is not. One collective for all routers
    sums the counts over `group`. Integer counts keep biases equal on all ranks. Counts are then reset to zero.

    Call `balance_routing(model)` before training a transformers model with `e_score_correction_bias`. Without this
    call, forwards of the model are not counted.

    Source: algorithm 1 of https://arxiv.org/abs/2408.15664.

    Args:
        group: the ranks that share a batch. The default None raises if there are several ranks.

    Raises:
        ValueError: no router has a selection bias. A bias is sharded, has fewer than 32 bits or is on another device
            than the counts. Forwards were not counted. `rate` is negative or not finite. A needed `group` is missing.
    """
    routers = [(each, bias) for each in model_routers(model).values() if (bias := each.selection_bias) is not None]
    if not routers:
        raise ValueError(
            "update_selection_bias: needs a router with a selection bias, as of RouterSpec.deepseek_v3(), got none"
        )
    if not (rate >= 0 and math.isfinite(rate)):
        raise ValueError(f"update_selection_bias: rate must be finite and not negative, got {rate}")
    check_group("update_selection_bias", group)
    for router, _ in routers:
        if not isinstance(router, TopKRouter):
            router.require_counts("update_selection_bias")
    for router, bias in routers:
        _prepare_counts(router, bias)
    total = torch.cat([router.expert_counts for router, _ in routers])
    if group is not None:
        distributed.all_reduce(total, group=group)
    sizes = [router.num_experts for router, _ in routers]
    for (router, bias), counts in zip(routers, total.split(sizes), strict=True):
        direction = (counts.sum() - len(counts) * counts).sign()
        bias.add_(direction.to(bias.dtype), alpha=rate)
        router.expert_counts.zero_()


def _prepare_counts(router: Any, bias: Tensor) -> None:
    """Move the counts to the device of the bias. Raise ValueError if the bias cannot be updated."""
    if is_dtensor(bias) or bias.dtype.itemsize < 4:
        raise ValueError(
            "update_selection_bias: a selection bias must be a float32 or float64 tensor that every rank holds "
            f"whole, got {'a DTensor' if is_dtensor(bias) else bias.dtype}"
        )
    router.take_counts_to(bias.device)
    if router.expert_counts.device != bias.device:
        raise ValueError(
            "update_selection_bias: a router's expert_counts must be on the device of its selection_bias, got "
            f"{router.expert_counts.device} and {bias.device}"
        )


@torch.no_grad()
def carry_expert_counts(model: nn.Module) -> None:
    """Include the counts of earlier micro-batches in the global-batch losses of later micro-batches. Call this function
    between the micro-batches of an optimizer step.

    Raises:
        ValueError: the model has no MoE layer.
    """
    routers = model_routers(model).values()
    check_found("carry_expert_counts", routers)
    for router in routers:
        router.take_counts_to(router.weight.device)
        router.accumulated_counts = router.expert_counts.clone()


@torch.no_grad()
def reset_expert_counts(model: nn.Module) -> None:
    """Reset expert counts for the next global batch. Call this function after each optimizer step that used
    `carry_expert_counts`.

    Raises:
        ValueError: the model has no MoE layer.
    """
    routers = model_routers(model).values()
    check_found("reset_expert_counts", routers)
    for router in routers:
        router.expert_counts.zero_()
        router.accumulated_counts = None


def _check_counts(counts: Tensor, own: Tensor) -> None:
    """Raise ValueError unless `counts` are integers with the shape and device of `own`."""
    if counts.shape != own.shape or counts.is_floating_point() or counts.device != own.device:
        raise ValueError(
            f"global_expert_counts: accumulated_counts must be [E={len(own)}] integers on {own.device}, "
            f"got {list(counts.shape)} {counts.dtype} on {counts.device}"
        )


def check_group(op: str, group: ProcessGroup | None) -> None:
    """Raise ValueError if there are several ranks and `group` is None."""
    if group is None and distributed.is_available() and distributed.is_initialized():
        num_ranks = distributed.get_world_size()
        if num_ranks > 1:
            raise ValueError(
                f"{op}: with {num_ranks} ranks the group that shares a batch must be given, got None; "
                "torch.distributed.group.WORLD is all ranks"
            )
