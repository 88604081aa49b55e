import inspect
import math
from functools import partial

import pytest
import torch

from moe_kernels import Activation, apply_activation, reference
from moe_kernels.activation.functions import ACTIVATIONS, EPILOGUES, PLAIN_EPILOGUES
from moe_kernels.activation.ops import Destination, RowBias, _activation_op, launch_weighted_activation_backward
from moe_kernels.experts.expert_bias import row_to_expert
from moe_kernels.specs import ACTIVATION_KINDS
from moe_kernels.testing import assert_accurate, check_accuracy, run_with_grads, to_float64

from ...dtypes import DTYPES
from ..compiled import assert_compiles

# Limits within the range of the inputs, so that inputs reach both sides of every clamp.
KINDS = [Activation(name, limit=None if kind.limit is None else 2.0) for name, kind in ACTIVATION_KINDS.items()] + [
    Activation("gpt_oss", limit=1.5, alpha=0.7),
    Activation("softcapped_swiglu", limit=5.0, alpha=0.7),
    Activation("swiglu", interleaved=True),
    Activation("gpt_oss", limit=1.5, interleaved=True),
]
ROW_KINDS = [
    (Activation("swiglu"), 47),
    (Activation("gpt_oss"), 130),
    (Activation("gpt_oss", interleaved=True), 130),
    (Activation("relu"), 47),
]


def make_preactivation(num_rows, d_ff, dtype, device, seed=0, gated=True):
    generator = torch.Generator(device).manual_seed(seed)
    return (3 * torch.randn(num_rows, (1 + gated) * d_ff, device=device, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "num_rows", "d_ff"),
    [
        *((kind, 7, 47) for kind in KINDS),
        *((kind, *sizes) for kind in KINDS[::9] for sizes in ((40, 32), (0, 8))),
        *((Activation(name), *sizes) for name in ("swiglu", "gelu") for sizes in ((1, 1), (3, 700))),
    ],
    ids=str,
)
def test_matches_reference(num_rows, d_ff, dtype, activation, device):
    check_accuracy(
        lambda h: apply_activation(h, activation, implementation="triton"),
        lambda h: reference.apply_activation(h, activation),
        lambda seed: (make_preactivation(num_rows, d_ff, dtype, device, seed, activation.gated),),
        ("out", "dpreactivation"),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interleaved_columns_give_the_same_bits(dtype, device):
    gates_first = make_preactivation(7, 47, dtype, device)
    interleaved = gates_first.unflatten(1, (2, 47)).transpose(1, 2).flatten(1)

    def run(h):
        activation = Activation("gpt_oss", limit=1.5, interleaved=h is interleaved)
        return run_with_grads(partial(apply_activation, activation=activation, implementation="triton"), (h,))

    (expected_out, expected), (out, actual) = run(gates_first), run(interleaved)
    assert torch.equal(out, expected_out) and out.any()
    assert torch.equal(actual[:, 0::2], expected[:, :47]) and torch.equal(actual[:, 1::2], expected[:, 47:])


def test_gelu_of_negative_values_keeps_its_digits(device):
    x = torch.linspace(-5, -1, 4001, device=device)[:, None]
    exact = x.double() * torch.special.ndtr(x.double())
    actual = apply_activation(x, "gelu", implementation="triton")
    torch.testing.assert_close(actual.double(), exact, rtol=4e-6, atol=0)


def test_softcaps_of_small_values_keep_their_digits(device):
    x = torch.linspace(-3, 3, 6001, device=device)[:, None]
    preactivation = torch.cat([torch.ones_like(x), 25 * x * x.abs() / 3], 1)
    exact = reference.apply_activation(preactivation.double(), "softcapped_swiglu")
    actual = apply_activation(preactivation, "softcapped_swiglu", implementation="triton")
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


def test_every_name_has_all_its_parts():
    assert list(ACTIVATION_KINDS) == list(ACTIVATIONS) == list(reference._ACTIVATIONS)
    for name, functions in (EPILOGUES | PLAIN_EPILOGUES).items():
        # An epilogue is called without numbers, so its defaults must be the published ones.
        assert ACTIVATION_KINDS[name].gated == (name in EPILOGUES)
        _, _, *numbers = inspect.signature(functions.forward.fn).parameters.values()
        assert [number.default for number in numbers] == [Activation(name).limit, Activation(name).alpha]


@pytest.mark.parametrize(
    ("activation", "d_ff"),
    [*((kind, 47) for kind in KINDS), *((Activation("swiglu"), d_ff) for d_ff in (32, 1100))],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_backward_matches_autograd(activation, d_ff, dtype, device):
    """Compare the fused middle of the expert op with autograd of w * activation(H), per slot."""
    experts = torch.tensor([[1, 0], [0, 1], [5, 0]], dtype=torch.int32, device=device)
    slot_to_row = reference.sort_by_expert(experts, 2).slot_to_row
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.rand(3, 2, device=device, generator=generator)
    preactivation = make_preactivation(6, d_ff, dtype, device, gated=activation.gated)
    dweighted = torch.randn(6, d_ff, device=device, generator=generator).to(dtype)
    weighted = dweighted.clone()
    dpreactivation, dweights = launch_weighted_activation_backward(
        preactivation, weighted, weights, slot_to_row, activation
    )
    actual = dpreactivation, weighted, dweights

    def autograd(preactivation, dweighted, weights):
        preactivation, weights = preactivation.detach().requires_grad_(), weights.detach().requires_grad_()
        activated = reference.apply_activation(preactivation, activation)
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
    # A sum of d_ff products in float32, whatever the dtype of the rows.
    torch.testing.assert_close(actual[2].double(), exact[2], rtol=0, atol=2e-6 * exact[2].abs().max().item())
    assert actual[2][2, 0] == 0


def _few_rows(d_ff, dtype, activation, device):
    """Return the fused backward's arguments, with a bias, and the rows' tokens. 8 rows hold 6 of the 15 slots."""
    experts = [[0, 7, 1], [7, 7, 7], [1, 0, 7], [7, 7, 0], [7, 1, 7]]
    permutation = reference.sort_by_expert(torch.tensor(experts, dtype=torch.int32, device=device), 2, max_rows=8)
    assert (permutation.slot_to_row >= 0).sum() == 6 and permutation.row_to_token.shape == (8,)
    generator = torch.Generator(device).manual_seed(0)
    preactivation = make_preactivation(8, d_ff, dtype, device, gated=activation.gated)
    dweighted = torch.randn(8, d_ff, device=device, generator=generator).to(dtype)
    preactivation[6:], dweighted[6:] = torch.nan, torch.nan
    weights = torch.rand(5, 3, device=device, generator=generator)
    bias = torch.randn(2, preactivation.shape[1], device=device, generator=generator).to(dtype)
    bias = RowBias(bias, row_to_expert(permutation.tile_table.bounds, 8))
    arguments = preactivation, dweighted, weights, permutation.slot_to_row, activation, bias
    return arguments, permutation.row_to_token


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "d_ff"), ROW_KINDS, ids=str)
def test_weighted_backward_by_row_is_that_by_slot(activation, d_ff, dtype, device):
    """Results are bitwise equal with fewer rows than slots: dropped slots get zeros, rows without a slot do not
    change."""
    (preactivation, dweighted, *rest), row_to_token = _few_rows(d_ff, dtype, activation, device)
    by_slot, by_row = dweighted.clone(), dweighted.clone()
    expected, expected_dweights = launch_weighted_activation_backward(preactivation, by_slot, *rest)
    actual, dweights = launch_weighted_activation_backward(preactivation, by_row, *rest, row_to_token=row_to_token)
    assert torch.equal(actual[:6], expected[:6]) and expected[:6].isfinite().all()
    assert torch.equal(by_row[:6], by_slot[:6]) and not torch.equal(by_row[:6], dweighted[:6])
    assert by_row[6:].isnan().all()
    assert torch.equal(dweights, expected_dweights)
    assert torch.equal(dweights != 0, rest[1] >= 0)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "d_ff"), ROW_KINDS, ids=str)
def test_weighted_backward_to_a_destination(activation, d_ff, dtype, by_row, device):
    """Writing to other rows of other tensors gives the same bits, and changes neither further rows nor operands."""
    (preactivation, dweighted, *rest), row_to_token = _few_rows(d_ff, dtype, activation, device)
    weighted, slot_to_row = dweighted.clone(), rest[1]
    expected, expected_dweights = launch_weighted_activation_backward(preactivation, weighted, *rest)
    place = torch.tensor([7, 2, 11, 0, 5, 3], dtype=torch.int32, device=device)  # destination of each row
    destination = Destination(
        preactivation.new_full((12, preactivation.shape[1]), 9),
        dweighted.new_full((12, d_ff), 9),
        torch.where(slot_to_row >= 0, place[slot_to_row.clamp(min=0).long()], -1),
    )
    untouched = dweighted.clone()
    given = {"row_to_token": row_to_token} if by_row else {}
    actual, dweights = launch_weighted_activation_backward(
        preactivation, dweighted, *rest, destination=destination, **given
    )
    assert actual is destination.dpreactivation
    for result, wanted in ((actual, expected), (destination.weighted, weighted)):
        assert torch.equal(result[place.long()], wanted[:6])
        others = [row for row in range(12) if row not in place.tolist()]
        assert (result[others] == 9).all()
    assert torch.equal(dweights, expected_dweights)
    assert torch.equal(dweighted[:6], untouched[:6])


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_large_values_do_not_overflow(implementation, device):
    preactivation = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], device=device)
    out, dpreactivation = run_with_grads(lambda h: apply_activation(h, implementation=implementation), (preactivation,))
    assert out.tolist() == [[0.0, 1e4]]
    assert dpreactivation.isfinite().all()


def test_strided_preactivation(device):
    preactivation = make_preactivation(9, 16, torch.float32, device)
    strided = preactivation.t().contiguous().t()
    actual = apply_activation(strided, implementation="triton")
    assert torch.equal(actual, apply_activation(preactivation, implementation="triton"))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_numbers_by_hand(implementation, device):
    """Check each activation at gate 2 (then 4), up 3 (then -5), limit 2.5 if it has one."""
    gate, up = torch.tensor([2.0, 4.0], device=device), torch.tensor([3.0, -5.0], device=device)

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    def normal_cdf(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    def tanh_cdf(x):
        return (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2

    expected = {
        "swiglu": [6 * sigmoid(2), -20 * sigmoid(4)],
        "geglu": [6 * normal_cdf(2), -20 * normal_cdf(4)],
        "geglu_tanh": [6 * tanh_cdf(2), -20 * tanh_cdf(4)],
        "reglu": [6.0, -20.0],
        "clamped_swiglu": [2 * sigmoid(2) * 2.5, 2.5 * sigmoid(2.5) * -2.5],
        "swiglu_clamped_after": [2 * sigmoid(2) * 2.5, 2.5 * -2.5],
        "clamped_geglu": [2 * normal_cdf(2) * 2.5, 2.5 * normal_cdf(2.5) * -2.5],
        "softcapped_swiglu": [
            4 * math.tanh(0.5) * sigmoid(2) * 2.5 * math.tanh(1.2),
            4 * math.tanh(1.0) * sigmoid(4) * 2.5 * math.tanh(-2.0),
        ],
        "gpt_oss": [3.5 * 2 * sigmoid(1.702 * 2), -1.5 * 2.5 * sigmoid(1.702 * 2.5)],
        "relu_squared": [4.0, 16.0],
        "relu": [2.0, 4.0],
        "gelu": [2 * normal_cdf(2), 4 * normal_cdf(4)],
        "gelu_tanh": [2 * tanh_cdf(2), 4 * tanh_cdf(4)],
        "silu": [2 * sigmoid(2), 4 * sigmoid(4)],
    }
    for name, values in expected.items():
        activation = Activation(name, limit=2.5 if ACTIVATION_KINDS[name].limit else None)
        preactivation = torch.cat([gate, up] if activation.gated else [gate])[None]
        out = apply_activation(preactivation, activation, implementation=implementation)
        torch.testing.assert_close(out[0].tolist(), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("activation", KINDS, ids=str)
def test_nan_is_not_lost(activation, implementation, device):
    preactivation = torch.full((2, 4), 1.0, device=device)
    preactivation[1] = torch.nan
    out = apply_activation(preactivation, activation, implementation=implementation)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_opcheck(device):
    preactivation = torch.randn(3, 8, device=device, requires_grad=True)
    plain = None, None, False
    for activation in (("swiglu", *plain), ("gpt_oss", 1.5, 1.702, True), ("relu_squared", *plain)):
        torch.library.opcheck(_activation_op.overload, (preactivation, *activation))


def test_compiles_without_graph_break(device):
    preactivation = torch.randn(3, 8, device=device)
    for activation in (Activation("swiglu"), Activation("gpt_oss", limit=1.5), Activation("silu")):
        run = partial(apply_activation, activation=activation, implementation="triton")
        assert_compiles(run, (preactivation,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(apply_activation, torch.zeros(3, 4), "swish"),
            "apply_activation: activation must be one of .*, got 'swish'",
        ),
        (partial(apply_activation, torch.zeros(3, 5)), "'swiglu' needs an even number of columns, gate and up, got 5"),
        (partial(apply_activation, torch.zeros(3), "relu"), r"preactivation must be \[R, N\]"),
        (partial(Activation, "swish"), "activation must be one of .*, got 'swish'"),
        (partial(Activation, "swiglu", limit=7.0), "activation 'swiglu' has no limit, got 7.0"),
        (partial(Activation, "clamped_swiglu", alpha=1.0), "activation 'clamped_swiglu' has no alpha, got 1.0"),
        (partial(Activation, "relu", interleaved=True), "activation 'relu' has no gate, got interleaved=True"),
        (partial(Activation, "gpt_oss", limit=-1.0), "limit of an activation must be positive, got -1.0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_are_published_unless_given():
    assert Activation("gpt_oss") == Activation("gpt_oss", limit=7.0, alpha=1.702)
    assert str(Activation("gpt_oss")) == "gpt_oss" and Activation("gpt_oss").published
    assert str(Activation("gpt_oss", limit=1.5)) == "gpt_oss(limit=1.5, alpha=1.702)"
    assert str(Activation("gpt_oss", interleaved=True)) == "gpt_oss(interleaved)"
