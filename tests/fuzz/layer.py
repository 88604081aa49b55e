"""Cases of `MoEFeedForward`, with all its options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from moe_kernels import Activation, RouterSpec, reference
from moe_layers import BalanceLosses, CapacityFactor, MoEFeedForward

from ..layers import moe_layer
from .case import Case, hold, sums_decide, with_upstream
from .tensors import Random, lay_out

ROUTERS = {
    "softmax": RouterSpec(),
    "softmax_unnormalized": RouterSpec(normalize=False),
    "ernie": RouterSpec.ernie(normalize=False, scale=2.0),
    "sigmoid": RouterSpec.deepseek_v3(scale=2.5),
    "llama4": RouterSpec.llama4(),
    "logit_bias": RouterSpec(logit_bias=True),
    "gemma4": RouterSpec.gemma4(1e-6),
}
NEAR_TIE = 1e-6  # keys this close may be chosen in either order


@dataclass(frozen=True)
class Layer(Case):
    leading: tuple[int, ...]  # axes of x before the last
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    dtype: str
    router: str  # a key of ROUTERS
    activation: str
    limit: float | None
    bias: bool
    shared_d_ff: int | None
    shared_gate: bool
    num_zero_experts: int
    latent_dim: int | None
    capacity: int | float | None  # a float is a capacity factor
    masked: float  # share of padding
    recompute: str | None
    losses: bool  # load-balancing and z loss
    frozen: tuple[str, ...]  # "x", or parts of the layer
    layouts: tuple[str, ...]  # for x, the upstream gradient
    seed: int

    def layer(self, device: str, implementation: str) -> MoEFeedForward:
        capacity = CapacityFactor(self.capacity) if isinstance(self.capacity, float) else self.capacity
        losses = BalanceLosses(switch=0.1, z=0.01) if self.losses else BalanceLosses()
        layer = moe_layer(
            self.d_model,
            self.d_ff,
            self.num_experts,
            self.top_k,
            activation=self.experts_activation,
            router=ROUTERS[self.router],
            bias=self.bias,
            shared_d_ff=self.shared_d_ff,
            shared_gate=self.shared_gate,
            num_zero_experts=self.num_zero_experts,
            latent_dim=self.latent_dim,
            capacity=capacity,
            recompute=self.recompute,
            balance_losses=losses,
            implementation=implementation,
            device=device,
            dtype=getattr(torch, self.dtype),
        ).eval()
        if (selection_bias := layer.router.selection_bias) is not None:
            selection_bias.copy_(Random("float32", device, self.seed).values(*selection_bias.shape, scale=0.3))
        return layer

    def draw(self, layer: MoEFeedForward, device: str, seed: int) -> tuple[Tensor, ...]:
        """Return x, the mask, the layer's own choice of experts, then its parameters."""
        multiples = sums_decide(self.limit, self.dtype)
        random = Random(self.dtype, device, 1000 * self.seed + seed, multiples=multiples)
        x = random.values(*self.leading, self.d_model)
        x = lay_out(x, self.layouts[0]) if x.dim() > 1 else x
        mask = random.chance(*self.leading, of=1 - self.masked)
        parameters = [random.values(*p.shape, scale=p.shape[-1] ** -0.5) for p in layer.parameters()]
        with torch.no_grad():
            named = dict(zip(self.names(layer), parameters, strict=True))
            routed = functional_call(layer, named, (x,), {"token_mask": mask, "return_routing": True})[1]
        self.check_choice(layer, routed, mask.flatten())
        # Padding tokens name some experts, which count for nothing.
        anything = torch.arange(self.top_k, device=device, dtype=torch.int32).expand_as(routed.choices)
        return x, mask, torch.where(routed.choices < 0, anything, routed.choices), *parameters

    @staticmethod
    def names(layer: MoEFeedForward) -> list[str]:
        return [name for name, _ in layer.named_parameters()]

    def check_choice(self, layer: MoEFeedForward, routed, mask: Tensor) -> None:
        """Check that experts are distinct, and that no unchosen expert has a higher key than a chosen one."""
        spec, choices = ROUTERS[self.router], routed.choices.long()
        assert torch.equal((choices >= 0).all(1), mask) and torch.equal((choices >= 0).any(1), mask), "padding"
        keys = reference.selection_keys(routed.logits.double(), spec, layer.router.selection_bias)[mask]
        chosen = torch.zeros_like(keys).scatter_(1, choices[mask], 1.0).bool()
        assert (chosen.sum(1) == self.top_k).all(), "experts of a token must be distinct"
        lowest = keys.masked_fill(~chosen, torch.inf).amin(1)
        assert (keys.masked_fill(chosen, -torch.inf).amax(1) <= lowest + NEAR_TIE).all(), "not the top-k"

    def upstream(self, dout: Tensor) -> Tensor:
        return lay_out(dout, self.layouts[1]) if dout.dim() > 1 else dout

    def run(self, layer: MoEFeedForward, replays: bool, x, mask, choice, *parameters) -> Tensor:
        options = {"token_mask": mask, **({"topk_experts": choice} if replays else {})}
        out = functional_call(layer, dict(zip(self.names(layer), parameters, strict=True)), (x,), options)
        return with_upstream(out, self.upstream, integers=False)

    def formula(self, layer: MoEFeedForward, x, mask, choice, *parameters) -> Tensor:
        """Compute the layer as a loop over experts, from its choice and its weights."""
        p = dict(zip(self.names(layer), parameters, strict=True))
        tokens = x.reshape(-1, self.d_model)
        weights, experts = self.weights(layer, p, tokens, choice), self.kept(choice, mask)
        inner = tokens if self.latent_dim is None else tokens @ p["w_latent_in"].T
        out = torch.zeros_like(inner)
        on_input = ROUTERS[self.router].weight_on_input
        for e in range(self.num_experts + self.num_zero_experts):
            t, k = (experts == e).nonzero(as_tuple=True)
            weight = weights[t, k, None]
            if e >= self.num_experts:
                y = inner[t]
            else:
                rows = weight * inner[t] if on_input else inner[t]
                y = feed_forward(self.experts_activation, rows, p, "experts.", e)
            out = out.index_add(0, t, y if on_input and e < self.num_experts else weight * y)
        out = out if self.latent_dim is None else out @ p["w_latent_out"].T
        if self.shared_d_ff is not None:
            shared = feed_forward(self.experts_activation, tokens, p, "shared_expert.")
            gate = p.get("shared_expert.w_gate")
            out = out + (shared if gate is None else shared * torch.sigmoid(tokens @ gate.T))
        return out.view(x.shape)

    @property
    def experts_activation(self) -> Activation:
        return Activation(self.activation, limit=self.limit)

    def weights(self, layer, p: dict[str, Tensor], tokens: Tensor, choice: Tensor) -> Tensor:  # [T, K]
        spec = ROUTERS[self.router]
        if spec.input_norm_epsilon is not None:
            norm = (tokens.square().mean(1, keepdim=True) + spec.input_norm_epsilon).sqrt()
            tokens = tokens / norm * p["router.input_scale"] * self.d_model**-0.5
        logits = tokens @ p["router.weight"].T
        logits = logits + p["router.bias"] if spec.logit_bias else logits
        scores = logits.softmax(1) if spec.score == "softmax" else logits.sigmoid()
        weights = scores.gather(1, choice.long())
        if spec.normalize:
            weights = weights / (weights.sum(1, keepdim=True) + spec.norm_epsilon)
        if spec.per_expert_scale:
            weights = weights * p["router.per_expert_scale"][choice.long()]
        return weights * spec.scale

    def kept(self, choice: Tensor, mask: Tensor) -> Tensor:  # [T, K]; -1 for padding and slots beyond the capacity
        length = self.leading[-1] if self.leading else 1
        capacity = self.capacity
        if isinstance(capacity, float):
            capacity = CapacityFactor(capacity).of(length, self.num_experts + self.num_zero_experts, self.top_k)
        taken: dict[tuple[int, int], int] = {}
        kept = []
        for t, (experts, is_token) in enumerate(zip(choice.tolist(), mask.flatten().tolist(), strict=True)):
            for e in experts:
                place = (t // length, e)
                taken[place] = taken.get(place, 0) + is_token
                kept.append(e if is_token and (capacity is None or taken[place] <= capacity) else -1)
        return torch.tensor(kept, dtype=torch.int32, device=choice.device).view(choice.shape)

    def check(self, device: str) -> None:
        layer, plain = self.layer(device, self.implementation), self.layer(device, "reference")
        names = ("x", *self.names(layer))
        hold(
            partial(self.run, layer, False),
            partial(self.run, plain, True),
            partial(self.formula, layer),
            partial(self.draw, layer, device),
            names,
            [name for name in names if any(f"{name}.".startswith(f"{part}.") for part in self.frozen)],
        )


def feed_forward(
    activation: Activation, rows: Tensor, p: dict[str, Tensor], prefix: str, e: int | None = None
) -> Tensor:
    """Compute one expert, or the shared expert, which has no expert axis and no biases."""
    w_up, w_down = (p[prefix + name] if e is None else p[prefix + name][e] for name in ("w_up", "w_down"))
    b_up, b_down = (p[prefix + name][e] if prefix + name in p else 0.0 for name in ("b_up", "b_down"))
    return reference.apply_activation(rows @ w_up.T + b_up, activation) @ w_down.T + b_down
