"""The four forms of `torch.nn.functional.grouped_mm`, each by the call that the guide of grouped GEMM names."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import grouped_mm

from moe_kernels import batched_gemm, grouped_gemm, grouped_gemm_wgrad
from moe_kernels.testing import check_accuracy, run_with_grads

from ...dtypes import DTYPES

# By name: the sizes of both operands, and the call. Groups are of 16, 0 and 32 rows, all of them covered.
FORMS = {
    "2d_3d": ((48, 24), (3, 24, 40), lambda a, b, offs, **options: grouped_gemm(a, b, offs, **options)),
    "2d_2d": ((24, 48), (48, 40), lambda a, b, offs, **options: grouped_gemm_wgrad(a.T, b, offs, **options)),
    "3d_2d": ((3, 24, 40), (40, 48), lambda a, b, offs, **options: grouped_gemm(b.T, a.mT, offs, **options).T),
    "3d_3d": ((3, 24, 40), (3, 40, 32), lambda a, b, offs, **options: batched_gemm(a, b, **options)),
}


def draw(form, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator).to(device, dtype) for size in FORMS[form][:2])


def offsets(form, device):
    return None if form == "3d_3d" else torch.tensor([16, 16, 48], dtype=torch.int32, device=device)


def loops(a, b, offs):
    """Compute the product group by group."""
    ends = [0, *([] if offs is None else offs.tolist())]
    rows = [slice(first, last) for first, last in pairwise(ends)]
    if a.dim() == b.dim() == 3:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    if a.dim() == 3:
        return torch.cat([matrix @ b[:, group] for matrix, group in zip(a, rows, strict=True)], 1)
    if b.dim() == 3:
        return torch.cat([a[group] @ matrix for matrix, group in zip(b, rows, strict=True)])
    return torch.stack([a[:, group] @ b[group] for group in rows])


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_product_of_each_group(form, dtype, implementation, device):
    offs = offsets(form, device)
    ours = partial(FORMS[form][2], offs=offs, implementation=implementation)
    check_accuracy(ours, partial(loops, offs=offs), partial(draw, form, dtype, device), ("out", "da", "db"))


@pytest.mark.parametrize("form", FORMS)
def test_equals_pytorchs(form):
    """Compare with PyTorch on the CPU, where its function takes float32."""
    functions = (partial(function, offs=offsets(form, "cpu")) for function in (FORMS[form][2], grouped_mm))
    actual, expected = (run_with_grads(function, draw(form, torch.float32, "cpu")) for function in functions)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
