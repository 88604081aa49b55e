"""Rows that start at multiples of 128 bytes."""

from functools import partial

import pytest
import torch

from moe_kernels import reference
from moe_kernels.experts import row_products
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.gemm import selection
from moe_kernels.runtime.row_layout import alignment, empty_aligned, empty_rows, has_aligned_rows
from moe_kernels.testing import check_accuracy

from ..experts.test_experts import NAMES, ODD, VARIANTS, draw_variant, flat_operands, run_variant, triton_experts


@pytest.mark.parametrize(
    ("num_columns", "dtype", "pitch"),
    [
        (520, torch.bfloat16, 576),
        (576, torch.bfloat16, 576),
        (504, torch.bfloat16, 504),  # under 1024 bytes
        (260, torch.float32, 288),
        (1040, torch.uint8, 1152),
        (520, None, 576),
    ],
)
def test_rows_start_at_multiples_of_128_bytes(num_columns, dtype, pitch):
    rows = empty_rows(torch.empty(0, dtype=torch.float16), 3, num_columns, dtype=dtype)
    assert rows.shape == (3, num_columns) and rows.stride() == (pitch, 1)
    assert rows.dtype == (dtype or torch.float16)


def test_alignment():
    assert [alignment(*sizes) for sizes in ((1544, 1552), (64, 96), (12, 0), (7, 16))] == [8, 16, 4, 1]


@pytest.mark.parametrize("variant", ["plain", "gpt_oss", "relu_bias", "weight_on_input_bias"])
def test_experts_read_no_padding(variant, device, monkeypatch):
    """The padding is NaN."""
    monkeypatch.setattr("moe_kernels.runtime.row_layout._LEAST_BYTES", 52)  # the bytes of the shortest rows, [R, F]
    check_accuracy(
        partial(run_variant, variant=variant),
        partial(run_variant, variant=variant, op=reference.fused_experts),
        partial(draw_variant, ODD, variant, torch.float32, device),
        NAMES if VARIANTS[variant].get("bias") else NAMES[:5],
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck_of_padded_rows(recompute, device, monkeypatch):
    monkeypatch.setattr("moe_kernels.runtime.row_layout._LEAST_BYTES", 52)  # the bytes of the shortest rows, [R, F]
    tokens, weights, experts, *matrices = draw_variant(ODD, "plain", torch.float32, device)
    permutation = reference.sort_by_expert(experts, ODD.num_experts)
    leaves = [t.requires_grad_() for t in (tokens, weights, *matrices)]
    operands = flat_operands(*leaves, permutation, recompute=recompute)
    torch.library.opcheck(fused_experts_op.overload, operands)


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_that_the_copy_engine_does_not_take(transposed, device, monkeypatch):
    """GEMMs of many rows per expert read an aligned copy. Gradients have the strides of the weights all the same."""
    monkeypatch.setattr(row_products, "is_worth_aligning", lambda matrices, *_: not has_aligned_rows(matrices))
    multiplied = []
    run_product = selection.run_product
    monkeypatch.setattr(selection, "run_product", lambda args: (multiplied.append(args.B), run_product(args)))

    def stored(weight):
        return weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight

    def run(tokens, weights, experts, w_up, w_down, op=triton_experts):
        return run_variant(tokens, weights, experts, stored(w_up), stored(w_down), variant="relu_squared", op=op)

    draw = partial(draw_variant, ODD, "relu_squared", torch.float16, device)
    check_accuracy(run, partial(run, op=reference.fused_experts), draw, NAMES[:5])
    assert multiplied and all(has_aligned_rows(b) for b in multiplied)
    tokens, weights, experts, w_up, w_down = draw(0)
    w_up, w_down = stored(w_up).requires_grad_(), stored(w_down).requires_grad_()
    out = run_variant(tokens, weights, experts, w_up, w_down, variant="relu_squared")
    gradients = torch.autograd.grad(out.sum(), (w_up, w_down))
    assert [g.stride() for g in gradients] == [w_up.stride(), w_down.stride()]


def test_aligned_copies_keep_the_contiguous_axis():
    matrices = torch.randn(2, 5, 70)[..., :69].half()
    assert not has_aligned_rows(matrices)
    for given in (matrices, matrices.transpose(1, 2)):
        copy = empty_aligned(given, given.device)
        assert has_aligned_rows(copy) and copy.shape == given.shape
        assert [stride == 1 for stride in copy.stride()] == [stride == 1 for stride in given.stride()]
