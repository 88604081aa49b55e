"""Warp-specialised GEMMs find tiles from the offsets of few groups, or a table for many: bitwise equal results."""

import dataclasses

import pytest
import torch

from moe_kernels import GroupedGemmArguments, WarpSpecializedDesign, get_kernels
from moe_kernels.gemm.tile_table import make_tile_table

pytestmark = pytest.mark.gpu

OFFSETS = {
    "one_group": [700],
    "empty_groups": [0, 0, 128, 128, 257, 700, 700],
    "tail": [1, 128, 255, 300],
    "all_tail": [0, 0],
    "decreasing": [500, 300, 600, 100],
    "outside": [-5, 200, 2**30, 650],
    "most": [21 * (g + 1) for g in range(32)],
}


def walking_kernels():
    def walks(metadata):
        takes_rows = metadata.kernel_class.arguments_class is GroupedGemmArguments and not metadata.design.gather
        return takes_rows and isinstance(metadata.design, WarpSpecializedDesign) and metadata.epilogue is None

    return [kernel for kernel in get_kernels(metadata_filter=walks) if kernel.obstacle is None]


def draw(offsets, kernel, device):
    size_n, size_k = 520, 200
    dtype = kernel.metadata.operands.A.dtype
    a = torch.randn(700, size_k, device=device).to(dtype)
    b = torch.randn(len(offsets), size_n, size_k, device=device).to(dtype).transpose(1, 2)
    if kernel.metadata.operands.B.layout == "row":
        b = b.contiguous()
    out = torch.full((700, size_n), float("nan"), device=device, dtype=dtype)
    return GroupedGemmArguments(a, b, out, offsets=torch.tensor(offsets, dtype=torch.int32, device=device))


@pytest.mark.parametrize("case", OFFSETS)
def test_as_with_a_table(case, device):
    if torch.cuda.get_device_capability()[0] != 9 or not walking_kernels():
        pytest.skip("no warp-specialised kernels here")
    for kernel in walking_kernels():
        args = draw(OFFSETS[case], kernel, device)
        assert kernel.metadata_bytes(args) == 0
        kernel.run(args)
        walked = args.out.clone()
        args.out.fill_(float("nan"))
        table = make_tile_table(args.offsets, 700, kernel.metadata.design.tile_shape[0])
        kernel.run(dataclasses.replace(args, tile_table=table))
        assert torch.equal(walked, args.out), kernel.metadata.kernel_name


def test_more_groups_take_a_table(device):
    if not walking_kernels():
        pytest.skip("no warp-specialised kernels here")
    kernel = walking_kernels()[0]
    args = draw([20 * (g + 1) for g in range(33)], kernel, device)
    assert kernel.metadata_bytes(args) > 0
    strided = dataclasses.replace(args, offsets=args.offsets[::2])
    assert kernel.metadata_bytes(dataclasses.replace(strided, B=args.B[:17])) > 0
