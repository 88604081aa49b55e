"""The memory through which the overlapped dispatcher copies between GPUs, used by calls in turn."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from moe_layers.parallel.symmetric_memory import CollectiveTransport, PeerCopies

from ..processes import eight_gpus, make_test
from .expert_parallel_cases import D_MODEL, assert_all_close, draw
from .test_overlapped import assert_equal, gradients_of, make_overlapped, own_tokens

pytestmark = pytest.mark.gpu


def copies_equal_collectives(device):
    """Test rows that are no multiples of 16 bytes, more tokens than before, for which the memory grows, and one token
    with one weight."""
    for num_tokens, d_model, top_k in ((4, D_MODEL, 3), (64, D_MODEL, 3), (7, 13, 3), (300, 37, 3), (1, D_MODEL, 1)):
        layer, other = (make_overlapped(device, bias=True, d_model=d_model, top_k=top_k) for _ in "ab")
        other.dispatcher.transport = lambda ranks, device: CollectiveTransport(ranks)
        x = draw(device, num_tokens, seed=distributed.get_rank(), width=d_model).float().requires_grad_()
        expected = gradients_of(other, x, other.parameters())
        for _ in range(3):
            assert_all_close(gradients_of(layer, x, layer.parameters()), expected)


def copies_repeat_bit_by_bit(device):
    layer, other = (make_overlapped(device, bias=True, d_model=128, d_ff=256, seed=seed) for seed in range(2))
    x = draw(device, 1024, seed=distributed.get_rank(), width=128).float().requires_grad_()
    expected = gradients_of(layer, x, layer.parameters())
    for _ in range(10):
        gradients_of(other, x, other.parameters())  # other calls use the same memory in between
        assert_equal(gradients_of(layer, x, layer.parameters()), expected)


def memory_is_free_after_a_recomputation(device):
    """Nothing waits for a recomputation's outputs; a late rank may still read memory that backward would overwrite."""
    layer, x = make_overlapped(device), own_tokens(device).requires_grad_()
    expected = gradients_of(layer, x, layer.parameters())
    copies = PeerCopies.of(layer.dispatcher.ranks, device)
    assert not copies.under_way
    region = partial(checkpoint, layer, use_reentrant=False)
    assert_equal(gradients_of(region, x, layer.parameters()), expected)  # compiles
    others = copies.others()

    def others_later():
        if distributed.get_rank() == 1:
            torch.cuda._sleep(10**8)  # cycles, on the copy stream
        return others

    with mock.patch.object(copies, "others", others_later):
        assert_equal(gradients_of(region, x, layer.parameters()), expected)


def a_late_process_finds_what_was_sent(device):
    """Faster ranks must not overwrite what a late rank has not read: every sum of one rank is late."""
    layers = nn.Sequential(*(make_overlapped(device, seed=seed) for seed in range(2)))
    x = own_tokens(device).requires_grad_()
    expected = gradients_of(layers, x, layers.parameters())
    copies = PeerCopies.of(layers[0].dispatcher.ranks, device)
    wait = copies.wait

    def wait_later(event):
        if distributed.get_rank() == 1:
            torch.cuda._sleep(2 * 10**7)  # cycles
        wait(event)

    with mock.patch.object(copies, "wait", wait_later):
        for _ in range(3):
            assert_equal(gradients_of(layers, x, layers.parameters()), expected)


def a_call_on_another_stream_waits(device):
    """The call waits before reusing memory that the previous call may still read: here its final sum is late."""
    layers = [make_overlapped(device, shared_d_ff=8, seed=seed) for seed in range(2)]
    x = own_tokens(device)
    with torch.no_grad():
        expected = [layer(x) for layer in layers]
        layers[0].shared_expert.register_forward_hook(lambda *_: torch.cuda._sleep(2 * 10**8))  # cycles
        outputs, streams = [], [torch.cuda.Stream() for _ in layers]
        torch.cuda.synchronize()
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(layer(x))
        torch.cuda.synchronize()
    assert_equal(outputs, expected)


def another_device_may_be_current(device):
    """Another device may be current, and stays current."""
    results = []
    for current in (device, torch.device("cuda", (device.index + 1) % torch.cuda.device_count())):
        layer = make_overlapped(device, d_model=48)
        x = draw(device, 512, seed=distributed.get_rank(), width=48).float().requires_grad_()
        with torch.cuda.device(current):
            results.append(gradients_of(layer, x, layer.parameters()))
            assert torch.cuda.current_device() == current.index
    assert_equal(*results)


def lost_outputs_are_an_error(device):
    layers = [make_overlapped(device, shared_d_ff=8, seed=seed) for seed in range(2)]
    x = own_tokens(device)
    expected = layers[1](x)

    def call_another(*_):
        layers[1](x)

    hook = layers[0].shared_expert.register_forward_hook(call_another)
    with pytest.raises(RuntimeError, match="outputs in flight were lost, because another layer"):
        layers[0](x)
    hook.remove()
    assert_equal([layers[1](x)], [expected])


CASES = [
    copies_equal_collectives,
    copies_repeat_bit_by_bit,
    memory_is_free_after_a_recomputation,
    a_late_process_finds_what_was_sent,
    a_call_on_another_stream_waits,
    another_device_may_be_current,
    lost_outputs_are_an_error,
]


test_two_gpus = make_test(CASES, 2)
test_four_gpus = make_test(CASES, 4)
test_eight_gpus = eight_gpus(make_test(CASES, 8))
