from functools import partial

import pytest
import torch

from moe_kernels import combine, permute, reference, sort_by_expert
from moe_kernels.permutation.permute import _combine_op, _permute_op, launch_permute
from moe_kernels.testing import CASES, check_accuracy, make_inputs, make_permutation

from ...dtypes import DTYPES
from ...tiers import OP_CASES
from ..compiled import assert_compiles


def draw_rows(case, dtype, device, seed=0):
    """Return (rows, weights, slot_to_row) for a case."""
    inputs = make_inputs(case, dtype, device, seed)
    weights, permutation = make_permutation(inputs, case.top_k)
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(case.num_tokens * case.top_k, case.d_model, device=device, generator=generator)
    return rows.to(dtype), weights, permutation.slot_to_row


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP_CASES)
def test_combine_matches_reference(case, dtype, weighted, device):
    def run(rows, *weights, op=reference.combine):
        *weights, slot_to_row = weights
        return op(rows, weights[0] if weighted else None, slot_to_row)

    def draw(seed):
        rows, weights, slot_to_row = draw_rows(CASES[case], dtype, device, seed)
        return (rows, weights, slot_to_row) if weighted else (rows, slot_to_row)

    names = ("out", "drows", "dweights") if weighted else ("out", "drows")
    check_accuracy(partial(run, op=partial(combine, implementation="triton")), run, draw, names)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP_CASES)
def test_permute_matches_reference(case, dtype, device):
    case = CASES[case]

    def draw(seed):
        inputs = make_inputs(case, dtype, device, seed)
        return inputs.tokens, reference.topk_routing(inputs.logits, case.top_k).topk_experts

    def run(tokens, experts, op=reference.permute):
        return op(tokens, reference.sort_by_expert(experts, case.num_experts))

    run_triton = partial(run, op=partial(permute, implementation="triton"))
    check_accuracy(run_triton, run, draw, ("rows", "dtokens"))
    assert torch.equal(run_triton(*draw(0)), run(*draw(0)))


def make_strided(permutation):
    """Return the permutation with indices that are not contiguous."""
    return permutation._replace(
        row_to_token=torch.stack([permutation.row_to_token] * 2, 1)[:, 0],
        slot_to_row=torch.stack([permutation.slot_to_row] * 2, 2)[..., 0],
    )


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_any_strides_of_the_permutation(implementation, device):
    permutation = sort_by_expert(torch.randint(0, 4, (20, 2), dtype=torch.int32, device=device), 4)
    tokens, strided = torch.randn(20, 8, device=device), make_strided(permutation)
    rows = permute(tokens, strided, implementation=implementation)
    assert torch.equal(rows, permute(tokens, permutation, implementation="reference"))
    sums = [combine(rows, None, p.slot_to_row, implementation=implementation) for p in (strided, permutation)]
    assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "d_model"), [(1, 3), (37, 4100), (700, 130)])
def test_tokens_spread_by_the_tile(num_tokens, d_model, dtype, device, monkeypatch):
    """Every token reaches its rows; rows of dropped slots and rows past the end are not written."""
    monkeypatch.setattr("moe_kernels.permutation.permute._FEWEST_TILES", 0)
    tokens = torch.randn(num_tokens, d_model + 1, device=device).to(dtype)[:, :d_model]
    slot_to_row = torch.randperm(2 * num_tokens, device=device).int().view(num_tokens, 2)
    dropped = slot_to_row % 5 == 3
    rows = tokens.new_full((2 * num_tokens, d_model), 7)
    launch_permute(tokens, None, torch.where(dropped, -1, slot_to_row), rows)
    expected = tokens.new_full((2 * num_tokens, d_model), 7)
    expected[slot_to_row[~dropped].long()] = tokens[:, None].expand(-1, 2, -1)[~dropped]
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_dropped_slots_add_nothing(implementation, device):
    experts = torch.tensor([[1, 9], [0, 1], [-1, -1]], dtype=torch.int32, device=device)
    permutation = sort_by_expert(experts, 2, implementation=implementation)
    rows = torch.full((6, 3), torch.nan, device=device)
    rows[:3] = torch.tensor([1.0, 2.0, 3.0], device=device)[:, None]
    rows.requires_grad_()
    weights = torch.full((3, 2), 10.0, device=device, requires_grad=True)
    out = combine(rows, weights, permutation.slot_to_row, implementation=implementation)
    assert out[:, 0].tolist() == [20.0, 40.0, 0.0]
    drows, dweights = torch.autograd.grad(out.sum(), (rows, weights))
    assert drows[:, 0].tolist() == [10.0, 10.0, 10.0, 0.0, 0.0, 0.0]
    assert dweights.tolist() == [[6.0, 0.0], [3.0, 9.0], [0.0, 0.0]]
    spoiled = weights.detach().masked_fill(permutation.slot_to_row < 0, torch.nan)
    assert torch.equal(combine(rows, spoiled, permutation.slot_to_row, implementation=implementation), out)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_padding_rows_are_zeros(implementation, device):
    """Padding rows follow the last expert's rows, or lie between other rows, as after communication. NaN of a token
    without an expert, or in the gradient of a padding row, reaches no result."""
    experts = torch.tensor([[1, 9], [0, 1], [-1, -1]], dtype=torch.int32, device=device)
    sorted_slots = sort_by_expert(experts, 2, implementation=implementation)
    spaced = sorted_slots._replace(
        slot_to_row=torch.tensor([[2, -1], [0, 100], [-1, -1]], dtype=torch.int32, device=device),
        row_to_token=torch.tensor([1, 2, 0, *[2] * 97, 1, 2], dtype=torch.int32, device=device),
    )
    values = torch.arange(1.0, 4.0, device=device)[:, None].repeat(1, 130)
    values[2] = torch.nan  # a token of no expert
    for permutation, owners in ((sorted_slots, {0: 2.0, 1: 1.0, 2: 2.0}), (spaced, {0: 2.0, 2: 1.0, 100: 2.0})):
        tokens = values.clone().requires_grad_()
        rows = permute(tokens, permutation, implementation=implementation)
        expected = torch.zeros_like(rows)
        for row, value in owners.items():
            expected[row] = value
        assert torch.equal(rows, expected)
        upstream = torch.full_like(rows, torch.nan)
        upstream[list(owners)] = 1.0
        (dtokens,) = torch.autograd.grad(rows, tokens, upstream)
        assert dtokens[:, 0].tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_integers_keep_their_dtype_and_value(dtype, implementation, device):
    """The rows may be ids of tokens, for instance. Beyond 2**24, float32 does not hold all integers."""
    permutation = sort_by_expert(torch.tensor([[1, -1], [0, 1]], dtype=torch.int32, device=device), 2)
    tokens = torch.tensor([[2**24 + 1], [5]], device=device).to(dtype)
    rows = permute(tokens, permutation, implementation=implementation)
    assert rows.dtype == dtype and rows[:3].tolist() == tokens[[1, 0, 1]].tolist() and not rows[3]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("num_rows", [0, 2, 9])
def test_combine_of_fewer_and_more_rows_than_slots(num_rows, implementation, device):
    """The slots own some rows, in any order. Other rows are not read and get a gradient of zero."""
    slots = {0: [[-1, -1], [-1, -1]], 2: [[1, -1], [-1, 0]], 9: [[8, 0], [-1, 3]]}[num_rows]
    slot_to_row = torch.tensor(slots, dtype=torch.int32, device=device)
    rows = torch.full((num_rows, 3), torch.nan, device=device)
    owned = [row for token in slots for row in token if row >= 0]
    rows[owned] = torch.arange(1.0, 1.0 + len(owned), device=device)[:, None]
    rows.requires_grad_()
    out = combine(rows, None, slot_to_row, implementation=implementation)
    assert out[:, 0].tolist() == {0: [0.0, 0.0], 2: [1.0, 2.0], 9: [3.0, 3.0]}[num_rows]
    (drows,) = torch.autograd.grad(out.sum(), rows)
    assert drows[:, 0].tolist() == [float(row in owned) for row in range(num_rows)]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_float64_weights(implementation, device, monkeypatch):
    """Kernels get float32 weights, as only the interpreter could read float64. The gradient is float64 again."""
    taken = []
    monkeypatch.setattr(
        "moe_kernels.permutation.permute._combine_op", lambda *args: taken.append(args[1].dtype) or _combine_op(*args)
    )
    rows, weights, slot_to_row = draw_rows(CASES["ordinary"], torch.float32, device)
    double = weights.detach().double().requires_grad_()
    out = combine(rows, double, slot_to_row, implementation=implementation)
    torch.testing.assert_close(out, combine(rows, weights, slot_to_row, implementation=implementation))
    assert set(taken) == ({torch.float32} if implementation == "triton" else set())
    (dweights,) = torch.autograd.grad(out.sum(), double)
    (expected,) = torch.autograd.grad(reference.combine(rows.double(), double, slot_to_row).sum(), double)
    assert dweights.dtype == torch.float64
    torch.testing.assert_close(dweights, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(("num_tokens", "top_k", "d_model"), [(3, 0, 4), (3, 2, 0), (0, 2, 4)])
def test_combine_of_nothing(num_tokens, top_k, d_model, implementation, device):
    """Without slots the result is zero; without columns the weights' gradient is zero."""
    num_rows = num_tokens * top_k
    rows = torch.ones(num_rows, d_model, device=device, requires_grad=True)
    weights = torch.ones(num_tokens, top_k, device=device, requires_grad=True)
    slot_to_row = torch.arange(num_rows, dtype=torch.int32, device=device).view(num_tokens, top_k)
    out = combine(rows, weights, slot_to_row, implementation=implementation)
    assert out.shape == (num_tokens, d_model) and not out.any()
    drows, dweights = torch.autograd.grad(out.sum(), (rows, weights))
    assert drows.shape == rows.shape and dweights.shape == weights.shape and not dweights.any()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_of_fewer_rows_skips_dropped_slots(dtype, weighted, device):
    """The result has the same bits as with rows for all slots; rows without a slot are not read."""
    slots = [[4, -1, 1], [-1, -1, -1], [-1, 0, -1], [5, 2, -1]]  # no slot owns row 3
    slot_to_row = torch.tensor(slots, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(12, 130, device=device, generator=generator).to(dtype)
    rows[3], rows[6:] = torch.nan, torch.nan
    weights = torch.rand(4, 3, device=device, generator=generator) if weighted else None
    out = combine(rows[:6], weights, slot_to_row, implementation="triton")
    assert torch.equal(out, combine(rows, weights, slot_to_row, implementation="triton"))
    assert out.isfinite().all() and not out[1].any() and out[[0, 2, 3]].any(1).all()


@pytest.mark.parametrize("weighted", [True, False])
def test_opcheck(weighted, device):
    experts = torch.tensor([[1, 0], [0, 2], [1, 2]], dtype=torch.int32, device=device)
    permutation = reference.sort_by_expert(experts, 3)
    rows = torch.randn(6, 4, device=device, requires_grad=True)
    weights = torch.rand(3, 2, device=device, requires_grad=True) if weighted else None
    torch.library.opcheck(_combine_op.overload, (rows, weights, permutation.slot_to_row))
    tokens = torch.randn(3, 4, device=device, requires_grad=True)
    torch.library.opcheck(_permute_op.overload, (tokens, permutation.row_to_token, permutation.slot_to_row))


def test_compiles_without_graph_break(device):
    experts = torch.tensor([[1, 0], [0, 2], [1, 2]], dtype=torch.int32, device=device)

    def there_and_back(tokens, weights):
        permutation = sort_by_expert(experts, 3, implementation="triton")
        rows = permute(tokens, permutation, implementation="triton")
        return combine(rows, weights, permutation.slot_to_row, implementation="triton")

    assert_compiles(there_and_back, (torch.randn(3, 4, device=device), torch.rand(3, 2, device=device)))


@pytest.mark.parametrize(
    ("rows", "weights", "slot_to_row", "message"),
    [
        (torch.zeros(4), None, torch.zeros(2, 2).int(), r"rows must be \[R, D\]"),
        (torch.zeros(4, 3), torch.zeros(2, 3), torch.zeros(2, 2).int(), r"topk_weights must be \[T, K\] with T=2, K=2"),
        (torch.zeros(4, 3), torch.zeros(2, 2).half(), torch.zeros(2, 2).int(), "topk_weights must be torch.float32"),
        (torch.zeros(4, 3), None, torch.zeros(2, 2).long(), "slot_to_row must be torch.int32"),
        (torch.zeros(4, 3, device="meta"), None, torch.zeros(2, 2).int(), "one device"),
        (torch.zeros(4, 3), None, torch.tensor([[0, 4]]).int(), r"slot_to_row must be below R=4, got 4"),
    ],
)
def test_bad_combine(rows, weights, slot_to_row, message):
    with pytest.raises(ValueError, match=message):
        combine(rows, weights, slot_to_row)


def test_bad_permute():
    permutation = reference.sort_by_expert(torch.zeros(3, 1, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"slot_to_row must be \[T, K\] with T=2, got \[3, 1\]"):
        permute(torch.zeros(2, 4), permutation)
