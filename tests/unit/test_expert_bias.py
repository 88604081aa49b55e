from itertools import pairwise

import pytest
import torch

from moe_kernels.experts.expert_bias import launch_segment_sum, row_to_expert, slot_to_expert
from moe_kernels.testing import assert_accurate

from ..dtypes import DTYPES

# Groups of 3, 0, 70, 0 and 5 rows, then 4 rows without a group.
BOUNDS = [0, 3, 3, 73, 73, 78, 82]


def bounds(device):
    return torch.tensor(BOUNDS, dtype=torch.int32, device=device)


def test_expert_of_rows_and_slots(device):
    of_row = row_to_expert(bounds(device), 82)
    assert of_row.dtype == torch.int32
    assert of_row.tolist() == [0] * 3 + [2] * 70 + [4] * 5 + [4] * 4
    slot_to_row = torch.tensor([[0, 3], [-1, 77]], dtype=torch.int32, device=device)
    assert slot_to_expert(of_row, slot_to_row).tolist() == [[0, 2], [-1, 4]]
    assert row_to_expert(torch.zeros(4, dtype=torch.int32, device=device), 0).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("num_columns", [47, 130])
def test_segment_sum(num_columns, indexed, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(82, num_columns, device=device, generator=generator).to(dtype)
    weights = torch.rand(82, device=device, generator=generator) if indexed else None
    index = torch.randperm(82, device=device, generator=generator).int() if indexed else None
    stored = rows.index_select(0, index.long().argsort()) if indexed else rows.clone()
    if not indexed:
        stored[78:] = torch.nan  # rows without a group are not read

    def expected(dtype):
        factor = 1 if weights is None else weights.to(dtype)[:, None]
        weighted = rows.to(dtype) * factor
        return torch.stack([weighted[a:b].sum(0) for a, b in pairwise(BOUNDS[:-1])])

    out = launch_segment_sum(stored, bounds(device), index, weights)
    assert_accurate(out, expected(torch.float32), expected(torch.float64))
    assert not out[1].any() and not out[3].any()
    assert torch.equal(out, launch_segment_sum(stored, bounds(device), index, weights))
    strided = launch_segment_sum(stored.t().contiguous().t(), bounds(device), index, weights)
    assert_accurate(strided, expected(torch.float32), expected(torch.float64))
