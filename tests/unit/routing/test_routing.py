from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import RouterSpec, linear_routing, reference, topk_routing
from moe_kernels.routing.linear_op import linear_routing_op
from moe_kernels.routing.routers import linear_router
from moe_kernels.routing.softmax import topk_routing_op
from moe_kernels.testing import CASES, check_accuracy, make_inputs

from ...dtypes import DTYPES
from ...tiers import OP_CASES
from ..compiled import assert_compiles
from ..saved import saved_tensors

triton_topk = partial(topk_routing, implementation="triton")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP_CASES)
def test_matches_reference(case, dtype, normalize, device):
    case, spec = CASES[case], RouterSpec(normalize=normalize)
    logits = make_inputs(case, dtype, device).logits.to(dtype)
    routed = triton_topk(logits, case.top_k, spec)
    assert torch.equal(routed.topk_experts, reference.topk_routing(logits, case.top_k).topk_experts)
    assert routed.topk_weights.dtype == torch.float32

    check_accuracy(
        lambda logits: triton_topk(logits, case.top_k, spec).topk_weights,
        lambda logits: reference.topk_routing(logits, case.top_k, spec).topk_weights,
        lambda seed: (make_inputs(case, dtype, device, seed).logits.to(dtype),),
        ("weights", "dlogits"),
    )


@pytest.mark.parametrize("op", [triton_topk, reference.topk_routing])
def test_normalizing_is_top_k_then_softmax_and_softmax_then_top_k(op, device):
    logits = make_inputs(CASES["odd_sizes"], torch.float32, device).logits
    chosen, _ = logits.topk(3)
    torch.testing.assert_close(op(logits, 3).topk_weights, chosen.softmax(-1))
    probabilities, _ = logits.softmax(-1).topk(3)
    torch.testing.assert_close(op(logits, 3).topk_weights, probabilities / probabilities.sum(-1, keepdim=True))
    torch.testing.assert_close(op(logits, 3, spec=RouterSpec(normalize=False)).topk_weights, probabilities)


@pytest.mark.parametrize("op", [triton_topk, reference.topk_routing])
def test_lower_id_wins_ties(op, device):
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0], [-0.0, 0.0, -1.0, 0.0, -0.0]])
    routed = op(logits.to(device), 4)
    assert routed.topk_experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 3, 4]]


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 70),
    data=st.data(),
    normalize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_size_with_many_ties(num_tokens, num_experts, data, normalize, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (num_tokens, num_experts), generator=generator).float().to(device)
    actual = triton_topk(logits, top_k, spec=RouterSpec(normalize=normalize))
    expected = reference.topk_routing(logits, top_k, spec=RouterSpec(normalize=normalize))
    assert torch.equal(actual.topk_experts, expected.topk_experts)
    torch.testing.assert_close(actual.topk_weights, expected.topk_weights)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("num_experts", [5, 64, 200, 512])
def test_the_last_bits_of_a_logit_decide(num_experts, device):
    """All logits of the first tokens are adjacent float32 numbers. Other tokens have only two adjacent ones: the last
    chosen and the first unchosen logit."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(40, num_experts, device=device, generator=generator)
    order = torch.rand(20, num_experts, device=device, generator=generator).argsort(-1)
    logits[:20] = (torch.tensor(1.5, device=device).view(torch.int32) + order.int()).view(torch.float32)
    logits[10:20] *= -1
    near = logits[20:].topk(5).indices
    fourth = logits[20:].gather(1, near[:, 3:4])
    logits[20:].scatter_(1, near[:, 4:5], torch.nextafter(fourth, fourth + 1))  # above the fourth by one bit
    for top_k in (1, 4):
        actual, expected = triton_topk(logits, top_k), reference.topk_routing(logits, top_k)
        assert torch.equal(actual.topk_experts, expected.topk_experts)


@pytest.mark.parametrize("op", [triton_topk, reference.topk_routing])
def test_masked_experts_are_chosen_last(op, device):
    logits = torch.tensor([[-torch.inf, 0.5, -torch.inf, 1.5, -torch.inf]], device=device)
    routed = op(logits, 4)
    assert routed.topk_experts.tolist() == [[3, 1, 0, 2]]
    assert routed.topk_weights[0, 2:].tolist() == [0.0, 0.0]


def test_strided_logits(device):
    logits = make_inputs(CASES["ordinary"], torch.float32, device).logits
    spread = torch.full((8, 200), torch.nan, device=device).t()[::2, :]
    spread[: len(logits)] = logits
    actual = triton_topk(spread[: len(logits)], 2)
    assert torch.equal(actual.topk_weights, triton_topk(logits, 2).topk_weights)


@pytest.mark.parametrize("output", ["topk_weights", "logits"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP_CASES)
def test_linear_routing_matches_reference(case, dtype, normalize, output, device):
    case = CASES[case]

    def draw(seed):
        generator = torch.Generator(device).manual_seed(seed + 100)
        w_router = torch.randn(case.num_experts, case.d_model, device=device, generator=generator).to(dtype)
        return make_inputs(case, dtype, device, seed).tokens, w_router

    def run(tokens, w_router, op=reference.linear_routing):
        return getattr(op(tokens, w_router, case.top_k, spec=RouterSpec(normalize=normalize)), output)

    triton_run = partial(run, op=partial(linear_routing, implementation="triton"))
    check_accuracy(triton_run, run, draw, (output, "dtokens", "dw_router"))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("spec", [RouterSpec(), RouterSpec.deepseek_v3()], ids=str)
def test_a_float32_weight_beside_shorter_tokens(spec, batch_invariant, device):
    """Results equal those of float32 tokens, except for what is saved of the tokens and the dtype of their gradient."""
    case, dtype = CASES["odd_sizes"], DTYPES[-1]
    tokens = make_inputs(case, dtype, device).tokens
    w_router = torch.randn(case.num_experts, case.d_model, device=device)
    bias = torch.zeros(case.num_experts, device=device)

    def run(tokens, w_router):
        tokens, w_router = tokens.detach().requires_grad_(), w_router.detach().requires_grad_()
        options = {"batch_invariant": batch_invariant, "implementation": "triton"}
        options["selection_bias"] = None if spec.selection_bias is None else bias
        routed = linear_routing(tokens, w_router, case.top_k, spec, **options)
        routed.topk_weights.square().sum().backward()
        return routed, tokens.grad, w_router.grad

    with saved_tensors() as saved:
        routed, dtokens, dw_router = run(tokens, w_router)
    expected, dtokens_float32, dw_router_float32 = run(tokens.float(), w_router)
    assert {tensor.dtype for tensor in saved if tensor.shape == tokens.shape} == {dtype}
    torch.testing.assert_close((*routed, dw_router), (*expected, dw_router_float32), rtol=0, atol=0)
    assert dtokens.dtype == dtype and torch.equal(dtokens, dtokens_float32.to(dtype))


@pytest.mark.parametrize("normalize", [True, False])
def test_opcheck(normalize, device):
    logits = torch.randn(6, 5, device=device, requires_grad=True)
    torch.library.opcheck(topk_routing_op.overload, (logits, 2, normalize))
    tokens = torch.randn(6, 4, device=device, requires_grad=True)
    w_router = torch.randn(5, 4, device=device, requires_grad=True)
    router = linear_router(RouterSpec(normalize=normalize), 2, w_router)
    torch.library.opcheck(linear_routing_op.overload, linear_routing_op.schema_arguments(tokens, router))


@pytest.mark.parametrize("normalize", [True, False])
def test_rounded_logits(normalize, device):
    """The choice, the weights and their gradient are those of the rounded logits."""
    tokens = torch.randn(40, 16, device=device).half().requires_grad_()
    w_router = torch.randn(6, 16, device=device).half().requires_grad_()
    router = linear_router(RouterSpec(normalize=normalize), 2, w_router)._replace(rounds_logits=True)
    topk_weights, topk_experts, logits = linear_routing_op(tokens, router)
    assert logits.dtype == torch.float16
    torch.testing.assert_close(logits, tokens @ w_router.t(), rtol=2e-3, atol=1e-3)
    given = logits.detach().float().requires_grad_()
    wanted = topk_routing(given, 2, RouterSpec(normalize=normalize), implementation="reference")
    assert torch.equal(topk_experts, wanted.topk_experts)
    torch.testing.assert_close(topk_weights, wanted.topk_weights, rtol=1e-5, atol=1e-6)
    (dlogits,) = torch.autograd.grad(wanted.topk_weights[:, 0].sum(), given)
    found = torch.autograd.grad(topk_weights[:, 0].sum(), (tokens, w_router))
    for gradient, expected in zip(found, (dlogits @ w_router.float(), dlogits.t() @ tokens.float()), strict=True):
        torch.testing.assert_close(gradient.float(), expected, rtol=1e-2, atol=2e-2)


def test_compiles_without_graph_break(device):
    assert_compiles(lambda logits: triton_topk(logits, 2).topk_weights, (torch.randn(6, 5, device=device),))


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (topk_routing, (torch.zeros(3), 1), r"logits must be \[T, E\], got \[3\]"),
        (topk_routing, (torch.zeros(3, 4, dtype=torch.int32), 1), "logits must be torch.float32"),
        (topk_routing, (torch.zeros(3, 4), 5), r"top_k must be in \[1, num_experts=4\], got 5"),
        (topk_routing, (torch.zeros(3, 4), 0), r"top_k must be in \[1, num_experts=4\], got 0"),
        (
            linear_routing,
            (torch.zeros(3, 4), torch.zeros(2, 5), 1),
            r"w_router must be \[E, D\] with D=4, got \[2, 5\]",
        ),
        (linear_routing, (torch.zeros(3, 4), torch.zeros(2, 4).half(), 1), "one floating-point dtype"),
        (linear_routing, (torch.zeros(3, 4).double(), torch.zeros(2, 4), 1), "one floating-point dtype"),
        (linear_routing, (torch.zeros(3, 4).int(), torch.zeros(2, 4), 1), "one floating-point dtype"),
        (linear_routing, (torch.zeros(3, 4), torch.zeros(2, 4, device="meta"), 1), "one device"),
    ],
)
def test_bad_input(op, arguments, message):
    with pytest.raises(ValueError, match=message):
        op(*arguments)
