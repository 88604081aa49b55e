"""The fuzzing itself: it draws the declared cases, finds errors, and prints a command that reproduces them."""

import dataclasses
import shlex

import pytest
import torch
from hypothesis import strategies as st

from moe_kernels import GroupedGemmListArguments
from moe_kernels.gemm import selection
from moe_kernels.permutation import permute
from moe_kernels.runtime.triton import HAS_TRITON

from . import __main__
from .case import CASES, parse
from .experts import Experts
from .grouped import GroupedGemm, GroupedWgrad
from .layer import Layer
from .products import BatchedGemm, GemmList, JaggedGemm
from .routing import RoutingAndCombine
from .strategies import KINDS
from .tensors import LAYOUTS
from .test_fuzz import search

needs_kernels = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels to check")
FIRST = torch.zeros(1, dtype=torch.int64)
GROUPS = {"sizes": (3, 0, 9), "tail": 2, "size_k": 21, "size_n": 6, "layouts": ("rows", "columns", "gaps")}
PLAIN = {"dtype": "float32", "frozen": (), "seed": 0}
NARROW = {"wide": False, "into_out": False}
CASE = GroupedGemm(
    **GROUPS, **NARROW, dtype="float32", frozen=("b",), seed=1, bias=True, row_scale=False, activation=None
)
# Enough rows to judge from one draw.
PRODUCTS = st.builds(
    BatchedGemm,
    batch=st.just(1),
    shared=st.sampled_from([None, "both"]),
    size_m=st.integers(5, 20),
    size_k=st.just(CASE.size_k),
    size_n=st.just(13),
    dtype=st.just("float32"),
    wide=st.just(False),
    frozen=st.sampled_from([(), ("b",)]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    seed=st.integers(0, 99),
)


def test_a_case_is_read_as_it_is_printed():
    assert parse(repr(CASE)) == CASE
    command = shlex.split(CASE.command)
    assert command[:3] == ["python", "-m", "tests.fuzz"] and parse(command[3]) == CASE
    for text in ("", "Nothing(a=1)", "GroupedGemm(sizes=(1,))", "print(1)", repr(CASE).replace("21", "open('x')")):
        with pytest.raises(ValueError, match="fuzz: a case must be one of"):
            parse(text)
    assert set(CASES) >= {"Experts", "GroupedGemm", "GroupedWgrad", "GemmList", "JaggedGemm", "BatchedGemm", "Layer"}


def plant(monkeypatch, change, *, everywhere=False):
    """Apply `change` to the output of a kernel."""
    launch = selection._launch

    def wrong(args):
        kernel = launch(args)
        # The product itself: its gradients sum over other axes.
        if kernel is not None and (everywhere or args.A.shape[-1] == CASE.size_k):
            change(args)
        return kernel

    monkeypatch.setattr(selection, "_launch", wrong)


# One case of each kind, on which every check runs.
SIZES = {"num_experts": 3, "top_k": 2, "d_model": 16}
ROUTED = {"num_tokens": 12, "routing": "random", "dropped": 0.1, "max_rows": None}
ONE_OF_EACH = {
    "experts": Experts(
        **SIZES,
        **PLAIN,
        **ROUTED,
        d_ff=8,
        activation="reglu",
        limit=None,
        bias=True,
        weight_on_input=False,
        recompute="up",
        layouts=("rows", "padded", "gaps", "columns", "rows"),
    ),
    "grouped_gemm": CASE,
    "grouped_gemm_wgrad": GroupedWgrad(**GROUPS, **PLAIN, **NARROW),
    "grouped_gemm_list": GemmList(
        **PLAIN, problems=((9, 8, 7), (0, 3, 2), (6, 11, 5)), wide=False, layouts=("rows", "columns", "gaps", "padded")
    ),
    "jagged_gemm": JaggedGemm(**GROUPS, **PLAIN, dtype_b="float16", long_offsets=True),
    "batched_gemm": BatchedGemm(
        **PLAIN, batch=2, shared="a", size_m=7, size_k=8, size_n=9, wide=False, layouts=("rows", "columns", "gaps")
    ),
    "routing": RoutingAndCombine(
        **SIZES,
        **{**PLAIN, "dtype": "float16"},
        **ROUTED,
        router="topk",
        normalize=False,
        weighted=True,
        block_rows=16,
        layouts=("rows", "columns", "gaps"),
    ),
    "layer": Layer(
        **SIZES,
        **{**PLAIN, "dtype": "float16"},
        leading=(2, 16),
        d_ff=8,
        router="sigmoid",
        activation="swiglu",
        limit=None,
        bias=True,
        shared_d_ff=8,
        shared_gate=False,
        num_zero_experts=1,
        latent_dim=None,
        capacity=1.5,
        masked=0.2,
        recompute=None,
        losses=True,
        layouts=("rows", "columns"),
    ),
}


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_sees_one_wrong_element(kind, device, monkeypatch):
    case = ONE_OF_EACH[kind]
    case.check(device)
    if kind == "routing":
        op = permute._combine_op
        monkeypatch.setattr(permute, "_combine_op", lambda *args: op(*args).index_fill(0, FIRST.to(device), 0))
    else:
        plant(monkeypatch, spoil_an_element, everywhere=True)
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        case.check(device)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_sees_an_inexact_reference(kind, device, monkeypatch):
    case = dataclasses.replace(ONE_OF_EACH[kind], dtype="float64")
    if kind == "layer":
        case = dataclasses.replace(case, losses=False)
    if kind == "jagged_gemm":
        case = dataclasses.replace(case, dtype_b="float64")
    case.check(device)
    formula = type(case).formula
    monkeypatch.setattr(type(case), "formula", lambda *args: formula(*args) * (1 + 1e-9))
    with pytest.raises(AssertionError, match="out: error"):
        case.check(device)


def forget_rows(args):
    args.out[..., 5:, :] = 0.0


def spoil_an_element(args):
    out = args.out_list[0] if isinstance(args, GroupedGemmListArguments) else args.out
    out.view(-1)[:1] += 0.5 + out.nan_to_num().abs().max()


def round_sums(args):
    args.out.copy_(args.out.half())


def write_operand(args):
    args.A[..., 5:, :] += 1.0


@needs_kernels
def test_a_planted_wrong_kernel_is_found_and_found_again(device, monkeypatch, capsys):
    plant(monkeypatch, forget_rows)
    with pytest.raises(AssertionError, match=r"error .* exceeds") as failure:
        search(PRODUCTS, 10, 0, device)
    (command,) = (line for line in failure.value.__notes__ if line.startswith("python -m tests.fuzz "))
    assert "\n" not in command
    case = parse(shlex.split(command)[3])
    # The first forgotten row remains as the last one, and everything irrelevant is removed.
    assert case.size_m == 6 and case.seed == 0 and case.frozen == () and set(case.layouts) == {"rows"}
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        __main__.main([repr(case)])
    monkeypatch.undo()
    assert __main__.main([repr(case)]) == 0
    assert capsys.readouterr().out == f"right: {case!r}\n"


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forget_rows, "out: error .* exceeds"),
        (round_sums, "out: error .* exceeds"),
        (write_operand, "input 0 was written to"),
    ],
)
def test_planted_errors(change, message, device, monkeypatch):
    CASE.check(device)
    plant(monkeypatch, change)
    with pytest.raises(AssertionError, match=message):
        CASE.check(device)
