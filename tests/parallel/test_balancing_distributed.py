"""A global batch over two ranks: losses, layers and biases equal those of one rank."""

import copy
from functools import partial

import pytest
import torch
from torch import distributed
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

from ..layer.balance_cases import random_logits, routing_of
from ..layers import moe_layer
from ..processes import make_test

LENGTHS = [7, 17]  # tokens of each rank


def losses_equal_one_process(device):
    """Losses and gradients of unequal parts add up to those of one rank with all tokens."""
    logits, rank = random_logits().to(device).requires_grad_(), distributed.get_rank()
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
    # Without the other rank's counts the loss would differ.
    local = load_balancing_loss(routing, num_tokens=24).detach()
    distributed.all_reduce(local)
    assert (local - expected).abs() > 1e-3


def draw_tokens(device, *batch):
    return torch.randn(*batch, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)


def make_layer(device, group, **options):
    torch.manual_seed(0)
    losses = BalanceLosses(global_batch=0.75, group=group)
    layer = moe_layer(16, 8, 5, 2, init_std=0.3, implementation="reference", balance_losses=losses, **options)
    return layer.double().to(device)


def layers_equal_one_process(device):
    """With two micro-batches per rank, gradients add up to those of one rank with the combined micro-batches."""
    tokens, rank = draw_tokens(device, 4), distributed.get_rank()
    layer = make_layer(device, distributed.group.WORLD)
    copied = copy.deepcopy(layer)
    assert copied.balance_losses.group is distributed.group.WORLD
    one = MoEFeedForward(16, 8, 5, 2, implementation="reference").double().to(device)
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

    for module, forward in ((layer, layer), (copied, partial(checkpoint, copied, use_reentrant=False))):
        for part in (first, second):
            forward(part[rank : rank + 1], num_tokens=24).sum().backward()
            carry_expert_counts(module)
        for parameter in module.parameters():
            distributed.all_reduce(parameter.grad)
    for exact, a, b in zip(expected(), layer.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(a.grad, exact, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(b.grad, exact, rtol=1e-10, atol=1e-12)


def bias_updates_equal_one_process(device):
    """One update of two layers equals that of one rank with all tokens, and is equal on all ranks."""
    tokens = draw_tokens(device, 2)
    router = RouterSpec.deepseek_v3()
    layers = [torch.nn.ModuleList([make_layer(device, None, router=router) for _ in "ab"]) for _ in "ab"]
    for pair, part in zip(layers, (tokens[distributed.get_rank()], tokens), strict=True):
        for layer in pair:
            layer.balance_losses = BalanceLosses()
            layer(part)
    update_selection_bias(layers[0], rate=0.5, group=distributed.group.WORLD)
    counts = [layer.router.expert_counts for layer in layers[1]]
    for layer, counted in zip(layers[0], counts, strict=True):
        expected = 0.5 * (counted.double().mean() - counted).sign()
        assert expected.any()
        assert torch.equal(layer.router.selection_bias.double(), expected)


def data_parallel_leaves_counts_alone(device):
    """DistributedDataParallel broadcasts the first rank's buffers before a forward, but each rank keeps its counts."""
    tokens = draw_tokens(device, 2, 2)[distributed.get_rank()]  # two micro-batches
    layer = make_layer(device, distributed.group.WORLD, router=RouterSpec.deepseek_v3())
    model = torch.nn.parallel.DistributedDataParallel(layer)
    for part in tokens:
        model(part).sum().backward()
    chosen = [layer.router(part).topk_experts.flatten().long().bincount(minlength=5) for part in tokens]
    assert torch.equal(layer.router.expert_counts, sum(chosen))


def errors(device):
    layer = make_layer(device, None, router=RouterSpec.deepseek_v3())
    x = torch.zeros(2, 3, 16, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=r"with 2 ranks the group that shares a batch must be given, got None"):
        layer(x)
    with pytest.raises(ValueError, match="update_selection_bias: with 2 ranks the group"):
        update_selection_bias(layer)


CASES = [
    losses_equal_one_process,
    layers_equal_one_process,
    bias_updates_equal_one_process,
    data_parallel_leaves_counts_alone,
    errors,
]

test_two_processes = make_test(CASES, 2)
