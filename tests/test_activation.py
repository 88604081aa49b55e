import pytest
import torch

from moe_kernels import ACTIVATIONS, gated_activation, reference
from moe_kernels.activation import _activation_op, launch_weighted_activation_backward
from moe_kernels.testing import assert_accurate, check_accuracy, run_with_grads, to_float64

from .dtypes import DTYPES


def make_preactivation(num_rows, d_ff, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return (3 * torch.randn(num_rows, 2 * d_ff, device=device, generator=generator)).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "d_ff"), [(40, 32), (1, 1), (0, 8), (7, 47), (3, 700)])
def test_matches_reference(num_rows, d_ff, dtype, activation, device):
    check_accuracy(
        lambda h: gated_activation(h, activation, implementation="triton"),
        lambda h: reference.gated_activation(h, activation),
        lambda seed: (make_preactivation(num_rows, d_ff, dtype, device, seed),),
        ("out", "dpreactivation"),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d_ff", [32, 47, 1100])
def test_weighted_backward_matches_autograd(d_ff, dtype, activation, device):
    """The fused middle of the expert op against autograd of w * activation(H), per slot."""
    experts = torch.tensor([[1, 0], [0, 1], [5, 0]], dtype=torch.int32, device=device)
    slot_to_row = reference.sort_by_expert(experts, 2).slot_to_row
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.rand(3, 2, device=device, generator=generator)
    preactivation = make_preactivation(6, d_ff, dtype, device)
    dweighted = torch.randn(6, d_ff, device=device, generator=generator).to(dtype)
    weighted = dweighted.clone()
    dpreactivation, dweights = launch_weighted_activation_backward(
        preactivation, weighted, weights, slot_to_row, activation
    )
    actual = dpreactivation, weighted, dweights

    def autograd(preactivation, dweighted, weights):
        preactivation, weights = preactivation.detach().requires_grad_(), weights.detach().requires_grad_()
        activated = reference.gated_activation(preactivation, activation)
        row_weights = weights.new_zeros(6).index_put((slot_to_row[slot_to_row >= 0].long(),), weights[slot_to_row >= 0])
        weighted = activated * row_weights[:, None].to(activated.dtype)
        dpreactivation, dweights = torch.autograd.grad(weighted, (preactivation, weights), dweighted)
        return dpreactivation, weighted.detach(), dweights

    baseline = autograd(preactivation, dweighted, weights)
    exact = autograd(*to_float64((preactivation, dweighted, weights)))
    kept = slice(0, 5)  # row 5 belongs to the dropped slot
    for name, a, b, e in zip(("dH", "A_w"), actual[:2], baseline[:2], exact[:2], strict=True):
        assert_accurate(a[kept], b[kept], e[kept], name)
    assert_accurate(actual[2], baseline[2], exact[2], "dweights")
    assert actual[2][2, 0] == 0


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_worked_by_hand(implementation, device):
    # silu(0) * 5 = 0; silu(1) * 2 = 2 / (1 + 1/e)
    preactivation = torch.tensor([[0.0, 1.0, 5.0, 2.0]], device=device)
    out = gated_activation(preactivation, implementation=implementation)
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 1.4621172]]))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_large_values_do_not_overflow(implementation, device):
    preactivation = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], device=device)
    out, dpreactivation = run_with_grads(lambda h: gated_activation(h, implementation=implementation), (preactivation,))
    assert out.tolist() == [[0.0, 1e4]]
    assert dpreactivation.isfinite().all()


def test_strided_preactivation(device):
    preactivation = make_preactivation(9, 16, torch.float32, device)
    strided = preactivation.t().contiguous().t()
    actual = gated_activation(strided, implementation="triton")
    assert torch.equal(actual, gated_activation(preactivation, implementation="triton"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_reference(activation):
    preactivation = make_preactivation(3, 4, torch.float64, "cpu").requires_grad_()
    torch.autograd.gradcheck(lambda h: reference.gated_activation(h, activation), preactivation)


def test_opcheck(device):
    torch.library.opcheck(_activation_op, (torch.randn(3, 8, device=device, requires_grad=True), "swiglu"))


def test_compiles_without_graph_break(device):
    preactivation = torch.randn(3, 8, device=device)
    compiled = torch.compile(gated_activation, fullgraph=True, backend="aot_eager")
    expected = gated_activation(preactivation, implementation="triton")
    assert torch.equal(compiled(preactivation, implementation="triton"), expected)


@pytest.mark.parametrize(
    ("preactivation", "activation", "message"),
    [
        (torch.zeros(3, 4), "swish", r"activation must be one of \['swiglu'\], got 'swish'"),
        (torch.zeros(3, 5), "swiglu", "even number of columns, got 5"),
        (torch.zeros(3), "swiglu", r"preactivation must be \[R, 2F\]"),
    ],
)
def test_bad_input(preactivation, activation, message):
    with pytest.raises(ValueError, match=message):
        gated_activation(preactivation, activation)
