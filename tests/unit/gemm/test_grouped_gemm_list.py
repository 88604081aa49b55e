import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_kernels import GroupedGemmListArguments, GroupedProblem, get_kernels, grouped_gemm_list, reference
from moe_kernels.activation.functions import PLAIN_EPILOGUES
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernels.problem_table import make_problem_table
from moe_kernels.gemm.ops import grouped_checks
from moe_kernels.gemm.ops.grouped_gemm_list import _grouped_gemm_list_op
from moe_kernels.testing import assert_accurate, to_float64

from ...dtypes import DTYPES
from ...gpu import waiting_is_an_error
from ...tiers import default_tier
from ..compiled import assert_compiles
from .kernel_arguments import kernels_of, name_of, run_or_skip, skip_without_float8

FLOAT8 = torch.float8_e4m3fn
triton_list = partial(grouped_gemm_list, implementation="triton")
reference_list = partial(grouped_gemm_list, implementation="reference")
KERNELS = kernels_of(GroupedGemmListArguments, (*DTYPES, FLOAT8))

# (M, N, K) of each problem
CASES = {
    "equal": [(64, 64, 64)] * 3,
    "unlike": [(40, 136, 24), (128, 16, 200), (8, 8, 8), (72, 72, 136)],
    "odd_sizes": [(53, 47, 97), (1, 1, 1), (17, 129, 3)],
    "one_row_or_column": [(1, 64, 32), (64, 1, 32), (32, 32, 1)],
    "empty": [(0, 16, 8), (16, 0, 8), (24, 16, 0), (0, 0, 0), (32, 24, 16)],
    "empty_outputs": [(0, 16, 8), (16, 0, 8), (32, 24, 16)],
    "only_empty": [(0, 4, 4), (4, 0, 4)],
    "one": [(130, 70, 40)],
}
QUICK = {"equal", "odd_sizes", "empty_outputs"}
if torch.cuda.is_available():
    # Programs walk several tiles of several problems, including problems that start between their tiles.
    CASES["many_tiles"] = [(1000 + 8 * g, 1504 - 16 * g, 64 * (g % 5) + 72) for g in range(12)]


def draw(case, dtype, device, layouts="rr", seed=0):
    """Return lists of A and B. Layouts: "r" by rows, "c" by columns, "m" alternating, "s" with gaps between rows."""
    generator = torch.Generator(device).manual_seed(seed)
    lists = [], []
    for g, (m, n, k) in enumerate(CASES[case]):
        for matrices, shape, layout in zip(lists, ((m, k), (k, n)), layouts, strict=True):
            matrix = torch.randn(shape, device=device, generator=generator).to(dtype)
            if layout == "c" or (layout == "m" and g % 2):
                matrix = matrix.t().contiguous().t()
            if layout == "s":
                gaps = torch.full((shape[0], shape[1] + 8), torch.nan, dtype=dtype, device=device)
                matrix = gaps[:, : shape[1]].copy_(matrix)
            matrices.append(matrix)
    return lists


def with_gradients(op, a_list, b_list, dtype=None):
    """Return every output, then the gradient of every matrix."""
    leaves = [matrix.detach().to(dtype or matrix.dtype).requires_grad_() for matrix in (*a_list, *b_list)]
    outs = op(leaves[: len(a_list)], leaves[len(a_list) :])
    generator = torch.Generator(outs[0].device).manual_seed(1)
    upstream = [
        torch.randn(out.shape, device=out.device, generator=generator).to(a_list[0].dtype).to(out.dtype) for out in outs
    ]
    return [out.detach() for out in outs], torch.autograd.grad(outs, leaves, upstream)


def joined(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def unwritten(a_list, b_list):
    """Return an output of NaN for each problem."""
    return [a.new_full((a.shape[0], b.shape[1]), torch.nan) for a, b in zip(a_list, b_list, strict=True)]


def check(a_list, b_list, **options):
    """Hold outputs and gradients of the kernels to the reference. Return the outputs."""
    actual, baseline = (with_gradients(partial(op, **options), a_list, b_list) for op in (triton_list, reference_list))
    exact = with_gradients(reference_list, a_list, b_list, torch.float64)
    for name, *results in zip(("out", "gradients"), actual, baseline, exact, strict=True):
        assert [t.shape for t in results[0]] == [t.shape for t in results[2]]
        assert_accurate(*map(joined, results), name)
    return actual[0]


@pytest.mark.parametrize("layouts", ["rr", "cc", "ms", "sm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", default_tier(CASES, QUICK))
def test_matches_reference(case, dtype, layouts, device):
    check(*draw(case, dtype, device, layouts))


@pytest.mark.parametrize("layouts", default_tier(["rr", "rc", "cr", "cc", "mm"], ["rc", "mm"]))
@pytest.mark.parametrize("case", default_tier(CASES, QUICK))
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_kernel(kernel, case, layouts, device):
    dtype = kernel.metadata.operands.A.dtype
    out_dtype = torch.float16 if dtype == FLOAT8 else dtype
    a_list, b_list = draw(case, dtype, device, layouts)
    shapes = [(m, n) for m, n, _ in CASES[case]]
    outs = [torch.full((m, n + 8), torch.nan, dtype=out_dtype, device=device) for m, n in shapes]
    out_list = [out[:, :n] for out, (_, n) in zip(outs, shapes, strict=True)]
    epilogue = kernel.metadata.epilogue
    args = GroupedGemmListArguments(a_list, b_list, out_list, epilogue=epilogue)
    run_or_skip(kernel, args)
    exact = reference_list(to_float64(a_list), to_float64(b_list))
    expected = [joined(reference_list(a_list, b_list, out_dtype=out_dtype)), joined(exact)]
    if epilogue is not None:
        expected = [reference.apply_activation(product, epilogue) for product in expected]
    assert_accurate(joined(args.out_list), *expected)
    assert all(out[:, n:].isnan().all() for out, (_, n) in zip(outs, shapes, strict=True)), "wrote between rows"


FLOAT8_CASES = {
    "unlike": [(40, 136, 32), (128, 16, 208), (16, 16, 16), (72, 80, 1040)],  # sizes that TMA supports, too
    "odd_sizes": [(53, 47, 97), (1, 1, 1), (17, 129, 3), (0, 4, 4), (5, 6, 0)],
}


@pytest.mark.parametrize("out_dtype", [*DTYPES[::-1], None], ids=str)
@pytest.mark.parametrize("layouts", ["rr", "rc", "mm"])
@pytest.mark.parametrize("case", FLOAT8_CASES)
def test_float8(case, layouts, out_dtype, device, monkeypatch):
    skip_without_float8()
    if out_dtype is None and torch.bfloat16 not in DTYPES:
        pytest.skip("no bfloat16 in the interpreter")
    monkeypatch.setitem(CASES, case, FLOAT8_CASES[case])
    a_list, b_list = draw(case, FLOAT8, device, layouts)
    exact = reference_list(to_float64(a_list), to_float64(b_list))
    outs = [triton_list(a_list, b_list, out_dtype=out_dtype)]
    outs.append(GroupedProblem.from_lists(a_list, b_list, out_dtype=out_dtype, implementation="triton").run())
    # Tensor cores sum the float8 products of a step with fewer bits than float32, but more than float16.
    kept = torch.float16 if device == "cuda" and out_dtype == torch.float32 else out_dtype or torch.bfloat16
    baseline = reference_list(a_list, b_list, out_dtype=kept)
    for out in outs:
        assert all(matrix.dtype == (out_dtype or torch.bfloat16) for matrix in out)
        assert_accurate(joined(out).to(kept), joined(baseline), joined(exact))


def test_float8_in_the_reference(device):
    a_list, b_list = draw("unlike", FLOAT8, device)
    prepared = GroupedProblem.from_lists(a_list, b_list, implementation="reference").run()
    for out, again, a, b in zip(reference_list(a_list, b_list), prepared, a_list, b_list, strict=True):
        assert out.dtype == torch.bfloat16 and torch.equal(out, (a.float() @ b.float()).bfloat16())
        assert torch.equal(out, again)


def test_float8_names_the_capability(monkeypatch):
    monkeypatch.setattr(grouped_checks, "device_cc", lambda device: 80)
    with FakeTensorMode():
        matrix = torch.empty(16, 16, dtype=FLOAT8, device="cuda")
    for op in (grouped_gemm_list, GroupedProblem.from_lists):
        with pytest.raises(NotImplementedError, match=r"need a GPU of compute capability 8\.9, this one has 8\.0"):
            op([matrix], [matrix])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epilogues(dtype, device):
    a_list, b_list = draw("odd_sizes", dtype, device, "mm")
    products = joined(reference_list(a_list, b_list))
    exact = joined(reference_list(to_float64(a_list), to_float64(b_list)))
    for epilogue in PLAIN_EPILOGUES:
        outs = unwritten(a_list, b_list)
        args = GroupedGemmListArguments(a_list, b_list, outs, epilogue=epilogue)
        selection.run(args)
        expected = (reference.apply_activation(product, epilogue) for product in (products, exact))
        assert_accurate(joined(outs), *expected, epilogue)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_results_of_16_bit_operands(dtype, device):
    outs = check(*draw("odd_sizes", dtype, device, "rc"), out_dtype=torch.float32)
    assert all(out.dtype == torch.float32 for out in outs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_lie_as_their_matrices(dtype, device):
    a_list, b_list = draw("unlike", dtype, device, "rc")
    _, gradients = with_gradients(triton_list, a_list, b_list)
    assert [g.stride() for g in gradients] == [m.stride() for m in (*a_list, *b_list)]


def test_an_operand_without_a_contiguous_axis(device):
    a = torch.randn(64, 96, device=device)[::2, ::3]
    b = torch.randn(32, 40, device=device)
    assert torch.equal(triton_list([a], [b])[0], triton_list([a.contiguous()], [b])[0])
    leaf = b.requires_grad_()
    out = triton_list([a], [leaf])[0]
    (gradient,) = torch.autograd.grad(out.sum(), leaf)  # the upstream gradient has no contiguous axis, either
    torch.testing.assert_close(gradient, a.sum(0)[:, None].expand(-1, 40))


def test_only_the_gradients_that_are_wanted(device):
    a_list, b_list = draw("unlike", torch.float32, device)
    wanted = [a_list[1].requires_grad_(), b_list[2].requires_grad_()]
    outs = triton_list(a_list, b_list)
    sum(out.sum() for out in outs).backward()
    assert all((matrix.grad is not None) == any(matrix is w for w in wanted) for matrix in (*a_list, *b_list))


def test_an_unused_output(device):
    a_list, b_list = draw("unlike", torch.float32, device)
    a_list[0].requires_grad_()
    (gradient,) = torch.autograd.grad(triton_list(a_list, b_list)[1].sum() + a_list[0].sum(), a_list[:1])
    assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_whatever_the_default_device(implementation, device):
    operands = draw("unlike", torch.float32, device)
    expected = grouped_gemm_list(*operands, implementation=implementation)
    with torch.device("meta"):
        outs = grouped_gemm_list(*operands, implementation=implementation)
        prepared = GroupedProblem.from_lists(*operands, implementation=implementation).run()
    for e, out, other in zip(expected, outs, prepared, strict=True):
        assert torch.equal(out, e) and torch.equal(other, e)


def test_artifact_and_workspace(device):
    a_list, b_list = draw("unlike", torch.float16, device)
    outs = unwritten(a_list, b_list)
    args = GroupedGemmListArguments(a_list, b_list, outs)
    expected = joined(reference_list(a_list, b_list))
    for kernel in get_kernels(args):
        for out in outs:
            out.fill_(torch.nan)
        artifact = kernel.compile(args)
        assert joined(outs).isnan().all(), "compiling writes nothing"
        num_bytes = kernel.get_workspace_size(args)
        # Exactly the requested size, with poisoned memory after it.
        memory = torch.full((num_bytes + 256,), 255, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % 128 :]
        kernel.run(args, artifact, workspace=memory[:num_bytes])
        torch.testing.assert_close(joined(outs), expected)
        assert (memory[num_bytes:] == 255).all() and (memory[num_bytes - 1 - args.A.element_size() :] != 255).any()
        with pytest.raises(ValueError, match=f"hold {num_bytes} bytes"):
            kernel.run(args, workspace=memory[: num_bytes - 1])


def test_any_dlpack_tensor():
    a, b, out = np.eye(3, dtype=np.float32), np.ones((3, 5), dtype=np.float32), np.zeros((3, 5), dtype=np.float32)
    args = GroupedGemmListArguments([a], [b], [out])
    assert args.error() is None and args.out_list[0].data_ptr() == out.ctypes.data


def test_table(device):
    """Tiles of the longest reduction come first; a problem without output has no tiles."""
    a_list, b_list = draw("empty", torch.float32, device)
    a_list.append(torch.zeros(65, 40, device=device))
    b_list.append(torch.zeros(200, 40, device=device).t())
    outs = unwritten(a_list, b_list)
    args = GroupedGemmListArguments(a_list, b_list, outs)
    table = make_problem_table(args, 64, 128)
    assert table.tile_to_problem.tolist() == [5, 5, 5, 5, 4, 2]
    assert table.problems[:, 3:6].tolist() == [[m, n, k] for m, n, k in CASES["empty"]] + [[65, 200, 40]]
    assert table.problems[:, :3].tolist() == [
        [t.data_ptr() for t in matrices] for matrices in zip(a_list, b_list, outs, strict=True)
    ]
    assert table.problems[4:, 6:9].tolist() == [[16, 24, 24], [40, 40, 200]]
    assert table.problems[:, 9].tolist() == [0, 0, 0, 0, 0, 2]
    assert table.problems[[5, 4, 2], 10:].tolist() == [[0, 4], [4, 5], [5, 6]]


@pytest.mark.gpu
def test_does_not_wait(device):
    a_list, b_list = draw("many_tiles", torch.bfloat16, device)
    with_gradients(triton_list, a_list, b_list)
    with waiting_is_an_error():
        triton_list(a_list, b_list)
        GroupedProblem.from_lists(a_list, b_list).run()


@pytest.mark.gpu
def test_addresses_past_two_gigabytes(device):
    size = 2**16 + 8
    a = torch.zeros(size, 2**15 + 8, dtype=torch.bfloat16, device=device)
    b = torch.zeros(2**15 + 8, size, dtype=torch.bfloat16, device=device)
    a[-1, -1], b[-1, -1] = 3.0, 5.0
    small = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    out, small_out = triton_list([a, small], [b, small])
    assert out[-1, -1] == 15.0 and (small_out == 8).all()
    out[-1, -1] = 0.0
    assert not any(out[i : i + 4096].any() for i in range(0, size, 4096))


@pytest.mark.parametrize("by_columns", [[False, False], [True, False]])
def test_opcheck(by_columns, device):
    a_list = [torch.randn(m, 8, device=device, requires_grad=True) for m in (3, 5)]
    b_list = [torch.randn(8, n, device=device, requires_grad=True) for n in (4, 2)]
    torch.library.opcheck(_grouped_gemm_list_op, (a_list, b_list, by_columns, torch.float32))


def test_compiles_without_graph_break(device):
    a_list, b_list = draw("unlike", torch.float32, device)

    def products(leaf):
        return joined(triton_list([a_list[0], leaf, *a_list[2:]], b_list))

    assert_compiles(products, (a_list[1],))


MATRIX = torch.zeros(4, 3), torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("a_list", "b_list", "message"),
    [
        ([], [], "at least 1, got 0, 0"),
        ([MATRIX[0]] * 2, [MATRIX[1]], "one length, at least 1, got 2, 1"),
        ([MATRIX[0]] * 2, [MATRIX[1], torch.zeros(4, 5)], r"problem 1 must be .* got \[4, 3\] @ \[4, 5\]"),
        ([torch.zeros(3)], [MATRIX[1]], r"problem 0 must be \[M, K\] @ \[K, N\], got \[3\]"),
        ([MATRIX[0]], [MATRIX[1].half()], r"one floating-point dtype, .* torch\.float32 @ torch\.float16"),
        ([MATRIX[0].int()], [MATRIX[1].int()], "one floating-point dtype"),
        ([MATRIX[0], MATRIX[0].to("meta")], [MATRIX[1]] * 2, "on one device"),
    ],
)
def test_bad_input(a_list, b_list, message):
    for op in (grouped_gemm_list, GroupedProblem.from_lists):
        with pytest.raises(ValueError, match=message):
            op(a_list, b_list)


def test_bad_dtypes():
    a, b = ([matrix] for matrix in MATRIX)
    for op in (grouped_gemm_list, GroupedProblem.from_lists):
        with pytest.raises(ValueError, match=r"operands of torch\.float32 do not give out_dtype torch\.float16"):
            op(a, b, out_dtype=torch.float16)
        with pytest.raises(ValueError, match=r"do not give out_dtype torch\.float8_e4m3fn"):
            op([a[0].to(FLOAT8)], [b[0].to(FLOAT8)], out_dtype=FLOAT8)
        with pytest.raises(ValueError, match=r"a must be torch\.float8_e4m3fn, got torch\.float8_e5m2"):
            op([a[0].to(torch.float8_e5m2)], [b[0].to(torch.float8_e5m2)])
    with pytest.raises(ValueError, match="with float8 operands no input may require a gradient"):
        grouped_gemm_list([a[0].to(FLOAT8).requires_grad_()], [b[0].to(FLOAT8)])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"A_list": [torch.zeros(8, 8), torch.zeros(8, 8).half()]}, "Operand `A` of problem 1: expected torch.float32"),
        ({"B_list": [torch.zeros(8, 16), torch.zeros(9, 16)]}, "problem 1: expected"),
        ({"B_list": [torch.zeros(8, 16)]}, "as many A as B"),
        ({"A_list": [torch.zeros(8, 8), torch.zeros(16, 16)[::2, ::2]]}, "Operand `A` of problem 1: expected one cont"),
        ({"out_list": [torch.zeros(8, 16), torch.zeros(16, 8).t()]}, "Operand `out` of problem 1: expected rows"),
    ],
)
def test_supports_names_the_operand(change, error):
    kernel = next(k for k in KERNELS if k.metadata.operands.A.dtype == torch.float32)
    args = GroupedGemmListArguments([torch.zeros(8, 8)] * 2, [torch.zeros(8, 16)] * 2, [torch.zeros(8, 16)] * 2)
    status = kernel.supports(dataclasses.replace(args, **change))
    assert not status and error in status.error


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        ((torch.zeros(8, 8).half()[1:, 1:], torch.zeros(7, 8).half()), "16 bytes"),
        ((torch.zeros(8, 12).half(), torch.zeros(12, 8).half()), "16 bytes"),
        ((torch.zeros(8, 8).half()[:, :0], torch.zeros(0, 8).half()), "takes no empty reduction"),
        ((torch.zeros(16, 8).half().t(), torch.zeros(16, 16).half()), "one layout for all problems"),
        ((torch.zeros(1, 8).half().expand(8, 8), torch.zeros(8, 8).half()), "leading dimensions of at least a row"),
    ],
)
def test_what_tma_refuses_the_pointer_kernel_takes(problem, error):
    tma = next(k for k in KERNELS if k.metadata.operands.A.dtype == torch.float16 and k.metadata.design.tma)
    good = torch.zeros(8, 8).half(), torch.zeros(8, 8).half()
    a_list, b_list = zip(good, problem, strict=True)
    args = GroupedGemmListArguments(a_list, b_list, unwritten(a_list, b_list))
    assert error in tma.supports(args).error
    if kernel := selection.find(args):  # None on a machine with a GPU, because these tensors are on the CPU
        assert not kernel.metadata.design.tma
