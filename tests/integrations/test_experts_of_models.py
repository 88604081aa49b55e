"""The experts of one block, with every layout of parameters, within the error budget."""

import copy
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call

from moe_kernels.testing import check_accuracy
from moe_layers.integrations.transformers import enable
from moe_layers.integrations.transformers.experts import expert_classes

from ..dtypes import DTYPES
from ..tiers import default_tier
from .models import build, draw_tokens, skip_old

# Gated; biases, interleaved and transposed; biases, transposed; plain; and gated with a norm behind.
LAYOUTS = ["qwen3_moe", "gpt_oss", "openai_privacy_filter", "nemotron_h", "muse_spark_text"]
several_layouts = pytest.mark.parametrize(
    "model_type", default_tier(["qwen3_moe", "gpt_oss", "muse_spark_text"], ["qwen3_moe", "gpt_oss"])
)
NUM_TOKENS, TOP_K = 24, 3


def experts_of(model):
    return next(module for name, module in model.named_modules() if name.endswith("experts"))


def both(model_type, device, dtype=torch.float32, **options):
    """Return a model's own experts, and ours with the same parameters."""
    model = build(model_type, device, dtype)
    enabled = copy.deepcopy(model)
    enable(enabled, **options)
    return experts_of(model), experts_of(enabled)


def draw_routing(experts, dtype, seed=0):
    """Return tokens, ids and weights for an experts module."""
    generator = torch.Generator().manual_seed(seed)
    if hasattr(experts, "mlp"):  # DBRX
        d_model, num_experts = experts.hidden_size, experts.num_experts
    else:
        d_model, num_experts = experts.down_proj.shape[2 if experts.is_transposed else 1], len(experts.down_proj)
    device = next(experts.parameters()).device
    tokens = torch.randn(NUM_TOKENS, d_model, generator=generator).to(device, dtype)
    ids = torch.rand(NUM_TOKENS, num_experts, generator=generator).argsort(-1)[:, :TOP_K].to(device)
    weights = torch.randn(NUM_TOKENS, TOP_K, generator=generator).softmax(-1).to(device, dtype)
    return tokens, ids, weights


@pytest.mark.parametrize("dtype", default_tier(DTYPES, DTYPES[-1:]), ids=str)
@pytest.mark.parametrize("model_type", default_tier(LAYOUTS, LAYOUTS[:4]))
def test_experts_are_the_models_own(model_type, dtype, device):
    own, ours = both(model_type, device, dtype)
    parameters = {name: parameter.detach() for name, parameter in own.named_parameters()}

    def draw(seed):
        tokens, ids, weights = draw_routing(own, dtype, seed)
        return tokens, ids, weights, *parameters.values()

    def run(experts, tokens, ids, weights, *values):
        return functional_call(experts, dict(zip(parameters, values, strict=True)), (tokens, ids, weights))

    names = ("out", "tokens", "weights", *parameters)
    check_accuracy(partial(run, ours), partial(run, own), draw, names)


@pytest.mark.parametrize("model_type", default_tier(LAYOUTS, ["gpt_oss", "nemotron_h"]))
def test_slots_of_experts_elsewhere_add_nothing(model_type, device):
    """Under expert parallelism, an id past the experts marks a slot that another rank computes."""
    _, ours = both(model_type, device)
    tokens, ids, weights = draw_routing(ours, torch.float32)
    elsewhere = torch.zeros_like(ids, dtype=torch.bool)
    elsewhere[::2, 1] = elsewhere[5] = True
    marked = ids.masked_fill(elsewhere, len(ours.down_proj))
    weights.requires_grad_()
    out = ours(tokens, marked, weights)
    out.sum().backward()
    assert not weights.grad[elsewhere].any() and weights.grad[~elsewhere].all()
    assert not out[5].any()
    torch.testing.assert_close(out, ours(tokens, ids, weights.masked_fill(elsewhere, 0.0)))


@several_layouts
def test_autocast_decides_the_dtype_of_the_products(model_type, device):
    _, ours = both(model_type, device)
    tokens, ids, weights = draw_routing(ours, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        actual = ours(tokens, ids, weights)
    assert actual.dtype == torch.float32
    expected = copy.deepcopy(ours).bfloat16()(tokens.bfloat16(), ids, weights)
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=0)
    actual.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())


@several_layouts
def test_compiles_without_a_break(model_type, device):
    _, ours = both(model_type, device)
    tokens, ids, weights = draw_routing(ours, torch.float32)
    # The upstream gradient is explicit, because that of a sum has strides of zero, which compiled code does not keep.
    upstream = torch.randn(tokens.shape, device=device, generator=torch.Generator(device).manual_seed(3))

    def run(experts):
        out = experts(tokens, ids, weights)
        return out.detach(), torch.autograd.grad(out, list(ours.parameters()), upstream)

    expected, actual = run(ours), run(torch.compile(ours, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's
@pytest.mark.parametrize(("model_type", "adapted"), [("qwen3_moe", False), ("qwen3_moe", True), ("llama4_text", False)])
def test_decoder_layers_share_their_compiled_code(model_type, adapted, device):
    """PEFT's wrappers and the experts of Llama 4 have forwards of their own."""

    def num_graphs(num_layers):
        model = build(model_type, device, num_hidden_layers=num_layers)
        enable(model, implementation="reference")
        if adapted:
            pytest.importorskip("peft", reason="needs peft")
            from . import peft_models

            peft_models.adapt(model, peft_models.lora())
        torch.compiler.reset()
        graphs = CompileCounterWithBackend("eager")
        for layer in model.model.layers:
            layer.compile(backend=graphs)
        tokens = draw_tokens(model)
        for _ in range(2):
            model(tokens, use_cache=False)
        return graphs.frame_count

    assert num_graphs(3) == num_graphs(2)


@pytest.fixture
def rebuilt(device, monkeypatch):
    """Return DBRX's experts on the kernels, and a list that records each copy of their gate and up weights."""
    skip_old("dbrx")
    copies = []
    w_up = expert_classes._FlatSpec.w_up
    monkeypatch.setattr(expert_classes._FlatSpec, "w_up", lambda *args: copies.append(args) or w_up(*args))
    _, ours = both("dbrx", device, implementation="triton")
    copies.clear()
    return ours, copies


def test_copy_is_not_kept_for_backward(rebuilt):
    ours, copies = rebuilt
    out = ours(*draw_routing(ours, torch.float32))
    assert len(copies) == 1
    out.sum().backward()
    assert len(copies) == 2


@pytest.mark.parametrize("changed", ["w1", "w2", "tokens"])
def test_changed_tensors_do_not_reach_backward(changed, rebuilt):
    ours, _ = rebuilt
    tokens, ids, weights = draw_routing(ours, torch.float32)
    out = ours(tokens.requires_grad_(), ids, weights)
    with torch.no_grad():
        {"w1": ours.mlp.w1, "w2": ours.mlp.w2, "tokens": tokens}[changed].add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()
