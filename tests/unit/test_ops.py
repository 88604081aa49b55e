"""Registered ops: what sees their calls, in forward and in backward."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels.experts.fused import fused_experts
from moe_kernels.experts.fused_op import fused_experts_op
from moe_kernels.runtime import ops
from moe_kernels.runtime.packing import places_of
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.testing import Case, make_inputs, make_permutation

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no ops without Triton")

BACKWARD_OPS = (
    "experts_hidden_gradients",
    "experts_w_down_gradient",
    "experts_tokens_gradient",
    "experts_w_up_gradient",
)


class Seen(TorchDispatchMode):
    """Records the ops of this package that the dispatcher calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_kernels":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def leaves_of(device):
    inputs = make_inputs(Case(6, 16, 8, 2, 1), torch.float32, device)
    topk_weights, permutation = make_permutation(inputs, 1)
    leaves = [t.detach().requires_grad_() for t in (inputs.tokens, topk_weights, inputs.w_up, inputs.w_down)]
    return leaves, permutation


def forward(leaves, permutation, implementation="triton"):
    tokens, topk_weights, *weights = leaves
    return fused_experts(tokens, topk_weights, permutation, *weights, implementation=implementation)


@pytest.fixture
def direct(monkeypatch):
    """Return a list that gets, for every backward, whether its ops are called directly."""
    calls = []
    unseen = ops.Op._unseen_backward
    monkeypatch.setattr(ops.Op, "_unseen_backward", lambda op, *args: calls.append(op._name) or unseen(op, *args))
    return calls


def test_direct_calls_give_the_same_gradients(device, direct):
    leaves, permutation = leaves_of(device)
    out, dout = forward(leaves, permutation), torch.randn_like(leaves[0])
    fast = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert direct == ["fused_experts"]
    with Seen() as seen:
        slow = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert direct == ["fused_experts"] and tuple(seen.names) == BACKWARD_OPS
    # The values of this gradient are not in its memory: only the dispatcher knows that they are to be negated.
    negated = torch.autograd.grad(out, leaves, torch._neg_view(-dout))
    assert direct == ["fused_experts"]
    for a, b, c in zip(fast, slow, negated, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_hooks_on_saved_tensors_may_run_the_op(device, direct):
    """As in a checkpointed region, whose forward runs again inside the backward, and needs its own graph."""
    leaves, permutation = leaves_of(device)
    graphs = []

    def recompute(saved):
        if not graphs:
            with torch.enable_grad():
                graphs.append(forward(leaves, permutation).grad_fn)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, recompute):
        out = forward(leaves, permutation)
    torch.autograd.grad(out.sum(), leaves)
    assert direct == [] and graphs[0] is not None


def test_a_profiler_sees_the_ops_of_backward(device, direct):
    leaves, permutation = leaves_of(device)
    out = forward(leaves, permutation)
    # PyTorch 2.11 warns without `acc_events`.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.autograd.grad(out.sum(), leaves)
    names = {event.name for event in profiler.events()}
    assert direct == [] and {f"moe_kernels::{name}" for name in BACKWARD_OPS} <= names


def test_an_error_in_backward_ends_the_direct_calls(device, direct, monkeypatch):
    leaves, permutation = leaves_of(device)

    def fail(ctx, *gradients):
        raise RuntimeError("stop")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stop"):
        patch.setattr(fused_experts_op, "_backward", fail)
        torch.autograd.grad(forward(leaves, permutation).sum(), leaves)
    with Seen() as seen:
        forward(leaves, permutation)
    assert direct == ["fused_experts"] and seen.names == ["fused_experts"]


def test_other_threads_are_not_in_this_backward(monkeypatch):
    seen = []
    monkeypatch.setattr(ops._thread, "in_unseen_backward", True)
    thread = threading.Thread(target=lambda: seen.append(ops._thread.in_unseen_backward))
    thread.start()
    thread.join()
    assert seen == [False]


def test_places_of_tensors():
    tensor, parameter = torch.ones(1), torch.nn.Parameter(torch.ones(1))
    places, read, are_plain = places_of((None, tensor, 2.0, parameter))
    assert places == (1, 3) and are_plain
    first, second = read((None, tensor, 2.0, parameter))
    assert first is tensor and second is parameter
    assert places_of((1, tensor)).read((1, tensor)) == (tensor,) and places_of(()).read(()) == ()
    assert not places_of((tensor, [1])).are_plain and not places_of((torch.nn.Buffer(tensor), object())).are_plain

    class Subclass(torch.Tensor):
        pass

    special = tensor.as_subclass(Subclass)
    assert places_of((special,)).places == (0,) and not places_of((special,)).are_plain
