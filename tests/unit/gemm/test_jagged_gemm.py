from functools import partial

import pytest
import torch

from moe_kernels import JaggedGemmArguments, WgradArguments, jagged_gemm, pack_groups, reference
from moe_kernels.gemm.kernels.jagged import FLOAT32_WGRAD_KERNELS, make_jagged_table
from moe_kernels.gemm.ops.jagged_gemm import _jagged_gemm_op, _jagged_wgrad_op
from moe_kernels.testing import assert_accurate, check_accuracy, run_with_grads, to_float64

from ...dtypes import DTYPES
from ...gpu import waiting_is_an_error
from ...tiers import default_tier, slow
from ..compiled import assert_compiles
from .kernel_arguments import kernels_of, name_of, run_or_skip

triton_jagged = partial(jagged_gemm, implementation="triton")
# Called below `jagged_gemm`, which refuses a first offset above 0 on the CPU.
OPS = [_jagged_gemm_op, reference.jagged_gemm]
KERNELS = kernels_of(JaggedGemmArguments, DTYPES)

# (group offsets, rows, K, N)
CASES = {
    "growing": ([0, 64, 192, 384, 640], 640, 256, 128),
    "head_and_tail": ([9, 9, 60, 150], 200, 40, 72),
    "no_group_rows": ([7, 7, 7], 20, 16, 24),
    "no_rows": ([0, 0], 0, 16, 8),
    "one_row": ([0, 1], 1, 32, 16),
    "from_zero": ([0, 3, 20, 50], 53, 97, 47),
    "odd_sizes": ([3, 3, 20, 21, 50], 53, 97, 47),
    "no_depth": ([1, 5], 7, 0, 16),
    "parts": ([5, 40, 400, 400, 760], 777, 24, 16),  # enough rows to sum B's gradient in parts
}
QUICK = {"head_and_tail", "no_depth", "no_rows"}
if torch.cuda.is_available():
    CASES["many_tiles"] = ([100, 101, 9000, 9000, 12345, 20000], 20100, 512, 768)


def draw(case, dtype, device, seed=0, offsets_dtype=torch.int32):
    offsets, num_rows, size_k, size_n = CASES[case]
    generator = torch.Generator(device).manual_seed(seed)
    a = torch.randn(num_rows, size_k, device=device, generator=generator).to(dtype)
    b = torch.randn(size_k, size_n, device=device, generator=generator).to(dtype)
    return a, b, torch.tensor(offsets, dtype=offsets_dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", default_tier(CASES, {"parts", *QUICK}))
def test_matches_reference(case, dtype, device):
    inputs = partial(draw, case, dtype, device, offsets_dtype=torch.int64 if dtype == torch.float32 else torch.int32)
    check_accuracy(_jagged_gemm_op, reference.jagged_gemm, inputs, ("out", "da", "db"))


@pytest.mark.parametrize("transposed", default_tier([False, True], [True]))
@pytest.mark.parametrize("case", default_tier(sorted(set(CASES) - {"growing", "one_row"}), QUICK))
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_kernel(kernel, case, transposed, device):
    """Test every kernel. Rows without a group hold NaN."""
    a, b, offsets = draw(case, kernel.metadata.operands.A.dtype, device)
    b = b.t().contiguous().t() if transposed else b
    clean = a.clone()
    a[: offsets[0]] = torch.nan
    a[offsets[-1] :] = torch.nan
    args = JaggedGemmArguments(a, b, a.new_full((len(a), b.shape[1]), torch.nan), offsets)
    run_or_skip(kernel, args)
    exact = reference.jagged_gemm(*to_float64((clean, b, offsets)))
    assert_accurate(args.out, reference.jagged_gemm(clean, b, offsets), exact)
    assert not args.out[: offsets[0]].any() and not args.out[offsets[-1] :].any()


@pytest.mark.parametrize("kernel", FLOAT32_WGRAD_KERNELS, ids=name_of)
def test_float32_wgrad_kernel(kernel, device):
    if (dtype := kernel.metadata.operands.A.dtype) not in DTYPES:
        pytest.skip("no bfloat16 in the interpreter")
    a, b, offsets = draw("head_and_tail", dtype, device)
    dout = (a @ b).detach()
    table = make_jagged_table(offsets, len(a), 65536, parts=3)
    args = WgradArguments(a, dout, a.new_full((3, *b.shape), torch.nan, dtype=torch.float32), tile_table=table)
    assert kernel.supports(args)
    kernel.run(args)
    parts = [slice(9, 56), slice(56, 103), slice(103, 150)]
    exact = torch.stack([a[rows].double().t() @ dout[rows].double() for rows in parts])
    baseline = torch.stack([a[rows].float().t() @ dout[rows].float() for rows in parts])
    assert_accurate(args.out, baseline, exact)


def gradients(op, a, b, offsets, dout):
    """Return the output, then both gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (a, b)]
    out = op(*leaves, offsets)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_of_no_group_do_not_leak(op, poison, device):
    a, b, offsets = draw("head_and_tail", torch.float32, device)
    dout = torch.ones(len(a), b.shape[1], device=device)
    clean = gradients(op, a, b, offsets, dout)
    for tensor in (a, dout):
        tensor[:9] = poison
        tensor[150:] = poison
    out, da, db = gradients(op, a, b, offsets, dout)
    assert torch.equal(out, clean[0]) and torch.equal(da, clean[1]) and torch.equal(db, clean[2])
    assert not out[:9].any() and not out[150:].any() and not da[:9].any() and not da[150:].any()


def test_rows_of_a_neighbour_do_not_leak(device):
    """A tile may hold rows of two groups, which do not affect each other."""
    a, b, offsets = draw("growing", torch.float32, device)
    clean = triton_jagged(a, b, offsets)
    a[64:192] = torch.nan
    out = triton_jagged(a, b, offsets)
    assert torch.equal(out[:64], clean[:64]) and torch.equal(out[192:], clean[192:])
    assert out[64:192].isnan().all()


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"),
    [(torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_mixed_dtypes_are_promoted(implementation, a_dtype, b_dtype, device):
    op = partial(jagged_gemm, implementation=implementation)
    a, b, offsets = draw("from_zero", torch.float16, device)
    a, b = a.to(a_dtype), b.to(b_dtype)
    out, da, db = run_with_grads(op, (a, b, offsets))
    assert (out.dtype, da.dtype, db.dtype) == (torch.float32, a_dtype, b_dtype)
    expected = run_with_grads(op, (a.float(), b.float(), offsets))
    assert torch.equal(out, expected[0])
    assert torch.equal(da, expected[1].to(a_dtype)) and torch.equal(db, expected[2].to(b_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_b_lies_as_b(dtype, device):
    a, b, offsets = draw("parts", dtype, device)
    for matrix in (b, b.t().contiguous().t()):
        assert run_with_grads(_jagged_gemm_op, (a, matrix, offsets))[2].stride() == matrix.stride()


def test_pack_groups(device):
    a_list = [torch.randn(m, 6, device=device, requires_grad=True) for m in (3, 0, 4)]
    packed, offsets = pack_groups(a_list)
    assert offsets.tolist() == [0, 3, 3, 7] and offsets.dtype == torch.int32 and offsets.device == packed.device
    assert torch.equal(packed, torch.cat(a_list))
    b = torch.randn(6, 5, device=device)
    triton_jagged(packed, b, offsets).sum().backward()
    for a in a_list:
        torch.testing.assert_close(a.grad, b.sum(1).expand(len(a), 6))


def test_pack_groups_whatever_the_default_device(device):
    a_list = [torch.randn(m, 6, device=device) for m in (3, 4)]
    with torch.device("meta"):
        packed, offsets = pack_groups(a_list)
    assert offsets.tolist() == [0, 3, 7] and offsets.device == packed.device == a_list[0].device


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("offsets", "num_rows"),
    [
        ([0, 10, 10, 40], 40),
        ([7, 7, 33], 64),
        ([5, 5], 9),
        ([0, 0], 0),
        # Invalid offsets: clamped to a non-decreasing sequence within the rows.
        ([7, 3, 12, -4, 9], 10),
        ([-3, 2, 300], 50),
        ([2**20, 3], 20),
    ],
)
def test_table(offsets, num_rows, offsets_dtype, device):
    """The table has the rows from the first to the last clamped offset. The rows outside become zeros."""
    offsets = torch.tensor(offsets, dtype=offsets_dtype, device=device)
    clamped = offsets.clamp(0, num_rows).cummax(0).values
    out = torch.full((num_rows, 3), torch.nan, device=device)
    table = make_jagged_table(offsets, num_rows, 16, out=out)
    first, last = int(clamped[0]), int(clamped[-1])
    assert table.bounds.tolist() == [first, last, num_rows]
    num_tiles = -(-(last - first) // 16)
    assert int(table.num_tiles[0]) == num_tiles
    assert table.tiles[:num_tiles].tolist() == [[0, block] for block in range(num_tiles)]
    outside = torch.ones(num_rows, dtype=torch.bool, device=device)
    outside[first:last] = False
    assert not out[outside].any() and out[~outside].isnan().all()


@pytest.mark.parametrize("parts", [1, 3])
def test_table_of_parts(parts, device):
    offsets = torch.tensor([7, 8, 8, 50], device=device)
    table = make_jagged_table(offsets, 60, 16, parts=parts)
    assert table.bounds.tolist() == ([7, 50, 60] if parts == 1 else [7, 22, 37, 50, 60])
    rows = []
    for group, block in table.tiles[: table.num_tiles[0].item()].tolist():
        start, end = table.bounds[group : group + 2].tolist()
        rows += range(start + block * 16, min(start + block * 16 + 16, end))
    assert rows == list(range(7, 50))


@pytest.mark.gpu
def test_bad_offsets_on_the_gpu_are_clamped(device):
    a, b, _ = draw("head_and_tail", torch.float32, device)
    bad, clamped = (torch.tensor(values, device=device) for values in ([50, 20, 1000], [50, 50, 200]))
    actual, expected = (run_with_grads(triton_jagged, (a, b, offsets)) for offsets in (bad, clamped))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.gpu
def test_does_not_wait(device):
    a, b, offsets = draw("many_tiles", torch.bfloat16, device)
    dout = torch.randn(len(a), b.shape[1], device=device).bfloat16()
    gradients(triton_jagged, a, b, offsets, dout)
    with waiting_is_an_error():
        gradients(triton_jagged, a, b, offsets, dout)
        pack_groups([a, a])


def test_too_many_groups(device):
    with pytest.raises(NotImplementedError, match="groups"):
        make_jagged_table(torch.zeros(10000, dtype=torch.int32, device=device), 10, 16, parts=1)


def test_repeats_bitwise(device):
    step = partial(run_with_grads, _jagged_gemm_op, draw("parts", DTYPES[-1], device))
    first = step()
    for _ in range(20 if device == "cuda" else 1):
        assert all(map(torch.equal, step(), first))


def test_frozen_operands_get_no_gradient(device):
    a, b, offsets = draw("growing", torch.float32, device)
    triton_jagged(a, b.requires_grad_(), offsets).sum().backward()
    assert a.grad is None and b.grad is not None


@slow
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(transposed, device):
    a, b, offsets = draw("odd_sizes", torch.float32, device)
    if transposed:
        b = b.t().contiguous().t()
    torch.library.opcheck(_jagged_gemm_op.overload, (a.requires_grad_(), b.requires_grad_(), offsets))
    torch.library.opcheck(_jagged_wgrad_op.overload, (a.detach(), a.detach(), offsets, transposed))


def test_compiles_without_graph_break(device):
    assert_compiles(triton_jagged, draw("from_zero", torch.float32, device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4)}, r"a_packed must be \[R, K\], got \[4\]"),
        ({"b": torch.zeros(4, 5)}, r"b must be \[K, N\] with K=3, got \[4, 5\]"),
        ({"offsets": torch.tensor([2])}, r"\[G \+ 1\] with at least one group, got \[1\]"),
        ({"offsets": torch.zeros(2, 2).int()}, r"at least one group, got \[2, 2\]"),
        ({"offsets": torch.tensor([0.0, 2.0])}, "must be torch.int32 or torch.int64"),
        ({"a": torch.zeros(4, 3).int()}, "operands must be floating-point"),
        ({"b": torch.zeros(3, 5, device="meta")}, "one device"),
        ({"offsets": torch.tensor([3, 2])}, r"non-decreasing.*got \[3, 2\]"),
        ({"offsets": torch.tensor([-1, 2])}, r"within \[0, R=4\], got \[-1, 2\]"),
        ({"offsets": torch.tensor([0, 5])}, r"within \[0, R=4\], got \[0, 5\]"),
        ({"offsets": torch.tensor([0, 1, 1, 2, 9])}, r"got \[0, 1, 1, and 2 more\]"),
        ({"offsets": torch.tensor([2, 4])}, r"start with 0, got 2; for end rows.*pad\(offs"),
    ],
)
def test_bad_input(change, message):
    operands = {"a": torch.zeros(4, 3), "b": torch.zeros(3, 5), "offsets": torch.tensor([0, 2])} | change
    with pytest.raises(ValueError, match=message):
        jagged_gemm(*operands.values())


@pytest.mark.parametrize("a_list", [[], [torch.zeros(3)], [torch.zeros(2, 3), torch.zeros(2, 4)]])
def test_bad_packing(a_list):
    with pytest.raises(ValueError, match="pack_groups: a_list must hold matrices"):
        pack_groups(a_list)


def test_supports_names_the_operand():
    kernel = next(k for k in KERNELS if k.metadata.operands.A.dtype == torch.float32)
    a, b, out = torch.zeros(4, 8), torch.zeros(8, 8), torch.zeros(4, 8)
    assert "Operand `B`: expected torch.float32, got torch.float16" in (
        kernel.supports(JaggedGemmArguments(a, b.half(), out, torch.tensor([0, 4]))).error
    )
    assert "Operand `group_offsets`: expected int32 or int64" in (
        kernel.supports(JaggedGemmArguments(a, b, out, torch.tensor([0.0, 4.0]))).error
    )
