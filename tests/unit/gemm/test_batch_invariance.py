"""With `batch_invariant=True`, other tokens of a batch change no bit of a token's output or gradient."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from moe_kernels import GemmArguments, GroupedGemmArguments, RouterSpec, linear_routing
from moe_kernels.gemm import selection
from moe_kernels.gemm.batch_invariance import ASSUMED_ROWS, canonical_layout, invariant_linear, invariant_product
from moe_kernels.routing.linear_op import linear_routing_op
from moe_kernels.routing.routers import linear_router
from moe_kernels.testing import assert_accurate, check_accuracy
from moe_layers import CapacityFactor, ExpertChoice, RoundRobinAssignment, RouterNoise

from ...dtypes import DTYPES
from ...layers import moe_layer
from ...tiers import default_tier
from .kernel_arguments import KERNELS, row_ends, supported_arguments

ON_GPU = torch.cuda.is_available()
D = 512 if ON_GPU else 40
SIZES = {"d_model": D, "d_ff": 384 if ON_GPU else 24, "num_experts": 6, "top_k": 2, "init_std": 1.5 * D**-0.5}
SHARED = {"shared_d_ff": 256 if ON_GPU else 16}
# Size of a batch, position of the token in it, and the others' choice; sizes on both sides of a tile's height.
BATCHES = [(2, 1, "opposite"), (19, 18, "random")]
if ON_GPU:
    BATCHES += [
        (17, 0, "alike"),
        (130, 129, "alike"),
        (257, 100, "opposite"),
        (1000, 0, "alike"),
        (4099, 4000, "random"),
    ]
NORMED = RouterSpec(input_norm_epsilon=1e-6, per_expert_scale=True)
FORMS = {
    "swiglu": {},
    "narrow": {"d_ff": 8},
    "probabilities": {"router": RouterSpec.softmax(normalize=False)},
    "biases": {"bias": True, "activation": "relu_squared", **SHARED},
    "shared": {**SHARED, "shared_gate": True, "shared_activation": "geglu"},
    "zero_experts": {"num_zero_experts": 3, "router": RouterSpec.ernie(normalize=False, scale=2.0)},
    "latent": {"latent_dim": 128 if ON_GPU else 12, "recompute": "up"},
    "weight_on_input": {"router": RouterSpec.llama4(), "recompute": "up"},
    "groups": {"router": RouterSpec.deepseek_v3(3, 2, scale=2.5), "top_k": 3},
    "normed": {"router": NORMED},
    "logit_bias": {"router": RouterSpec(logit_bias=True)},
    "odd_sizes": {"d_model": D - 7, "d_ff": 21, "num_experts": 5},
}


def multiply_in_order(a, b, dtype):
    """Multiply like np.matmul, but add the terms in order; its BLAS sums a row by its position in the matrix."""
    a, b = a.astype(dtype), b.astype(dtype)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None] * b[..., None, k, :]
    return total


@pytest.fixture(autouse=True)
def ordered_sums(monkeypatch):
    """Make the interpreter sum every row of a tile alike, as tensor cores do and NumPy does not."""
    if not ON_GPU:
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", multiply_in_order)


def make_layer(device, dtype, **options):
    torch.manual_seed(0)
    layer = moe_layer(**{**SIZES, "batch_invariant": True, **options}, device=device, dtype=dtype)
    for bias in (layer.experts.b_up, layer.experts.b_down, layer.router.bias, layer.router.selection_bias):
        if bias is not None:
            torch.nn.init.normal_(bias, std=0.3)
    return layer


def make_tokens(num_tokens, device, dtype, seed=1, d_model=D):
    return torch.randn(num_tokens, d_model, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def step(layer, tokens, dout):
    """Return per-token results: output, routing and gradient."""
    tokens = tokens.detach().requires_grad_()
    out, routing = layer(tokens, return_routing=True)
    gradient = torch.autograd.grad([out, routing.logits], tokens, [dout, torch.ones_like(routing.logits)])
    return out.detach(), routing.topk_experts, routing.topk_weights.detach(), routing.logits.detach(), *gradient


def batches(token, device, dtype, largest):
    """Yield batches that hold the token among random tokens, tokens that choose as it does, or tokens that do not."""
    for size, place, kind in (batch for batch in BATCHES if batch[0] <= largest):
        others = make_tokens(size, device, dtype, seed=size, d_model=token.shape[1])
        if kind != "random":
            others = others / 8 + (token if kind == "alike" else -token)
        others[place] = token
        yield f"{size} tokens, {kind}", others, place


def differing(layer, token, largest=20):
    """Return the batches of up to `largest` tokens in which a token gets other bits than alone."""
    names = ("out", "experts", "weights", "logits", "gradient")
    dout = make_tokens(1, token.device, token.dtype, seed=2, d_model=token.shape[1])
    alone = step(layer, token, dout)
    found = []
    for description, tokens, place in batches(token, token.device, token.dtype, largest):
        douts = make_tokens(len(tokens), token.device, token.dtype, seed=3, d_model=token.shape[1])
        douts[place] = dout
        together = step(layer, tokens, douts)
        for name, a, b in zip(names, together, alone, strict=True):
            if not torch.equal(a[place], b[0]):
                found.append(f"{name} of {description}")
    return found


QUICK = {"shared", "latent", "groups", "weight_on_input"}
CASES = [(form, dtype) for form in FORMS for dtype in DTYPES]
if not ON_GPU:  # the interpreter is slow
    CASES = [(form, torch.float32) for form in FORMS] + [("shared", torch.float16)]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("form", "dtype"), default_tier(CASES, lambda case: case[0] in QUICK and case[1] == torch.float32), ids=str
)
def test_a_token_alone_and_in_any_batch(form, dtype, implementation, device):
    layer = make_layer(device, dtype, implementation=implementation, **FORMS[form])
    token = make_tokens(1, device, dtype, d_model=layer.d_model)
    assert differing(layer, token, largest=5000 if implementation == "triton" else 20) == []


def test_without_it_the_batch_shows():
    """Show that the comparison can fail: PyTorch sums a product of one row in another order than one of many rows."""
    layer = make_layer("cpu", torch.float32, implementation="reference", batch_invariant=False, d_model=512, d_ff=384)
    assert differing(layer, make_tokens(1, "cpu", torch.float32, d_model=512))
    layer.batch_invariant = True
    assert not differing(layer, make_tokens(1, "cpu", torch.float32, d_model=512))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_where_tokens_lie_in_memory(implementation, device):
    layer = make_layer(device, torch.float16, implementation=implementation, **SHARED)
    tokens = make_tokens(4, device, torch.float16)
    expected = layer(tokens)
    wide = torch.zeros(4, D + 3, device=device, dtype=torch.float16)[:, 2:-1].copy_(tokens)
    columns = tokens.t().contiguous().t()
    views = {
        "wide": (wide, slice(4)),
        "columns": (columns, slice(4)),
        "shape": (tokens.view(2, 2, D), slice(4)),
        "row in wide": (wide[1:2], slice(1, 2)),
        "row in columns": (columns[2:3], slice(2, 3)),
        "vector": (tokens[3], slice(3, 4)),
    }
    for name, (x, rows) in views.items():
        assert torch.equal(layer(x).view(-1, D), expected[rows]), name
        kept = canonical_layout(x)
        assert torch.equal(kept, x) and kept.data_ptr() % 16 == 0, name
        assert kept.stride() == torch.empty(x.shape).stride(), name
    assert canonical_layout(tokens).data_ptr() == tokens.data_ptr()  # no unnecessary copy


@pytest.mark.parametrize("form", ["grouped_gemm", "gemm"])
def test_kernels_are_chosen_whatever_the_number_of_rows(form, device):
    dtype = torch.bfloat16 if ON_GPU else torch.float16

    def chosen(num_rows, **options):
        a, b = (torch.zeros(size, device=device, dtype=dtype) for size in ((num_rows, 256), (2, 64, 256)))
        out = a.new_zeros(num_rows, 64)
        if form == "gemm":
            return selection.find(GemmArguments(a, b[0].t(), out, **options))
        offsets = torch.tensor([num_rows // 2, num_rows], device=device, dtype=torch.int32)
        return selection.find(GroupedGemmArguments(a, b.transpose(1, 2), out, offsets=offsets, **options))

    sizes = (1, 15, 16, 100, 5000)
    assert len({chosen(size).metadata.kernel_name for size in sizes}) > 1
    assert len({chosen(size, assumed_rows=ASSUMED_ROWS).metadata.kernel_name for size in sizes}) == 1


PRODUCTS = [kernel for kernel in KERNELS if kernel.arguments_class in (GroupedGemmArguments, GemmArguments)]


@pytest.mark.parametrize("kernel", PRODUCTS, ids=repr)
def test_every_kernel_sums_a_row_alike_in_any_tile(kernel, device):
    """With equal rows and one matrix for all groups, all results must be equal."""
    args = supported_arguments(kernel, device)
    args.B.copy_(args.B[:1].clone())
    args.A.copy_(args.A.flatten(0, -2)[:1].clone().expand_as(args.A))
    kernel.run(args)
    for written in args.outputs:
        rows = written.flatten(0, -2)[: row_ends(kernel)[-1]]
        assert rows.isfinite().all() and rows.any()
        different = (rows != rows[0]).any(1).nonzero().flatten().tolist()
        assert not different, f"rows {different} differ from row 0"


@pytest.mark.parametrize(
    ("form", "dtype", "implementation"),
    [
        *[(form, torch.float32, "triton") for form in (FORMS if ON_GPU else ["shared", "latent", "groups"])],
        *[(form, torch.bfloat16, "reference") for form in ("shared", "biases", "logit_bias")],
    ],
)
def test_results_are_within_the_error_budget(form, dtype, implementation, device):
    """Compare output and gradients of input and parameters with those of a layer in plain PyTorch. The gradients of
    parameters are sums over many tokens."""
    num_tokens = 40 if implementation == "triton" else 300

    def run(dtype, **options):
        layer = make_layer(device, torch.float32, **FORMS[form], **options).to(dtype)
        tokens = make_tokens(num_tokens, device, torch.float32, d_model=layer.d_model).to(dtype).requires_grad_()
        out = layer(tokens)
        upstream = make_tokens(num_tokens, device, torch.float32, seed=2, d_model=layer.d_model).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, [tokens, *layer.parameters()], upstream)]

    plain = {"batch_invariant": False, "implementation": "reference"}
    actual = run(dtype, implementation=implementation)
    results = zip(actual, run(dtype, **plain), run(torch.float64, **plain), strict=True)
    for i, (actual, baseline, exact) in enumerate(results):
        assert_accurate(actual, baseline, exact, f"result {i}")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_no_tokens(implementation, device):
    layer = make_layer(device, torch.float32, implementation=implementation, latent_dim=8, **SHARED, shared_gate=True)
    tokens = make_tokens(0, device, torch.float32).requires_grad_()
    layer(tokens).sum().backward()
    assert tokens.grad.shape == (0, D)
    assert all(parameter.grad.eq(0).all() for parameter in layer.parameters())


def test_padding_is_no_other_token(device):
    layer = make_layer(device, torch.float32, implementation="triton")
    tokens = make_tokens(5, device, torch.float32)
    mask = torch.tensor([True, False, True, True, False], device=device)
    assert torch.equal(layer(tokens, token_mask=mask)[mask], layer(tokens)[mask])


@pytest.mark.parametrize("form", default_tier(["latent", "shared"], ["shared"]))
def test_compiles_without_graph_break(form, device):
    layer = make_layer(device, torch.float32, implementation="triton", **FORMS[form])
    tokens = make_tokens(5, device, torch.float32).requires_grad_()
    leaves = [tokens, *layer.parameters()]
    outs = torch.compile(layer, fullgraph=True, backend="aot_eager")(tokens), layer(tokens)
    assert torch.equal(*outs)
    dout = make_tokens(5, device, torch.float32, seed=2)
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, dout) for out in outs))


def test_is_set_on_every_part(device):
    layer = make_layer(device, torch.float32, batch_invariant=False, **SHARED)
    parts = (layer.router, layer.experts, layer.shared_expert)
    assert not layer.batch_invariant and not any(part.batch_invariant for part in parts)
    layer.batch_invariant = True
    assert layer.batch_invariant and all(part.batch_invariant for part in parts)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": CapacityFactor(2.0)},
        {"assignment": RoundRobinAssignment()},
        {"assignment": ExpertChoice(2.0)},
        {"noise": RouterNoise(gumbel=1.0)},
    ],
)
def test_choices_that_look_at_other_tokens_are_refused(options):
    with pytest.raises(ValueError, match=r"batch_invariant must have no capacity.*, got"):
        make_layer("cpu", torch.float32, **options)


def test_parts_that_are_replaced_later_are_refused(device):
    layer = moe_layer(8, 4, 4, 2, batch_invariant=True, device=device)
    layer.router.assignment = ExpertChoice(2.0)
    with pytest.raises(ValueError, match="batch_invariant must have no capacity, assignment or noise, got"):
        layer(torch.randn(3, 8, device=device))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_linear_is_within_the_error_budget(num_tokens, dtype, out_dtype, implementation, device):
    def draw(seed):
        return tuple(make_tokens(rows, device, dtype, seed + rows, d_model=48) for rows in (num_tokens, 21))

    def plain(tokens, weight):
        wide = torch.promote_types(tokens.dtype, out_dtype or tokens.dtype)
        return functional.linear(tokens.to(wide), weight.to(wide))

    op = partial(invariant_linear, out_dtype=out_dtype, implementation=implementation)
    check_accuracy(op, plain, draw, ("out", "dtokens", "dweight"))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_linear_by_hand(implementation, device):
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], device=device)
    out = invariant_linear(tokens, weight, implementation=implementation)
    assert out.tolist() == [[1.0, 2.0, 3.0], [3.0, 4.0, 7.0]]


def test_opcheck(device):
    tokens, weight = (make_tokens(rows, device, torch.float32).requires_grad_() for rows in (5, 3))
    matrix = make_tokens(D, device, torch.float32, d_model=3).requires_grad_()
    torch.library.opcheck(invariant_product.overload, (tokens, matrix, torch.float32))
    router = linear_router(RouterSpec(normalize=False), 2, weight, batch_invariant=True)
    torch.library.opcheck(linear_routing_op.overload, linear_routing_op.schema_arguments(tokens, router))


def test_linear_gradcheck_of_reference():
    operands = [make_tokens(rows, "cpu", torch.float64, d_model=4).requires_grad_() for rows in (3, 2)]
    torch.autograd.gradcheck(invariant_linear, operands)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, 5), "invariant_linear: .*D"),
        (torch.zeros(3, 4, dtype=torch.float16), "one floating-point dtype"),
        (torch.zeros(3, 4, device="meta"), "one device"),
    ],
)
def test_linear_bad_input(tokens, message):
    with pytest.raises(ValueError, match=message):
        invariant_linear(tokens, torch.zeros(2, 4))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("route", [linear_routing, partial(linear_routing, spec=RouterSpec(score="sigmoid"))])
def test_routing_is_that_of_the_ordinary_op(route, implementation, device):
    tokens, weight = make_tokens(30, device, torch.float32), make_tokens(6, device, torch.float32)
    actual = route(tokens, weight, top_k=2, batch_invariant=True, implementation=implementation)
    expected = route(tokens, weight, top_k=2, implementation=implementation)
    assert torch.equal(actual.topk_experts, expected.topk_experts)
    torch.testing.assert_close(actual.topk_weights, expected.topk_weights)
    torch.testing.assert_close(actual.logits, expected.logits)
