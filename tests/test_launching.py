"""Launches through what earlier ones were compiled to."""

import pytest
import torch

from moe_kernels import fused_experts
from moe_kernels._triton import HAS_TRITON
from moe_kernels.launching import Launch, static_properties
from moe_kernels.permutation import _spread_kernel, launch_spread
from moe_kernels.testing import CASES, make_inputs, make_permutation

if HAS_TRITON:
    from triton.runtime.jit import JITFunction


def spread_launch(tokens, weights, index, rows, d_model=32, top_k=2):
    options = {"TOP_K": top_k, "BLOCK_D": 32}
    return Launch(_spread_kernel, (4, 1), (tokens, tokens.stride(), weights, index, rows, d_model), options)


def test_static_properties_tell_apart_what_triton_compiles_for():
    tokens, rows = torch.zeros(4, 32), torch.zeros(8, 32)
    weights, index = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    plain = static_properties(spread_launch(tokens, weights, index, rows))
    others = {
        "dtype": spread_launch(tokens.half(), weights, index, rows),
        "alignment": spread_launch(torch.zeros(129)[1:].view(4, 32), weights, index, rows),
        "a stride of 1": spread_launch(torch.zeros(32, 4).t(), weights, index, rows),
        "a stride's divisors": spread_launch(torch.zeros(4, 33)[:, :32], weights, index, rows),
        "a stride of 64 bits": spread_launch(tokens.as_strided((1, 32), (2**31, 1)), weights, index, rows),
        "an absent operand": spread_launch(tokens, None, index, rows),
        "a size's divisors": spread_launch(tokens, weights, index, rows, d_model=33),
        "a constant": spread_launch(tokens, weights, index, rows, top_k=1),
    }
    for what, launch in others.items():
        assert static_properties(launch) != plain, what
    alike = spread_launch(torch.ones(7, 32), weights, index, rows)
    assert static_properties(alike) == plain and hash(static_properties(alike)) == hash(plain)


@pytest.mark.gpu
def test_a_launch_like_an_earlier_one_spares_the_jit(device, monkeypatch):
    inputs = make_inputs(CASES["ordinary"], torch.bfloat16, device)
    weights, permutation = make_permutation(inputs, CASES["ordinary"].top_k)
    operands = (inputs.tokens, weights, permutation, inputs.w_up, inputs.w_down)
    expected = fused_experts(*operands)
    monkeypatch.setattr(JITFunction, "run", None)
    assert torch.equal(fused_experts(*operands), expected)


@pytest.mark.gpu
def test_other_properties_get_a_kernel_of_their_own(device):
    """Each combination after the others, so that a kernel kept for one would show in the next."""
    index = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    weights = torch.rand(4, 2, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        for shift, columns in ((0, 32), (1, 32), (0, 33), (1, 33)):
            tokens = torch.randn(shift + 4 * columns, device=device).to(dtype)[shift:].view(4, columns)
            for scale in (None, weights):
                rows = tokens.new_empty(8, columns)
                launch_spread(tokens, scale, index, rows)
                factors = weights.new_ones(4, 2, 1) if scale is None else scale[:, :, None]
                assert torch.equal(rows, (tokens[:, None].float() * factors).to(dtype).view(8, columns))
