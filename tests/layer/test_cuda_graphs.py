"""A captured layer, replayed with other tokens and other routing, computes the same as the eager layer."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterSpec
from moe_kernels.testing import make_logits
from moe_layers import BalanceLosses, CapacityFactor, ExpertChoice, observe, save_routing, update_selection_bias

from ..gpu import captured
from ..layers import moe_layer

pytestmark = [
    pytest.mark.gpu,
    # The eager run for comparison is not captured.
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning"),
]

SIZES = {"d_model": 512, "d_ff": 256, "num_experts": 16, "top_k": 4, "init_std": 0.05}
DTYPE = torch.bfloat16
NUM_TOKENS = 768
# Dropless cases: all tokens on one expert, and tokens spread evenly.
ROUTINGS = ("first", "even", "zipf", "random")
FORMS = {
    "dropless": {},
    "wide": {"d_ff": 768},
    "recompute_up": {"recompute": "up"},
    "biases": {"bias": True, "activation": "relu_squared"},
    "shared": {"shared_d_ff": 256, "shared_gate": True},
    "latent_zero": {"latent_dim": 128, "router": RouterSpec.softmax(normalize=False)},
    "zero_experts": {"num_zero_experts": 3},
    "losses": {
        "balance_losses": BalanceLosses(switch=0.01, z=0.001, sequence=0.01, global_batch=0.01, importance=0.01)
    },
    "groups": {"router": RouterSpec.deepseek_v3(4, 2)},
    "capacity": {"capacity": CapacityFactor(1.0, by="weight")},
    "expert_choice": {"assignment": ExpertChoice(1.0)},
    "batch_invariant": {"batch_invariant": True, "shared_d_ff": 256},
}
# A captured region draws no random numbers, and the generator's state cannot be read during capture.
checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
REGIONS = {
    "plain": lambda block, x: block(x),
    "checkpointed": checkpointed,
    "saving_routing": partial(checkpointed, context_fn=save_routing),
}


def make_layer(device, **options):
    torch.manual_seed(0)
    return moe_layer(**{**SIZES, **options}, device=device, dtype=DTYPE)


def make_x(layer, routing, device):
    """Return tokens whose choice of experts follows a pattern: [2, T / 2, D]."""
    w_router = layer.router.weight.detach().float()
    generator = torch.Generator(device).manual_seed(ROUTINGS.index(routing))
    tokens = torch.randn(NUM_TOKENS, w_router.shape[1], device=device, generator=generator)
    wanted = 8 * make_logits(NUM_TOKENS, len(w_router), routing, device, generator)
    tokens += torch.linalg.lstsq(w_router, (wanted - tokens @ w_router.t()).t()).solution.t()
    return tokens.to(DTYPE).view(2, -1, w_router.shape[1])


def forward_and_backward(layer, x, region=REGIONS["plain"]):
    """Return the output and every gradient."""
    out = region(layer, x)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])


def assert_replays_equal_eager(run, layer, device):
    """Capture `run(x)` with one routing, and replay it with others."""
    x = make_x(layer, "random", device).requires_grad_()
    replay, results = captured(lambda: run(x))
    seen = []
    for routing in (*ROUTINGS, "first"):
        fresh = make_x(layer, routing, device).requires_grad_()
        with torch.no_grad():
            x.copy_(fresh)
        replay()
        for i, (actual, expected) in enumerate(zip(results, run(fresh), strict=True)):
            assert torch.equal(actual, expected), f"result {i} with routing {routing!r}"
        seen.append(layer(x, return_routing=True)[1].topk_experts)
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[-1])  # the routing did change


@pytest.mark.parametrize("form", FORMS)
def test_forward(form, device):
    layer = make_layer(device, **FORMS[form]).eval()

    @torch.no_grad()
    def run(x):
        return (layer(x),)

    assert_replays_equal_eager(run, layer, device)


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward(form, device):
    layer = make_layer(device, **FORMS[form])
    assert_replays_equal_eager(partial(forward_and_backward, layer), layer, device)


@pytest.mark.parametrize("region", ["checkpointed", "saving_routing"])
@pytest.mark.parametrize("form", ["dropless", "recompute_up", "shared", "losses", "groups", "capacity"])
def test_with_activation_checkpointing(form, region, device, monkeypatch):
    if region == "saving_routing":  # this region runs router and experts one by one
        monkeypatch.setattr("moe_layers.feed_forward.runs_as_one_op", lambda *_: False)
    layer = make_layer(device, **FORMS[form])
    run = partial(forward_and_backward, layer, region=REGIONS[region])
    assert_replays_equal_eager(run, layer, device)
    x = make_x(layer, "zipf", device).requires_grad_()
    torch.testing.assert_close(run(x), forward_and_backward(layer, x), rtol=0, atol=0)


class Model(nn.Module):
    """Two residual blocks, with norm and layer in a checkpointed region each."""

    def __init__(self, region, device, **options):
        super().__init__()
        self.layers = nn.ModuleList(make_layer(device, **options) for _ in range(2))
        self.region = REGIONS[region]

    def forward(self, x):
        for layer in self.layers:
            x = x + self.region(lambda x, layer=layer: layer(functional.rms_norm(x, x.shape[-1:])), x)
        return x


class Training:
    """A complete step on static inputs: forward, backward, AdamW, and the update of selection biases."""

    def __init__(self, model, x):
        self.model, self.x, self.target = model, x.clone(), torch.zeros_like(x)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)

    def load(self, x, target):
        self.x.copy_(x)
        self.target.copy_(target)

    def step(self):
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(self.x).float(), self.target.float())
        loss.backward()
        self.optimizer.step()
        for layer in self.model.layers:
            if layer.router.selection_bias is not None:
                update_selection_bias(layer)
        return loss.detach()

    def state(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        counts = [layer.router.expert_counts for layer in self.model.layers]
        return *self.model.parameters(), *self.model.buffers(), *counts, *moments


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("form", ["dropless", "recompute_up", "losses", "groups"])
def test_an_optimizer_step(form, region, device):
    """Every parameter, buffer and moment is bitwise equal after each of several steps."""
    eager = Training(model := Model(region, device, **FORMS[form]), make_x(model.layers[0], "random", device))
    graphed = Training(copy.deepcopy(model), eager.x)
    for _ in range(3):  # the number of warm-up steps
        eager.step()
    replay, loss = captured(graphed.step)
    before = [parameter.clone() for parameter in model.parameters()]
    for routing in (*ROUTINGS, *ROUTINGS):
        x = make_x(model.layers[0], routing, device)
        for training in (eager, graphed):
            training.load(x, x.roll(1, dims=1))
        expected = eager.step()
        replay()
        assert torch.equal(loss, expected), f"loss with routing {routing!r}"
        for i, (a, e) in enumerate(zip(graphed.state(), eager.state(), strict=True)):
            assert torch.equal(a, e), f"tensor {i} of the state with routing {routing!r}"
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_is_counted(device):
    """Counts increase with every replay, but not by the recomputation in a replay."""
    layer = make_layer(device, router=RouterSpec.ernie())
    observer = observe(layer)[""]
    x = make_x(layer, "zipf", device).requires_grad_()
    replay, _ = captured(lambda: forward_and_backward(layer, x, REGIONS["saving_routing"]))
    observer.reset()
    layer.router.expert_counts.zero_()
    for _ in range(5):
        replay()
    assert observer.read().num_calls == 5 and observer.read().num_tokens == 5 * NUM_TOKENS
    assert layer.router.expert_counts.sum() == 5 * NUM_TOKENS * SIZES["top_k"]
    assert torch.equal(layer.router.expert_counts.cpu(), observer.read().tokens_per_expert)
