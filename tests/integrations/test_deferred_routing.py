"""Routers that the experts' op computes, their results, and readers that make a router run by itself."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from moe_layers import RoutingReplay
from moe_layers.architectures import ARCHITECTURES
from moe_layers.integrations.transformers import disable, enable
from moe_layers.integrations.transformers.experts.deferred_routing import DeferredRouting
from moe_layers.integrations.transformers.routers import deferral
from moe_layers.integrations.transformers.routers.deferral import FORM

from ..tiers import default_tier
from .models import assert_same_step, build, draw_tokens, logits_of, step

DEFERRED = {
    *("aria_text", "cohere2_moe", "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("jamba", "mellum", "minimax", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
    *("qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen4_exp_text"),
}
COMPARED = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"]  # normalised, without a cast, not normalised, shared expert


@pytest.fixture
def deferred(monkeypatch):
    """Return a list to which each DeferredRouting is appended."""
    found, make = [], DeferredRouting.__init__

    def remember(self, *args):
        found.append(self)
        make(self, *args)

    monkeypatch.setattr(DeferredRouting, "__init__", remember)
    return found


def enabled(device, model_type="qwen3_moe", **changes):
    model = build(model_type, device, **changes)
    enable(model, implementation="triton")
    return model


def routers_of(model):
    return [module for module in model.modules() if FORM in vars(module)]


@pytest.mark.parametrize(
    "model_type",
    default_tier(sorted({*ARCHITECTURES} - {"switch_transformers"}), [*COMPARED, "gpt_oss", "deepseek_v3"]),
)
def test_which_routers(model_type):
    model = build(model_type)
    report = enable(model, implementation="triton")
    routers = routers_of(model)
    assert len(routers) == report.fused_routers == (report.blocks if model_type in DEFERRED else 0)
    disable(model)
    assert not routers_of(model) and not any("forward" in vars(module) for module in routers)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("model_type", default_tier(COMPARED, ["qwen3_moe", "olmoe"]))
def test_results_are_within_the_error_budget(model_type, training, device, deferred):
    """The first calls run the op, and later calls replay its launches."""
    model = build(model_type, device).train(training)
    tokens, options = draw_tokens(model), {"output_router_logits": False}
    baseline, exact = step(model, tokens, **options), step(copy.deepcopy(model).double(), tokens, **options)
    report = enable(model, implementation="triton")
    for _ in range(5):
        deferred.clear()
        assert_same_step(step(model, tokens, **options), baseline, exact)
        assert len(deferred) == report.blocks


def wrap_forward(module):
    forward = module.forward
    module.forward = lambda *args: forward(*args)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        out = self.inner(*args)
        assert not any(isinstance(value, DeferredRouting) for value in (*args, *out))
        return out


def wrap_router(model):
    block = model.model.layers[0].mlp
    block.gate = Wrapper(block.gate)


def change_class(model):
    """Change the forward of the first router's class, as patches that record the routing do."""
    router = routers_of(model)[0]
    forward = type(router).forward
    router.__class__ = type("Changed", (type(router),), {"forward": lambda self, x: forward(self, x)})


def change_top_k(model):
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 4


def replay(model):
    record = RoutingReplay()
    with record.capture(model):
        logits_of(model)
    return record.replay(model)


READERS = {
    "hook of a router": lambda model: routers_of(model)[0].register_forward_hook(lambda *_: None),
    "hook of experts": lambda model: model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *_: None),
    "forward of a router": lambda model: wrap_forward(routers_of(model)[0]),
    "forward of experts": lambda model: wrap_forward(model.model.layers[0].mlp.experts),
    "forward of a block": lambda model: wrap_forward(model.model.layers[0].mlp),
    "wrapper of a router": wrap_router,
    "class of a router": change_class,
    "another top_k": change_top_k,
    "another implementation": lambda model: model.set_experts_implementation("batched_mm"),
    "dispatch mode": lambda model: FlopCounterMode(display=False),
    "function mode": lambda model: BaseTorchFunctionMode(),
    "replay": replay,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_gets_tensors(reader, device, deferred):
    model, plain = enabled(device), build("qwen3_moe", device)
    context = READERS[reader](model) or nullcontext()
    if reader == "another top_k":
        change_top_k(plain)
    deferred.clear()
    with context:
        logits = logits_of(model)
    assert len(deferred) == (1 if "of" in reader else 0)
    torch.testing.assert_close(logits, logits_of(plain), rtol=1e-4, atol=1e-5)


def test_replicas_of_data_parallel(device):
    """nn.DataParallel copies modules with their instance attributes. Replicas have other weights than the original."""
    model = enabled(device)
    block = model.model.layers[0].mlp
    replica = block.gate._replicate_for_data_parallel()
    replica.weight = -block.gate.weight.detach()
    x = torch.randn(5, model.config.hidden_size, device=device)
    torch.testing.assert_close(replica(x)[0], -type(block.gate).forward(block.gate, x)[0])


def test_other_tokens_than_those_routed(device):
    """Experts that get other tensors than the router compute with the routing of the router's tokens."""
    model = enabled(device)
    block, tokens = model.model.layers[0].mlp, torch.randn(5, model.config.hidden_size, device=device)
    with torch.no_grad():
        _, weights, experts = type(block.gate).forward(block.gate, tokens)
        routing = block.gate(tokens)[1]
        found, wanted = block.experts(2 * tokens, routing, routing), block.experts(2 * tokens, experts, weights)
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("target", ["experts", "router"])
def test_adapters(target, device, deferred):
    """PEFT's adapters of experts are part of the op. A router with adapters is computed by its class."""
    peft_models = pytest.importorskip("tests.integrations.peft_models", exc_type=ImportError)
    targets = peft_models.TARGETS if target == "experts" else ["mlp.gate.weight"]
    ours, golden = (build("qwen3_moe", device) for _ in range(2))
    enable(ours, implementation="triton")
    ours, golden = (peft_models.adapt(model, peft_models.lora(targets=targets)) for model in (ours, golden))
    tokens = draw_tokens(golden)
    deferred.clear()
    found, wanted = (step(model, tokens, output_router_logits=False) for model in (ours, golden))
    peft_models.assert_equal_steps(found, wanted, 1e-5)
    assert enable(golden, implementation="triton").fused_routers == (2 if target == "experts" else 0)
    assert len(deferred) == (2 if target == "experts" else 0)


def test_autocast(device, deferred):
    """Under autocast the op computes router and experts in float16, as transformers' modules do."""
    ours, plain = (model.model.layers[0].mlp for model in (enabled(device), build("qwen3_moe", device)))
    tokens = torch.randn(1, 24, plain.gate.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad(), torch.autocast(device, torch.float16):
        found, wanted = ours(tokens), plain(tokens)
    assert len(deferred) == 1 and found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.01 * wanted.abs().max().item())


def test_copies_and_pickles(device, deferred):
    model = enabled(device)
    wanted, file = logits_of(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        deferred.clear()
        assert torch.equal(logits_of(other), wanted) and len(deferred) == 2
        block = other.model.layers[0].mlp
        assert getattr(block.gate, FORM).block is block
    router = copy.deepcopy(model.model.layers[0].mlp.gate).cpu()  # as PEFT's modules_to_save does
    assert getattr(router, FORM).block is None
    assert all(isinstance(part, torch.Tensor) for part in router(torch.randn(3, model.config.hidden_size)))


def test_compiled(device, deferred):
    """Layers share their compiled code, in which the routing is deferred, too."""
    model, plain = enabled(device), build("qwen3_moe", device)
    counted = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counted, fullgraph=True)
    tokens, options = draw_tokens(plain), {"output_router_logits": False}
    found, wanted = step(model, tokens, **options), step(plain, tokens, **options)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert counted.frame_count == 1
    assert "linear_routing" in counted.graphs[0].code


FORWARDS = dict(
    good="def forward(self, x):\n y = x.view(-1, 2)\n _, w, e = self.gate(y)\n y = self.experts(y, e, w)\n return y",
    scaled="def forward(self, x):\n _, w, e = self.gate(x)\n return self.experts(x, e, 2 * w)",
    returned="def forward(self, x):\n _, w, e = self.gate(x)\n return self.experts(x, e, w), w",
    logits_read="def forward(self, x):\n z, w, e = self.gate(x)\n return self.experts(x, e, w) + z",
    other_tokens="def forward(self, x):\n _, w, e = self.gate(x)\n return self.experts(self.norm(x), e, w)",
    changed_tokens="def forward(self, x):\n _, w, e = self.gate(x)\n x = x + 1\n return self.experts(x, e, w)",
    changed_in_place="def forward(self, x):\n _, w, e = self.gate(x)\n x *= 2\n return self.experts(x, e, w)",
    other_name="def forward(self, x):\n _, w, e = self.gate(x=x)\n return self.experts(x, e, w)",
    more_arguments="def forward(self, x):\n _, w, e = self.gate(x, self.bias)\n return self.experts(x, e, w)",
)


@pytest.mark.parametrize("name", FORWARDS)
def test_which_blocks(name, monkeypatch):
    monkeypatch.setattr(deferral.inspect, "getsource", lambda function: FORWARDS[name])
    assert deferral._passes_on(nn.Identity.forward, "gate") == (name == "good")
