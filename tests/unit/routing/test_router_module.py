"""The module behind the routers: state, conversions, and Gemma 4's own router."""

import warnings

import pytest
import torch

from moe_kernels import RouterSpec
from moe_layers import MoEConfig, MoEFeedForward, RoundRobinAssignment, TopKRouter

from ...gpu import assert_never_waits
from .test_router_presets import SPECS


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_matches_gemma4(implementation, device):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    gemma4 = pytest.importorskip(
        "transformers.models.gemma4.modeling_gemma4", reason="this transformers has no Gemma 4"
    )
    config = transformers.Gemma4TextConfig(hidden_size=48, num_experts=10, top_k_experts=3, enable_moe_block=True)
    theirs = gemma4.Gemma4TextRouter(config).to(device)
    generator = torch.Generator(device).manual_seed(0)
    state = {name: torch.randn(t.shape, device=device, generator=generator) for name, t in theirs.state_dict().items()}
    theirs.load_state_dict(state)
    spec = RouterSpec.gemma4(config.rms_norm_eps)
    ours = TopKRouter(48, 10, 3, router=spec, implementation=implementation, device=device)
    names = {"proj.weight": "weight", "scale": "input_scale", "per_expert_scale": "per_expert_scale"}
    ours.load_state_dict({names[name]: tensor for name, tensor in state.items()})
    tokens = torch.randn(40, 48, device=device, generator=generator)

    def results(router, parameters, read):
        x = tokens.clone().requires_grad_()
        weights, experts = read(router(x))
        experts, order = experts.long().sort(-1)
        weights = weights.gather(1, order)
        leaves = [x, *map(router.get_parameter, parameters)]
        return experts, weights, *torch.autograd.grad(weights.square().sum(), leaves)

    actual = results(ours, names.values(), lambda routed: (routed.topk_weights, routed.topk_experts))
    torch.testing.assert_close(actual, results(theirs, names, lambda routed: routed[1:]), rtol=1e-4, atol=1e-5)


def test_selection_bias_stays_float32(device):
    router = TopKRouter(8, 6, 2, router=RouterSpec.deepseek_v3(), device=device)
    with torch.no_grad():
        router.selection_bias.copy_(torch.arange(6) / 1000 + 1)
    before = router.selection_bias.clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and torch.equal(router.selection_bias, before)
    assert router.double().selection_bias.dtype == torch.float64
    made = TopKRouter(8, 6, 2, router=RouterSpec.deepseek_v3(), device=device, dtype=torch.bfloat16)
    assert made.selection_bias.dtype == torch.float32
    assert "selection_bias" in made.state_dict() and "selection_bias" not in dict(made.named_parameters())


def test_module_starts_with_neutral_factors():
    spec = RouterSpec.gemma4(1e-6, logit_bias=True)
    router = TopKRouter(64, 32, 2, router=spec)
    router.reset_parameters(0.02)
    assert abs(router.weight.std().item() - 0.02) < 0.002
    assert not router.bias.any() and (router.input_scale == 1).all() and (router.per_expert_scale == 1).all()
    assert "input_norm_epsilon=1e-06" in repr(router)


@pytest.mark.parametrize("spec", [RouterSpec.gemma4(1e-6), SPECS["deepseek_v3"], SPECS["sparsemixer"]], ids=str)
def test_module_compiles_without_graph_break(spec, device):
    router = TopKRouter(16, 12, 2, router=spec, implementation="triton", device=device)
    router.reset_parameters(1.0)
    tokens = torch.randn(9, 16, device=device)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    routed = compiled(tokens)
    torch.testing.assert_close(routed.topk_weights, router(tokens).topk_weights)
    routed.topk_weights.sum().backward()
    assert router.weight.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [RouterSpec.gemma4(1e-6), *SPECS.values()], ids=str)
def test_module_never_waits_for_the_gpu(spec, device):
    router = TopKRouter(64, 12, 2, router=spec, device=device, dtype=torch.bfloat16)
    router.reset_parameters(0.5)
    tokens = torch.randn(40, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    assert_never_waits(lambda: router(tokens).topk_weights.sum().backward())


def warned(make):
    """Return what `make` makes, and whether it warned that the router cannot learn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    assert all("pass router=RouterSpec.softmax(normalize=False)" in str(warning.message) for warning in caught)
    return made, bool(caught)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "sparsemixer"])
def test_a_router_of_one_expert_warns_where_it_cannot_learn(name):
    router, is_warned = warned(lambda: TopKRouter(8, 12, 1, router=SPECS[name], init_std=0.3, dtype=torch.float64))
    tokens = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient = torch.autograd.grad(router(tokens).topk_weights.sum(), router.weight)[0]
    assert is_warned == (gradient.abs().max() < 1e-4)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: MoEFeedForward(8, 4, 6, 1), True),
        (lambda: MoEFeedForward.from_config(MoEConfig(8, 4, 6, 1)), True),
        (lambda: MoEFeedForward(8, 4, 6, 1, assignment=RoundRobinAssignment()), True),
        (lambda: MoEFeedForward(8, 4, 6, 1, assignment=lambda logits: logits.topk(1)), False),
        (lambda: MoEFeedForward(8, 4, 6, 1, router=RouterSpec.softmax(normalize=False)), False),
        (lambda: MoEFeedForward(8, 4, 6, 1, router=RouterSpec(norm_epsilon=1.0)), False),
        (lambda: MoEFeedForward.from_config(MoEConfig.llama4_scout(), device="meta"), False),
        (lambda: MoEFeedForward(8, 4, 1, 1), False),
        (lambda: MoEFeedForward(8, 4, 6, 2), False),
    ],
)
def test_a_layer_of_one_expert_warns_where_its_router_cannot_learn(make, expected):
    assert warned(make)[1] == expected
