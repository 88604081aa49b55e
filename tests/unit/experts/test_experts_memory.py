"""The peak memory of a forward and backward of the experts, from the sizes of what they allocate.

Kernels are not launched. The shapes are those of models, made smaller so that their tensors keep their proportions.
"""

import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_kernels import fused_experts, reference
from moe_kernels.gemm import selection
from moe_kernels.testing import Case, make_inputs

from ...dtypes import DTYPES

DTYPE = DTYPES[-1]
SHAPES = {
    "4096x1024-e128": Case(256, 256, 64, 16, 8),
    "olmoe": Case(256, 128, 64, 16, 8),
    "mixtral": Case(64, 64, 224, 4, 2),
}
SMALL = 48 * 2**10  # routing weights, their gradients and what else has no D and F


class Peak:
    """Sums the storages that are alive at each allocation."""

    def __init__(self):
        self.bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch(self, function):
        def allocate(*args, **kwargs):
            out = function(*args, **kwargs)
            storage = out.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
            self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
            return out

        return allocate


@pytest.fixture
def peak(monkeypatch):
    """Measure a run without launches. GEMMs read copies of the rows unless a test chooses otherwise."""
    for module in [module for name, module in sys.modules.items() if name.startswith("moe_kernels.")]:
        for launch in ("launch_kernel", "launch_product"):
            if hasattr(module, launch):
                monkeypatch.setattr(module, launch, lambda *args, **kwargs: None)
    monkeypatch.setattr(selection, "run", lambda args: None)
    monkeypatch.setattr(selection, "run_product", lambda args: None)
    monkeypatch.setattr(selection, "run_if_supported", lambda args: True)
    monkeypatch.setattr(selection, "choose_copies", lambda *args: selection.Copies(True, True, True))
    found = Peak()
    monkeypatch.setattr(torch.Tensor, "new_empty", found.watch(torch.Tensor.new_empty))
    for name in ("empty_like", "zeros_like", "ones_like"):
        monkeypatch.setattr(torch, name, found.watch(getattr(torch, name)))
    return found


def run(case, device, *, retain_graph=False, hooks=None, **options):
    inputs = make_inputs(case, DTYPE, device)
    routed = reference.topk_routing(inputs.logits, case.top_k)
    permutation = reference.sort_by_expert(routed.topk_experts, case.num_experts)
    leaves = [t.requires_grad_() for t in (inputs.tokens, routed.topk_weights, inputs.w_up, inputs.w_down)]
    dout = torch.randn_like(inputs.tokens)
    with torch.autograd.graph.saved_tensors_hooks(*(hooks or (lambda t: t, lambda t: t))):
        out = fused_experts(leaves[0], leaves[1], permutation, *leaves[2:], implementation="triton", **options)
    return torch.autograd.grad(out, leaves, dout, retain_graph=retain_graph)


def sizes(case):
    """Bytes of H, A, one [R, D], one [T, D] and the weights."""
    num_rows, matrix = case.num_tokens * case.top_k, case.num_experts * case.d_ff * case.d_model
    numbers = 2 * num_rows * case.d_ff, num_rows * case.d_ff, num_rows * case.d_model, case.num_tokens * case.d_model
    return [DTYPE.itemsize * number for number in (*numbers, 2 * matrix, matrix)]


def expected_peak(case, copies, recompute):
    """The largest sum of the steps at the top of `fused_op.py`."""
    hidden, activated, rows, tokens, w_up, w_down = sizes(case)
    copy = rows if copies else 0
    steps = [
        hidden + activated + rows,  # forward
        tokens + (1 if recompute else 2) * hidden + activated + copy,
        tokens + hidden + activated + copy + w_down,
        tokens + hidden + w_down + rows + tokens,
        tokens + hidden + w_down + tokens + copy + w_up,
    ]
    return max(steps)


@pytest.mark.parametrize("recompute", [None, "up"])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_preactivations_are_free_before_the_weights_gradients(shape, copies, recompute, peak, device, monkeypatch):
    case = SHAPES[shape]
    monkeypatch.setattr(selection, "choose_copies", lambda *args: selection.Copies(*[copies] * 3))
    run(case, device, recompute=recompute)
    expected = expected_peak(case, copies, recompute)
    assert expected <= peak.bytes <= expected + SMALL < expected + sizes(case)[0] / 2


def test_a_retained_graph_keeps_the_preactivations(peak, device):
    case = SHAPES["mixtral"]
    run(case, device, retain_graph=True)
    expected = expected_peak(case, True, None) + sizes(case)[0]
    assert expected <= peak.bytes <= expected + SMALL


def test_unpacked_preactivations_are_freed(peak, device):
    """With hooks that keep saved tensors elsewhere, as offloading does, only the unpacked ones are alive."""
    case = SHAPES["mixtral"]
    run(case, device, hooks=(lambda tensor: tensor.clone(), lambda tensor: torch.empty_like(tensor).copy_(tensor)))
    *_, tokens, w_up, w_down = sizes(case)
    # The hooks make copies of all operands, too.
    assert peak.bytes <= expected_peak(case, True, None) + tokens + w_up + w_down + SMALL
