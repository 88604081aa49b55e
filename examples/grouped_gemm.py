"""Multiply groups of rows by their own matrices, and check the results, the gradients and an expert against PyTorch.

    python examples/grouped_gemm.py

Without a GPU the kernels run in Triton's interpreter, on smaller matrices.
"""

import os

import torch
from torch.nn import functional

if not torch.cuda.is_available():
    # Triton reads this when kernels are defined, so it is set before they are imported.
    os.environ["TRITON_INTERPRET"] = "1"

from moe_kernels import grouped_gemm, grouped_gemm_wgrad

ON_GPU = torch.cuda.is_available()


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a tolerance relative to the largest value, because the order of sums differs."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=1e-3 * largest)


def main() -> None:
    torch.manual_seed(0)
    # The interpreter has no bfloat16.
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    size_k, size_n = (1024, 2048) if ON_GPU else (32, 64)
    sizes = torch.tensor([700, 0, 1300, 48] if ON_GPU else [7, 0, 13, 4])  # rows of each group; one is empty
    offsets = sizes.cumsum(0).int().to(device)  # end row of each group
    num_groups, num_rows = len(sizes), int(sizes.sum())

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    a = normal(num_rows, size_k).requires_grad_()
    weight = normal(num_groups, size_n, size_k).requires_grad_()  # [groups, out, in], as nn.Linear
    b = weight.transpose(-2, -1)  # no copy

    out = grouped_gemm(a, b, offsets)  # [rows, size_n]
    expected = functional.grouped_mm(a, b, offs=offsets)
    check(out, expected)
    print(f"forward agrees with torch.nn.functional.grouped_mm: {list(out.shape)} {out.dtype}")

    dout = normal(num_rows, size_n)
    actual = torch.autograd.grad(out, [a, weight], dout)
    for gradient, e in zip(actual, torch.autograd.grad(expected, [a, weight], dout), strict=True):
        check(gradient, e)
    assert not actual[1][1].any()  # the empty group's gradient is exactly zero
    print("both gradients agree")

    # Weight gradients accumulated in float32, into existing memory.
    main_grad = torch.empty(num_groups, size_k, size_n, device=device)
    grouped_gemm_wgrad(a.detach(), dout, offsets, out=main_grad)
    check(main_grad.to(dtype), actual[1].transpose(-2, -1))
    print(f"weight gradient in {main_grad.dtype}")

    # The two GEMMs of an expert: a gated activation after the first, the routing weights after the second.
    w_down = normal(num_groups, size_n // 2, size_k) * size_n**-0.5
    bias = normal(num_groups, size_k)
    routing_weights = torch.rand(num_rows, device=device)
    with torch.no_grad():
        activated = grouped_gemm(a, b * size_k**-0.5, offsets, activation="swiglu")
        y = grouped_gemm(activated, w_down, offsets, bias=bias, row_scale=routing_weights)
    print(f"an expert: {list(a.shape)} -> {list(activated.shape)} -> {list(y.shape)}")


if __name__ == "__main__":
    main()
