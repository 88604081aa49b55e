"""Routings shared by tests of losses and counts, and every loss by its definition, in loops over float64."""

import math
from functools import partial

import torch

from moe_layers import (
    LayerRouting,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)

# Counts of a larger batch, for experts in the order of their ids.
OTHER_COUNTS = torch.arange(40).square() % 17

LOSSES = {
    "switch": load_balancing_loss,
    "switch_sigmoid": partial(load_balancing_loss, score="sigmoid"),
    "sequence": sequence_load_balancing_loss,
    "sequence_sqrt_softplus": partial(sequence_load_balancing_loss, score="sqrt_softplus"),
    "global": lambda routing, **numbers: global_load_balancing_loss(
        routing, OTHER_COUNTS[: routing.logits.shape[1]], **numbers
    ),
    "importance": importance_loss,
    "z": router_z_loss,
}

# Tokens, experts, top_k, sequences: E not a power of two, K = 1, K = E, one expert, one token.
SIZES = [(24, 6, 2, 4), (21, 5, 1, 3), (12, 7, 7, 2), (20, 13, 3, 1), (9, 1, 1, 3), (1, 4, 2, 1)]


def random_logits(num_tokens=24, num_experts=6, seed=0, dtype=torch.float64):
    return torch.randn(num_tokens, num_experts, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def count(experts, num_experts):
    return torch.bincount(experts[experts >= 0], minlength=num_experts).int()


def routing_of(logits, top_k=2, sequence_lengths=None, token_mask=None):
    """Return a softmax router's decision for these logits; lower ids first on ties."""
    experts = logits.detach().nan_to_num().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.gather(1, experts).softmax(-1)
    if token_mask is not None:
        experts = torch.where(token_mask[:, None], experts, -1)
    counts = count(experts, logits.shape[1])
    return LayerRouting(
        experts.int(), weights, logits, counts, token_mask=token_mask, sequence_lengths=sequence_lengths
    )


def by_definition(name, routing):
    """Compute the loss of a routing without padding, one token at a time."""
    logits, experts = routing.logits, routing.topk_experts.tolist()
    num_tokens, num_experts = logits.shape
    score = name.removeprefix("switch_").removeprefix("sequence_")

    def probabilities(token):
        exponentials = token.exp()
        scores = {
            "sigmoid": exponentials / (1 + exponentials),
            "sqrt_softplus": torch.log(1 + exponentials).sqrt(),
        }.get(score, exponentials)
        return scores / scores.sum()

    def switch(first, last, counts=None):
        slots = [expert for token in experts[first:last] for expert in token]
        counts = [slots.count(e) for e in range(num_experts)] if counts is None else counts
        mean = sum(probabilities(token) for token in logits[first:last]) / (last - first)
        return num_experts * sum(counts[e] / sum(counts) * mean[e] for e in range(num_experts))

    if name.startswith("switch"):
        return switch(0, num_tokens)
    if name == "global":
        return switch(0, num_tokens, OTHER_COUNTS[:num_experts].tolist())
    if name.startswith("sequence"):
        length = routing.sequence_lengths
        firsts = range(0, num_tokens, length)
        return sum(switch(first, first + length) for first in firsts) / len(firsts)
    if name == "importance":
        importance = [logits.new_zeros(()) for _ in range(num_experts)]
        for token, weights in zip(experts, routing.topk_weights, strict=True):
            for expert, weight in zip(token, weights, strict=True):
                importance[expert] = importance[expert] + weight
        mean = sum(importance) / num_experts
        return sum((value - mean) ** 2 for value in importance) / num_experts / mean**2
    return sum(token.exp().sum().log() ** 2 for token in logits) / num_tokens


def balanced_logits(num_experts, num_tokens):
    """Return logits where, in each E tokens, experts are chosen equally often per rank with equal mean probability."""
    expert, token = torch.arange(num_experts), torch.arange(num_tokens)
    return -((expert[None] - token[:, None]) % num_experts).double()


def balanced_value(name, num_experts):
    return {"importance": 0.0, "z": math.log(num_experts) ** 2}.get(name, 1.0)
