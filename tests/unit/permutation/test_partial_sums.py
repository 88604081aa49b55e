import pytest
import torch

from moe_kernels.permutation.partial_sums import sum_shares
from moe_kernels.testing import assert_accurate

from ...dtypes import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d_model", [1, 37, 1024, 1100])
@pytest.mark.parametrize(("num_shares", "rank"), [(1, 0), (2, 1), (5, 0), (5, 3)])
def test_sum(num_shares, rank, d_model, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    shares = torch.randn(num_shares, 7, d_model, device=device, generator=generator).to(dtype)
    received = shares.clone()
    received[rank] = torch.nan  # must not be read
    out = torch.full((7, d_model), torch.nan, dtype=dtype, device=device)
    sum_shares(shares[rank].contiguous(), received, rank, out)
    assert_accurate(out, shares.sum(0), shares.double().sum(0))
    wide = torch.zeros(7, 3 * d_model, dtype=dtype, device=device)
    sum_shares(shares[rank].contiguous(), received, rank, wide[:, d_model : 2 * d_model])
    assert torch.equal(wide[:, d_model : 2 * d_model], out)
    assert not wide[:, :d_model].any() and not wide[:, 2 * d_model :].any()


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 5, 0)])
def test_nothing_to_sum(shape, device):
    received, memory = torch.ones(shape, device=device), torch.zeros(5, 5, device=device)
    sum_shares(received[0], received, 0, memory[: shape[1], : shape[2]])
    assert not memory.any()


def test_rounds_once(device):
    """The sum adds half a unit in the last place twice. Rounding at each step would lose both."""
    values = torch.tensor([1.0, 2**-11, 2**-11], device=device).half()
    out = torch.empty(1, 1, dtype=torch.float16, device=device)
    sum_shares(values[:1].view(1, 1), values.view(3, 1, 1), 0, out)
    assert out.item() == 1 + 2**-10


def test_counts_as_a_change(device):
    """The write counts as a change of tensors that autograd may have saved."""
    out = torch.zeros(2, 8, device=device)
    before = out._version
    sum_shares(torch.ones(2, 4, device=device), torch.ones(1, 2, 4, device=device), 0, out.detach()[:, 4:])
    assert out._version > before
    assert out.sum() == 8


def test_errors(device):
    own, received = torch.zeros(3, 4, device=device), torch.zeros(2, 3, 4, device=device)
    out = torch.zeros(3, 8, device=device)
    for operands, message in (
        ((own, received, 0, out), "sum_shares"),
        ((own, received.half(), 0, own), "sum_shares: operands must have one floating-point dtype"),
        ((own, received, 2, own), r"sum_shares: rank must be in \[0, 2\), got 2"),
        ((own, received, -1, own), r"sum_shares: rank must be in \[0, 2\), got -1"),
        ((own, received.to("meta"), 0, own), "sum_shares: all tensors must be on one device"),
        ((out[:, :4], received, 0, own), "sum_shares: own, received and each row of out must be contiguous, got"),
        ((own, out[:, :4].expand(2, 3, 4), 0, own), "sum_shares: own, received and each row of out must be contiguous"),
        ((own, received, 0, out[:, ::2]), "sum_shares: own, received and each row of out must be contiguous, got"),
    ):
        with pytest.raises(ValueError, match=message):
            sum_shares(*operands)
    with pytest.raises(NotImplementedError, match=r"sum_shares: .* do not compute in torch\.float64"):
        sum_shares(own.double(), received.double(), 0, own.double())
