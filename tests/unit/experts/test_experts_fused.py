"""Biases and activations that the experts' up GEMM computes in its epilogue."""

from functools import partial

import pytest
import torch

from moe_kernels import Activation, reference
from moe_kernels.activation.functions import ACTIVATIONS, EPILOGUES, PLAIN_EPILOGUES
from moe_kernels.experts.row_products import Rows
from moe_kernels.experts.steps import Experts, activate
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Kernel, Status, TmaDesign, WarpSpecializedDesign
from moe_kernels.runtime.gluon import KNOWS_GLUON
from moe_kernels.testing import check_accuracy, run_with_grads
from moe_kernels.types import ExpertWeights

from ...dtypes import DTYPES
from ...tiers import default_tier
from .test_experts import NAMES, run

COMPUTED = [(activation, bias) for activation in ACTIVATIONS for bias in (False, True)]
FUSED = [case for case in COMPUTED if case[0] in EPILOGUES or case[0] in PLAIN_EPILOGUES]
# (rows of each expert, D, F): the last column tile is partial, and some slots are dropped, so rows follow the last
# group. On a GPU, D has enough steps for all parts of an epilogue, and F is large enough that the rows are copied.
UNEVEN_ON_GPU = ([0, 1, 127, 128, 129], 648, 1288)
UNEVEN = UNEVEN_ON_GPU if torch.cuda.is_available() else ([0, 1, 15, 16, 17], 24, 40)


def draw_uneven(activation, bias, dtype, device, seed=0):
    counts, d_model, d_ff = UNEVEN
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, device=device, generator=generator)).to(dtype)

    experts = torch.arange(-1, len(counts)).repeat_interleave(torch.tensor([3, *counts]))
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed))]
    columns = (1 + Activation(activation).gated) * d_ff
    operands = [
        normal(len(experts), d_model),
        torch.rand(len(experts), 1, device=device, generator=generator),
        experts[:, None].int().to(device),
        normal(len(counts), columns, d_model, scale=d_model**-0.5),
        normal(len(counts), d_model, d_ff, scale=d_ff**-0.5),
    ]
    return *operands, *((normal(len(counts), columns), normal(len(counts), d_model)) if bias else ())


@pytest.mark.parametrize("d_model", [648, 136])
@pytest.mark.parametrize(("activation", "bias"), FUSED)
def test_what_hopper_fuses(activation, bias, d_model, monkeypatch):
    """Check the selection alone, as for bfloat16 on an H200; the selected kernel does not run."""

    def supports(kernel, args):
        return kernel.takes(args) if kernel.supports_cc(90) else Status("for another GPU")

    chosen, passes = [], []

    def choose(args):
        chosen.append(selection.find(args))
        return chosen[-1] is not None

    monkeypatch.setattr(Kernel, "supports", supports)
    monkeypatch.setattr(selection, "_selected", {})
    monkeypatch.setattr(selection, "_copies", {})
    for name in ("run", "run_if_supported"):
        monkeypatch.setattr(selection, name, choose)
    monkeypatch.setattr("moe_kernels.experts.row_products.launch_permute", lambda *args: None)
    monkeypatch.setattr("moe_kernels.experts.row_products.launch_activation", lambda *args: passes.append(args))
    counts, _, d_ff = UNEVEN_ON_GPU
    kind, num_rows = Activation(activation), sum(counts)
    offsets = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = reference.tile_table(offsets, num_rows, 128)
    rows = Rows(torch.zeros(num_rows, 1), torch.zeros(num_rows, dtype=torch.int32), table)
    tokens = torch.empty(num_rows, d_model, dtype=torch.bfloat16)
    w_up = tokens.new_empty(len(counts), (1 + kind.gated) * d_ff, d_model)
    w_down = tokens.new_empty(len(counts), d_model, d_ff)
    experts = Experts.of(ExpertWeights(w_up, w_down, w_up[:, :, 0] if bias else None), kind)
    assert rows.choose_copies(tokens, experts.weights).tokens_forward
    activate(experts, rows, tokens)
    # With few reduction steps the warp-specialised kernel has no time for the pieces of an activation.
    kernel, is_fused = chosen[-1], d_model == 648 or kind.gated
    assert len(passes) == (not is_fused) and kernel.metadata.epilogue == (activation if is_fused else None)
    is_specialized = d_model == 648 or not is_fused
    assert isinstance(kernel.metadata.design, WarpSpecializedDesign if is_specialized else TmaDesign)


@pytest.mark.parametrize(
    ("activation", "bias"), default_tier(COMPUTED, [("swiglu", True), ("gpt_oss", True), ("relu_squared", False)])
)
def test_fused_activations_and_biases_match_reference(activation, bias, device, monkeypatch):
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9 and KNOWS_GLUON
    if hopper and (activation, bias) in FUSED:
        monkeypatch.setattr("moe_kernels.experts.row_products.launch_activation", None)  # a call would fail
    check_accuracy(
        partial(run, activation=activation),
        partial(run, activation=activation, op=reference.fused_experts),
        partial(draw_uneven, activation, bias, DTYPES[-1], device),
        NAMES if bias else NAMES[:5],
    )


@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_recomputed_preactivations_and_biases_give_the_same_bits(activation, device):
    operands, op = draw_uneven(activation, True, DTYPES[-1], device), partial(run, activation=activation)
    actual, expected = (run_with_grads(partial(op, recompute=recompute), operands) for recompute in ("up", None))
    assert all(map(torch.equal, actual, expected))
