"""The four forms of `torch.nn.functional.grouped_mm`, each by the call that the guide of grouped GEMM names."""

import pytest
import torch
from torch.nn.functional import grouped_mm

from moe_kernels import batched_gemm, grouped_gemm, grouped_gemm_wgrad

# By name: the sizes of both operands, and the call. Groups are of 16, 0 and 32 rows, all of them covered.
FORMS = {
    "2d_3d": ((48, 24), (3, 24, 40), lambda a, b, offs: grouped_gemm(a, b, offs)),
    "2d_2d": ((24, 48), (48, 40), lambda a, b, offs: grouped_gemm_wgrad(a.T, b, offs)),
    "3d_2d": ((3, 24, 40), (40, 48), lambda a, b, offs: grouped_gemm(b.T, a.transpose(1, 2), offs).T),
    "3d_3d": ((3, 24, 40), (3, 40, 32), lambda a, b, offs: batched_gemm(a, b)),
}


@pytest.mark.parametrize("form", FORMS)
def test_equals_pytorchs(form):
    """With gradients, on the CPU, where PyTorch's function takes float32."""
    *sizes, ours = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    offsets = None if form == "3d_3d" else torch.tensor([16, 16, 48], dtype=torch.int32)
    outs = [function(*operands, offs=offsets) for function in (ours, grouped_mm)]
    dout = torch.randn(outs[0].shape, generator=generator)
    results = zip(*((out, *torch.autograd.grad(out, operands, dout)) for out in outs), strict=True)
    for actual, expected in results:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
