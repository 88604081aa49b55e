"""The GEMM with an activation's gradient in its epilogue: every kernel, and the step of backward that uses it."""

import dataclasses

import pytest
import torch

from moe_kernels import Activation, reference
from moe_kernels.experts import row_products
from moe_kernels.experts.row_products import Rows
from moe_kernels.experts.steps import Experts, hidden_gradients
from moe_kernels.gemm import selection
from moe_kernels.gemm.arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from moe_kernels.gemm.verify import check_result
from moe_kernels.runtime.row_layout import empty_rows
from moe_kernels.testing import Case, assert_accurate, make_inputs, make_permutation, to_float64
from moe_kernels.types import ExpertWeights

from ...dtypes import DTYPES
from .kernel_arguments import kernels_of, name_of, run_or_skip, shuffled

KERNELS = kernels_of(ActivationGradientArguments)
UNEVEN = [0, 700, 1, 64, 300, 0, 129, 1500, 63, 2, 640, 65]
# (rows of each group, rows without a group, K, F). The reduction has at least one step for each part of the epilogue.
CASES = {
    "tile_edges": ([0, 1, 127, 128, 129, 63, 65], 0, 768, 256),
    "one_group_owns_all": ([0, 0, 150, 0], 0, 712, 128),
    "multiples_of_eight": ([5, 131, 17, 0], 3, 712, 200),
    "narrow": ([9, 0, 40], 21, 1032, 8),
    "many_uneven_tiles": (UNEVEN, 100, 1024, 1544),
    "gpt_oss": ([959, 1090, 0, 1153], 100, 2880, 2880),
}


def draw(kernel, case, device, seed=0):
    """Return arguments with NaN in rows that no group has, and in all outputs."""
    sizes, tail, depth, d_ff = CASES[case]
    generator = torch.Generator(device).manual_seed(seed)
    num_rows, operands = sum(sizes) + tail, kernel.metadata.operands

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, device=device, generator=generator) * scale).to(operands.A.dtype)

    a, b = normal(num_rows, depth), normal(len(sizes), depth, d_ff, scale=depth**-0.5)
    hidden = empty_rows(a, num_rows, 2 * d_ff).copy_(normal(num_rows, 2 * d_ff, scale=3.0))
    weights = torch.rand(num_rows, device=device, generator=generator)
    for rows in (a, hidden, weights):
        rows[sum(sizes) :] = torch.nan
    a, index = shuffled(a) if kernel.metadata.design.gather else (a, None)
    return ActivationGradientArguments(
        a,
        b.mT.contiguous().mT if operands.B.layout == "column" else b,
        torch.full_like(hidden, torch.nan),
        hidden,
        empty_rows(a, num_rows, d_ff).fill_(torch.nan),
        weights,
        weights.new_full((num_rows, -(-d_ff // COLUMNS)), torch.nan),
        kernel.metadata.epilogue,
        offsets=torch.tensor(sizes).cumsum(0).int().to(device),
        row_to_token=index,
    )


def run_and_check(kernel, args):
    run_or_skip(kernel, args)
    for first in range(len(args.B)):
        check_result(args, kernel.metadata.kernel_name, first=first)
    end = args.offsets[-1]
    for written in args.outputs:
        assert written[:end].isfinite().all() and written[end:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_every_kernel(kernel, case, device):
    run_and_check(kernel, draw(kernel, case, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS[0].epilogues)
@pytest.mark.parametrize("kernel", KERNELS[:2], ids=name_of)
def test_every_activation(kernel, name, device):
    kernel = kernel.with_epilogue(name)
    args = draw(kernel, "many_uneven_tiles", device)
    args.preactivation.mul_(2)  # some values beyond the limits of clamps
    run_and_check(kernel, args)


@pytest.mark.gpu
def test_in_place_and_with_few_programs(device):
    """The gradient may overwrite what it is computed from, and does not depend on the number of programs."""
    args = draw(KERNELS[0], "many_uneven_tiles", device)
    run_and_check(KERNELS[0], args)
    for reserved in (0, 131, 127):
        hidden = args.preactivation.clone()
        sums, weighted = torch.full_like(args.row_sums, 7), torch.full_like(args.weighted, 7)
        changes = {"out": hidden, "preactivation": hidden, "row_sums": sums, "weighted": weighted}
        again = dataclasses.replace(args, **changes, reserved_sms=reserved)
        KERNELS[0].run(again)
        end = args.offsets[-1]
        for actual, expected in zip(again.outputs, args.outputs, strict=True):
            assert torch.equal(actual[:end], expected[:end])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"A": (64, 640)}, "Operand `A`: expected at least 705 columns, got 640"),
        ({"preactivation": (64, 255)}, "Operand `preactivation`: expected shape [64, 256], got [64, 255]"),
        ({"row_sums": (64, 2)}, "Operand `row_sums`: expected shape [64, 1], got [64, 2]"),
        ({"F": 12}, "Operand `B`: expected pointer and strides aligned to 16 bytes"),
        ({"epilogue": "geglu"}, "applies swiglu epilogue, requested geglu"),
    ],
)
def test_status(changes, error):
    kernel = next(k for k in KERNELS if k.metadata.operands.A.dtype == torch.float16)
    (num_rows, depth), d_ff = changes.get("A", (64, 768)), changes.get("F", 128)
    hidden = torch.zeros(changes.get("preactivation", (num_rows, 2 * d_ff)), dtype=torch.float16)
    args = ActivationGradientArguments(
        torch.zeros(num_rows, depth, dtype=torch.float16),
        torch.zeros(2, depth, d_ff, dtype=torch.float16),
        torch.zeros(num_rows, 2 * d_ff, dtype=torch.float16),
        hidden,
        torch.zeros(num_rows, d_ff, dtype=torch.float16),
        torch.zeros(num_rows),
        torch.zeros(changes.get("row_sums", (num_rows, 1))),
        changes.get("epilogue", "swiglu"),
        offsets=torch.zeros(2, dtype=torch.int32),
    )
    assert kernel.takes(args).error.startswith(error)


def test_the_rule_reads_sizes_alone():
    def is_worth(rows_per_group, depth, d_ff):
        return row_products.is_worth_fusing(torch.empty(4, depth, d_ff, device="meta"), 4 * rows_per_group)

    assert is_worth(2048, 2880, 2880) and is_worth(320, 1536, 512)
    assert not is_worth(64, 2880, 2880) and not is_worth(0, 2880, 2880)
    assert not is_worth(2048, 4096, 14336) and not is_worth(2048, 4096, 1024)


def emulate(args):
    """Compute with the reference what the kernel computes."""
    bounds = args.tile_table.bounds
    end = int(bounds[-2])
    a = args.A if args.row_to_token is None else args.A[args.row_to_token.long()]
    product = reference.grouped_gemm(a.nan_to_num(), args.B, bounds[1:-1])[:end].float()
    h, weights = args.preactivation[:end].float().requires_grad_(), args.row_weights[:end, None]
    activated = reference.apply_activation(h, args.epilogue)
    (gradient,) = torch.autograd.grad(activated, h, weights * product)
    args.out[:end], args.weighted[:end] = gradient.to(args.out.dtype), (weights * activated).to(args.out.dtype)
    for column in range(args.row_sums.shape[1]):
        block = slice(column * COLUMNS, (column + 1) * COLUMNS)
        args.row_sums[:end, column] = (product * activated)[:, block].sum(1).detach()


@pytest.fixture
def emulated(monkeypatch, device):
    """Let every form be fused; without a GPU the kernel is the reference."""
    fused, run, find = [], selection.run, selection.find

    def run_here(args):
        if not isinstance(args, ActivationGradientArguments):
            return run(args)
        fused.append(args)
        return run(args) if device == "cuda" else emulate(args)

    def find_here(args):
        is_emulated = device == "cpu" and isinstance(args, ActivationGradientArguments)
        return KERNELS[0] if is_emulated else find(args)

    monkeypatch.setattr(selection, "run", run_here)
    monkeypatch.setattr(selection, "find", find_here)
    monkeypatch.setattr(row_products, "is_worth_fusing", lambda *args: True)
    return fused


def draw_step(device, dtype, *, few_rows=False):
    """Return (experts, rows, dout, topk_weights, preactivation, all in `dtype`), with an empty expert."""
    case = Case(600, 768, 136, 5, 2) if device == "cuda" else Case(40, 24, 136, 5, 2)
    inputs = make_inputs(case, dtype, device)
    inputs.logits[:, 3] = -torch.inf
    topk_weights, permutation = make_permutation(inputs, case.top_k)
    if few_rows:  # slots of token 5 and later ones of expert 0 are dropped
        experts = reference.topk_routing(inputs.logits, case.top_k).topk_experts
        experts[5], experts[20:][experts[20:] == 0] = -1, -1
        num_rows = int((experts >= 0).sum()) + 9
        permutation = reference.sort_by_expert(experts, case.num_experts, max_rows=num_rows)
    rows = Rows.of(permutation, reserved_sms=0)
    generator = torch.Generator(device).manual_seed(1)
    dout = torch.randn(case.num_tokens, case.d_model, device=device, generator=generator).to(dtype)
    hidden = torch.randn(len(rows.row_to_token), 2 * case.d_ff, device=device, generator=generator).to(dtype)
    experts = Experts.of(ExpertWeights(inputs.w_up, inputs.w_down), Activation("swiglu"))
    return experts, rows, dout, topk_weights, hidden


def exact_step(experts, rows, dout, topk_weights, hidden):
    """Return (dH, A_w, dtopk_weights) by the reference."""
    end = int(rows.table.bounds[-2])
    product = reference.grouped_gemm(dout[rows.row_to_token.long()], experts.weights.w_down, rows.table.bounds[1:-1])
    is_kept, place = rows.slot_to_row >= 0, rows.slot_to_row.clamp(min=0).long()
    weights = topk_weights.new_zeros(len(hidden)).index_put((place[is_kept],), topk_weights[is_kept])[:, None]
    product, h = product.to(weights.dtype), hidden.to(weights.dtype).requires_grad_()
    activated = reference.apply_activation(h, "swiglu")
    (gradient,) = torch.autograd.grad(activated, h, weights * product)
    sums = torch.where(is_kept, (product * activated).sum(1)[place], 0.0).detach()
    return gradient[:end].to(hidden.dtype), (weights * activated)[:end].detach().to(hidden.dtype), sums


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("few_rows", [False, True])
def test_step_of_backward(few_rows, overwrite, copies, device, emulated, monkeypatch):
    """Compare gradients of pre-activations and routing weights, with dropped slots, and rows copied or gathered."""
    copied = selection.Copies(False, copies, False)
    monkeypatch.setattr(selection, "choose_copies", lambda *args: copied)
    operands = draw_step(device, DTYPES[-1], few_rows=few_rows)
    experts, rows, dout, topk_weights, hidden = operands
    made = hidden_gradients(experts, rows, dout, topk_weights, hidden.clone(), overwrite=overwrite)
    if device == "cuda" and not emulated:
        pytest.skip("no kernel with the gradient in its epilogue runs here")
    (args,) = emulated
    assert (args.row_to_token is None) == copies == (made.drows is not None)
    assert (args.out.data_ptr() == args.preactivation.data_ptr()) == overwrite
    weights = ExpertWeights(*to_float64(experts.weights[:2]))
    exact = exact_step(experts._replace(weights=weights), rows, *to_float64((dout, topk_weights, hidden)))
    end = int(rows.table.bounds[-2])
    actual = made.dpreactivation[:end], made.weighted[:end], made.dtopk_weights
    names = "dH", "A_w", "dtopk_weights"
    for name, a, b, e in zip(names, actual, exact_step(*operands), exact, strict=True):
        assert_accurate(a, b, e, name)
    assert torch.equal(made.dtopk_weights != 0, rows.slot_to_row >= 0)
