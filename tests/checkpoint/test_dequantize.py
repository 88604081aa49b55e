import pytest
import torch

from moe_layers.checkpoint.files.dequantize import dequantize_float4, dequantize_float8, dequantize_mxfp4

from .golden import Golden


def test_mxfp4_equals_the_golden_tensors_bit_for_bit(device):
    golden = Golden("gpt_oss_mxfp4")
    model, expected = golden.tensors("model"), golden.tensors("dequant")
    assert len(expected) == 2
    for name, tensor in expected.items():
        blocks, scales = model[f"{name}_blocks"].to(device), model[f"{name}_scales"].to(device)
        value = dequantize_mxfp4(blocks, scales, name)  # [E, out, in]
        assert torch.equal(value.mT.cpu(), tensor)


def test_mxfp4_by_hand(device):
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8, device=device)
    blocks[0, 0, 0] = 0x21  # low nibble 1 is the even element: 0.5; high nibble 2: 1.0
    blocks[0, 0, 1] = 0xF7  # 6 and -6
    value = dequantize_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8, device=device), "w")
    assert value[0, :4].tolist() == [1.0, 2.0, 12.0, -12.0] and value.shape == (1, 32)
    smallest = dequantize_mxfp4(blocks, torch.tensor([[0]], dtype=torch.uint8, device=device), "w")
    assert smallest[0, :2].tolist() == [2.0**-128, 2.0**-127]


@pytest.mark.parametrize("as_uint8", [True, False])
def test_float4_by_hand(as_uint8, device):
    """Two rows of 64 numbers, whose second half has another scale."""
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 0], packed[1, 16] = 0x21, 0xF7  # 0.5 and 1; 6 and -6
    scales = torch.tensor([[128, 127], [127, 126]], dtype=torch.uint8)
    scales = scales if as_uint8 else scales.view(torch.float8_e8m0fnu)
    value = dequantize_float4(packed.view(torch.int8).to(device), scales.to(device), "w")
    assert value.shape == (2, 64) and value.count_nonzero() == 4
    assert value[0, :2].tolist() == [1.0, 2.0] and value[1, 32:34].tolist() == [3.0, -3.0]


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (200, 130), (127, 257), (3, 129, 64)], ids=str)
def test_float8_blocks_whose_edges_are_no_multiples(shape, device):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(shape, generator=generator).mul(50).to(torch.float8_e4m3fn)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), generator=generator)
    expected = torch.empty(shape)
    for *lead, i, j in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        expected[(*lead, i, j)] = q[(*lead, i, j)].float() * scale[(*lead, i // 128, j // 128)]
    value = dequantize_float8(q.to(device), scale.to(device), (128, 128), "w")
    assert torch.equal(value.cpu(), expected)


@pytest.mark.parametrize("as_uint8", [True, False])
def test_float8_with_power_of_two_scales(as_uint8, device):
    stored = torch.tensor([[130]], dtype=torch.uint8)
    scale = stored if as_uint8 else stored.view(torch.float8_e8m0fnu)
    q = torch.ones(2, 3).to(torch.float8_e4m3fn)
    assert (dequantize_float8(q.to(device), scale.to(device), (128, 128), "w") == 8).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_float8_scales_must_be_finite(bad, device):
    q = torch.ones(2, 300, device=device).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, bad, 1.0]], device=device)
    with pytest.raises(ValueError, match=rf"scales of model\.w must be finite, got {bad}"):
        dequantize_float8(q, scale, (128, 128), "model.w")


def test_mxfp4_scales_must_not_be_nan(device):
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"scales of model\.w must be finite, got the NaN of e8m0"):
        dequantize_mxfp4(blocks, torch.tensor([[255]], dtype=torch.uint8, device=device), "model.w")


def test_all_powers_of_two(device):
    blocks = torch.full((255, 1, 16), 0x22, dtype=torch.uint8, device=device)  # ones
    scales = torch.arange(255, dtype=torch.uint8, device=device)[:, None]
    value = dequantize_mxfp4(blocks, scales, "w")
    expected = torch.pow(2.0, torch.arange(255, dtype=torch.float64) - 127).float()
    assert torch.equal(value.cpu(), expected[:, None].expand(255, 32))
