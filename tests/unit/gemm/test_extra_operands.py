"""The second pair of operands of a grouped GEMM: more steps of one reduction, one rounding."""

import dataclasses
import re

import pytest
import torch

from moe_kernels import GroupedGemmArguments, reference
from moe_kernels.gemm.selection import get_kernels
from moe_kernels.testing import assert_accurate

from ...dtypes import DTYPES

COUNTS = {"cuda": (0, 37, 5, 130), "cpu": (0, 17, 2)}  # the interpreter is slow


def make_args(device, dtype, *, rank=16, gather=False, column=True, size_k=72):
    generator, num_columns = torch.Generator(device).manual_seed(0), 96

    def randn(*shape):
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    counts = COUNTS[torch.device(device).type]
    offsets = torch.tensor(counts, device=device).cumsum(0).int()
    num_rows, num_groups = sum(counts) + 3, len(counts)  # the last rows belong to no group
    index = torch.randint(50, (num_rows,), device=device, generator=generator).int() if gather else None
    b, extra_b = randn(num_groups, size_k, num_columns), randn(num_groups, rank, num_columns)
    if column:
        b, extra_b = (x.mT.contiguous().mT for x in (b, extra_b))
    extra_a = randn(num_rows, rank)
    extra_a[sum(counts) :] = torch.nan
    out = torch.empty(num_rows, num_columns, device=device, dtype=dtype)
    a = randn(50 if gather else num_rows, size_k)
    return GroupedGemmArguments(a, b, out, offsets=offsets, row_to_token=index, extra_a=extra_a, extra_b=extra_b)


def expected(args, dtype):
    rows = args.A if args.row_to_token is None else args.A[args.row_to_token.long()]
    a = torch.cat([rows, args.extra_a], 1).to(dtype)
    return reference.grouped_gemm(a, torch.cat([args.B, args.extra_b], 1).to(dtype), args.offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("column", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
def test_every_kernel_adds_the_second_product_before_rounding(gather, column, dtype, device):
    for rank in (8, 40):
        args = make_args(device, dtype, rank=rank, gather=gather, column=column)
        kernels = get_kernels(args)
        assert kernels
        for kernel in kernels:
            kernel.run(args)
            assert_accurate(args.out, expected(args, dtype), expected(args, torch.float64), kernel.metadata.kernel_name)


@pytest.mark.parametrize("epilogue", ["swiglu", "relu"])
@pytest.mark.gpu
def test_activation_after_both_products(epilogue, device):
    for gather in (False, True):
        args = make_args(device, torch.bfloat16, gather=gather, size_k=704)
        width = 48 if epilogue == "swiglu" else 96
        out = torch.empty(len(args.out), width, device=device, dtype=torch.bfloat16)
        args = dataclasses.replace(args, out=out, epilogue=epilogue, preactivation=args.out)
        kernels = get_kernels(args)
        assert kernels or (epilogue == "relu" and gather)
        for kernel in kernels:
            kernel.run(args)
            name = kernel.metadata.kernel_name
            assert_accurate(args.preactivation, expected(args, torch.bfloat16), expected(args, torch.float64), name)
            exact = args.preactivation.double()
            activate = reference.apply_activation
            assert_accurate(args.out, activate(exact.bfloat16(), epilogue), activate(exact, epilogue), name)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"extra_b": None}, "expected together with extra_b"),
        ({"extra_a": torch.zeros(3, 8)}, r"`extra_a`: expected shape"),
        ({"extra_b": torch.zeros(3, 8, 96)}, r"`extra_b`: expected shape"),
        ({"extra_a": torch.zeros(22, 16, dtype=torch.float64)}, r"`extra_a`: expected torch.float32"),
    ],
)
def test_operands_that_do_not_fit_are_named(changes, error):
    args = dataclasses.replace(make_args("cpu", torch.float32), **changes)
    assert not get_kernels(args)
    assert re.search(error, args.error())
