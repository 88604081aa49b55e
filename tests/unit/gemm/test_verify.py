"""Verification of kernel results: right ones pass, planted errors are caught, and no check runs unless asked for."""

import dataclasses
from functools import partial

import pytest
import torch

from moe_kernels import GroupedGemmArguments, GroupedGemmListArguments, get_kernels
from moe_kernels.gemm import selection
from moe_kernels.gemm.verify import check_result, verified, verify_interval
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.tools.tune import check

from ...processes import run_python
from ...tiers import slow
from .kernel_arguments import skip_without_float8
from .test_catalog_run import ARGUMENTS, gemm_arguments, grouped_arguments, wgrad_arguments

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels to check")


def gathering_arguments(device):
    args = grouped_arguments(device)
    index = torch.arange(len(args.out), device=device).flip(0).int()
    return dataclasses.replace(args, row_to_token=index)


def gathering_wgrad_arguments(device):
    args = wgrad_arguments(device)
    return dataclasses.replace(args, a_row_to_token=torch.arange(len(args.A), device=device).flip(0).int())


def optional_arguments(device):
    args = grouped_arguments(device)
    bias, scale = torch.ones(3, 48, device=device), torch.linspace(1, 2, len(args.out), device=device)
    return dataclasses.replace(args, bias=bias, row_scale=scale, out=args.out.float())


def float32_result_arguments(device):
    args = wgrad_arguments(device)
    return dataclasses.replace(args, out=args.out.float())


def batched_arguments(device):
    a, b = (torch.randn(3, *shape, device=device).half() for shape in ((300, 16), (16, 40)))
    return dataclasses.replace(gemm_arguments(device), A=a, B=b, out=a.new_empty(3, 300, 40))


def list_arguments(device):
    a_list = [torch.randn(16, 24, device=device).half() for _ in range(3)]
    b_list = [torch.randn(24, 8 * g, device=device).half() for g in (1, 2, 3)]
    return GroupedGemmListArguments(
        a_list, b_list, [a.new_empty(16, b.shape[1]) for a, b in zip(a_list, b_list, strict=True)]
    )


CASES = {
    **ARGUMENTS,
    "decoding": partial(arguments_of, "decoding_gemm weight=int8 B=column gather=A float16 G=3 K=48 N=40 rows=8"),
    "gathering": gathering_arguments,
    "gathering_wgrad": gathering_wgrad_arguments,
    "optional": optional_arguments,
    "float32_result": float32_result_arguments,
    "batched": batched_arguments,
    "list": list_arguments,
}


def result_of(args):
    return args.out_list[-1] if isinstance(args, GroupedGemmListArguments) else args.out


def test_float8(device):
    skip_without_float8()
    args = list_arguments(device)
    a_list, b_list = ([matrix.to(torch.float8_e4m3fn) for matrix in ms] for ms in (args.A_list, args.B_list))
    args = dataclasses.replace(args, A_list=a_list, B_list=b_list)
    selection.run(args)
    check_result(args, "right")
    args.out_list[-1][3] += 1
    with pytest.raises(AssertionError, match="wrong: error"):
        check_result(args, "wrong")


@pytest.mark.parametrize("case", CASES)
def test_right_kernels_pass_and_a_wrong_number_does_not(case, device):
    args = CASES[case](device)
    kernel = selection.select(args)
    check(kernel, args)
    for first in range(3):
        check_result(args, "right", first=first)
    part = result_of(args)[len(result_of(args)) // 2]
    part += 1
    with pytest.raises(AssertionError, match=r"wrong: error .* exceeds"):
        for first in range(3):
            check_result(args, "wrong", first=first)


def test_autocast_makes_no_wrong_number_right(device):
    """The products that a result is compared with are not rounded further than the result."""
    args = gemm_arguments(device, torch.float32)
    selection.run(args)
    args.out.mul_(1.001)
    with torch.autocast(device, torch.bfloat16), pytest.raises(AssertionError, match="wrong: error"):
        check_result(args, "wrong")


def fused_arguments(device):
    args = grouped_arguments(device)
    activated = args.out.new_empty(len(args.out), 24)
    return dataclasses.replace(args, out=activated, epilogue="swiglu", preactivation=args.out)


@pytest.mark.parametrize("spoiled", ["out", "preactivation"])
def test_product_and_activation_are_both_checked(spoiled, device):
    args = fused_arguments(device)
    product = dataclasses.replace(args, out=args.preactivation, epilogue=None, preactivation=None)
    selection.run(product)
    gate, up = args.preactivation.float().chunk(2, dim=1)
    args.out.copy_(torch.nn.functional.silu(gate) * up)
    check_result(args, "right")
    getattr(args, spoiled)[5] += 1
    with pytest.raises(AssertionError, match="wrong: error"):
        check_result(args, "wrong")


@pytest.mark.parametrize("case", ["grouped", "jagged"])
def test_rows_of_no_group_must_be_zero(case, device):
    args = CASES[case](device)
    selection.run(args)
    args.out[-1, -1] = 1e-3
    with pytest.raises(AssertionError, match=r"wrong: error 1\.000e-03"):
        check_result(args, "wrong")
    if isinstance(args, GroupedGemmArguments):
        check_result(dataclasses.replace(args, zero_tail=False), "right")


def test_values_that_are_not_finite_are_not_judged(device):
    args = grouped_arguments(device)
    args.A[0, 0] = torch.inf
    selection.run(args)
    check_result(args, "right")
    args.A.fill_(1)
    args.out.fill_(torch.inf)
    with pytest.raises(AssertionError, match="wrong: error inf"):
        check_result(args, "wrong")


def test_every_nth_launch_is_checked(device):
    args = grouped_arguments(device)
    kernel = selection.select(args)
    launches = []

    def wrong_launch(args):
        launches.append(args)
        args.out.fill_(7.0)
        return kernel

    launch = verified(wrong_launch, 3)
    name = kernel.metadata.kernel_name
    for _ in range(2):
        assert launch(args) is launch(args) is kernel
        with pytest.raises(RuntimeError, match=f"MOE_VERIFY: wrong result in launch [36]: {name}: error .* exceeds"):
            launch(args)
    assert launches == [args] * 6


def test_what_was_not_launched_is_not_checked(device, monkeypatch):
    monkeypatch.setattr("moe_kernels.gemm.verify.check_result", lambda *_, **options: pytest.fail("checked"))
    assert verified(lambda args: None, 1)(grouped_arguments(device)) is None


def test_groups_take_turns(device):
    """A kernel that is wrong in one group of many is caught, but possibly not at once."""
    rows = torch.randn(64, 16, device=device).half()
    offsets = torch.arange(4, 65, 4, device=device).int()
    args = GroupedGemmArguments(rows, torch.randn(16, 16, 16, device=device).half(), rows.clone(), offsets=offsets)
    kernel = selection.select(args)

    def wrong_in_group_11(args):
        kernel.run(args)
        args.out[45] += 1
        return kernel

    launch = verified(wrong_in_group_11, 1)
    launch(args)
    with pytest.raises(RuntimeError, match=kernel.metadata.kernel_name):
        for _ in range(15):
            launch(args)


def test_the_interval():
    assert verify_interval(None) is verify_interval("") is verify_interval("0") is None
    assert verify_interval("20") == 20
    for setting in ("-1", "yes", "1.5"):
        with pytest.raises(ValueError, match=f"MOE_VERIFY: must be a number of launches, got '{setting}'"):
            verify_interval(setting)


@pytest.mark.skipif(selection.VERIFY is not None, reason="MOE_VERIFY is set")
def test_off_costs_nothing():
    assert selection._launch is selection._launch_selected


PLANTED = """
import torch
from moe_kernels import fused_experts
from moe_kernels.gemm import selection
from moe_kernels.testing import Case, make_inputs, make_permutation
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = make_inputs(Case(32, 32, 32, 4, 2), torch.float16, device)
weights, permutation = make_permutation(inputs, 2)
forward = lambda: fused_experts(inputs.tokens, weights, permutation, inputs.w_up, inputs.w_down)
launches = []
run_launch = selection.run_launch
def noted(launch, operand):
    launches.append(launch.function.fn.__name__)
    run_launch(launch, operand)
selection.run_launch = noted
for _ in range(3):
    forward()
    print(launches)
    launches.clear()
def planted(launch, operand):
    run_launch(launch, operand)
    operand.mul_(1.5)  # The result is no longer that of the operands.
selection.run_launch = planted
try:
    forward()
    forward()
except RuntimeError as error:
    print(error)
"""


@slow  # two processes in the interpreter; test_every_nth_launch_is_checked covers the checks themselves
def test_the_environment_turns_it_on():
    """MOE_VERIFY changes no launch. Python -O leaves assertions out, which must not turn MOE_VERIFY off."""
    lines = {}
    for setting in ("0", "2"):
        result = run_python(["-O", "-c", PLANTED], interpret=True, MOE_VERIFY=setting)
        lines[setting] = result.stdout.splitlines()
    *launches, raised = lines["2"]
    assert launches == lines["0"] and len(launches) == 3 and "kernel" in launches[-1]
    assert raised.startswith("MOE_VERIFY: ")
    assert raised.split(": ")[2] in {kernel.metadata.kernel_name for kernel in get_kernels()}
