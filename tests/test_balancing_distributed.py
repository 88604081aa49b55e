"""A global batch over two processes with gloo: losses, layers and biases equal those of one process."""

import copy

import pytest
import torch
from torch import distributed
from torch.multiprocessing import spawn
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_layers import (
    BalanceLosses,
    MoEFeedForward,
    carry_expert_counts,
    global_expert_counts,
    global_load_balancing_loss,
    load_balancing_loss,
    update_selection_bias,
)

from .balance_cases import random_logits, routing_of

LENGTHS = [7, 17]  # tokens of each process


def check_loss(rank):
    """Losses and gradients of unequal parts add up to those of one process with all tokens."""
    logits = random_logits().requires_grad_()
    expected = load_balancing_loss(routing_of(logits))
    (gradient,) = torch.autograd.grad(expected, logits)
    own = logits.detach().split(LENGTHS)[rank].requires_grad_()
    routing = routing_of(own)
    counts = global_expert_counts(routing, group=distributed.group.WORLD)
    assert counts.tolist() == routing_of(logits).tokens_per_expert.tolist()
    loss = global_load_balancing_loss(routing, counts, num_tokens=24)
    (own_gradient,) = torch.autograd.grad(loss, own)
    torch.testing.assert_close(own_gradient, gradient.split(LENGTHS)[rank], rtol=1e-10, atol=1e-12)
    total = loss.detach()
    distributed.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
    # Without the other's counts it would be another loss.
    local = load_balancing_loss(routing, num_tokens=24).detach()
    distributed.all_reduce(local)
    assert (local - expected).abs() > 1e-3


def make_layer(group, **options):
    torch.manual_seed(0)
    losses = BalanceLosses(global_batch=0.75, group=group)
    layer = MoEFeedForward(16, 8, 5, 2, init_std=0.3, implementation="reference", balance_losses=losses, **options)
    return layer.double()


def check_layer(rank):
    """Two micro-batches on each process; the gradients add up to those of one process that has both of both."""
    tokens = torch.randn(4, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = make_layer(distributed.group.WORLD)
    copied = copy.deepcopy(layer)
    assert copied.balance_losses.group is distributed.group.WORLD
    one = MoEFeedForward(16, 8, 5, 2, implementation="reference").double()
    one.load_state_dict(layer.state_dict())
    first, second = tokens[:2], tokens[2:]

    def expected():
        earlier = one(first, return_routing=True)[1]
        later_y, later = one(second, return_routing=True)
        seen = earlier.tokens_per_expert
        loss = global_load_balancing_loss(earlier, seen, num_tokens=24)
        loss = loss + global_load_balancing_loss(later, seen + later.tokens_per_expert, num_tokens=24)
        (later_y.sum() + one(first).sum() + 0.75 * loss).backward()
        return [parameter.grad for parameter in one.parameters()]

    for forward in (layer, lambda x, **facts: checkpoint(copied, x, use_reentrant=False, **facts)):
        module = layer if forward is layer else copied
        for part in (first, second):
            forward(part[rank : rank + 1], num_tokens=24).sum().backward()
            carry_expert_counts(module)
        for parameter in module.parameters():
            distributed.all_reduce(parameter.grad)
    for exact, a, b in zip(expected(), layer.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(a.grad, exact, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(b.grad, exact, rtol=1e-10, atol=1e-12)


def check_bias_update(rank):
    """One update of two layers equals that of one process with all tokens, and is the same everywhere."""
    tokens = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    router = RouterSpec.sigmoid_groups()
    layers = [torch.nn.ModuleList([make_layer(group, router=router) for _ in "ab"]) for group in (None, None)]
    for layer in layers[0]:
        layer.balance_losses = BalanceLosses()
        layer(tokens[rank])
    for layer in layers[1]:
        layer.balance_losses = BalanceLosses()
        layer(tokens)
    update_selection_bias(layers[0], rate=0.5, group=distributed.group.WORLD)
    counts = [layer.router.expert_counts for layer in layers[1]]
    for layer, counted in zip(layers[0], counts, strict=True):
        expected = 0.5 * (counted.double().mean() - counted).sign()
        assert expected.any()
        assert torch.equal(layer.router.selection_bias.double(), expected)


def check_errors(rank):
    layer = make_layer(None, router=RouterSpec.sigmoid_groups())
    x = torch.zeros(2, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"with 2 processes the group that shares a batch must be given, got None"):
        layer(x)
    with pytest.raises(ValueError, match="update_selection_bias: with 2 processes the group"):
        layer.update_selection_bias()


def run(rank, path):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for check in (check_loss, check_layer, check_bias_update, check_errors):
        check(rank)
    distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    spawn(run, (tmp_path / "store",), nprocs=2)
