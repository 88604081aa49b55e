"""Multiply pairs of matrices of different sizes in one launch, check the products, and time them against a loop.

    python examples/grouped_gemm_list.py
    python examples/grouped_gemm_list.py --sizes 64 48

Without a GPU the kernels run in Triton's interpreter, on smaller matrices.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.utils.benchmark import Timer

if not torch.cuda.is_available():
    # Set before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

from moe_kernels import GroupedProblem, grouped_gemm_list
from moe_kernels.testing import assert_accurate

HAS_GPU = torch.cuda.is_available()
SIZES = (1024, 512, 256, 128) if HAS_GPU else (128, 64, 32, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    sizes = parser.parse_args().sizes
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)
    # Problem g is [M, K] @ [K, N] with its own sizes; B is stored by columns, like the weight of an nn.Linear.
    a_list = [torch.randn(m, k, device=device, dtype=dtype) for m, k in zip(sizes, reversed(sizes), strict=True)]
    b_list = [torch.randn(m, a.shape[1], device=device, dtype=dtype).t() for m, a in zip(sizes, a_list, strict=True)]

    check(a_list, b_list, grouped_gemm_list(a_list, b_list))

    # For repeated products of the same tensors: once prepared, a call is one launch.
    problem = GroupedProblem.from_lists(a_list, b_list)
    check(a_list, b_list, problem.run())
    print(f"{len(sizes)} products are right; kernel {problem.kernel.metadata.kernel_name}")

    # The products are differentiable in every matrix.
    weights = [b.clone().requires_grad_() for b in b_list]
    sum(out.float().sum() for out in grouped_gemm_list(a_list, weights)).backward()
    ones = [torch.ones(a.shape[0], b.shape[1], device=device, dtype=dtype) for a, b in zip(a_list, b_list, strict=True)]
    check([a.t() for a in a_list], ones, [weight.grad for weight in weights])
    print("so are the gradients")

    if HAS_GPU:
        loop = "[torch.mm(a, b) for a, b in zip(a_list, b_list)]"
        names = {"torch": torch, "a_list": a_list, "b_list": b_list, "op": grouped_gemm_list, "problem": problem}
        for label, statement in (("mm loop", loop), ("op", "op(a_list, b_list)"), ("prepared", "problem.run()")):
            print(f"{label:9} {1e6 * Timer(statement, globals=names).blocked_autorange().median:7.1f} us")


def check(a_list: list[torch.Tensor], b_list: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    for g, (a, b, out) in enumerate(zip(a_list, b_list, outs, strict=True)):
        assert_accurate(out, baseline=a @ b, exact=a.double() @ b.double(), name=f"product {g}")


if __name__ == "__main__":
    main()
