"""Behaviour that all ops share: choice of the implementation, and PyTorch's modes and transforms."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from moe_kernels import (
    GroupedProblem,
    apply_activation,
    batched_gemm,
    combine,
    grouped_gemm,
    grouped_gemm_list,
    grouped_gemm_wgrad,
    jagged_gemm,
    linear_routing,
    reference,
    topk_routing,
)
from moe_kernels.experts.fused import compute_experts
from moe_kernels.gemm.batch_invariance import invariant_linear
from moe_kernels.types import ExpertWeights

R, N = 24, 32
SLOTS = [[t % 3, (t + 1) % 3] for t in range(R)]


def offsets_of(rows, dtype=torch.int32):
    return torch.tensor([5, len(rows)], dtype=dtype, device=rows.device)


def experts(rows, matrices, weights, **options):
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=rows.device)
    w_down = matrices[:, :, : N // 2]
    permutation = reference.sort_by_expert(slots, 3)
    return compute_experts(rows, weights, permutation, ExpertWeights(matrices, w_down), **options)


# Operands: rows [R, N], matrices [3, N, N] and weights [R, 2].
OPS = {
    "grouped_gemm": lambda r, m, w, **o: grouped_gemm(r, m[:2], offsets_of(r), **o),
    "gated grouped_gemm": lambda r, m, w, **o: grouped_gemm(r, m[:2], offsets_of(r), activation="swiglu", **o),
    "grouped_gemm_wgrad": lambda r, m, w, **o: grouped_gemm_wgrad(r, r.cos(), offsets_of(r), **o),
    "batched_gemm": lambda r, m, w, **o: batched_gemm(r, m, **o),
    "grouped_gemm_list": lambda r, m, w, **o: grouped_gemm_list([r], [m[0]], **o)[0],
    "jagged_gemm": lambda r, m, w, **o: jagged_gemm(r, m[0], functional.pad(offsets_of(r), (1, 0)), **o),
    "invariant_linear": lambda r, m, w, **o: invariant_linear(r, m[0], **o),
    "fused_experts": experts,
    "invariant fused_experts": partial(experts, batch_invariant=True),
    "linear_routing": lambda r, m, w, **o: linear_routing(r, m[0], 2, **o).topk_weights,
    "topk_routing": lambda r, m, w, **o: topk_routing(r, 2, **o).topk_weights,
    "apply_activation": lambda r, m, w, **o: apply_activation(r, **o),
    "combine": lambda r, m, w, **o: combine(r, w[: R // 2], torch.arange(R, device=r.device).int().view(-1, 2), **o),
}
PRODUCTS = [name for name in OPS if name not in ("topk_routing", "apply_activation", "combine")]
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["triton", "reference"])


@pytest.fixture
def operands(device):
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=generator)
    return draw(R, N), draw(3, N, N), draw(R, 2).softmax(1)


def run_with_grads(op, operands, *, forward=False, backward=False):
    """Run forward and backward, each with or without autocast."""
    autocast = partial(torch.autocast, operands[0].device.type, torch.bfloat16)
    leaves = [operand.detach().requires_grad_() for operand in operands]
    with autocast(enabled=forward):
        out = op(*leaves)
    loss = out.cos().sum()
    with autocast(enabled=backward):
        return out, *torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize(("implementation", "backward"), [("triton", False), ("triton", True), ("reference", False)])
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_no_bit(op, implementation, backward, operands):
    """Ops compute in their operands' dtype; callers convert operands for another dtype.

    The reference's backward is PyTorch's own, so autocast must be off around it.
    """
    op = partial(OPS[op], implementation=implementation)
    under_autocast = run_with_grads(op, operands, forward=True, backward=backward)
    for actual, expected in zip(under_autocast, run_with_grads(op, operands), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


@IMPLEMENTATIONS
def test_autocast_changes_no_bit_of_a_prepared_problem(implementation, operands):
    rows, matrices, _ = operands
    problem = GroupedProblem.from_lists([rows], [matrices[0]], implementation=implementation)
    expected = problem.run()[0].clone()
    with torch.autocast(rows.device.type, torch.bfloat16):
        assert torch.equal(problem.run()[0], expected)


def test_autocast_of_a_device_without_it():
    rows, matrix = torch.empty(4, 8, device="meta"), torch.empty(8, 8, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert batched_gemm(rows, matrix, implementation="reference").dtype == torch.float32


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", OPS)
def test_transforms_give_the_gradient_or_name_the_reference(op, implementation, operands):
    """torch.func differentiates the reference. Kernels have gradients only from autograd."""
    rows, *others = operands
    op = partial(OPS[op], implementation=implementation)

    def loss(rows):
        return op(rows, *others).cos().sum()

    for gradient in (torch.func.grad(loss), lambda rows: torch.func.vjp(loss, rows)[1](torch.ones_like(rows[0, 0]))[0]):
        if implementation == "reference":
            expected = torch.autograd.grad(loss(leaf := rows.clone().requires_grad_()), leaf)[0]
            torch.testing.assert_close(gradient(rows), expected, rtol=1e-4, atol=1e-3)
        else:
            with pytest.raises(NotImplementedError, match=r"torch\.func.*implementation='reference'"):
                gradient(rows)


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", OPS)
def test_several_gradients_at_once_are_computed_or_name_the_reference(op, implementation, operands):
    rows, *others = operands
    rows = rows.clone().requires_grad_()
    out = OPS[op](rows, *others, implementation=implementation)
    douts = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    if implementation == "reference":
        (gradients,) = torch.autograd.grad(out, rows, douts, is_grads_batched=True)
        torch.testing.assert_close(gradients[1], 2 * gradients[0])
    else:
        with pytest.raises(NotImplementedError, match="one gradient at a time; omit is_grads_batched"):
            torch.autograd.grad(out, rows, douts, is_grads_batched=True)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("op", OPS)
def test_references_of_tensors_without_data(op, kind, operands):
    """Kernels are registered ops. `test_fakes.py` compares those with their fakes."""
    device = "meta" if kind == "meta" else operands[0].device
    with FakeTensorMode() if kind == "fake" else nullcontext():
        leaves = [torch.empty(operand.shape, device=device, requires_grad=True) for operand in operands]
        out = OPS[op](*leaves, implementation="reference")
        gradients = torch.autograd.grad(out.cos().sum(), leaves, materialize_grads=True)
    assert out.shape == OPS[op](*operands, implementation="reference").shape
    assert [gradient.shape for gradient in gradients] == [operand.shape for operand in operands]


@pytest.mark.parametrize("op", OPS)
def test_references_in_traced_graphs(op, operands):
    """A graph computes another input's groups, not those of its example."""

    class Module(torch.nn.Module):
        def forward(self, *operands):
            return OPS[op](*operands, implementation="reference")

    others = [operand.flip(0).contiguous() for operand in operands]
    expected = Module()(*others)
    graphs = [torch.export.export(Module(), tuple(operands), strict=False).module(), make_fx(Module())(*operands)]
    for graph in graphs:
        torch.testing.assert_close(graph(*others), expected)


@pytest.mark.parametrize("op", ["grouped_gemm", "gated grouped_gemm", "grouped_gemm_wgrad", "jagged_gemm"])
def test_compiled_references(op, operands):
    op = partial(OPS[op], implementation="reference")
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run_with_grads(compiled, operands), run_with_grads(op, operands))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace. is deprecated")
@IMPLEMENTATIONS
@pytest.mark.parametrize("op", OPS)
def test_the_tracer_of_torchscript_is_refused(op, implementation, operands, monkeypatch):
    """This tracer would record the example's groups, and see no kernel."""
    permutation = reference.sort_by_expert(torch.tensor(SLOTS, dtype=torch.int32, device=operands[0].device), 3)
    monkeypatch.setattr(reference, "sort_by_expert", lambda *_: permutation)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace .*use torch\.compile or torch\.export"):
        torch.jit.trace(lambda *operands: OPS[op](*operands, implementation=implementation), tuple(operands))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_vmap_of_kernels(needs_gradient, operands):
    """vmap works with autograd around it."""
    rows, matrices, weights = operands
    batch = torch.stack([rows, rows.flip(0)]).requires_grad_(needs_gradient)
    op = partial(OPS["grouped_gemm"], m=matrices, w=weights, implementation="triton")
    out, expected = torch.vmap(op)(batch), torch.stack([op(rows) for rows in batch])
    assert torch.equal(out, expected)
    if needs_gradient:
        gradients = (torch.autograd.grad(y.cos().sum(), batch)[0] for y in (out, expected))
        assert torch.equal(*gradients)
