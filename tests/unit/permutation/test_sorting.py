from functools import partial

import pytest
import torch

from moe_kernels import reference, sort_by_expert
from moe_kernels.permutation import sort
from moe_kernels.permutation.sort import _bound_op, _sort_op
from moe_kernels.testing import CASES, make_inputs

from ...tiers import OP_CASES, default_tier
from ..gemm.test_tile_table import assert_same_table

triton_sort = partial(sort_by_expert, implementation="triton")


@pytest.fixture(params=["few", "many"], scope="module", autouse=True)
def num_slots(request):
    """Run every test with the one kernel that sorts few slots, and with the three kernels that sort many."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "many":
            patch.setattr(sort, "_FEW_SLOTS", -1)
        yield request.param


def assert_same(actual, expected):
    for name in ("offsets", "slot_to_row", "row_to_token"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert getattr(actual, name).dtype == torch.int32
    assert_same_table(actual.tile_table, expected.tile_table)


@pytest.mark.parametrize(("block_rows", "max_rows"), [(16, None), (128, None), (16, 1), (16, 90), (16, 300), (16, 500)])
@pytest.mark.parametrize("case", OP_CASES)
def test_matches_reference(case, block_rows, max_rows, device):
    case = CASES[case]
    experts = reference.topk_routing(make_inputs(case, torch.float32, device).logits, case.top_k).topk_experts
    if max_rows is not None:
        experts = torch.where(experts % 3 == 1, -1, experts)
    options = {"block_rows": block_rows, "max_rows": max_rows}
    actual = triton_sort(experts, case.num_experts, **options)
    assert_same(actual, reference.sort_by_expert(experts, case.num_experts, **options))


@pytest.mark.parametrize(("dtype", "unknown"), [(torch.int32, 7), (torch.int64, 2**32)], ids=["int32", "int64"])
@pytest.mark.parametrize("op", [triton_sort, reference.sort_by_expert])
def test_worked_by_hand(op, dtype, unknown, device):
    # Three tokens, two choices each. Slots: 0->2, 1->0, 2->0, 3->2, 4->unknown (dropped), 5->0.
    experts = torch.tensor([[2, 0], [0, 2], [unknown, 0]], dtype=dtype, device=device)
    permutation = op(experts, 3, block_rows=2)
    assert permutation.offsets.tolist() == [3, 3, 5]
    assert permutation.slot_to_row.tolist() == [[3, 0], [1, 4], [-1, 2]]
    assert permutation.row_to_token.tolist() == [0, 1, 2, 0, 1, 2]
    table = permutation.tile_table
    assert table.bounds.tolist() == [0, 3, 3, 5, 6]
    assert table.num_tiles.tolist() == [3, 4, 0, 0]
    assert table.tiles.tolist()[:4] == [[0, 0], [0, 1], [2, 0], [3, 0]]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    default_tier([(200, 1024, 7), (600, 100, 1), (3, 513, 513)], [(600, 100, 1)]),
)
def test_many_experts_and_several_blocks(num_tokens, num_experts, top_k, device):
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int().to(device)
    assert_same(triton_sort(experts, num_experts), reference.sort_by_expert(experts, num_experts))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(32768, 128, 8), (16384, 512, 10), (1_000_000, 8, 2)])
def test_real_sizes(num_tokens, num_experts, top_k, device):
    experts = torch.randn(num_tokens, num_experts, device=device).topk(top_k).indices.int()
    assert_same(triton_sort(experts, num_experts), reference.sort_by_expert(experts, num_experts))


def test_launches_do_not_depend_on_sizes(num_slots, device, monkeypatch):
    launched = []
    monkeypatch.setattr(sort, "launch_kernel", lambda kernel, *arguments, **options: launched.append(kernel))
    for num_tokens, num_experts in [(1, 2), (700, 3), (20, 600)]:
        launched.clear()
        triton_sort(torch.zeros(num_tokens, 1, dtype=torch.int32, device=device), num_experts)
        many = [sort._count_kernel, sort._scan_kernel, sort._place_kernel]
        assert launched == (many if num_slots == "many" else [sort._rank_kernel])


@pytest.mark.parametrize("num_tokens", [511, 512, 513])
def test_few_slots_and_one_more(num_tokens, device):
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.randint(-1, 70, (num_tokens, 2), generator=generator).int().to(device)
    assert_same(triton_sort(experts, 69), reference.sort_by_expert(experts, 69))


def test_opcheck(device):
    experts = torch.tensor([[2, 0], [0, 2], [1, 0]], dtype=torch.int32, device=device)
    torch.library.opcheck(_sort_op.overload, (experts, 3, 16))
    for max_rows in (5, 9):
        torch.library.opcheck(_bound_op.overload, (*_sort_op(experts, 3, 16)[:3], max_rows, 16))


@pytest.mark.parametrize(
    ("experts", "num_experts", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), 2, r"topk_experts must be \[T, K\], got \[3\]"),
        (torch.zeros(3, 1), 2, "topk_experts must be torch.int32 or torch.int64, got torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int32), 0, "num_experts must be positive, got 0"),
    ],
)
def test_bad_input(experts, num_experts, message):
    with pytest.raises(ValueError, match=message):
        sort_by_expert(experts, num_experts)


def test_too_many_experts(device):
    with pytest.raises(NotImplementedError, match="at most 1024 experts, got 1025"):
        triton_sort(torch.zeros(3, 1, dtype=torch.int32, device=device), 1025)
