from functools import partial

import pytest
import torch

from moe_kernels import fused_experts, reference, sort_by_expert
from moe_kernels.experts import _fused_experts_op
from moe_kernels.testing import CASES, Case, check_accuracy, make_inputs

from .dtypes import DTYPES

triton_experts = partial(fused_experts, implementation="triton")


def draw(case, dtype, device, seed=0):
    """(tokens, weights, experts, w_up, w_down) for a case."""
    inputs = make_inputs(case, dtype, device, seed)
    routed = reference.topk_routing(inputs.logits, case.top_k)
    return inputs.tokens, routed.topk_weights, routed.topk_experts, inputs.w_up, inputs.w_down


def run(tokens, weights, experts, w_up, w_down, op=triton_experts):
    return op(tokens, weights, reference.sort_by_expert(experts, len(w_up)), w_up, w_down)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype, device):
    check_accuracy(
        run,
        partial(run, op=reference.fused_experts),
        partial(draw, CASES[case], dtype, device),
        ("out", "dtokens", "dweights", "dw_up", "dw_down"),
    )


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_worked_by_hand(implementation, device):
    # One token, two experts of one hidden unit each. silu(2) * 3 = 5.2848; silu(1) * 1 = 0.7311.
    tokens = torch.tensor([[1.0]], device=device)
    w_up = torch.tensor([[[2.0], [3.0]], [[1.0], [1.0]]], device=device)
    w_down = torch.tensor([[[1.0]], [[10.0]]], device=device)
    experts = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    permutation = sort_by_expert(experts, 2, implementation=implementation)
    weights = torch.tensor([[0.25, 0.75]], device=device)
    out = fused_experts(tokens, weights, permutation, w_up, w_down, implementation=implementation)
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.25 * 5.2847824 + 7.5 * 0.7310586]]))


def test_saves_tokens_preactivation_and_routing_only(device):
    case = CASES["ordinary"]
    tokens, weights, experts, w_up, w_down = draw(case, torch.float32, device)
    leaves = [t.requires_grad_() for t in (tokens, weights, w_up, w_down)]
    permutation = sort_by_expert(experts, case.num_experts, implementation="triton")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_experts(leaves[0], leaves[1], permutation, *leaves[2:])
    floats = {t.data_ptr(): t for t in saved if t.is_floating_point()}
    known = {leaf.data_ptr() for leaf in leaves}
    (preactivation,) = (t for pointer, t in floats.items() if pointer not in known)
    num_rows = case.num_tokens * case.top_k
    assert preactivation.shape == (num_rows, 2 * case.d_ff)
    integers = {t.data_ptr(): t.numel() for t in saved if not t.is_floating_point()}
    # slot_to_row, row_to_token, and a table that is small beside them at real sizes.
    table = sum(t.numel() for t in permutation.tile_table[:4])
    assert sum(integers.values()) == 2 * num_rows + table


@pytest.mark.parametrize("frozen", ["tokens", "weights", "w_up", "w_down"])
def test_frozen_operands_are_skipped(frozen, device):
    names = ("tokens", "weights", "experts", "w_up", "w_down")
    tensors = dict(zip(names, draw(CASES["ordinary"], torch.float32, device), strict=True))
    leaves = [name for name in tensors if name != "experts"]

    def gradients(names):
        operands = {k: t.detach().requires_grad_(k in names) for k, t in tensors.items()}
        out = run(*operands.values())
        return dict(zip(names, torch.autograd.grad(out.sum(), [operands[name] for name in names]), strict=True))

    every = gradients(leaves)
    for name, gradient in gradients([name for name in leaves if name != frozen]).items():
        assert torch.equal(gradient, every[name]), name


def test_frozen_weights_launch_no_weight_gradient(device, monkeypatch):
    monkeypatch.setattr("moe_kernels.experts._Rows.wgrad", None)  # calling it would fail
    tokens, weights, chosen, w_up, w_down = draw(CASES["ordinary"], torch.float32, device)
    tokens.requires_grad_()
    run(tokens, weights, chosen, w_up, w_down).sum().backward()
    assert tokens.grad.isfinite().all()


@pytest.mark.parametrize("op", [triton_experts, reference.fused_experts])
def test_nan_stays_in_its_token(op, device):
    tokens, weights, experts, w_up, w_down = draw(CASES["ordinary"], torch.float32, device)
    clean = run(tokens, weights, experts, w_up, w_down, op)
    broken = tokens.clone()
    broken[5] = torch.nan
    out = run(broken, weights, experts, w_up, w_down, op)
    assert out[5].isnan().all()
    others = torch.arange(len(out), device=device) != 5
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("op", [triton_experts, reference.fused_experts])
def test_dropped_slots_add_nothing_and_get_no_gradient(op, device):
    tokens, weights, experts, w_up, w_down = draw(CASES["ordinary"], torch.float32, device)
    leaves = [t.detach().requires_grad_() for t in (tokens, weights, w_up, w_down)]
    dropped = experts.clone()
    dropped[3, 0] = -1
    dropped[8] = 8
    masked = weights.clone()
    masked[3, 0] = 0
    masked[8] = 0
    out = run(leaves[0], leaves[1], dropped, *leaves[2:], op)
    torch.testing.assert_close(out, run(tokens, masked, experts, w_up, w_down, op), rtol=1e-5, atol=1e-6)
    dtokens, dweights, *_ = torch.autograd.grad(out.square().sum(), leaves)
    assert not out[8].any() and not dtokens[8].any()
    assert dweights[3, 0] == 0 and not dweights[8].any() and dweights[3, 1] != 0


def test_transposed_weights(device):
    tokens, weights, experts, w_up, w_down = draw(CASES["odd_sizes"], torch.float32, device)
    stored = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w_up, w_down)]
    leaves = [w.detach().requires_grad_() for w in (w_up, w_down)]
    transposed = [w.detach().requires_grad_() for w in stored]
    expected = run(tokens, weights, experts, *leaves)
    out = run(tokens, weights, experts, *transposed)
    assert torch.equal(out, expected)
    for a, b in zip(
        torch.autograd.grad(out.sum(), transposed), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["ordinary", "odd_sizes", "skewed"])
def test_repeats_bitwise(case, device):
    inputs = draw(CASES[case], DTYPES[-1], device)
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]

    def once():
        out = run(*leaves)
        return out, *torch.autograd.grad(out.float().square().sum(), [t for t in leaves if t.requires_grad])

    first = once()
    for _ in range(20 if device == "cuda" else 2):
        for a, b in zip(once(), first, strict=True):
            assert torch.equal(a, b)


def test_backward_twice_on_a_kept_graph(device):
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in draw(CASES["odd_sizes"], DTYPES[-1], device)]
    wanted = [t for t in leaves if t.requires_grad]
    out = run(*leaves).sum()
    first = torch.autograd.grad(out, wanted, retain_graph=True)
    second = torch.autograd.grad(out, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck_of_reference():
    case = Case(5, 4, 3, 3, 2)
    tokens, weights, experts, w_up, w_down = draw(case, torch.float64, "cpu")
    permutation = reference.sort_by_expert(experts, 3)
    operands = [t.double().requires_grad_() for t in (tokens, weights, w_up, w_down)]
    torch.autograd.gradcheck(lambda x, w, up, down: reference.fused_experts(x, w, permutation, up, down), operands)


def test_opcheck(device):
    tokens, weights, experts, w_up, w_down = draw(Case(6, 8, 4, 3, 2), torch.float32, device)
    permutation = reference.sort_by_expert(experts, 3)
    for tensor in (tokens, weights, w_up, w_down):
        tensor.requires_grad_()
    table = permutation.tile_table
    torch.library.opcheck(
        _fused_experts_op,
        (tokens, weights, w_up, w_down, permutation.slot_to_row, permutation.row_to_token, *table, "swiglu"),
    )


def test_compiles_without_graph_break(device):
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in draw(CASES["odd_sizes"], DTYPES[-1], device)]
    wanted = [t for t in inputs if t.requires_grad]

    def layer(tokens, weights, experts, w_up, w_down):
        permutation = sort_by_expert(experts, 5, implementation="triton")
        return triton_experts(tokens, weights, permutation, w_up, w_down)

    expected = layer(*inputs)
    actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(actual, expected)
    gradients = zip(torch.autograd.grad(actual.sum(), wanted), torch.autograd.grad(expected.sum(), wanted), strict=True)
    assert all(torch.equal(a, b) for a, b in gradients)


def bad_operands(**changes):
    tokens, weights, experts, w_up, w_down = draw(Case(6, 8, 4, 3, 2), torch.float32, "cpu")
    operands = {
        "tokens": tokens,
        "topk_weights": weights,
        "permutation": reference.sort_by_expert(experts, 3),
        "w_up": w_up,
        "w_down": w_down,
    }
    return {**operands, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(6, 9)}, r"w_up must be \[E, 2F, D\] with E=3, D=9, got \[3, 8, 8\]"),
        ({"tokens": torch.zeros(7, 8)}, r"topk_weights must be \[T, K\] with T=7"),
        ({"w_up": torch.zeros(3, 6, 8)}, r"w_up must be \[E, 2F, D\] and w_down \[E, D, F\], got \[3, 6, 8\]"),
        ({"w_down": torch.zeros(2, 8, 4)}, r"w_down must be \[E, D, F\] with E=3, D=8, got \[2, 8, 4\]"),
        ({"w_up": torch.zeros(3, 8, 8).half()}, "one floating-point dtype"),
        ({"topk_weights": torch.zeros(6, 2).half()}, "topk_weights must be torch.float32"),
        ({"w_down": torch.zeros(3, 8, 4, device="meta")}, "one device"),
        ({"activation": "tanh"}, r"activation must be one of \['swiglu'\], got 'tanh'"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        fused_experts(**bad_operands(**changes))
