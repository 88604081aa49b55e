"""Multiply packed groups of rows by one shared matrix, check the products, and time them against a dense product.

    python examples/jagged_gemm.py
    python examples/jagged_gemm.py --rows 5 0 70 --columns 24

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

from moe_kernels import jagged_gemm, pack_groups
from moe_kernels.testing import assert_accurate

HAS_GPU = torch.cuda.is_available()
ROWS = [64, 128, 192, 256] if HAS_GPU else [16, 32, 48, 64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of each group")
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--columns", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)
    groups = [torch.randn(rows, options.depth, device=device, dtype=dtype) for rows in options.rows]
    b = torch.randn(options.depth, options.columns, device=device, dtype=dtype, requires_grad=True)

    packed, offsets = pack_groups(groups)  # [R, K], [G + 1]
    out = jagged_gemm(packed, b, offsets)  # [R, N]
    exact = packed.double() @ b.detach().double()
    assert_accurate(out.detach(), baseline=packed @ b.detach(), exact=exact, name="all groups")

    # Rows at or past the last offset belong to no group; their results are zeros, whatever they hold.
    if len(groups) > 1:
        end = int(offsets[-2])
        holed = packed.clone()
        holed[end:] = torch.nan
        part = jagged_gemm(holed, b, offsets[:-1]).detach()
        assert torch.equal(part[:end], out[:end].detach()) and not part[end:].any()
    print(f"{len(groups)} groups of {options.rows} rows are right")

    out.float().sum().backward()
    ones = torch.ones_like(out)
    assert_accurate(b.grad, baseline=packed.t() @ ones, exact=packed.double().t() @ ones.double(), name="gradient of b")
    print("so is the gradient of the shared matrix")

    if HAS_GPU:
        names = {"torch": torch, "op": jagged_gemm, "a": packed, "b": b.detach(), "offsets": offsets}
        for label, statement in (("jagged", "op(a, b, offsets)"), ("dense", "a @ b")):
            print(f"{label:6} {1e6 * Timer(statement, globals=names).blocked_autorange().median:7.1f} us")


if __name__ == "__main__":
    main()
