"""Rows that start at multiples of 128 bytes."""

from functools import partial

import pytest
import torch

from moe_kernels import reference
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.runtime.memory import alignment, empty_rows
from moe_kernels.testing import Case, check_accuracy

from .test_experts import VARIANTS, draw_variant, flat_operands, run_variant

ODD = Case(33, 21, 13, 4, 2)


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
    rows = empty_rows(torch.empty(0, dtype=torch.float16), 3, num_columns, dtype)
    assert rows.shape == (3, num_columns) and rows.stride() == (pitch, 1)
    assert rows.dtype == (dtype or torch.float16)


def test_alignment():
    assert [alignment(*sizes) for sizes in ((1544, 1552), (64, 96), (12, 0), (7, 16))] == [8, 16, 4, 1]


@pytest.mark.parametrize("variant", ["plain", "gpt_oss", "relu_bias", "weight_on_input_bias"])
def test_experts_read_no_padding(variant, device, monkeypatch):
    """The padding is NaN."""
    monkeypatch.setattr("moe_kernels.runtime.memory._LEAST_BYTES", 52)  # of the shortest rows, [R, F]
    names = ("out", "dtokens", "dweights", "dw_up", "dw_down", "db_up", "db_down")
    check_accuracy(
        partial(run_variant, variant=variant),
        partial(run_variant, variant=variant, op=reference.fused_experts),
        partial(draw_variant, ODD, variant, torch.float32, device),
        names if VARIANTS[variant].get("bias") else names[:5],
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck_of_padded_rows(recompute, device, monkeypatch):
    monkeypatch.setattr("moe_kernels.runtime.memory._LEAST_BYTES", 52)  # of the shortest rows, [R, F]
    tokens, weights, experts, *matrices = draw_variant(ODD, "plain", torch.float32, device)
    permutation = reference.sort_by_expert(experts, ODD.num_experts)
    leaves = [t.requires_grad_() for t in (tokens, weights, *matrices)]
    torch.library.opcheck(
        fused_experts_op.overload, flat_operands(*leaves, None, None, permutation, recompute=recompute)
    )
