"""Every router function of a published model: against its formula, gradcheck, and transformers' own results."""

from functools import partial

import pytest
import torch

from moe_kernels import RouterSpec, reference

from .golden_case import load_case

SPECS = {
    "softmax": RouterSpec.softmax(),
    "softmax_unnormalized": RouterSpec.softmax(normalize=False, scale=0.5),
    "softmax_norm": RouterSpec.softmax_norm(2.0),
    "softmax_groups": RouterSpec.softmax_groups(4, 2, scale=1.7),
    "softmax_groups_zero": RouterSpec.softmax_groups(4, 2, scale=1.7, excluded_score=0.0),
    "softmax_top2_groups": RouterSpec.softmax(num_groups=3, top_groups=2, group_score="top2_sum", norm_epsilon=1e-20),
    "sigmoid_groups": RouterSpec.sigmoid_groups(4, 2, scale=2.5),
    "sigmoid_groups_zero": RouterSpec.sigmoid_groups(4, 2, scale=2.5, excluded_score=0.0),
    "sigmoid_one_group": RouterSpec.sigmoid_groups(norm_epsilon=0.0),
    "sigmoid_epsilon": RouterSpec.sigmoid_groups(norm_epsilon=0.3, selection_bias=None),
    "sigmoid_plain": RouterSpec.sigmoid_groups(normalize=False),
    "sqrt_softplus": RouterSpec.sigmoid_groups(score="sqrt_softplus", scale=1.5),
    "biased_softmax": RouterSpec.biased_softmax(norm_minimum=1e-12),
    "biased_softmax_minimum": RouterSpec.biased_softmax(norm_minimum=0.5),
    "biased_softmax_scale": RouterSpec.biased_softmax(normalize=False, scale=6.0),
    "sigmoid_on_input": RouterSpec.sigmoid_on_input(),
    "biased_logit": RouterSpec(score="sigmoid", selection_bias="logit"),
    "softcap": RouterSpec.sigmoid_groups(norm_epsilon=0.0, logit_softcap=2.0),
    "multiplier": RouterSpec.sigmoid_groups(norm_epsilon=1e-15, logit_multiplier=0.25),
    "sparsemixer": RouterSpec.sparsemixer(0.1),
}


def draw(spec, num_tokens=40, num_experts=12, device="cpu", dtype=torch.float32, seed=0):
    """(logits, selection bias or None)"""
    generator = torch.Generator(device).manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, num_experts, device=device, generator=generator)
    bias = 0.7 * torch.randn(num_experts, device=device, generator=generator)
    return logits.to(dtype), None if spec.selection_bias is None else bias


def by_hand(logits, top_k, spec, bias):
    """One token's (experts, weights) from its logits, written as loops over Python numbers."""
    logits = logits * spec.logit_multiplier
    if spec.logit_softcap:
        logits = spec.logit_softcap * (logits / spec.logit_softcap).tanh()
    if spec.score == "softmax":
        scores = (logits.exp() / logits.exp().sum()).tolist()
    elif spec.score == "sigmoid":
        scores = (1 / (1 + (-logits).exp())).tolist()
    else:
        scores = (1 + logits.exp()).log().sqrt().tolist()
    keys = logits.tolist() if spec.selection_bias == "logit" else scores
    keys = [key + (0.0 if bias is None else bias[e].item()) for e, key in enumerate(keys)]
    size = len(keys) // spec.num_groups
    groups = [keys[first : first + size] for first in range(0, len(keys), size)]
    worth = [max(g) if spec.group_score == "max" else sum(sorted(g)[-2:]) for g in groups]
    best = sorted(range(len(groups)), key=lambda g: -worth[g])[: spec.top_groups]
    keys = [key if e // size in best else spec.excluded_score for e, key in enumerate(keys)]
    experts = sorted(range(len(keys)), key=lambda e: -keys[e])[:top_k]
    weights = [scores[e] for e in experts]
    if spec.normalize:
        norm = sum(w**spec.norm_power for w in weights) ** (1 / spec.norm_power) + spec.norm_epsilon
        weights = [w / max(norm, spec.norm_minimum) for w in weights]
    return experts, [w * spec.scale for w in weights]


@pytest.mark.parametrize("name", [name for name in SPECS if name != "sparsemixer"])
def test_reference_matches_loops(name):
    spec, top_k = SPECS[name], 3
    logits, bias = draw(spec, dtype=torch.float64)
    routed = reference.scored_routing(logits, top_k, spec, bias)
    for t in range(len(logits)):
        experts, weights = by_hand(logits[t], top_k, spec, bias)
        assert routed.topk_experts[t].tolist() == experts
        torch.testing.assert_close(routed.topk_weights[t].tolist(), weights)


def test_sparsemixer_by_hand():
    # Relative distance to the highest, 4: 0, 0.05, 0.5, 2 / 0.4 for -4: two experts within 2 * 0.1.
    # Then to 3.8: experts 2 and 3 are at 0.4737 and beyond, so the second is alone.
    logits = torch.tensor([[4.0, 3.8, 2.0, -4.0]], dtype=torch.float64)
    routed = reference.scored_routing(logits, 2, RouterSpec.sparsemixer(0.1))
    assert routed.topk_experts.tolist() == [[0, 1]]
    first = 1 / (1 + torch.exp(torch.tensor(-0.2, dtype=torch.float64)))
    torch.testing.assert_close(routed.topk_weights, torch.stack([first, torch.ones_like(first)])[None])


@pytest.mark.parametrize("name", SPECS)
def test_gradcheck_of_reference(name):
    spec = SPECS[name]
    logits, bias = draw(spec, 6, dtype=torch.float64)
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: reference.scored_routing(x, 2, spec, bias)[1:], logits)
    tokens = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    w_router = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    logit_bias = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, w, b: reference.scored_linear_routing(x, w, 2, spec, b, bias)[1:], (tokens, w_router, logit_bias)
    )


def test_spec_without_facts_is_the_plain_softmax_router():
    logits, _ = draw(RouterSpec())
    for normalize in (True, False):
        routed = reference.scored_routing(logits, 3, RouterSpec(normalize=normalize))
        plain = reference.topk_routing(logits, 3, normalize=normalize)
        assert torch.equal(routed.topk_experts, plain.topk_experts)
        torch.testing.assert_close(routed.topk_weights, plain.topk_weights)


# The router of each golden case: its facts, top_k, and the names of its weight, logit bias and selection bias.
GOLDEN = {
    "qwen3_moe": (RouterSpec.softmax(), 3, "gate.weight", None, None),
    "qwen2_moe": (RouterSpec.softmax(normalize=False), 3, "gate.weight", None, None),
    "dbrx": (RouterSpec.softmax_norm(1.0), 3, "router.layer.weight", None, None),
    "gpt_oss": (RouterSpec.softmax(logit_bias=True), 3, "router.weight", "router.bias", None),
    "granitemoe": (RouterSpec.softmax(), 3, "router.layer.weight", None, None),
    "deepseek_v2": (RouterSpec.softmax_groups(4, 2, scale=1.7), 3, "gate.weight", None, None),
    "deepseek_v3": (
        RouterSpec.sigmoid_groups(4, 2, scale=2.5),
        4,
        "gate.weight",
        None,
        "gate.e_score_correction_bias",
    ),
    "ernie4_5_moe": (
        RouterSpec.biased_softmax(norm_minimum=1e-12),
        3,
        "gate.weight",
        None,
        "moe_statics.e_score_correction_bias",
    ),
    "llama4": (RouterSpec.sigmoid_on_input(), 2, "router.weight", None, None),
    "phimoe": (RouterSpec.sparsemixer(0.3), 2, "gate.weight", None, None),
}


def assert_same_routing(experts, weights, golden):
    """The choice and its weights, whatever the order of the slots."""
    expected_experts, order = golden["topk_idx"].sort(-1)
    expected_weights = golden["topk_weight"].gather(1, order)
    actual_experts, order = experts.long().sort(-1)
    assert torch.equal(actual_experts, expected_experts)
    torch.testing.assert_close(weights.gather(1, order), expected_weights, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", GOLDEN)
def test_reference_matches_golden(name):
    spec, top_k, weight, logit_bias, selection_bias = GOLDEN[name]
    case = load_case(name, "cpu")
    biases = [None if key is None else case.weights[key].flatten() for key in (logit_bias, selection_bias)]
    tokens = case.golden["x"].flatten(0, -2)
    routed = reference.scored_linear_routing(tokens, case.weights[weight], top_k, spec, *biases)
    assert_same_routing(routed.topk_experts, routed.topk_weights, case.golden)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(RouterSpec, score="tanh"), r"score must be one of \('softmax', .*\), got 'tanh'"),
        (partial(RouterSpec, selection_bias="weight"), "selection_bias must be one of"),
        (partial(RouterSpec, group_score="mean"), "group_score must be one of"),
        (partial(RouterSpec, excluded_score=1.0), "excluded_score must be one of"),
        (partial(RouterSpec, num_groups=2, top_groups=3), r"top_groups must be in \[1, num_groups=2\], got 3"),
        (partial(RouterSpec, norm_power=0.0), "norm_power must be positive, got 0.0"),
        (partial(RouterSpec, norm_epsilon=-1.0), "must not be negative, got -1.0 and 0.0"),
        (partial(RouterSpec().check_sizes, "r", 4, 5), r"top_k must be in \[1, num_experts=4\], got 5"),
        (partial(RouterSpec(num_groups=3).check_sizes, "r", 4, 1), "multiple of num_groups=3, got 4"),
        (partial(RouterSpec.softmax_groups(4, 1).check_sizes, "r", 8, 3), "top_k must be at most 2, .*, got 3"),
        (partial(RouterSpec.sparsemixer(0.1).check_sizes, "r", 8, 3), "chooses top_k=2 experts, got 3"),
    ],
)
def test_bad_facts(make, message):
    with pytest.raises(ValueError, match=message):
        make()
