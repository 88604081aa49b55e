import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from moe_kernels import grouped_gemm, grouped_gemm_wgrad, reference
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernels import float32_products
from moe_kernels.gemm.kernels.float32_products import has_fast_float64
from moe_kernels.gemm.ops.grouped_gemm import _grouped_gemm_op, _wgrad_op
from moe_kernels.testing import assert_accurate, check_accuracy, run_with_grads

from ...dtypes import DTYPES
from ...tiers import default_tier

triton_gemm = partial(grouped_gemm, implementation="triton")
triton_wgrad = partial(grouped_gemm_wgrad, implementation="triton")

# (end rows of the groups, rows, K, N)
CASES = {
    "ordinary": ([20, 50, 64], 64, 64, 128),
    "one_row": ([0, 1], 1, 32, 16),
    "no_rows": ([0, 0], 0, 32, 16),
    "empty_groups": ([0, 0, 30, 30, 30, 45, 45], 45, 32, 48),
    "all_in_one_group": ([0, 0, 130, 130], 130, 64, 64),
    "odd_sizes": ([5, 36, 53], 53, 97, 47),
    "tail": ([7, 40], 70, 48, 64),
    "only_tail": ([0, 0], 33, 32, 16),
    "tile_edges": ([0, 1, 128, 256, 385], 385, 32, 32),
    "column": ([3, 9], 9, 40, 1),
}


def draw(case, dtype, device, seed=0):
    ends, num_rows, size_k, size_n = CASES[case]
    generator = torch.Generator(device).manual_seed(seed)
    a = torch.randn(num_rows, size_k, device=device, generator=generator).to(dtype)
    b = torch.randn(len(ends), size_k, size_n, device=device, generator=generator).to(dtype)
    return a, b, torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", default_tier(CASES, lambda case: case != "column"))
def test_matches_reference(case, dtype, device):
    check_accuracy(triton_gemm, reference.grouped_gemm, partial(draw, case, dtype, device), ("out", "da", "db"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_wgrad_matches_reference(case, dtype, device):
    ends, num_rows, _, size_n = CASES[case]

    def draw_wgrad(seed):
        a, _, offsets = draw(case, dtype, device, seed)
        generator = torch.Generator(device).manual_seed(seed + 50)
        return a, torch.randn(num_rows, size_n, device=device, generator=generator).to(dtype), offsets

    check_accuracy(triton_wgrad, reference.grouped_gemm_wgrad, draw_wgrad, ("out", "da", "ddout"))
    wgrad = triton_wgrad(*draw_wgrad(0))
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            assert not wgrad[group].any(), "an empty group's gradient must be exact zeros"


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("triton", torch.bfloat16 if torch.cuda.is_available() else torch.float32), ("reference", torch.bfloat16)],
)
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    tail=st.integers(0, 20),
    size_k=st.integers(1, 8),
    size_n=st.integers(1, 8),
    transposed=st.booleans(),
)
def test_agrees_with_torch(implementation, dtype, sizes, tail, size_k, size_n, transposed):
    """torch.nn.functional.grouped_mm needs strides of whole 16 bytes. Integer values make every sum exact."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def draw_integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator).to(device, dtype)

    offsets = torch.tensor(sizes).cumsum(0).int().to(device)
    end, size_k, size_n = sum(sizes), 8 * size_k, 8 * size_n
    a, dout = draw_integers(end + tail, size_k), draw_integers(end + tail, size_n)
    b = draw_integers(len(sizes), *((size_n, size_k) if transposed else (size_k, size_n)))
    if transposed:
        b = b.permute(0, 2, 1)
    out = grouped_gemm(a, b, offsets, implementation=implementation)
    assert torch.equal(out[:end], functional.grouped_mm(a, b, offs=offsets)[:end]) and not out[end:].any()
    wgrad = grouped_gemm_wgrad(a, dout, offsets, implementation=implementation)
    expected = functional.grouped_mm(a[:end].t(), dout[:end], offs=offsets)
    for group, size in enumerate(sizes):
        assert torch.equal(wgrad[group], expected[group]) if size else not wgrad[group].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_operands_with_gradients(dtype, device):
    a, b, offsets = draw("odd_sizes", dtype, device)
    spread = torch.full((2 * len(a), 3 * a.shape[1]), torch.nan, dtype=dtype, device=device)[::2, 1::3]
    strided = spread.copy_(a), b.mT.contiguous().mT
    actual, expected = (run_with_grads(triton_gemm, (*operands, offsets)) for operands in (strided, (a, b)))
    # In the interpreter, NumPy's order of summation may depend on strides.
    exact = {"rtol": 0.0, "atol": 0.0} if actual[0].is_cuda else {}
    torch.testing.assert_close(actual, expected, **exact)
    assert actual[2].stride() == strided[1].stride()


def test_rows_of_a_neighbour_do_not_leak(device):
    """A tile only partly in a group reads none of the next group's NaN into its own rows or gradient."""
    a, b, offsets = draw("ordinary", torch.float32, device)
    clean = triton_gemm(a, b, offsets)
    broken = a.clone()
    broken[20:50] = torch.nan
    out = triton_gemm(broken, b, offsets)
    assert torch.equal(out[:20], clean[:20]) and torch.equal(out[50:], clean[50:])
    assert out[20:50].isnan().all()
    wgrad = triton_wgrad(broken, torch.ones_like(out), offsets)
    assert wgrad[[0, 2]].isfinite().all() and wgrad[1].isnan().all()


@pytest.mark.gpu
def test_bad_offsets_on_the_gpu_are_clamped(device):
    a, b, _ = draw("ordinary", torch.float32, device)
    offsets = torch.tensor([50, 20, 1000], dtype=torch.int32, device=device)
    clamped = torch.tensor([50, 50, 64], dtype=torch.int32, device=device)
    assert torch.equal(triton_gemm(a, b, offsets), triton_gemm(a, b, clamped))
    assert torch.equal(triton_wgrad(a, a, offsets), triton_wgrad(a, a, clamped))


@pytest.fixture
def precision_settings():
    """Reset the settings of float32 products after the test."""
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"


@pytest.mark.gpu
def test_float32_uses_tf32_only_on_request(device, precision_settings):
    a, b, offsets = draw("ordinary", torch.float32, device)
    exact = reference.grouped_gemm(a.double(), b.double(), offsets)
    error = (triton_gemm(a, b, offsets) - exact).abs().max()
    torch.set_float32_matmul_precision("high")
    tf32_error = (triton_gemm(a, b, offsets) - exact).abs().max()
    assert error < 1e-4 < tf32_error


MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("settings", "tf32"),
    [
        ([], False),
        ([(MATMUL, "tf32")], True),
        ([(torch.backends, "tf32")], True),
        ([(torch.backends, "tf32"), (MATMUL, "ieee")], False),
        ([(torch.backends.mkldnn.matmul, "bf16")], False),
        (["high"], True),
        (["medium"], True),
        (["high", (MATMUL, "ieee")], False),
        (["high", "highest"], False),
    ],
)
def test_every_way_to_ask_for_tf32(settings, tf32, device, precision_settings):
    for setting in settings:
        if isinstance(setting, str):
            torch.set_float32_matmul_precision(setting)
        else:
            setting[0].fp32_precision = setting[1]
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == tf32
    a, b, offsets = draw("ordinary", torch.float32, device)
    assert (float32_products.dot_precision(a) == "tf32") == tf32
    for dtype in DTYPES:
        a, b = a.to(dtype), b.to(dtype)
        out = triton_gemm(a, b, offsets)
        assert torch.equal(torch.compile(triton_gemm, fullgraph=True, backend="aot_eager")(a, b, offsets), out)
        torch.testing.assert_close(out, reference.grouped_gemm(a, b, offsets), rtol=1e-2, atol=1e-1)


def test_float32_is_rounded_once(device):
    """Where float64 is fast, a float32 product is exact and rounded once; a float32 sum of 4096 terms is not."""
    if not has_fast_float64(torch.device(device)):
        pytest.skip("this GPU's float64 is slow: float32 is summed in float32")
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(4096, 40, device=device, generator=generator)
    b = torch.randn(1, 4096, 24, device=device, generator=generator)
    offsets = torch.tensor([40], dtype=torch.int32, device=device)
    exact = a.T.double() @ b[0].double()
    assert torch.equal(triton_gemm(a.T, b, offsets), exact.float())
    rows = torch.tensor([4096], dtype=torch.int32, device=device)
    assert torch.equal(triton_wgrad(a, b[0], rows)[0], exact.float())


@pytest.mark.parametrize("case", default_tier(CASES, {"ordinary", "odd_sizes", "tail"}))
def test_float32_where_float64_is_slow(case, device, monkeypatch):
    monkeypatch.setattr(float32_products, "has_fast_float64", lambda device: False)
    check_accuracy(triton_gemm, reference.grouped_gemm, partial(draw, case, torch.float32, device), ("out", "da", "db"))


@pytest.mark.gpu
def test_addresses_past_two_gigabytes(device):
    """a, b and out each hold more elements than an int32 can count."""
    size = 2**16 + 8
    a = torch.zeros(size, 2**15 + 8, dtype=torch.bfloat16, device=device)
    b = torch.zeros(2, 2**15 + 8, size, dtype=torch.bfloat16, device=device)
    a[-1, -1], b[1, -1, -1] = 3.0, 5.0
    offsets = torch.tensor([1, size], dtype=torch.int32, device=device)
    out = triton_gemm(a, b, offsets)
    assert out.numel() > 2**32 and out[-1, -1] == 15.0
    out[-1, -1] = 0.0
    assert not any(out[i : i + 4096].any() for i in range(0, size, 4096))
    del out, b
    torch.cuda.empty_cache()
    dout = torch.zeros(size, 2**16, dtype=torch.bfloat16, device=device)
    dout[-1, -1] = 7.0
    wgrad = triton_wgrad(a, dout, offsets)
    assert wgrad[1, -1, -1] == 21.0 and not wgrad[0].any()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_gradient_of_a_stored_weight_takes_the_kernel_of_a_plain_one(dtype, device, monkeypatch):
    """A weight stored as [G, N, K] gets its transposed gradient written by rows, as the fastest kernels do."""
    a, dout = torch.randn(2, 300, 256, device=device).to(dtype)
    offsets = torch.tensor([100, 130, 300], dtype=torch.int32, device=device)
    taken = []
    monkeypatch.setattr(selection, "run", lambda args: taken.append(args) or selection.select(args).run(args))
    stored = torch.empty(3, 256, 256, dtype=dtype, device=device)
    for out in (stored.transpose(1, 2), stored):
        grouped_gemm_wgrad(a, dout, offsets, out=out, implementation="triton")
        baseline, exact = (
            reference.grouped_gemm_wgrad(x, y, offsets) for x, y in ((a, dout), (a.double(), dout.double()))
        )
        assert_accurate(out, baseline, exact)
    assert selection.select(taken[0]) is selection.select(taken[1])


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_accumulated_gradients_are_added_and_rounded_once(implementation, dtype, out_dtype, device):
    """`out` may be a transposed view. An empty group keeps its values."""
    out_dtype = out_dtype or dtype
    generator = torch.Generator().manual_seed(0)
    a, dout = (torch.randn(70, size, generator=generator).to(device, dtype) for size in (40, 24))
    offsets = torch.tensor([30, 30, 65], dtype=torch.int32, device=device)
    before = torch.randn(3, 40, 24, generator=generator).to(device, out_dtype)
    for out in (before.clone(), before.mT.contiguous().mT):
        returned = grouped_gemm_wgrad(a, dout, offsets, out=out, accumulate=True, implementation=implementation)
        assert returned is out and torch.equal(out[1], before[1])
        wide = torch.promote_types(dtype, out_dtype)
        baseline = (before.to(wide) + reference.grouped_gemm_wgrad(a.to(wide), dout.to(wide), offsets)).to(out_dtype)
        exact = before.double() + reference.grouped_gemm_wgrad(a.double(), dout.double(), offsets)
        assert_accurate(out, baseline, exact)
    with pytest.raises(ValueError, match="grouped_gemm_wgrad: accumulate needs out, got none"):
        grouped_gemm_wgrad(a, dout, offsets, accumulate=True, implementation=implementation)


@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(transposed, device):
    a, b, offsets = draw("tail", torch.float32, device)
    if transposed:
        b = b.mT.contiguous().mT
    torch.library.opcheck(_grouped_gemm_op.overload, (a.requires_grad_(), b.detach().requires_grad_(), offsets))
    torch.library.opcheck(_wgrad_op.overload, (a.detach(), a.detach(), offsets, transposed))


@pytest.mark.parametrize(
    ("backend", "by_columns"),
    default_tier(itertools.product(["aot_eager", "inductor"], [False, True]), [("aot_eager", True)]),
)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_reference_compiles_with_group_sizes_as_symbols(backend, by_columns):
    a, b, offsets = draw("tail", torch.float64, "cpu")
    a = a.T.contiguous().T if by_columns else a
    run = partial(grouped_gemm, implementation="reference")
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.testing.assert_close(*(run_with_grads(function, (a, b, offsets)) for function in (compiled, run)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4)}, r"a must be \[R, K\], got \[4\]"),
        ({"b": torch.zeros(2, 4, 5)}, r"b must be \[G, K, N\] with K=3"),
        ({"offsets": torch.tensor([1]).int()}, r"offsets must be \[G\] with G=2, got \[1\]"),
        ({"offsets": torch.tensor([1, 2])}, "offsets must be torch.int32, got torch.int64"),
        ({"b": torch.zeros(2, 3, 5).half()}, "one floating-point dtype"),
        ({"a": torch.zeros(4, 3).int(), "b": torch.zeros(2, 3, 5).int()}, "one floating-point dtype"),
        ({"b": torch.zeros(2, 3, 5, device="meta")}, "one device"),
        ({"offsets": torch.tensor([3, 2]).int()}, r"non-decreasing.*got \[3, 2\]"),
        ({"offsets": torch.tensor([-1, 2]).int()}, r"within \[0, R=4\], got \[-1, 2\]"),
        ({"offsets": torch.tensor([1, 5]).int()}, r"within \[0, R=4\], got \[1, 5\]"),
        ({"b": torch.zeros(0, 3, 5), "offsets": torch.tensor([]).int()}, "at least one group"),
    ],
)
def test_bad_input(change, message):
    operands = {"a": torch.zeros(4, 3), "b": torch.zeros(2, 3, 5), "offsets": torch.tensor([1, 2]).int()} | change
    with pytest.raises(ValueError, match=message):
        grouped_gemm(*operands.values())


def test_bad_wgrad_input():
    with pytest.raises(ValueError, match=r"dout must be \[R, N\] with R=4, got \[5, 3\]"):
        grouped_gemm_wgrad(torch.zeros(4, 3), torch.zeros(5, 3), torch.tensor([4]).int())
