"""The kernels that add a forward's statistics to totals, against plain PyTorch in float64."""

import math

import pytest
import torch

from moe_kernels.routing import statistics
from moe_kernels.routing.statistics import RoutedForward, add_routing_statistics
from moe_kernels.runtime.triton import HAS_TRITON
from moe_layers.balance.routing_statistics import _add_in_plain_pytorch

from ...dtypes import DTYPES

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels")


def new_totals(num_experts, device):
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    sums[5] = math.inf
    return torch.zeros(2 * num_experts + 4, dtype=torch.int64, device=device), sums


def draw(device, num_tokens, num_experts, top_k, *, dtype=torch.float32, index_dtype=torch.int64, seed=0, **flags):
    """Return operands. Each of the flags `masked`, `capacity` and `loss` adds an optional one."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = (2 * torch.randn(num_tokens, num_experts, device=device, generator=generator)).to(dtype)
    keys = logits.sigmoid()
    operands = {"logits": logits, "keys": keys, "choices": keys.topk(top_k).indices.to(index_dtype)}
    operands |= {"kept": None, "token_mask": None, "aux_loss": None}
    if flags.get("masked"):
        operands["token_mask"] = torch.rand(num_tokens, device=device, generator=generator) < 0.7
    if flags.get("capacity"):
        dropped = torch.rand(num_tokens, top_k, device=device, generator=generator) < 0.3
        operands["kept"] = operands["choices"].masked_fill(dropped, -1)
    if flags.get("loss"):
        operands["aux_loss"] = torch.tensor(0.75, device=device)
    return RoutedForward(**operands)


def assert_same(calls, num_experts, num_parameters, device):
    actual, expected = new_totals(num_experts, device), new_totals(num_experts, device)
    for operands in calls:
        add_routing_statistics(*actual, operands, num_parameters)
        _add_in_plain_pytorch(*expected, operands, num_parameters)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-6, atol=1e-7)
    return actual


CASES = {
    "plain": {},
    "masked": {"masked": True},
    "capacity": {"capacity": True, "masked": True},
    "loss": {"loss": True},
    "int32": {"index_dtype": torch.int32},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(70, 6, 2), (1, 130, 5), (40, 7, 7)])
def test_equals_plain_pytorch(num_tokens, num_experts, top_k, case, device, monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_PROGRAMS", 3)
    monkeypatch.setattr(statistics, "_BLOCK", 128)  # several blocks of tokens for each program, and of programs
    calls = [draw(device, num_tokens, num_experts, top_k, seed=seed, **CASES[case]) for seed in range(2)]
    counts, sums = assert_same(calls, num_experts, num_experts - 1, device)
    assert counts[-4:-1].tolist() == [2, counts[-3].item(), 2 * num_tokens]
    assert sums[4] == (2 if case == "loss" else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_strides(dtype, device):
    logits, keys, *others = draw(device, 40, 12, 3, dtype=dtype)
    logits = torch.stack([logits, logits], 1)[:, 0]
    assert_same([RoutedForward(logits, keys.t().contiguous().t(), *others)], 12, 12, device)


def test_no_tokens_repeated_experts_and_infinite_keys(device):
    logits = torch.tensor([[3.0, 2.0, -math.inf, -2.0]], device=device)
    keys = torch.tensor([[1.0, -math.inf, -math.inf, -math.inf]], device=device)
    calls = [
        RoutedForward(logits, keys, torch.tensor([choices], device=device), None, None, None)
        for choices in ([0, 0, 1], [0, -1, -1], [-1, -1, -1], [0, 1, 2])
    ]
    counts, sums = assert_same([*calls[:2], draw(device, 0, 4, 3)], 4, 4, device)
    assert counts.tolist() == [3, 1, 0, 0, 3, 1, 0, 0, 3, 2, 2, 126 + 127 + 127]
    assert sums[5] == 0.0
    assert_same([draw(device, 0, 4, 3)], 4, 4, device)
    for call in calls:
        assert_same([call], 4, 4, device)


def test_padding_may_hold_nan(device):
    logits, keys, choices, *_ = draw(device, 9, 5, 2)
    mask = torch.arange(9, device=device) < 6
    logits[6:], keys[6:] = math.nan, math.nan
    counts, sums = assert_same([RoutedForward(logits, keys, choices, None, mask, None)], 5, 5, device)
    assert counts[-3] == 6 and sums.isfinite().all()


def test_two_launches_add_a_forward(device, monkeypatch):
    launches = []
    launch_kernel = statistics.launch_kernel
    monkeypatch.setattr(
        statistics, "launch_kernel", lambda *args, **given: launches.append(launch_kernel(*args, **given))
    )
    add_routing_statistics(*new_totals(6, device), draw(device, 70, 6, 2, masked=True, loss=True), 6)
    assert len(launches) == 2
