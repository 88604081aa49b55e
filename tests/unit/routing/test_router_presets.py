"""Every router function of a published model: against its formula, and gradcheck."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_kernels import RouterSpec, linear_routing, reference, routing_weights, topk_routing
from moe_kernels.routing.linear_op import linear_routing_op
from moe_kernels.routing.routers import linear_router
from moe_kernels.routing.scored import launch_backward, score_settings, scored_routing_op
from moe_kernels.testing import assert_accurate, check_accuracy
from moe_layers import TopKRouter

from ...dtypes import DTYPES
from ..compiled import assert_compiles
from ..saved import saved_tensors

triton_scored = partial(topk_routing, implementation="triton")
triton_linear = partial(linear_routing, implementation="triton")

SPECS = {
    "softmax": RouterSpec.softmax(),
    "softmax_unnormalized": RouterSpec.softmax(normalize=False, scale=0.5),
    "dbrx": RouterSpec.dbrx(2.0),
    "deepseek_v2": RouterSpec.deepseek_v2(4, 2, scale=1.7),
    "softmax_top2_groups": RouterSpec.softmax(num_groups=3, topk_groups=2, group_score="top2_sum", norm_epsilon=1e-20),
    "deepseek_v3": RouterSpec.deepseek_v3(4, 2, scale=2.5),
    "sigmoid_one_group": RouterSpec.deepseek_v3(norm_epsilon=0.0),
    "sigmoid_epsilon": RouterSpec.deepseek_v3(norm_epsilon=0.3, selection_bias=None),
    "sigmoid_plain": RouterSpec.deepseek_v3(normalize=False),
    "sqrt_softplus": RouterSpec.deepseek_v3(score="sqrt_softplus", scale=1.5),
    "ernie": RouterSpec.ernie(norm_minimum=1e-12),
    "biased_softmax_minimum": RouterSpec.ernie(norm_minimum=0.5),
    "biased_softmax_scale": RouterSpec.ernie(normalize=False, scale=6.0),
    "llama4": RouterSpec.llama4(),
    "biased_logit": RouterSpec.deepseek_v3(norm_epsilon=0.0, selection_bias="logit"),
    "biased_logit_groups": RouterSpec.deepseek_v3(4, 2, selection_bias="logit"),
    "softcap": RouterSpec.deepseek_v3(norm_epsilon=0.0, logit_softcap=2.0),
    "sparsemixer": RouterSpec.phimoe(0.1),
}


def draw(spec, num_tokens=40, num_experts=12, device="cpu", dtype=torch.float32, seed=0):
    """Return (logits, selection bias or None)."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, num_experts, device=device, generator=generator)
    bias = 0.7 * torch.randn(num_experts, device=device, generator=generator)
    return logits.to(dtype), None if spec.selection_bias is None else bias


def by_hand(logits, top_k, spec, bias):
    """Compute one token's (experts, weights) from its logits, with loops over Python numbers."""
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
    best = sorted(range(len(groups)), key=lambda g: -worth[g])[: spec.topk_groups]
    keys = [key if e // size in best else -torch.inf for e, key in enumerate(keys)]
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
    routed = reference.topk_routing(logits, top_k, spec, bias)
    for t in range(len(logits)):
        experts, weights = by_hand(logits[t], top_k, spec, bias)
        assert routed.topk_experts[t].tolist() == experts
        torch.testing.assert_close(routed.topk_weights[t].tolist(), weights)


def test_sparsemixer_by_hand():
    # Relative distance to the highest, 4: 0, 0.05, 0.5, 2 / 0.4 for -4: two experts within 2 * 0.1.
    # Then to 3.8: experts 2 and 3 are at 0.4737 and beyond, so the second is alone.
    logits = torch.tensor([[4.0, 3.8, 2.0, -4.0]], dtype=torch.float64)
    routed = reference.topk_routing(logits, 2, RouterSpec.phimoe(0.1))
    assert routed.topk_experts.tolist() == [[0, 1]]
    first = 1 / (1 + torch.exp(torch.tensor(-0.2, dtype=torch.float64)))
    torch.testing.assert_close(routed.topk_weights, torch.stack([first, torch.ones_like(first)])[None])


@pytest.mark.parametrize("name", SPECS)
def test_gradcheck_of_reference(name):
    spec = SPECS[name]
    logits, bias = draw(spec, 3, dtype=torch.float64)
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: reference.topk_routing(x, 2, spec, bias).topk_weights, logits)


@pytest.mark.parametrize("name", ["softmax", "deepseek_v3", "softcap"])
def test_gradcheck_of_linear_reference(name):
    spec = replace(SPECS[name], logit_bias=True)
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (12, 4), (12,))
    operands = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    bias = draw(spec)[1]
    torch.autograd.gradcheck(lambda x, w, b: reference.linear_routing(x, w, 2, spec, b, bias).topk_weights, operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_kernel_matches_reference(name, dtype, device):
    spec = SPECS[name]
    top_k = 2 if name == "sparsemixer" else 5
    logits, bias = draw(spec, device=device, dtype=dtype)
    routed = triton_scored(logits, top_k, spec, selection_bias=bias)
    expected = reference.topk_routing(logits, top_k, spec, bias)
    assert torch.equal(routed.topk_experts, expected.topk_experts)
    assert torch.equal(routed.logits, expected.logits)
    assert routed.topk_weights.dtype == torch.float32
    check_accuracy(
        lambda logits: triton_scored(logits, top_k, spec, selection_bias=bias).topk_weights,
        lambda logits: reference.topk_routing(logits, top_k, spec, bias).topk_weights,
        lambda seed: (draw(spec, device=device, dtype=dtype, seed=seed)[0],),
        ("weights", "dlogits"),
    )


@pytest.mark.parametrize("preset", [partial(RouterSpec.deepseek_v3, scale=2.5), RouterSpec.deepseek_v2])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_groups", "top_k"),
    [(0, 8, 4, 2), (1, 1, 1, 1), (3, 8, 8, 4), (5, 160, 8, 6), (16, 65, 1, 65), (3, 600, 3, 10)],
)
def test_any_size(num_tokens, num_experts, num_groups, top_k, preset, device):
    spec = preset(num_groups, (num_groups + 1) // 2)
    bias = draw(spec, num_tokens, num_experts, device)[1]
    check_accuracy(
        lambda logits: triton_scored(logits, top_k, spec, selection_bias=bias).topk_weights,
        lambda logits: reference.topk_routing(logits, top_k, spec, bias).topk_weights,
        lambda seed: (draw(spec, num_tokens, num_experts, device, seed=seed)[0],),
        ("weights", "dlogits"),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output", ["topk_weights", "logits"])
@pytest.mark.parametrize("name", ["softmax", "dbrx", "deepseek_v3", "softcap", "sparsemixer"])
def test_linear_matches_reference(name, output, dtype, device):
    spec = replace(SPECS[name], logit_bias=True)
    _, selection_bias = draw(spec, device=device)

    def operands(seed):
        generator = torch.Generator(device).manual_seed(seed)
        shapes = ((30, 20), (12, 20), (12,))
        return tuple(torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)

    def run(op):
        return lambda tokens, w, b: getattr(op(tokens, w, 2, spec, logit_bias=b, selection_bias=selection_bias), output)

    check_accuracy(
        run(triton_linear), run(reference.linear_routing), operands, (output, "dtokens", "dw_router", "dbias")
    )


@pytest.mark.parametrize("spec", [RouterSpec(), RouterSpec(normalize=False), SPECS["deepseek_v3"]], ids=str)
def test_linear_saves_tokens_weights_and_the_choice_only(spec, device):
    tokens, w_router = (torch.randn(rows, 20, device=device, requires_grad=True) for rows in (40, 12))
    with saved_tensors() as saved:
        triton_linear(tokens, w_router, 2, spec, selection_bias=draw(spec, device=device)[1])
    choice = [(40, 2)] * (2 if spec.score == "softmax" else 1)  # only gradients of a softmax read the routing weights
    assert sorted(tuple(tensor.shape) for tensor in saved) == [(12, 20), *choice, (40, 20)]


def test_split_gradient_adds_up(device):
    spec, generator = SPECS["deepseek_v3"], torch.Generator(device).manual_seed(0)
    logits, bias = draw(spec, device=device)
    experts = triton_scored(logits, 3, spec, selection_bias=bias).topk_experts
    dweights, direct = (torch.randn(40, n, device=device, generator=generator) for n in (3, 12))
    split = launch_backward(dweights, experts, logits, direct, torch.float16, score_settings(spec))
    high, low = split.float().chunk(2, dim=1)

    def gradient(logits):
        leaf = logits.clone().requires_grad_()
        routed = reference.topk_routing(leaf, 3, spec, bias)
        assert torch.equal(routed.topk_experts, experts)
        return torch.autograd.grad(routed.topk_weights, leaf, dweights.to(leaf.dtype))[0] + direct

    baseline, exact = gradient(logits), gradient(logits.double())
    assert_accurate(high + low, baseline, exact, "dlogits")
    with pytest.raises(AssertionError, match="dlogits"):
        assert_accurate(high, baseline, exact, "dlogits")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_lower_id_wins_ties(implementation, device):
    op = partial(topk_routing, implementation=implementation)
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [2.0] * 6], device=device)
    grouped = RouterSpec.deepseek_v3(3, 2, selection_bias=None)
    # Groups (0, 1), (1, 0), (1, 1): the last group, and the first of the equal others.
    routed = op(logits, 4, grouped)
    assert routed.topk_experts.tolist() == [[1, 4, 5, 0], [0, 1, 2, 3]]
    plain = op(logits, 4, RouterSpec.deepseek_v3(selection_bias=None))
    assert plain.topk_experts.tolist() == [[1, 2, 4, 5], [0, 1, 2, 3]]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_excluded_groups_never_come_back(implementation, device):
    """A negative bias on all kept experts does not bring them back either."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.full((4,), -5.0, device=device)
    spec = RouterSpec.deepseek_v3(2, 1)
    routed = topk_routing(logits, 2, spec, selection_bias=bias, implementation=implementation)
    assert routed.topk_experts.tolist() == [[0, 1]]


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", SPECS)
def test_nan_stays_in_its_token_and_ids_are_distinct(name, implementation, device):
    spec, top_k = SPECS[name], 2
    logits, bias = draw(spec, device=device)
    op = partial(topk_routing, top_k=top_k, spec=spec, selection_bias=bias, implementation=implementation)
    clean = op(logits)
    broken = logits.clone()
    broken[4] = torch.nan
    broken[7, 2] = torch.nan
    broken[9, :] = torch.inf
    broken[11, 1:] = -torch.inf
    routed = op(broken)
    others = [t for t in range(len(logits)) if t not in (4, 7, 9, 11)]
    assert torch.equal(routed.topk_weights[others], clean.topk_weights[others])
    assert torch.equal(routed.topk_experts[others], clean.topk_experts[others])
    assert routed.topk_weights[4].isnan().all()
    for t in (4, 7, 9, 11):
        ids = routed.topk_experts[t].tolist()
        assert len(set(ids)) == top_k and all(0 <= i < 12 for i in ids), ids


def test_small_scores_keep_their_precision(device):
    """softplus(-20) is 2e-9: lost when added to one, kept by the kernel's logarithm."""
    logits = torch.tensor([[-20.0, -30.0, -12.0, 15.0]], device=device)
    spec = RouterSpec(score="sqrt_softplus", normalize=False)
    weights = triton_scored(logits, 4, spec).topk_weights
    exact = reference.topk_routing(logits.double(), 4, spec).topk_weights
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
def test_scores_that_underflow_have_no_gradient(normalize, device):
    """softplus(-200) is 0 in float32, where the gradient of a square root is infinite."""
    spec = RouterSpec(score="sqrt_softplus", normalize=normalize)
    logits = torch.tensor([[1.0, 2.0, -200.0, 0.5], [1.0, -torch.inf, -110.0, 0.5]], device=device, requires_grad=True)
    results = [topk_routing(logits, 4, spec, implementation=each) for each in ("triton", "reference")]
    results.append(results[1]._replace(topk_weights=routing_weights(logits, results[1].topk_experts, spec)))
    kernel, plain, given = (torch.autograd.grad(r.topk_weights[:, :2].cos().sum(), logits)[0] for r in results)
    assert plain.isfinite().all() and torch.equal(given, plain)
    torch.testing.assert_close(kernel, plain)


def test_strided_logit_bias(device):
    tokens, w_router, biases = (torch.randn(5, n, device=device, dtype=torch.float16) for n in (8, 8, 3))
    for bias in (biases[:, 1], biases[0, :1].expand(5)):
        got, want = (
            linear_routing(tokens, w_router, 2, RouterSpec(logit_bias=True), logit_bias=given).logits
            for given in (bias, bias.contiguous())
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie"])
def test_opcheck(name, device):
    spec = SPECS[name]
    logits, bias = draw(spec, 6, device=device)
    scored = scored_routing_op.schema_arguments(logits.requires_grad_(), bias, 2, score_settings(spec))
    torch.library.opcheck(scored_routing_op.overload, scored)
    tokens = torch.randn(6, 4, device=device, requires_grad=True)
    w_router = torch.randn(12, 4, device=device, requires_grad=True)
    logit_bias = torch.randn(12, device=device, requires_grad=True)
    router = linear_router(spec, 2, w_router, logit_bias=logit_bias, selection_bias=bias)
    torch.library.opcheck(linear_routing_op.overload, linear_routing_op.schema_arguments(tokens, router))


def test_compiles_without_graph_break(device):
    spec = SPECS["deepseek_v3"]
    logits, bias = draw(spec, device=device)
    assert_compiles(lambda x: triton_scored(x, 2, spec, selection_bias=bias).topk_weights, (logits,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(TopKRouter, 8, 4, 2, router="softmax"), "router must be a RouterSpec, got str 'softmax'"),
        (partial(TopKRouter, 8, 4, 2, router=RouterSpec(num_groups=3)), "TopKRouter: num_experts must be a multiple"),
        (partial(RouterSpec, score="tanh"), r"score must be one of \('softmax', .*\), got 'tanh'"),
        (partial(RouterSpec, selection_bias="weight"), "selection_bias must be one of"),
        (partial(RouterSpec, group_score="mean"), "group_score must be one of"),
        (partial(RouterSpec, num_groups=2, topk_groups=3), r"topk_groups must be in \[1, num_groups=2\], got 3"),
        (partial(RouterSpec, norm_power=0.0), "norm_power must be positive, got 0.0"),
        (partial(RouterSpec, scale=float("nan")), "scale must be a finite number, got nan"),
        (partial(RouterSpec, norm_epsilon=None), "norm_epsilon must be a finite number, got None"),
        (partial(RouterSpec, num_groups=2.0), "num_groups must be an integer, got 2.0"),
        (partial(RouterSpec, norm_epsilon=-1.0), "must not be negative, got -1.0 and 0.0"),
        (partial(RouterSpec().check_sizes, "r", 4, 5), r"top_k must be in \[1, num_experts=4\], got 5"),
        (partial(RouterSpec(num_groups=3).check_sizes, "r", 4, 1), "multiple of num_groups=3, got 4"),
        (partial(RouterSpec.deepseek_v2(4, 1).check_sizes, "r", 8, 3), "top_k must be at most 2, .*, got 3"),
        (partial(RouterSpec.phimoe(0.1).check_sizes, "r", 8, 3), "chooses top_k=2 experts, got 3"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


route = partial(topk_routing, torch.zeros(3, 12), 2)
route_linearly = partial(linear_routing, torch.zeros(3, 4), torch.zeros(2, 4), 1)
NEEDS_SELECTION_BIAS, NEEDS_LOGIT_BIAS = RouterSpec.deepseek_v3(), RouterSpec(logit_bias=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(route, NEEDS_SELECTION_BIAS), "selection_bias must be given for this spec, got none"),
        (partial(route, selection_bias=torch.zeros(12)), "selection_bias must be omitted for this spec, got one"),
        (
            partial(route, NEEDS_SELECTION_BIAS, selection_bias=torch.zeros(11)),
            r"selection_bias must be \[E\] with E=12",
        ),
        (partial(route_linearly, logit_bias=torch.zeros(2)), "logit_bias must be omitted for this spec, got one"),
        (partial(route_linearly, NEEDS_LOGIT_BIAS), "logit_bias must be given for this spec, got none"),
        (partial(route_linearly, NEEDS_LOGIT_BIAS, logit_bias=torch.zeros(2, device="meta")), "one device"),
    ],
)
def test_bad_biases(call, message):
    with pytest.raises(ValueError, match=message):
        call()
