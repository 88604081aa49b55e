"""Replay, losses and statistics of transformers models on two ranks, with DistributedDataParallel and FSDP2."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_layers import BalanceLosses, RoutingReplay, aux_losses, observe, set_aux_loss_scale, update_selection_bias
from moe_layers.integrations.transformers import balance_routing, enable
from moe_layers.integrations.transformers.routers.attached import hooked_routers

from ..processes import make_test
from ..tiers import slow
from .models import build, draw_tokens
from .sharded_models import whole

LOSSES = BalanceLosses(switch=0.2, z=0.1)


def make_model(device, model_type="qwen3_moe", use_reentrant=None):
    model = build(model_type, device, dtype=torch.float64).train()
    enable(model, implementation="reference")
    if use_reentrant is not None:
        # Both public methods warn, in one version of transformers or another.
        recompute = lambda *args: checkpoint(*args, use_reentrant=use_reentrant)  # noqa: E731
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recompute)
        model.enable_input_require_grads()
    return model


def batch(device):
    """Return tokens [4, S], and arrays [S, layer, top-k] for them with a token that has no choice."""
    tokens = draw_tokens(make_model(device), batch=4)
    arrays = torch.rand(*tokens.shape, 2, 8, generator=torch.Generator().manual_seed(5)).argsort(-1)[..., :3].int()
    arrays[:, 4] = -1
    return tokens, arrays


def replayed_loss(model, tokens, arrays):
    with RoutingReplay.from_rollouts(model, arrays).replay(model):
        return model(input_ids=tokens, use_cache=False).logits.square().mean()


def check(device, wrap, prefix=""):
    """Gradients equal those of one process, which runs the ranks' parts in turn."""
    tokens, arrays = batch(device)
    reference = make_model(device)
    balance_routing(reference, LOSSES)
    set_aux_loss_scale(reference, torch.tensor(0.5, dtype=torch.float64, device=device))
    for part in range(2):
        (replayed_loss(reference, tokens.chunk(2)[part], arrays.chunk(2)[part]) / 2).backward()
    rank = distributed.get_rank()
    for use_reentrant in (None, False, True):
        model = make_model(device, use_reentrant=use_reentrant)
        balance_routing(model, LOSSES)
        wrapped = wrap(model, device)
        replayed_loss(wrapped, tokens.chunk(2)[rank], arrays.chunk(2)[rank]).backward()
        for name, parameter in reference.named_parameters():
            gradient = whole(wrapped.get_parameter(prefix + name).grad)
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-7, atol=1e-9)


def data_parallel(device):
    check(device, lambda model, _: DistributedDataParallel(model), "module.")


def fully_sharded(device):
    def wrap(model, device):
        mesh = init_device_mesh(device.type, (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    check(device, wrap)


def losses_and_statistics_hold_both_ranks(device):
    group, rank = distributed.group.WORLD, distributed.get_rank()
    tokens, _ = batch(device)
    losses, numbers = [], []
    for part, owner in ((tokens, None), (tokens.chunk(2)[rank], group)):
        model = make_model(device)
        observers = observe(model)
        with pytest.raises(
            ValueError, match="balance_routing: with 2 ranks the group that shares a batch must be given"
        ):
            balance_routing(model, BalanceLosses(global_batch=1.0))
        # A group of one rank means that no other rank shares the batch.
        alone = distributed.new_subgroups(1)[0]
        balance_routing(model, BalanceLosses(global_batch=1.0, group=owner or alone))
        model(input_ids=part)
        losses.append(torch.stack(list(aux_losses(model).values())))
        numbers.append([observer.read(group=owner)._replace(aux_loss=0) for observer in observers.values()])
    distributed.all_reduce(losses[1], distributed.ReduceOp.AVG if device.type == "cuda" else distributed.ReduceOp.SUM)
    torch.testing.assert_close(losses[1] / (1 if device.type == "cuda" else 2), losses[0], rtol=1e-7, atol=0)
    for one, both in zip(*numbers, strict=True):
        assert both.tokens_per_expert.tolist() == one.tokens_per_expert.tolist()
        assert both.entropy == pytest.approx(one.entropy, rel=1e-6) and both.max_violation == one.max_violation


def biases_stay_equal(device):
    group, rank = distributed.group.WORLD, distributed.get_rank()
    tokens, _ = batch(device)
    biases = []
    for part, owner in ((tokens, distributed.new_subgroups(1)[0]), (tokens.chunk(2)[rank], group)):
        model = make_model(device, "deepseek_v3")
        balance_routing(model)
        model(input_ids=part)
        update_selection_bias(model, rate=0.25, group=owner)
        (router,) = hooked_routers(model).values()
        biases.append(router.selection_bias.clone())
    assert torch.equal(*biases)


# Two processes import transformers, which takes seconds.
test_two_ranks = slow(
    make_test([data_parallel, fully_sharded, losses_and_statistics_hold_both_ranks, biases_stay_equal], 2)
)
