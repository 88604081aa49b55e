"""Hazards of racecheck that pass, and the machine code that justifies this."""

import pytest
import torch

from moe_kernels import GroupedGemmArguments, get_kernels
from moe_kernels.gemm import selection

from ..processes import run_python
from ..tiers import slow
from . import sanitize
from .racecheck import HOPPER, is_known, parse, warp_specialize_lines
from .sanitize import only
from .sass import functions_between_multiplications, spills_in_reductions, unordered_accesses

KERNEL = "grouped_gemm_kernel"
DEF, CALL = sorted(line for _, line in warp_specialize_lines()[KERNEL])


def report(*hazards, shown=None):
    lines = ["========= COMPUTE-SANITIZER", "d_model 136, d_ff 200: finite"]
    for hazard in hazards:
        lines += ["========= " + line for line in hazard] + ["========= "]
    shown = len(hazards) if shown is None else shown
    return "\n".join([*lines, f"========= RACECHECK SUMMARY: {shown} hazards displayed ({shown} errors, 0 warnings)"])


def first(kind, line, kernel=KERNEL):
    return f"Error: Race reported between {kind} access at {kernel}+0x160 in grouped_device.py:{line}"


def other(kind, line, kernel=KERNEL):
    return f"    and {kind} access at {kernel}+0xe770 in grouped_device.py:{line} [213 hazards]"


# As reported by an H200: one hazard on the word that names the function, one on a value that it needs.
STATE = (first("Read", DEF), other("Write", DEF), other("Write", CALL))
VALUE = (first("Write", DEF), other("Read", DEF), other("Read", DEF))

FOREIGN = {
    "first_elsewhere": (first("Read", DEF + 1), other("Write", DEF)),
    "second_elsewhere": (first("Read", DEF), other("Write", DEF), other("Write", CALL + 1)),
    "two_writes": (first("Write", DEF), other("Write", CALL)),
    "another_kernel": (first("Read", DEF, "_combine_kernel"), other("Write", DEF, "_combine_kernel")),
    "two_kernels": (first("Read", DEF), other("Write", DEF, "wgrad_kernel")),
}


def test_the_words_of_warp_specialize_pass():
    hazards = parse(report(STATE, VALUE))
    assert len(hazards) == 2 and all(map(is_known, hazards))


@pytest.mark.parametrize("hazard", FOREIGN.values(), ids=FOREIGN)
def test_any_other_hazard_does_not_pass(hazard):
    assert [is_known(found) for found in parse(report(STATE, hazard, VALUE))] == [True, False, True]


@pytest.mark.parametrize(
    "text",
    [
        report(STATE).rsplit("\n", 1)[0],
        report(STATE, shown=2),
        report(STATE[:1]),
        report(("Internal Sanitizer Error: the program ended",)),
    ],
    ids=["cut", "count", "half", "unknown"],
)
def test_an_incomplete_report_raises(text):
    with pytest.raises(ValueError, match="racecheck: expected"):
        parse(text)


def test_lines_are_those_of_the_source():
    found = warp_specialize_lines()
    products = "grouped_gemm", "block_scaled_gemm", "activation_gradient", "wgrad"
    assert set(found) == {f"{name}_kernel" for name in products}
    for kernel, places in found.items():
        texts = [(HOPPER / file).read_text().splitlines()[line - 1].strip() for file, line in sorted(places)]
        assert texts == [f"def {kernel}(", "gl.warp_specialize("]


# Warps 0 to 3 jump to .L_x_1. The others wait, read, and either exit or pass two more barriers and loop.
SASS = """
	//## File "/folder/kernel.py", line 1
        /*0000*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0020*/                   LDS.U8 R0, [R0+UR6+0x380dc] ;
        /*0030*/              @!P0 EXIT ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
	//## File "/folder/kernel.py", line 9
        /*0050*/                   STS [R1], R2 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
	//## File "/folder/kernel.py", line 1
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0080*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*0090*/                   STS.64 [UR14+0x380e0], R2 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
	//## File "/folder/kernel.py", line 2
        /*00d0*/                   STS.64 [UR4+0x380e0], R2 ;
        /*00e0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00f0*/                   EXIT ;
"""
LINES = {("kernel.py", 1), ("kernel.py", 2)}

# From Triton 3.8 on, the other warps jump, and warps without a function pass two barriers by a predicate.
JUMPS = """
	//## File "/folder/kernel.py", line 1
        /*0000*/               @P0 BRA `(.L_x_0) ;
        /*0010*/                   STS.64 [UR14+0x380e0], R2 ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0050*/                   STS.64 [UR4+0x380e0], R2 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0070*/                   EXIT ;
.L_x_0:
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0090*/                   LDS.U8 R0, [R0+UR6+0x380dc] ;
        /*00a0*/               @P1 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00b0*/               @P1 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00c0*/               @P1 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
"""


CODES = {"first_jump": SASS, "others_jump": JUMPS}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_barriers_between_all_accesses(code):
    assert unordered_accesses(code, LINES) == []


@pytest.mark.parametrize(
    ("name", "address"),
    [
        *(("first_jump", address) for address in ("0010", "0040", "0070", "00a0", "00b0", "00c0", "00e0")),
        *(("others_jump", address) for address in ("0020", "0040", "0060", "0080", "00a0", "00b0")),
    ],
)
def test_no_barrier_can_be_missing(name, address):
    (barrier,) = (line for line in CODES[name].splitlines() if f"/*{address}*/" in line)
    assert "BAR.SYNC.DEFER_BLOCKING 0x1 ;" in barrier
    for changed in (f"/*{address}*/ NOP ;", barrier.replace("0x1 ;", "0x1, 0x80 ;")):
        assert unordered_accesses(CODES[name].replace(barrier, changed), LINES)


def test_another_predicate_says_nothing_of_barriers():
    for changed in (JUMPS.replace("@P1 BRA", "@P2 BRA"), JUMPS.replace("/*00b0*/               @P1", "/*00b0*/ @!P1")):
        assert unordered_accesses(changed, LINES)


# Two consumers. Each loop over steps waits in another loop, and is inside a loop over tiles.
LOOPS = """
.L_x_0:
        /*0000*/                   LDL R0, [R1] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_4) ;
.L_x_2:
        /*0020*/                   HGMMA.64x256x16.F32 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   STL [R1], R0 ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
.L_x_3:
        /*0060*/                   HGMMA.64x256x16.F32 R24, gdesc[UR8], R24, gsb0 ;
        /*0070*/               @P1 BRA `(.L_x_3) ;
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/              @!P0 BRA `(.L_x_4) ;
        /*00a0*/                   BRA `(.L_x_2) ;
"""


def test_spills_are_counted_in_steps_alone():
    assert spills_in_reductions(LOOPS) == 0
    for address in ("0010", "0060"):
        line = next(line for line in LOOPS.splitlines() if f"/*{address}*/" in line)
        assert spills_in_reductions(LOOPS.replace(line, f"        /*0fff*/ LDL R7, [R1] ;\n{line}")) == 1
    with pytest.raises(ValueError, match="expected a loop of each consumer, got 1"):
        spills_in_reductions(LOOPS.replace("@P1 BRA `(.L_x_3)", "NOP"))


# The second exponential is between two multiplications of a step, the third between two steps.
STEPS = """
        /*0000*/                   MUFU.EX2 R1, R1 ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0020*/                   MUFU.EX2 R1, R1 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   MUFU.EX2 R1, R1 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
"""


def test_functions_are_counted_within_a_step_alone():
    assert functions_between_multiplications(STEPS) == 1


def test_another_access_on_the_lines_is_found():
    (wrong,) = unordered_accesses(SASS, {*LINES, ("kernel.py", 9)})
    assert wrong.startswith("+0x50 STS [R1], R2: write of the other warps")


def test_machine_code_that_says_nothing_raises():
    with pytest.raises(ValueError, match="expected writes and reads on lines"):
        unordered_accesses(SASS, {("kernel.py", 3)})
    with pytest.raises(ValueError, match="cannot follow"):
        unordered_accesses(SASS.replace("LDS.U8 R0, [R0+UR6+0x380dc]", "BRX R2 -0x10"), LINES)
    with pytest.raises(ValueError, match="expected a branch"):
        unordered_accesses("", LINES)


def test_sanitized_kernels_can_be_restricted(device):
    a, b = torch.empty(64, 64, device=device, dtype=torch.float16), torch.empty(2, 64, 64, device=device).half()
    offsets = torch.tensor([32, 64], dtype=torch.int32, device=device)
    args = GroupedGemmArguments(a, b, torch.empty_like(a), offsets=offsets)
    chosen = selection.select(args)
    designs = {type(kernel.metadata.design) for kernel in get_kernels(args)}
    assert len(designs) > 1
    for design in designs:
        with only(design):
            assert isinstance(selection.select(args).metadata.design, design)
    assert selection.select(args) is chosen


@slow  # ten seconds in the interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs for minutes, under the checkers")
def test_the_sanitized_program_reaches_every_function_that_the_interpreter_can_run():
    result = run_python(["-m", "tests.machine_code.sanitize"], interpret=True)
    *_, reached, remaining = result.stdout.splitlines()
    assert reached.startswith("catalog: ") and remaining.startswith("remaining: ")
    functions = {name for name in remaining.split() if name.startswith("moe_kernels.")}
    assert functions == {name for name in sanitize.triton_kernels() if ".kernels.hopper." in name}


def test_the_sanitized_program_names_what_it_did_not_reach(monkeypatch):
    monkeypatch.setattr(sanitize, "run_catalog", set)
    for name in ("run_layers", "run_ops"):
        monkeypatch.setattr(sanitize, name, lambda: None)
    with pytest.raises(
        SystemExit, match=r"not reached: .*routing\.linear\._product_kernel.*routing\.softmax\._topk_kernel"
    ):
        sanitize.main([])
