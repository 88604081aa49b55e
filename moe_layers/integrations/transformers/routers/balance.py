"""Adds auxiliary losses and counts of chosen experts to transformers models."""

from __future__ import annotations

from torch import Tensor, nn

from ....balance.balancing import BalanceLosses, check_group
from ....checks import check_kind
from ....input import check_num_tokens
from .attached import hooked_routers
from .hooks import PROBABILITIES
from .model_forward import check_single_loss


def balance_routing(
    model: nn.Module, losses: BalanceLosses | None = None, *, num_tokens: int | Tensor | None = None
) -> None:
    """From now on, count the experts chosen in training mode, and add the gradients of auxiliary losses.

    `update_selection_bias`, `carry_expert_counts` and `reset_expert_counts` use the counts. Losses behave as in
    `MoEFeedForward`. Every backward through a layer's output adds the gradients of the losses. `aux_losses` returns the
    losses, and `set_aux_loss_scale` scales the gradients. Losses and counts exclude the padding of an attention mask
    [B, S]. The loss that the model returns does not contain the auxiliary losses.

    Under gradient accumulation, average the losses with `set_aux_loss_scale(model, torch.tensor(1 / num_accumulated))`,
    or sum the losses with `num_tokens`.

    Args:
        losses: coefficients, which replace those of an earlier call. Default None: no losses.
        num_tokens: divisor of the losses, see `moe_layers.balance.losses`. A tensor is not copied, so a change in place
            takes effect from the next forward on. Default: the number of tokens in each call.

    Raises:
        ValueError: the model has no MoE block of transformers or an unsupported router, or `z` is set for a router that
            returns probabilities. Other causes: the model adds the losses of transformers (`output_router_logits`), or
            there are several ranks and no group for `global_batch`.
    """
    losses = BalanceLosses() if losses is None else losses
    check_kind("balance_routing", "losses", losses, BalanceLosses)
    routers = hooked_routers(model).values()
    if not routers:
        raise ValueError(f"balance_routing: the model must have MoE blocks of transformers, got {type(model).__name__}")
    if num_tokens is not None:
        check_num_tokens("balance_routing", num_tokens)
    if losses.global_batch:
        check_group("balance_routing", losses.group)
    if losses.any:
        for module in model.modules():
            if hasattr(module, "config"):
                check_single_loss(module, {})
    for router in routers:
        kind = type(router.router).__name__
        if losses.z and kind in PROBABILITIES:
            raise ValueError(f"balance_routing: z needs the router's logits, got {kind}, which returns probabilities")
    for router in routers:
        router.balance_losses, router.num_tokens, router.counts = losses, num_tokens, True
