"""Capacity factors: which slots are dropped, and the remaining rows."""

from fractions import Fraction

import pytest
import torch

from moe_kernels import RouterSpec, sort_by_expert
from moe_layers import CapacityFactor, MoEFeedForward, RoundRobinAssignment

from .assignment_cases import SIZES, check_equals_dense, count_rows, make_layer, make_x


def expected_slots(experts, weights, length, capacity, by):
    """Return the kept slots, one sequence and one expert at a time."""
    kept = [[-1] * len(row) for row in experts]
    for first in range(0, len(experts), length):
        slots = [(t, k) for t in range(first, first + length) for k in range(len(experts[t]))]
        if by == "weight":
            slots.sort(key=lambda slot: -weights[slot[0]][slot[1]])
        taken = {}
        for t, k in slots:
            expert = experts[t][k]
            if expert >= 0 and taken.get(expert, 0) < capacity:
                taken[expert] = taken.get(expert, 0) + 1
                kept[t][k] = expert
    return kept


@pytest.mark.parametrize("by", ["position", "weight"])
@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1])
def test_drops_whom_the_definition_drops(factor, num_experts, top_k, by, device):
    router = RouterSpec.softmax(normalize=False)
    layer = make_layer(device, num_experts, top_k, router=router, capacity=CapacityFactor(factor, by))
    mask = torch.ones(3, 7, dtype=torch.bool, device=device)
    mask[0, :2] = False
    _, routing = layer(make_x(device), return_routing=True, token_mask=mask)
    capacity = -(-Fraction(str(factor)) * 7 * top_k // num_experts)
    expected = expected_slots(routing.choices.tolist(), routing.topk_weights.tolist(), 7, capacity, by)
    assert routing.topk_experts.tolist() == expected
    assert routing.tokens_per_expert.max() <= 3 * capacity
    assert ((routing.topk_experts < 0) & (routing.choices >= 0)).any() == (factor == 0.3 or num_experts > top_k)


@pytest.mark.parametrize("by", ["position", "weight"])
def test_ties_go_to_the_first(by, device):
    layer = make_layer(device, capacity=CapacityFactor(1.0, by))
    torch.nn.init.zeros_(layer.router.weight)
    _, routing = layer(make_x(device, (2, 9, 32)), return_routing=True)
    assert routing.topk_experts.view(2, 9, 2).tolist() == [[[0, 1]] * 3 + [[-1, -1]] * 6] * 2


@pytest.mark.parametrize(
    ("by", "router", "bias"), [("position", RouterSpec(), True), ("weight", RouterSpec.llama4(), False)], ids=str
)
def test_equals_the_dense_formula(by, router, bias, device):
    """Check every form of the experts, with rows for the kept slots only."""
    routing = check_equals_dense(device, capacity=CapacityFactor(0.5, by), router=router, bias=bias)
    assert (routing.topk_experts < 0).any()


def test_a_small_factor_computes_fewer_rows(device, monkeypatch):
    rows = count_rows(monkeypatch)
    layer = make_layer(device, dtype=torch.float32, capacity=CapacityFactor(0.5), implementation="triton")
    layer(make_x(device, (2, 12, 32), torch.float32)).sum().backward()
    assert set(rows) == {2 * 6 * 2}


def test_position_is_causal_and_sequences_are_apart(device):
    layer = make_layer(device, capacity=CapacityFactor(0.5))
    x = make_x(device, (2, 12, 32))
    y = layer(x)
    changed = x.clone()
    changed[0, 7:] = 1.0
    assert torch.equal(layer(changed)[0, :7], y[0, :7]) and torch.equal(layer(changed)[1], y[1])


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("max_rows", [1, 4, 6, 100])
def test_rows_beyond_the_bound_are_dropped(implementation, max_rows, device):
    experts = torch.tensor([[2, 0], [-1, 2], [1, 0]], dtype=torch.int32, device=device)  # rows 3 0, - 4, 2 1
    permutation = sort_by_expert(experts, 3, max_rows=max_rows, implementation=implementation)
    num_rows = min(max_rows, 6)
    rows = [[3, 0], [-1, 4], [2, 1]]
    assert permutation.slot_to_row.tolist() == [[row if row < num_rows else -1 for row in pair] for pair in rows]
    assert permutation.offsets.tolist() == [min(end, num_rows) for end in (2, 3, 5)]
    assert permutation.row_to_token.tolist() == [0, 2, 2, 0, 1, 1][:num_rows]
    assert permutation.tile_table.bounds.tolist() == [0, *permutation.offsets.tolist(), num_rows]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_bad_factor(factor):
    with pytest.raises(ValueError, match="CapacityFactor: factor must be a positive number, got"):
        CapacityFactor(factor)


def test_bad_construction():
    with pytest.raises(ValueError, match=r"CapacityFactor: by must be one of .* got 'token'"):
        CapacityFactor(1.0, "token")
    with pytest.raises(ValueError, match=r"capacity must be a positive integer, got 1\.25; .* CapacityFactor\(1\.25\)"):
        make_layer("cpu", capacity=1.25)
    with pytest.raises(ValueError, match="sort_by_expert: max_rows must be positive, got 0"):
        sort_by_expert(torch.zeros(1, 1, dtype=torch.int32), 1, max_rows=0)


def test_a_checkpoint_holds_the_capacity_factor_and_no_assignment(device, tmp_path):
    """The loaded layer has the same weights, and its router chooses by itself."""
    layer = make_layer(device, dtype=torch.float32, capacity=CapacityFactor(0.5), assignment=RoundRobinAssignment())
    layer.save_checkpoint(tmp_path / "out")
    loaded = MoEFeedForward.from_checkpoint(tmp_path / "out", device=device)
    assert loaded.config == layer.config and loaded.router.assignment is None
    torch.testing.assert_close(loaded.state_dict(), layer.state_dict(), rtol=0, atol=0)
