"""What keeps experts evenly loaded: the coefficients of a layer's losses, counts of a global batch, the bias update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from ..routing.result import LayerRouting
from ..routing.router import TopKRouter
from .losses import (
    SCORES,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)


@dataclass(frozen=True)
class BalanceLosses:
    """The coefficients of a layer's auxiliary losses; 0 leaves one out. `losses.py` says how they differ.

    Args:
        switch: of `load_balancing_loss`, over the tokens of a call.
        sequence: of `sequence_load_balancing_loss`. x must be [..., S, d_model], or `sequence_lengths` be given.
        global_batch: of `global_load_balancing_loss`, with the counts of all processes of `group`.
        importance: of `importance_loss`.
        z: of `router_z_loss`.
        score: "softmax", "sigmoid" or "sqrt_softplus", whose shares are the probabilities of the first three.
        group: the processes that share a global batch. To be named where there are several.

    Raises:
        ValueError: a coefficient is negative or not finite, an unknown score, or a group that no loss needs.
    """

    switch: float = 0.0
    sequence: float = 0.0
    global_batch: float = 0.0
    importance: float = 0.0
    z: float = 0.0
    score: str = "softmax"
    group: ProcessGroup | None = None

    def __post_init__(self):
        for name, value in self.coefficients.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"BalanceLosses: {name} must be finite and not negative, got {value}")
        if self.score not in SCORES:
            raise ValueError(f"BalanceLosses: score must be one of {tuple(SCORES)}, got {self.score!r}")
        if self.group is not None and not self.global_batch:
            raise ValueError("BalanceLosses: only global_batch needs a group, got global_batch=0.0")

    def __deepcopy__(self, memo) -> BalanceLosses:
        return self  # frozen, and process groups have no copies

    @property
    def coefficients(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("switch", "sequence", "global_batch", "importance", "z")}

    @property
    def any(self) -> bool:
        """Whether there is a loss at all."""
        return any(self.coefficients.values())

    def total(
        self,
        routing: LayerRouting,
        *,
        num_tokens: int | Tensor | None = None,
        accumulated_counts: Tensor | None = None,  # [E]
    ) -> Tensor:  # scalar
        """The sum of the losses, times their coefficients."""
        loss = routing.logits.new_zeros(())
        by_score = {"num_tokens": num_tokens, "score": self.score}
        if self.switch:
            loss = loss + self.switch * load_balancing_loss(routing, **by_score)
        if self.sequence:
            loss = loss + self.sequence * sequence_load_balancing_loss(routing, **by_score)
        if self.global_batch:
            counts = global_expert_counts(routing, group=self.group, accumulated_counts=accumulated_counts)
            loss = loss + self.global_batch * global_load_balancing_loss(routing, counts, **by_score)
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
    """How many slots of a global batch chose each expert: those of this call, plus `accumulated_counts`, over `group`.

    Communicates E integers, and no gradient. Does not wait for the GPU.

    Args:
        group: None where there is one process.
        accumulated_counts: of this process: the counts of other calls in the same optimizer step.

    Raises:
        ValueError: `accumulated_counts` has another shape or is not of integers, or there are several processes and no
            group.
    """
    own = routing.choices_per_expert
    if accumulated_counts is not None:
        check_expert_counts("global_expert_counts", accumulated_counts, own)
    check_group("global_expert_counts", group)
    return _global_counts_op(own, accumulated_counts, "" if group is None else group.group_name)


# A registered op, so that a checkpointed region can save its result: neither the other processes are asked twice, nor
# does the loss change with counts that were accumulated in between.
@torch.library.custom_op("moe_layers::global_expert_counts", mutates_args=())
def _global_counts_op(own: Tensor, accumulated: Tensor | None, group_name: str) -> Tensor:
    total = own.to(torch.int64, copy=True) if accumulated is None else own.to(torch.int64) + accumulated
    if group_name:
        distributed.all_reduce(total, group=_resolve_process_group(group_name))
    return total


@_global_counts_op.register_fake
def _(own, accumulated, group_name):
    return own.new_empty(own.shape, dtype=torch.int64)


@torch.no_grad()
def update_selection_bias(
    model: nn.Module,
    *,
    rate: float = 1e-3,
    group: ProcessGroup | None = None,
) -> None:
    """Balance without a loss: call once per optimizer step, for a layer or a whole model.

    The selection bias of experts that were chosen less than the mean since the last call rises by `rate`, that of
    experts chosen more falls by it, and one at the mean stays. Forwards count in training mode, recomputed ones not
    again; padding and slots of a capacity's overflow as in `LayerRouting.choices`. Counts are compared as integers and
    added over `group` in one call for all routers, so that biases stay the same in every process. Then they are zero.

    Source: algorithm 1 of https://arxiv.org/abs/2408.15664.

    Args:
        group: the processes that share a batch. To be named where there are several.

    Raises:
        ValueError: no router here has a selection bias, or one has its counts on another device, `rate` is negative or
            not finite, or there are several processes and no group.
    """
    routers = [router for router in _routers(model) if router.selection_bias is not None]
    if not routers:
        raise ValueError(
            "update_selection_bias: needs a router with a selection bias, as of RouterSpec.deepseek_v3(), got none"
        )
    if not (rate >= 0 and math.isfinite(rate)):
        raise ValueError(f"update_selection_bias: rate must be finite and not negative, got {rate}")
    check_group("update_selection_bias", group)
    for router in routers:
        router.take_counts_to(router.selection_bias.device)
        if router.expert_counts.device != router.selection_bias.device:
            raise ValueError(
                "update_selection_bias: a router's expert_counts must be where its selection_bias is, got "
                f"{router.expert_counts.device} and {router.selection_bias.device}"
            )
    total = torch.cat([router.expert_counts for router in routers])
    if group is not None:
        distributed.all_reduce(total, group=group)
    for router, counts in zip(routers, total.split([router.num_experts for router in routers]), strict=True):
        direction = (counts.sum() - len(counts) * counts).sign()
        router.selection_bias.add_(direction.to(router.selection_bias.dtype), alpha=rate)
        router.expert_counts.zero_()


@torch.no_grad()
def carry_expert_counts(model: nn.Module) -> None:
    """Call between the micro-batches of an optimizer step: the next global-batch losses count those so far, too."""
    for router in _routers(model):
        router.take_counts_to(router.weight.device)
        router.accumulated_counts = router.expert_counts.clone()


@torch.no_grad()
def reset_expert_counts(model: nn.Module) -> None:
    """Call after an optimizer step with `carry_expert_counts`: the next global batch starts."""
    for router in _routers(model):
        router.expert_counts.zero_()
        router.accumulated_counts = None


def _routers(model: nn.Module) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def check_expert_counts(op: str, counts: Tensor, own: Tensor) -> None:
    """Raises ValueError unless these are counts of the same experts, on the same device."""
    if counts.shape != own.shape or counts.is_floating_point() or counts.device != own.device:
        raise ValueError(
            f"{op}: accumulated_counts must be [E={len(own)}] integers on {own.device}, "
            f"got {list(counts.shape)} {counts.dtype} on {counts.device}"
        )


def check_group(op: str, group: ProcessGroup | None) -> None:
    """Raises ValueError if there are several processes, and it is not said which ones share a batch."""
    if group is None and distributed.is_available() and distributed.is_initialized():
        num_processes = distributed.get_world_size()
        if num_processes > 1:
            raise ValueError(
                f"{op}: with {num_processes} processes the group that shares a batch must be given, got None; "
                "torch.distributed.group.WORLD are all"
            )
