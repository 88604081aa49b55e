"""Output of `explain`: a layer's kernels, why none is faster, and whether they are accurate and as fast as recorded."""

import dataclasses

import pytest
import torch

from moe_kernels import WarpSpecializedDesign, get_kernels, reference
from moe_kernels.__main__ import main
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import device_cc
from moe_kernels.gemm.kernels.hopper.gated_gradient import WarpSpecializedActivationGradient
from moe_kernels.gemm.kernels.hopper.grouped import WarpSpecializedGroupedGemm
from moe_kernels.gemm.kernels.hopper.wgrad import WarpSpecializedWgrad
from moe_kernels.gemm.measurements import Table
from moe_kernels.gemm.selection import Target, find_for
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.testing import Case
from moe_kernels.tools import explain
from moe_kernels.tools.explain import find_target, op_of, print_speed, print_steps, why_not_faster
from moe_kernels.tools.layers import Step, layer_of

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels to choose from")

LAYER = Case(512, 512, 1408, 4, 2)
HOPPER = Target(90, None, Table({}, {}))


@pytest.fixture
def with_gluon(monkeypatch):
    """Pretend that the installed software runs the warp-specialised kernels."""
    for kernel_class in (WarpSpecializedGroupedGemm, WarpSpecializedWgrad, WarpSpecializedActivationGradient):
        monkeypatch.setattr(kernel_class, "obstacle", None)


def plan(case=LAYER, dtype=torch.bfloat16, target=HOPPER, **settings):
    return layer_of(case, dtype, "meta", **settings).plan(target)


def args_of(name, steps):
    return next(step.args for step in steps if step.name == name)


@pytest.mark.parametrize("settings", [{}, {"precision": "fp8"}, {"format": "mxfp4"}, {"activation": "relu_squared"}])
@pytest.mark.parametrize("num_tokens", [64, 1024])
def test_a_plan_without_memory_asks_for_what_the_op_runs(num_tokens, settings, device, monkeypatch):
    case, dtype = Case(num_tokens, 64, 32, 4, 2), torch.float16 if settings else torch.float32
    if device == "cpu":  # the kernels' own results are tested elsewhere, and take minutes in the interpreter
        monkeypatch.setattr(selection, "_launch", selection.find)
    ran = layer_of(case, dtype, device, **settings).plan()
    meta = plan(case, dtype, HOPPER._replace(cc=selection.target_cc(torch.device(device)) or 90), **settings)
    assert [(step.name, step.args.table_key()) for step in ran] == [(s.name, s.args.table_key()) for s in meta]
    assert all(step.args.error() is None for step in (*ran, *meta))


def test_names_a_kernel_for_every_op(capsys):
    assert main(["explain", "512,512,1024,4,2", "--cc", "80"]) == 0
    printed = capsys.readouterr().out
    names = {kernel.metadata.kernel_name for kernel in get_kernels(cc=80)}
    chosen = [line.split(": ")[1].split(" (by")[0] for line in printed.splitlines() if line.endswith("(by rule)")]
    assert len(chosen) == 6 and set(chosen) <= names
    for op in ("up with activation", "down", "down, gradient of its input", "up, gradient of its weight"):
        assert f"\n{op}: " in printed
    assert "within the error budget" in printed and f"PyTorch {torch.__version__}" in printed


def test_takes_warp_specialised_kernels_where_they_run(with_gluon):
    steps = plan()
    for step in steps:
        assert isinstance(step.kernel.metadata.design, WarpSpecializedDesign) and not step.gathers
        assert why_not_faster(step, HOPPER) is None
    first, *others = plan(target=HOPPER._replace(cc=80))
    assert first.name == "up" == others[0].name and first.kernel is None  # so the activation is a separate launch
    assert [step.name for step in others if step.gathers] == ["up", "down_dgrad", "down_wgrad", "up_wgrad"]
    assert len(others) == 6 and not any(isinstance(s.kernel.metadata.design, WarpSpecializedDesign) for s in others)


@pytest.mark.parametrize(("d_model", "d_ff"), [(2880, 2880), (2048, 768), (512, 768), (4096, 768)])
def test_takes_one_gemm_for_the_gradient_of_an_activation(d_model, d_ff, with_gluon):
    steps = plan(Case(2048, d_model, d_ff, 4, 2), activation="gpt_oss")
    (step,) = (step for step in steps if step.name == "down_dgrad")
    assert op_of(step).endswith(" and of the activation") == (d_model in (2880, 2048))
    if step.kernel.metadata.epilogue is not None:
        assert step.kernel.metadata.kernel_class is WarpSpecializedActivationGradient
        assert step.kernel.metadata.epilogue == "gpt_oss" and step.kernel.metadata.design.gather == step.gathers


def test_forms_of_a_plain_activation(with_gluon):
    steps = plan(dataclasses.replace(LAYER, d_ff=64), activation="relu_squared")
    up = args_of("up", steps)
    assert up.B.shape[2] == up.out.shape[1] == 64 == args_of("up_wgrad", steps).A.shape[1]
    assert [step.name for step in steps if step.kernel is None] == ["up"]  # only a GEMM of copied rows applies it


@pytest.mark.parametrize(
    ("case", "dtype", "cc", "reason"),
    [
        (LAYER, torch.bfloat16, 80, "needs compute capability 90 to 90, the device has 80"),
        (LAYER, torch.float32, 90, "Operand `A`: expected torch.bfloat16, got torch.float32"),
        (Case(512, 97, 1024, 4, 2), torch.bfloat16, 90, "expected pointer and strides aligned to 16 bytes"),
    ],
    ids=["capability", "dtype", "alignment"],
)
def test_says_why_nothing_faster_runs(case, dtype, cc, reason, with_gluon):
    target = HOPPER._replace(cc=cc)
    for step in plan(case, dtype, target):
        said = why_not_faster(step, target)
        assert reason in said, said


def test_says_that_software_is_missing(monkeypatch):
    for kernel_class in (WarpSpecializedGroupedGemm, WarpSpecializedWgrad, WarpSpecializedActivationGradient):
        monkeypatch.setattr(kernel_class, "obstacle", "no such Gluon")
    for step in plan():
        assert why_not_faster(step, HOPPER).endswith(": no such Gluon")


def test_follows_the_table(with_gluon, capsys):
    args = args_of("up", plan())
    slow = next(k for k in reversed(get_kernels(cc=90)) if k.takes(args))
    target = HOPPER._replace(gpu="GPU X", table=Table({args.table_key(): slow.metadata.kernel_name}, {}))
    assert find_for(args, target) is slow is not find_for(args, HOPPER)
    assert "is available, the table prefers this one" in why_not_faster(Step("up", args, slow), target)
    # Another epilogue uses the listed epilogue's kernel.
    other = dataclasses.replace(args, epilogue="reglu")
    assert find_for(other, target) is slow.with_epilogue("reglu")
    assert "the table prefers this one" in why_not_faster(Step("up", other, slow.with_epilogue("reglu")), target)
    layer = layer_of(LAYER, torch.bfloat16, "meta", activation="reglu")
    print_steps(layer, layer.plan(target), target)
    first, *others = (line for line in capsys.readouterr().out.splitlines() if "(by " in line)
    assert first == f"up with activation: {slow.with_epilogue('reglu').metadata.kernel_name} (by table)"
    assert others and all(line.endswith("(by rule)") for line in others)


@pytest.mark.parametrize(("num_tokens", "decodes"), [(16, True), (1024, False)])
def test_quantised_weights_are_decoded_by_few_rows_and_dequantised_for_many(num_tokens, decodes, capsys):
    assert main(["explain", f"{num_tokens},512,256,4,2", "--quantized", "fp8", "--cc", "90"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": decoding_gemm_") == (4 if decodes else 0)
    assert ("Weights: fp8, dequantised before each GEMM" in printed) != decodes


def test_precision_fp8_has_products_of_block_scaled_operands(monkeypatch, capsys):
    command = ["explain", "512,512,256,4,2", "--precision", "fp8", "--cc", "90"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert sum(": block_scaled_gemm_" in line for line in lines) == 4
    assert sum("gradient of its weight: wgrad_" in line for line in lines) == 2
    assert "numbers: small layer" in printed and "within the error budget" in printed
    monkeypatch.setattr(explain, "_FP8_ERROR", 0.01)
    assert main(command) == 1
    assert "WRONG: output: differs by 0.0" in capsys.readouterr().out


def test_wrong_numbers_exit_with_1(monkeypatch, capsys):
    def wrong(*args, **kwargs):
        return 1.5 * reference.fused_experts(*args, **kwargs)

    monkeypatch.setattr(explain, "fused_experts", wrong)
    assert main(["explain", "512,512,1024,4,2", "--cc", "90"]) == 1
    assert "WRONG: output: " in capsys.readouterr().out


def test_compares_speed_with_the_table(monkeypatch, capsys):
    steps = [step for step in plan() if step.name in ("down", "up_dgrad", "up_wgrad")]
    kernels = {step.args.table_key(): step.kernel.metadata.kernel_name for step in steps}
    milliseconds = {step.args.table_key(): 1.0 for step in steps[:2]}
    target = HOPPER._replace(table=Table(kernels, {}, milliseconds))
    monkeypatch.setattr(explain, "measure", lambda runs: dict(zip(runs, (1.1, 1.3, 9.0), strict=True)))
    print_speed(steps, target)
    down, up_dgrad, up_wgrad = capsys.readouterr().out.splitlines()
    assert down.endswith("1.100 ms, the table 1.000 ms: as expected")
    assert up_dgrad.endswith("1.300 ms, the table 1.000 ms: SLOW")
    assert up_wgrad.endswith("9.000 ms, the table records none")


@pytest.mark.parametrize("layer", ["1,2,3,4", "1,2,3,4,x"])
def test_a_layer_has_five_sizes(layer, capsys):
    with pytest.raises(SystemExit):
        main(["explain", layer])
    assert f"a layer must be T,D,F,E,K, got '{layer}'" in capsys.readouterr().err


@pytest.mark.parametrize("layer", ["0,2,3,4,1", "1,2,3,0,1", "1,2,3,4,0", "1,-2,3,4,1", "1,2,3,4,5"])
def test_sizes_that_no_layer_has(layer, capsys):
    with pytest.raises(SystemExit):
        main(["explain", layer, "--cc", "80"])
    assert f"T, D, F, E and K must be at least 1, and K at most E, got '{layer}'" in capsys.readouterr().err


RULES = {"--quantized=mxfp4": "needs rows of whole blocks of 32", "--precision=fp8": "needs multiples of 16"}


@pytest.mark.parametrize("option", RULES)
def test_sizes_that_a_format_does_not_take(option, capsys):
    assert main(["explain", "16,64,40,4,2", option]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("moe_kernels explain: ") and RULES[option] in printed


def test_says_which_ops_are_replayed(device, capsys):
    explain.print_records(torch.float16, device, "swiglu", None)
    assert "records: none, because no kernels run or single launches are wanted" in capsys.readouterr().out  # poisoned
    torch.use_deterministic_algorithms(False)
    explain.print_records(torch.float16, device, "swiglu", None)
    names = ["fused_experts", "fused_experts_gradients"]
    assert sorted(capsys.readouterr().out.splitlines()) == [f"records: {name}: replayed" for name in names]


@pytest.mark.gpu
def test_on_the_gpu(capsys):
    assert main(["explain", "512,512,1024,4,2", "--dtype", "float16"]) == 0
    printed = capsys.readouterr().out
    assert torch.cuda.get_device_name() in printed and printed.count("within the error budget") == 7
    assert printed.count("speed: ") == 6


@pytest.mark.gpu
def test_asking_about_this_gpu_says_what_is_selected_here():
    asked, is_here = find_target(device_cc(torch.device("cuda", 0)), torch.cuda.get_device_name())
    assert not is_here and find_target(None, None) == (asked, True)
    here = layer_of(LAYER, torch.bfloat16, "cuda").plan()
    assert [step.kernel for step in plan(target=asked)] == [step.kernel for step in here]
