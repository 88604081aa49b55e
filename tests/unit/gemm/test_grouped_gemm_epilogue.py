"""grouped_gemm beyond the product: bias, scales, activation, other result dtypes, float8, `out=`."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from moe_kernels import Activation, GroupedGemmArguments, grouped_gemm, grouped_gemm_wgrad, reference
from moe_kernels.gemm.kernel import PointerDesign
from moe_kernels.gemm.ops.grouped_gemm import (
    _gated_gemm_op,
    _grouped_gemm_op,
    _grouped_gemm_out_op,
    _row_scale_backward_op,
    _wgrad_op,
)
from moe_kernels.gemm.passes import launch_bias_and_scale
from moe_kernels.gemm.selection import find
from moe_kernels.gemm.tile_table import make_tile_table
from moe_kernels.runtime.checks import check_float8
from moe_kernels.testing import assert_accurate, check_accuracy, run_with_grads, to_float64

from ...dtypes import DTYPES
from ...tiers import default_tier, slow
from ..compiled import assert_compiles
from .kernel_arguments import kernels_of, skip_without_float8

FLOAT8 = torch.float8_e4m3fn
IMPLEMENTATIONS = ("triton", "reference")
triton_gemm = partial(grouped_gemm, implementation="triton")

# (end rows of the groups, rows, K, N)
CASES = {
    "ordinary": ([20, 50, 64], 64, 64, 128),
    "no_rows": ([0, 0], 0, 32, 16),
    "empty_groups": ([0, 0, 30, 30, 45], 45, 32, 48),
    "odd_sizes": ([5, 36, 53], 57, 97, 46),
}
BOTH = ("bias", "row_scale")
OPTIONS = (("bias",), ("row_scale",), BOTH)


def draw(case, dtype, device, names=(), seed=0):
    """Return (a, b, offsets, then the named options in order)."""
    ends, num_rows, size_k, size_n = CASES[case]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, device=device, generator=generator)

    a, b = normal(num_rows, size_k).to(dtype), normal(len(ends), size_k, size_n).to(dtype)
    drawn = {
        "bias": normal(len(ends), size_n, scale=2.0).to(torch.float32 if dtype == FLOAT8 else dtype),
        "row_scale": normal(num_rows),
        "scale_a": normal(num_rows),
        "scale_b": normal(len(ends), size_n),
    }
    return a, b, torch.tensor(ends, dtype=torch.int32, device=device), *(drawn[name] for name in names)


def with_options(op, names, **fixed):
    """Return `op` as a function of tensors alone. Result dtypes apply to 8- and 16-bit operands."""

    def call(a, b, offsets, *options):
        kept = fixed if a.dtype.itemsize <= 2 else {k: v for k, v in fixed.items() if k != "out_dtype"}
        return op(a, b, offsets, **dict(zip(names, options, strict=True)), **kept)

    return call


def check(case, dtype, device, names, **fixed):
    check_accuracy(
        with_options(triton_gemm, names, **fixed),
        with_options(reference.grouped_gemm, names, **fixed),
        partial(draw, case, dtype, device, names),
        ("out", "da", "db", *(f"d{name}" for name in names)),
    )


@pytest.mark.parametrize(
    ("names", "activation"), [*((names, None) for names in OPTIONS), ((), "swiglu"), (BOTH, "swiglu")], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", default_tier(CASES, {"odd_sizes"}))
def test_matches_reference(case, dtype, names, activation, device):
    check(case, dtype, device, names, activation=activation)


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_results_of_16_bit_operands(dtype, activation, device):
    check("odd_sizes", dtype, device, BOTH, activation=activation, out_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("names", OPTIONS, ids="+".join)
@pytest.mark.parametrize("activation", [None, "swiglu", "geglu"])
def test_a_fast_kernel_with_the_rest_behind(activation, names, device, monkeypatch):
    """At sizes of TMA or warp-specialised kernels, a scale, or a bias they do not support, is a separate pass."""
    monkeypatch.setitem(CASES, "large", ([100, 100, 250], 256, 64, 528))
    dtype = DTYPES[-1]
    a, b, offsets, *_ = draw("large", dtype, device)
    kernel = find(GroupedGemmArguments(a, b, a.new_empty(256, 528), offsets=offsets))
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the fast kernels are for capability 9.0")
    assert not isinstance(kernel.metadata.design, PointerDesign)
    check("large", dtype, device, names, activation=activation)


@pytest.mark.parametrize("names", OPTIONS, ids="+".join)
def test_the_pass_behind_a_fast_kernel(names, device):
    a, _, offsets, *options = draw("odd_sizes", torch.float32, device, names)
    rows, options = a[:, :46].clone(), dict(zip(names, options, strict=True))
    table = make_tile_table(offsets, len(rows), 128)
    bias, scale = (options.get(name) for name in ("bias", "row_scale"))
    expected = rows.clone()
    for g, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        expected[start:end] += 0 if bias is None else bias[g]
        expected[start:end] *= 1 if scale is None else scale[start:end, None]
    launch_bias_and_scale(rows, bias, scale, table)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_float16_may_overflow_before_the_scale(activation, implementation, device):
    """Products of 102400, beyond float16's range, are scaled by 1/1024."""
    a, b = torch.full((2, 256, 256), 20.0, device=device).half()
    offsets, scale = torch.tensor([100, 256], dtype=torch.int32, device=device), torch.full((256,), 1 / 1024).to(device)
    b = b[None].expand(2, -1, -1).contiguous()
    out = grouped_gemm(a, b, offsets, row_scale=scale, activation=activation, implementation=implementation)
    assert (out == (100.0 if activation is None else 10000.0)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_rows_past_the_end_do_not_leak(activation, implementation, device):
    a, b, offsets, *options = draw("odd_sizes", torch.float32, device, BOTH)
    end = int(offsets[-1])
    op = with_options(partial(grouped_gemm, implementation=implementation), BOTH, activation=activation)
    expected = op(a, b, offsets, *options)
    a[end:] = options[1][end:] = torch.nan
    leaves = [tensor.requires_grad_() for tensor in (a, b, *options)]
    out = op(a, b, offsets, *options)
    assert torch.equal(out, expected) and not out[end:].any()
    upstream = torch.ones_like(out)
    upstream[end:] = torch.nan
    gradients = torch.autograd.grad(out, leaves, upstream)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][end:].any() and not gradients[3][end:].any()


KERNELS = [
    kernel
    for kernel in kernels_of(GroupedGemmArguments, (*DTYPES, FLOAT8))
    if "bias" in kernel.metadata.optional_operands and isinstance(kernel.metadata.design, PointerDesign)
]


def as_precise_as_the_gpu(dtype, *results):
    """Tensor cores sum the float8 products of a step with fewer bits than float32, but more than float16."""
    return [result.half() if dtype == FLOAT8 and result.is_cuda else result for result in results]


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_each_kernel_with_every_optional_operand(kernel, device):
    dtype = kernel.metadata.operands.A.dtype
    # test_extra_operands.py adds the second product.
    names = [name for name in kernel.metadata.optional_operands if not name.startswith("extra_")]
    if dtype == FLOAT8:
        skip_without_float8()
    inputs = draw("odd_sizes", dtype, device, names)
    a, b, offsets, *options = inputs
    end = int(offsets[-1])
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(0)).to(device)
    gather = kernel.metadata.design.gather
    baseline = with_options(reference.grouped_gemm, names, out_dtype=torch.float32)(*inputs)
    exact = with_options(reference.grouped_gemm, names)(*to_float64(inputs))
    if dtype != FLOAT8:
        a[end:] = torch.nan
    for option in options:
        if len(option) == len(a):
            option[end:] = torch.nan
    args = GroupedGemmArguments(
        a[order.argsort()] if gather else a,
        b,
        torch.full_like(baseline, torch.nan),
        offsets=offsets,
        row_to_token=order.int() if gather else None,
        **dict(zip(names, options, strict=True)),
    )
    assert kernel.supports(args)
    kernel.run(args)
    assert_accurate(*as_precise_as_the_gpu(dtype, args.out, baseline), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("names", [(), ("scale_a", "scale_b"), ("bias", "row_scale", "scale_a", "scale_b")], ids=len)
def test_float8(names, dtype, device):
    skip_without_float8()
    for case in CASES:
        inputs = draw(case, FLOAT8, device, names)
        options = dict(zip(names, inputs[3:], strict=True))
        exact = with_options(reference.grouped_gemm, names)(*to_float64(inputs))
        baseline = reference.grouped_gemm(*inputs[:3], **options, out_dtype=dtype)
        actual = grouped_gemm(*inputs[:3], **options, out_dtype=dtype, implementation="triton")
        assert_accurate(*as_precise_as_the_gpu(FLOAT8, actual, baseline), exact, case)


def test_float8_upcasts_in_the_reference(device):
    a, b, offsets = draw("ordinary", FLOAT8, device)
    out = grouped_gemm(a, b, offsets, implementation="reference")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, reference.grouped_gemm(a.float(), b.float(), offsets).bfloat16())


def test_float8_names_the_capability():
    with pytest.raises(NotImplementedError, match=r"needs? a GPU of compute capability 8\.9, this one has 8\.0"):
        check_float8("grouped_gemm", 80)
    check_float8("grouped_gemm", 89)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_out(activation, implementation, device):
    a, b, offsets, *options = draw("odd_sizes", torch.float16, device, BOTH)
    op = partial(grouped_gemm, implementation=implementation, activation=activation)
    expected = with_options(op, BOTH)(a, b, offsets, *options)
    for dtype in (torch.float16, torch.float32):
        memory = torch.full((2 * len(a), 3 * expected.shape[1]), torch.nan, dtype=dtype, device=device)
        out = memory[::2, ::3]
        result = with_options(op, BOTH, out=out)(a, b, offsets, *options)
        assert result is out and not out[int(offsets[-1]) :].any()
        assert_accurate(out.to(torch.float16), expected, expected.double())
        assert memory[1::2].isnan().all() and memory[:, 1::3].isnan().all()


def test_wgrad_out(device):
    a, _, offsets = draw("odd_sizes", torch.float16, device)
    dout = a[:, :31].clone()
    for implementation in IMPLEMENTATIONS:
        expected = reference.grouped_gemm_wgrad(a.double(), dout.double(), offsets)
        wide = grouped_gemm_wgrad(a, dout, offsets, out_dtype=torch.float32, implementation=implementation)
        assert_accurate(wide, reference.grouped_gemm_wgrad(a.float(), dout.float(), offsets), expected)
        for dtype in (torch.float16, torch.float32):
            out = torch.full((3, 31, 97), torch.nan, dtype=dtype, device=device).transpose(1, 2)
            assert grouped_gemm_wgrad(a, dout, offsets, out=out, implementation=implementation) is out
            # Another kernel may write the other layout, so the last bit may differ.
            baseline = reference.grouped_gemm_wgrad(a.to(dtype), dout.to(dtype), offsets)
            assert_accurate(out, baseline, expected)


def test_repeats_bitwise(device):
    op = with_options(triton_gemm, BOTH, activation="swiglu")
    step = partial(run_with_grads, op, draw("odd_sizes", DTYPES[-1], device, BOTH))
    first = step()
    for _ in range(20 if device == "cuda" else 2):
        assert all(map(torch.equal, step(), first))


def test_frozen_operands(device):
    """Only operands that need a gradient get one, and it does not depend on the others."""
    inputs = draw("ordinary", torch.float32, device, BOTH)
    op = with_options(triton_gemm, BOTH)
    every = (0, 1, 3, 4)
    operands = [inputs[i].requires_grad_() for i in every]
    expected = dict(zip(every, torch.autograd.grad(op(*inputs).sum(), operands), strict=True))
    for kept in ((0,), (1,), (3,), (4,), (1, 4)):
        for i in every:
            inputs[i].requires_grad_(i in kept)
        op(*inputs).sum().backward()
        assert [i for i in every if inputs[i].grad is not None] == list(kept)
        for i in kept:
            torch.testing.assert_close(inputs[i].grad, expected[i])
        for i in every:
            inputs[i].grad = None


@slow
def test_opcheck(device):
    a, b, offsets, bias, row_scale = draw("odd_sizes", torch.float32, device, BOTH)
    operands = (a.requires_grad_(), b.requires_grad_(), offsets, bias.requires_grad_(), row_scale.requires_grad_())
    torch.library.opcheck(_grouped_gemm_op.overload, (*operands, None, None, torch.float32))
    torch.library.opcheck(_gated_gemm_op.overload, (*operands, None, None, "swiglu", torch.float32))
    plain = tuple(tensor.detach() for tensor in operands)
    out = torch.empty(len(a), b.shape[2], device=device)
    torch.library.opcheck(_grouped_gemm_out_op, (*plain, None, None, None, out))
    torch.library.opcheck(_row_scale_backward_op.overload, (out.fill_(1.0), *plain, True))
    torch.library.opcheck(_row_scale_backward_op.overload, (out, *plain, False))
    torch.library.opcheck(_wgrad_op.overload, (operands[0], out.requires_grad_(), offsets, False, torch.float32))


def test_compiles_without_graph_break(device):
    inputs = draw("odd_sizes", torch.float32, device, BOTH)
    assert_compiles(with_options(triton_gemm, BOTH, activation="swiglu"), inputs)

    def into(out, *inputs):
        return with_options(triton_gemm, BOTH, out=out)(*inputs)

    memory = torch.empty(len(inputs[0]), inputs[1].shape[2], device=device)
    torch.compile(into, fullgraph=True, backend="aot_eager")(memory, *inputs)
    assert torch.equal(memory, into(torch.empty_like(memory), *inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.zeros(2, 4)}, r"bias must be \[G, N\] with G=2, N=6, got \[2, 4\]"),
        ({"bias": torch.zeros(2, 6).half()}, "bias must be torch.float32, got torch.float16"),
        ({"row_scale": torch.zeros(3)}, r"row_scale must be \[R\] with R=4, got \[3\]"),
        ({"row_scale": torch.zeros(4).half()}, "row_scale must be torch.float32, got torch.float16"),
        ({"row_scale": torch.zeros(4, device="meta")}, "one device"),
        ({"scale_a": torch.zeros(4)}, "scale_a belongs to float8 operands, got torch.float32"),
        ({"activation": "unknown"}, "activation must be one of"),
        ({"out_dtype": torch.float16}, "operands of torch.float32 do not give out_dtype torch.float16"),
        ({"out": torch.zeros(4, 5)}, r"out must be \[R, N\] with R=4, N=6, got \[4, 5\]"),
        ({"out": torch.zeros(4, 6), "activation": "swiglu"}, r"out must be \[R, F\] with R=4, F=3, got \[4, 6\]"),
        ({"out": torch.zeros(4, 6).half(), "out_dtype": torch.float32}, "out_dtype must be out's"),
        ({"out": torch.zeros(1, 6).expand(4, 6)}, r"out must not overlap itself, got strides \(0, 1\)"),
        ({"out": torch.zeros(4, 6, requires_grad=True)}, "with out= no input may require a gradient"),
        ({"out": torch.zeros(4, 6), "bias": torch.zeros(2, 6, requires_grad=True)}, "with out= no input"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(torch.zeros(4, 3), torch.zeros(2, 3, 6), torch.tensor([1, 2]).int(), **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_activation_is_a_name(implementation):
    """A name means the published numbers."""
    operands = torch.zeros(4, 3), torch.zeros(2, 3, 6), torch.tensor([1, 2]).int()
    message = r"activation must be a name, got Activation\(.*; apply_activation and fused_experts take more"
    with pytest.raises(ValueError, match=message):
        grouped_gemm(*operands, activation=Activation("clamped_swiglu", limit=1.0), implementation=implementation)


def test_more_bad_input():
    a, offsets = torch.zeros(4, 3), torch.tensor([1, 2]).int()
    with pytest.raises(ValueError, match="b must have an even number of columns with an activation, got N=5"):
        grouped_gemm(a, torch.zeros(2, 3, 5), offsets, activation="swiglu")
    with pytest.raises(ValueError, match=r"a must be torch.float8_e4m3fn, got torch.float8_e5m2"):
        grouped_gemm(a.to(torch.float8_e5m2), torch.zeros(2, 3, 5).to(torch.float8_e5m2), offsets)
    with pytest.raises(ValueError, match="with float8 operands no input may require a gradient"):
        bias = torch.zeros(2, 5, requires_grad=True)
        grouped_gemm(a.to(FLOAT8), torch.zeros(2, 3, 5).to(FLOAT8), offsets, bias=bias)
    with pytest.raises(ValueError, match="operands must have 16 bits or more"):
        grouped_gemm_wgrad(a.to(FLOAT8), a.to(FLOAT8), offsets)
    with pytest.raises(ValueError, match=r"out must be \[G, K, N\] with G=2, K=3, N=3, got \[2, 3, 4\]"):
        grouped_gemm_wgrad(a, a, offsets, out=torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="grouped_gemm_wgrad: out must not overlap itself"):
        grouped_gemm_wgrad(a, a, offsets, out=torch.zeros(3, 3).expand(2, 3, 3))
    with pytest.raises(ValueError, match="grouped_gemm_wgrad: with out= no input may require a gradient"):
        grouped_gemm_wgrad(a.requires_grad_(), a, offsets, out=torch.zeros(2, 3, 3))
