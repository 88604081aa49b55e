"""The four forms of `torch.nn.functional.grouped_mm`, each by the call that the guide of grouped GEMM names."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import grouped_mm

from moe_kernels import batched_gemm, grouped_gemm, grouped_gemm_wgrad
from moe_kernels.testing import assert_accurate

from ...dtypes import DTYPES

# By name: the sizes of both operands, and the call. Groups are of 16, 0 and 32 rows, all of them covered.
FORMS = {
    "2d_3d": ((48, 24), (3, 24, 40), lambda a, b, offs, **options: grouped_gemm(a, b, offs, **options)),
    "2d_2d": ((24, 48), (48, 40), lambda a, b, offs, **options: grouped_gemm_wgrad(a.T, b, offs, **options)),
    "3d_2d": ((3, 24, 40), (40, 48), lambda a, b, offs, **options: grouped_gemm(b.T, a.mT, offs, **options).T),
    "3d_3d": ((3, 24, 40), (3, 40, 32), lambda a, b, offs, **options: batched_gemm(a, b, **options)),
}


def operands(form, dtype, device):
    """Return both operands and a gradient of the product."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).to(device, dtype) for size in FORMS[form][:2])
    dout = torch.randn(loops(a, b, offsets(form, "cpu")).shape, generator=generator).to(a)
    return a, b, dout


def offsets(form, device):
    return None if form == "3d_3d" else torch.tensor([16, 16, 48], dtype=torch.int32, device=device)


def results(function, form, a, b, dout):
    """Return the product and the gradients of both operands."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    out = function(a, b, offs=offsets(form, a.device))
    return out, *torch.autograd.grad(out, (a, b), dout)


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
    ours, tensors = partial(FORMS[form][2], implementation=implementation), operands(form, dtype, device)
    actual, baseline = results(ours, form, *tensors), results(loops, form, *tensors)
    exact = results(loops, form, *(tensor.double() for tensor in tensors))
    for a, b, e in zip(actual, baseline, exact, strict=True):
        assert_accurate(a, b, e, form)


@pytest.mark.parametrize("form", FORMS)
def test_equals_pytorchs(form):
    """On the CPU, where PyTorch's function takes float32."""
    tensors = operands(form, torch.float32, "cpu")
    actual, expected = (results(function, form, *tensors) for function in (FORMS[form][2], grouped_mm))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
