"""Registered ops: what sees their calls, in forward and in backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moe_kernels.experts.fused import fused_experts
from moe_kernels.runtime import registered_ops
from moe_kernels.runtime.replay import Replayed
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.testing import Case, make_inputs, make_permutation

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no ops without Triton")

BACKWARD_OPS = ("experts_hidden_gradients", "experts_down_gradients", "experts_up_gradients")


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


def forward(leaves, permutation):
    tokens, topk_weights, *weights = leaves
    return fused_experts(tokens, topk_weights, permutation, *weights, implementation="triton")


@pytest.fixture
def direct(monkeypatch):
    """Return a list that gets the name of each op whose function runs without the dispatcher."""
    calls, dispatched = [], []
    run, below = Replayed.run, registered_ops.Op._below_autograd
    monkeypatch.setattr(
        registered_ops.Op, "_below_autograd", lambda op, *args: dispatched.append(op.name) or below(op, *args)
    )

    def note(replayed, *args):
        if dispatched[-1:] == [replayed.name]:
            dispatched.pop()
        else:
            calls.append(replayed.name)
        return run(replayed, *args)

    monkeypatch.setattr(Replayed, "run", note)
    return calls


def test_direct_calls_give_the_same_gradients(device, direct):
    leaves, permutation = leaves_of(device)
    out, dout = forward(leaves, permutation), torch.randn_like(leaves[0])
    fast = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert tuple(direct) == ("fused_experts", "fused_experts_gradients")
    direct.clear()
    with Seen() as seen:
        slow = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert direct == [] and tuple(seen.names) == BACKWARD_OPS
    # The values of this gradient are not in its memory: only the dispatcher knows that they are to be negated.
    negated = torch.autograd.grad(out, leaves, torch._neg_view(-dout))
    assert direct == list(BACKWARD_OPS[2:])  # reads dout no more
    for a, b, c in zip(fast, slow, negated, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


class Wrapped(torch.Tensor):
    """A wrapper of another tensor, like the subclasses that tracers unwrap. Ops on it return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values):
        self.values_ = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map_only(cls, lambda t: t.values_, args), **(kwargs or {}))


def test_weights_of_a_subclass_reach_backward_through_the_dispatcher(device):
    (tokens, topk_weights, *weights), permutation = leaves_of(device)
    weights = [weight.detach() for weight in weights]
    got, want = (
        torch.autograd.grad(forward((tokens, topk_weights, *given), permutation).sum(), (tokens, topk_weights))
        for given in (map(Wrapped, weights), weights)
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_hooks_on_saved_tensors_may_run_the_op(device):
    """In a checkpointed region, the forward runs again inside the backward, and needs its own graph."""
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
    assert graphs[0] is not None


def test_hooks_on_saved_tensors_may_change_strides(device):
    leaves, permutation = leaves_of(device)
    expected = torch.autograd.grad(forward(leaves, permutation).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.mT.contiguous() if t.dim() > 1 else t, lambda t: t.mT if t.dim() > 1 else t
    ):
        out = forward(leaves, permutation)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), expected))


def test_a_profiler_sees_the_ops_of_backward(device, direct):
    leaves, permutation = leaves_of(device)
    out = forward(leaves, permutation)
    direct.clear()
    # PyTorch 2.11 warns without `acc_events`.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.autograd.grad(out.sum(), leaves)
    names = {event.name for event in profiler.events()}
    assert direct == [] and {f"moe_kernels::{name}" for name in BACKWARD_OPS} <= names
