"""Packed float4, of which no golden case exists. `moe_kernels.quantization` has the tests of the arithmetic."""

import pytest
import torch

from moe_layers.checkpoint.files.stored_weights import dequantize_mxfp4


@pytest.mark.parametrize("as_uint8", [True, False])
def test_float4_by_hand(as_uint8, device):
    """Two rows of 64 numbers, whose second half has another scale."""
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 0], packed[1, 16] = 0x21, 0xF7  # 0.5 and 1; 6 and -6
    scales = torch.tensor([[128, 127], [127, 126]], dtype=torch.uint8)
    scales = scales if as_uint8 else scales.view(torch.float8_e8m0fnu)
    value = dequantize_mxfp4(packed.view(torch.int8).to(device), scales.to(device), "w")
    assert value.shape == (2, 64) and value.count_nonzero() == 4
    assert value[0, :2].tolist() == [1.0, 2.0] and value[1, 32:34].tolist() == [3.0, -3.0]
