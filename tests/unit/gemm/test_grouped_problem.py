"""Products of a list, prepared once for many runs."""

import pytest
import torch

from moe_kernels import GroupedProblem

from .test_grouped_gemm_list import KERNELS, MATRIX, draw, joined, reference_list, triton_list, unwritten


def test_prepared_problem(device):
    a_list, b_list = draw("unlike", torch.float32, device)
    problem = GroupedProblem.from_lists(a_list, b_list, implementation="triton")
    outs = problem.run()
    assert all(torch.equal(x, e) for x, e in zip(outs, triton_list(a_list, b_list), strict=True))
    a_list[0].mul_(2)
    assert problem.run()[0] is outs[0]
    assert all(torch.equal(x, e) for x, e in zip(outs, triton_list(a_list, b_list), strict=True))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_another_run_does_not_pass_unseen(implementation, device):
    """Autograd detects that a second run has overwritten what it saved of the first."""
    a_list, b_list = draw("unlike", torch.float32, device)
    problem = GroupedProblem.from_lists(a_list, b_list, implementation=implementation)
    factor = torch.ones_like(problem.run()[0]).requires_grad_()
    product = problem.run()[0] * factor
    problem.run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_prepared_problem_with_a_kernel_of_choice(device):
    a_list, b_list = draw("unlike", torch.float16, device)
    kernels = [kernel for kernel in KERNELS if kernel.metadata.operands.A.dtype == torch.float16]
    for kernel in kernels:
        if kernel.supports_cc(90) and kernel.metadata.epilogue is None:
            problem = GroupedProblem.from_lists(a_list, b_list, kernel=kernel)
            assert problem.kernel is kernel
            torch.testing.assert_close(joined(problem.run()), joined(reference_list(a_list, b_list)))
    other = next(kernel for kernel in KERNELS if kernel.metadata.operands.A.dtype == torch.float32)
    with pytest.raises(ValueError, match=r"Operand `A`: expected torch\.float32, got torch\.float16"):
        GroupedProblem.from_lists(a_list, b_list, kernel=other)


def test_prepared_problem_of_the_reference(device):
    a_list, b_list = draw("empty", torch.float64, device)
    outs = unwritten(a_list, b_list)
    results = GroupedProblem.from_lists(a_list, b_list, out_list=outs).run()
    assert all(x is out for x, out in zip(results, outs, strict=True))
    assert all(torch.equal(x, a @ b) for x, a, b in zip(results, a_list, b_list, strict=True))


@pytest.mark.gpu
def test_prepared_problem_in_a_cuda_graph(device):
    a_list, b_list = draw("many_tiles", torch.bfloat16, device)
    problem = GroupedProblem.from_lists(a_list, b_list)
    problem.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = problem.run()
        with pytest.raises(NotImplementedError, match="CUDA graph"):
            GroupedProblem.from_lists(a_list, b_list)
    a_list[3].normal_()
    for out in outs:
        out.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(x, e) for x, e in zip(outs, triton_list(a_list, b_list), strict=True))


def test_bad_preparation():
    a, b = MATRIX
    for change, message in (
        ({"out_list": [torch.zeros(4, 4)]}, "problem 0: expected"),
        ({"out_list": []}, "as many A as B and out, got 1, 1 and 0"),
        ({"out_list": [torch.zeros(5, 4).t()]}, "expected rows contiguous"),
        ({"out_list": [torch.zeros(1, 5).expand(4, 5)]}, "expected rows that do not overlap"),
        ({"out_list": [torch.zeros(4, 5, requires_grad=True)]}, "require grad"),
        ({"out_list": [torch.zeros(4, 5).half()]}, "operands of torch.float32 do not give out_dtype torch.float16"),
        ({"out_list": [torch.zeros(4, 5)], "out_dtype": torch.float16}, "out_dtype must be out's"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupedProblem.from_lists([a], [b], **change)
    with pytest.raises(ValueError, match="require grad"):
        GroupedProblem.from_lists([a.clone().requires_grad_()], [b])
    with pytest.raises(ValueError, match=r"Operand `out` of problem 1: expected torch\.float32, got torch\.float64"):
        GroupedProblem.from_lists([a, a], [b, b], out_list=[torch.zeros(4, 5), torch.zeros(4, 5).double()])
    with pytest.raises(ValueError, match="one contiguous axis"):
        GroupedProblem.from_lists([torch.zeros(8, 6)[::2, ::2]], [b])
