"""The account of a step misses none of its GEMMs, whether a launch is the first of its kind or like an earlier one."""

import pytest
import torch

from benchmarks.account import record_gemms
from moe_kernels._triton import HAS_TRITON
from moe_layers import MoEFeedForward


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_every_gemm_of_a_step_is_recorded(device):
    layer = MoEFeedForward(d_model=32, d_ff=16, num_experts=4, top_k=2, implementation="triton", device=device)
    x = torch.randn(10, 32, device=device, requires_grad=True)

    def step():
        layer(x).sum().backward()

    first, again = record_gemms(step), record_gemms(step)
    assert first == again
    # Forward, the gradients of the rows, and those of the weights: d_model is 32, two halves of d_ff are as wide.
    sizes = [(20, 32, 32), (20, 16, 32), (20, 32, 16), (20, 32, 32), (20, 32, 16), (20, 32, 32)]
    assert sorted(gemm[2:] for gemm in first) == sorted(sizes)
