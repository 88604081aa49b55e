"""Quantisation to e4m3 with a scale per block: rows, and weights in both orientations."""

from itertools import product

import pytest
import torch

from moe_kernels import Activation, reference_fp8
from moe_kernels.activation.ops import (
    RowBias,
    can_scale_gradient,
    launch_activation,
    launch_scaled_activation,
    launch_weighted_activation_backward,
)
from moe_kernels.quantization.fp8_rows import empty_scaled_rows
from moe_kernels.quantization.fp8_weights import Forms, empty_checksums, launch_quantize_weight, launch_requantize
from moe_kernels.quantization.ops import _quantize_rows_op, pack_rows, quantize_rows, unpack_rows
from moe_kernels.quantization.quantize import quantize

from ...dtypes import DTYPES
from ...tiers import default_tier


def draw(shape, dtype, device, seed=0):
    """Return values of unit scale, some 1000 times larger or smaller."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, device=device, generator=generator)
    return (values * 10.0 ** torch.randint(-3, 4, shape, device=device, generator=generator)).to(dtype)


def assert_same(actual, expected):
    """Check that values and scales are equal, where any NaN equals any other."""
    for name, a, e in zip(("values", "scales"), actual, expected, strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype, name
        torch.testing.assert_close(a.float(), e.float(), rtol=0.0, atol=0.0, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 256), (5, 2048), (19, 200), (3, 16), (2, 2880), (0, 200)], ids=str)
def test_rows_have_the_bits_of_the_reference(shape, dtype, device):
    rows = draw(shape, dtype, device)
    actual = quantize_rows(rows, implementation="triton")
    assert actual.scales.stride(0) == 1 and actual.scales.shape[1] == -(-rows.shape[1] // 128)
    assert_same(actual, quantize_rows(rows, implementation="reference"))
    assert_same(quantize_rows(rows.t().contiguous().t(), implementation="triton"), actual)


def test_every_rounding(device):
    """All bits of bfloat16 within [-448, 448], each number and its neighbours in float32: ties go to the even code."""
    values = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()
    values = values[values.abs() <= 448.0]
    bits = values.view(torch.int32)
    values = torch.cat([values, (bits + 1).view(torch.float32), (bits + 0x7FFF).view(torch.float32)])
    values = values[values.abs() <= 448.0]
    values = torch.nn.functional.pad(values, (0, -len(values) % 1016)).view(-1, 127)
    blocks = torch.cat([values.new_full((len(values), 1), 448.0), values], 1).to(device)  # all scales are 1
    actual = quantize_rows(blocks.view(-1, 1024), implementation="triton")
    assert (actual.scales == 1.0).all()
    assert torch.equal(actual.values.float().view(-1, 128), blocks.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_rows_by_hand(implementation, device):
    rows = torch.zeros(2, 200, device=device)
    rows[0, :3] = torch.tensor([-896.0, 2.0, 1.1])  # the scale is 2
    rows[0, 199] = 4.48
    values, scales = quantize_rows(rows, implementation=implementation)
    assert values[0, :3].tolist() == [-448.0, 1.0, 0.5625]
    assert values[0, 199] == 448.0 and scales[0, 0] == 2.0 and scales[0, 1].item() == pytest.approx(0.01)
    assert not values[1].float().any() and scales[1].tolist() == [1.0, 1.0]


def test_extreme_rows(device):
    """A value that is not finite affects its block alone. The smallest numbers become zero, not NaN."""
    rows = torch.ones(5, 256, device=device)
    rows[0, 7], rows[1, 130], rows[2, :] = torch.nan, torch.inf, 1e-42
    rows[3, 0] = 3e38
    actual = quantize_rows(rows, implementation="triton")
    assert_same(actual, quantize_rows(rows, implementation="reference"))
    read = reference_fp8.dequantize_blocks(*actual, 1, 128, torch.float32)
    assert read[0, :128].isnan().all() and not read[1, 128:].isfinite().any()
    assert read[2:].isfinite().all() and read[3, 0].item() == pytest.approx(3e38)
    assert torch.equal(read[4], rows[4]) and torch.equal(read[0, 128:], rows[0, 128:])


def test_rounding_error_is_that_of_three_bits(device):
    rows = draw((64, 512), torch.float32, device)
    read = reference_fp8.dequantize_blocks(*quantize_rows(rows), 1, 128, torch.float32)
    largest = rows.view(64, 4, 128).abs().amax(2).repeat_interleave(128, 1)
    assert ((read - rows).abs() <= rows.abs() / 16 + largest / 448 / 2**10 * 1.01).all()


WEIGHTS = {"blocks": (2, 256, 128), "odd": (3, 200, 144), "one_block": (2, 48, 16), "empty": (0, 16, 16)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["as_is", "transposed"])
@pytest.mark.parametrize("shape", WEIGHTS)
def test_weights_in_both_orientations(shape, stored, dtype, device):
    weight = draw(WEIGHTS[shape], dtype, device)
    if stored == "transposed":
        weight = weight.mT.contiguous().mT
    expected = quantize(weight, "fp8")
    both = launch_quantize_weight(weight)
    here, turned = launch_quantize_weight(weight, transposed=False), launch_quantize_weight(weight, as_is=False)
    assert here[2:] == turned[:2] == (None, None)
    for values, scales, turned_values, turned_scales in (both, Forms(*here[:2], *turned[2:])):
        assert_same((values, scales), (expected.values, expected.scales))
        assert_same((turned_values.mT, turned_scales.mT), (expected.values, expected.scales))


def test_opcheck_and_compile(device):
    rows = draw((5, 200), torch.float32, device)
    torch.library.opcheck(_quantize_rows_op.overload, (rows,))
    compiled = torch.compile(lambda x: quantize_rows(x, implementation="triton"), fullgraph=True, backend="aot_eager")
    assert_same(compiled(rows), quantize_rows(rows, implementation="triton"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [(torch.zeros(3), r"rows must be \[R, K\], got \[3\]"), (torch.zeros(2, 3).int(), "of floating point, got")],
)
def test_bad_input(rows, message):
    with pytest.raises(ValueError, match=message):
        quantize_rows(rows)


FUSED = {
    "swiglu": (Activation("swiglu"), 256),
    "partial_block": (Activation("swiglu"), 144),
    "narrow": (Activation("gpt_oss"), 16),
    "plain": (Activation("relu_squared"), 144),
    "interleaved": (Activation("gpt_oss", interleaved=True), 128),
    "wide": (Activation("swiglu"), 2048),
}


def draw_hidden(activation, d_ff, dtype, device, num_rows=13):
    """Return H and a bias."""
    width = (1 + activation.gated) * d_ff
    bias = RowBias(draw((3, width), dtype, device, 1), torch.arange(num_rows, device=device).int() % 3)
    return draw((num_rows, width), dtype, device), bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FUSED)
def test_activation_quantises_what_it_would_store(form, dtype, device):
    activation, d_ff = FUSED[form]
    hidden, bias = draw_hidden(activation, d_ff, dtype, device)
    for given in (None, bias):
        actual = launch_scaled_activation(hidden, activation, given)
        assert_same(actual, quantize_rows(launch_activation(hidden, activation, given), implementation="triton"))


@pytest.mark.parametrize("handles", ["slots", "rows"])
@pytest.mark.parametrize("form", [name for name, (kind, d_ff) in FUSED.items() if can_scale_gradient(kind, d_ff)])
def test_activation_backward_quantises_what_it_stores(form, handles, device):
    """Compare the rows that slots own. The other rows are unwritten in both results."""
    activation, d_ff = FUSED[form]
    dtype, num_rows, num_kept = DTYPES[-1], 13, 11
    hidden = draw_hidden(activation, d_ff, dtype, device)[0].clamp(-9, 9)
    dweighted = draw((num_rows, d_ff), dtype, device, 2).clamp(-9, 9)
    num_tokens = 6 if handles == "slots" else 9
    order = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(0))
    slot_to_row = torch.where(order < num_kept, order, -1).int().view(num_tokens, 2).to(device)
    owner = torch.zeros(num_rows, dtype=torch.int32, device=device)
    token, k = (slot_to_row >= 0).nonzero(as_tuple=True)
    owner[slot_to_row[token, k].long()] = token.int()
    weights = torch.rand(num_tokens, 2, device=device)
    results = []
    for scaled in (None, empty_scaled_rows(hidden, *hidden.shape)):
        weighted = dweighted.clone()
        launched = launch_weighted_activation_backward(
            hidden, weighted, weights, slot_to_row, activation, row_to_token=owner, scaled=scaled
        )
        results.append((launched[0][:num_kept], weighted[:num_kept], launched[1]))
    assert all(map(torch.equal, *results))
    expected = quantize_rows(results[0][0], implementation="triton")
    assert_same((scaled.values[:num_kept], scaled.scales[:num_kept]), expected)


CHANGES = {
    "all": lambda w: w.mul_(1.01),
    "average": lambda w: w.copy_(w.flip(0)),
    "one_expert": lambda w: w[1].zero_(),
    "one_block": lambda w: w[2, 128:, :128].add_(1.0),
    "one_row": lambda w: w[:, 150].zero_(),
    "one_column": lambda w: w[:, :, 5].zero_(),
    "one_element": lambda w: w[2, 199, 143].add_(3.0),
    "two_rows_swapped": lambda w: w[0, :2].copy_(w[0, :2].flip(0)),
    "other_signs": lambda w: w.neg_(),
    "nothing": lambda w: w,
}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    default_tier(
        product(["as_is", "transposed"], [torch.float16, torch.float32]),
        [("as_is", torch.float32), ("transposed", torch.float16)],
    ),
    ids=str,
)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_quantised_again_in_place(change, stored, dtype, device):
    weight = draw((3, 200, 144), dtype, device)
    if stored == "transposed":
        weight = weight.mT.contiguous().mT
    checksums = empty_checksums(weight)
    forms = launch_quantize_weight(weight, checksums=checksums)
    pointers = [tensor.data_ptr() for tensor in forms]
    CHANGES[change](weight)
    launch_requantize(weight, forms, checksums)
    expected = launch_quantize_weight(weight)
    assert_same(forms[:2], expected[:2])
    assert_same(forms[2:], expected[2:])
    forms.scales.fill_(7.0)  # stays, because nothing is written the second time
    launch_requantize(weight, forms, checksums)
    assert (forms.scales == 7.0).all() and pointers == [tensor.data_ptr() for tensor in forms]


def test_only_blocks_of_other_bits_are_written(device):
    """Bits are compared: NaN equals itself, and zeros of other signs differ."""
    weight = torch.zeros(1, 256, 128, device=device)
    weight[0, 0, :64] = torch.nan
    checksums = empty_checksums(weight)
    forms = launch_quantize_weight(weight, checksums=checksums)
    scales = forms.scales, forms.turned_scales
    for scale in scales:
        scale.fill_(7.0)
    launch_requantize(weight, forms, checksums)
    assert all((scale == 7.0).all() for scale in scales)
    weight[0, 200, 3] = -0.0
    launch_requantize(weight, forms, checksums)
    assert scales[0].flatten().tolist() == scales[1].flatten().tolist() != [7.0, 7.0]
    assert (scales[0] == 7.0).sum() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 256), (3, 16), (5, 208), (0, 48)])
def test_packed_rows_hold_numbers_and_scales(shape, dtype, device):
    rows = draw(shape, dtype, device)
    packed = {name: pack_rows(rows, implementation=name) for name in ("triton", "reference")}
    width = shape[1] + 8 * -(-shape[1] // 256)
    for name, tensor in packed.items():
        assert tensor.dtype == dtype and tensor.shape == (shape[0], width // dtype.itemsize), name
    used = shape[1] + 4 * -(-shape[1] // 128)
    assert torch.equal(*(tensor.view(torch.uint8)[:, :used] for tensor in packed.values()))
    values, scales = quantize_rows(rows, implementation="reference")
    expected = reference_fp8.dequantize_blocks(values, scales, 1, 128, torch.float32).to(dtype)
    for name in packed:
        actual = unpack_rows(packed["triton"], shape[1], implementation=name)
        torch.testing.assert_close(actual, expected, rtol=0.0 if dtype == torch.float32 else 1e-3, atol=0.0)


def test_packed_rows_are_quantised_alike_again(device):
    """The receiver quantises what it unpacked, and so multiplies the numbers that were sent."""
    rows = draw((64, 256), DTYPES[-1], device)
    again = quantize_rows(unpack_rows(pack_rows(rows), 256))
    first = quantize_rows(rows)
    assert torch.equal(again.values.float(), first.values.float())
    torch.testing.assert_close(again.scales, first.scales, rtol=0.01, atol=0.0)
