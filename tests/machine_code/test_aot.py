"""Every kernel configuration compiles, without a GPU, for every architecture that its metadata declares."""

import json

import pytest

from moe_kernels import get_kernels
from moe_kernels.gemm.kernel import WarpSpecializedDesign
from moe_kernels.runtime.gluon import KNOWS_GLUON
from moe_kernels.runtime.triton import HAS_TRITON, TRITON_VERSION

from ..processes import run_python
from ..tiers import slow
from .targets import TARGETS

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    # Hundreds of compilations take minutes. In the default tier, tests/unit/runtime/test_launch.py compiles a kernel of
    # every kind of launch.
    slow,
]

# Shared memory available to one program, in bytes. Kernels for 80 also run on 86 and 89, which have less.
SHARED_BYTES = {80: 101_376, 90: 232_448, 100: 232_448}
INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.fixture(scope="module")
def records():
    # Run in a separate process, because kernel definitions choose the interpreter.
    # Triton 3.9 warns unless multiply-add fusion is set explicitly; 3.6 fuses.
    result = run_python(["-m", "tests.machine_code.aot"], TRITON_DEFAULT_FP_FUSION="1")
    return [json.loads(line) for line in result.stdout.splitlines()]


def where(record):
    return f"{record['kernel']} ({record['case']}) for sm_{record['cc']}"


def compiles_here(metadata):
    """Return whether this Triton version has the Gluon that the warp-specialised kernels need."""
    return not isinstance(metadata.design, WarpSpecializedDesign) or KNOWS_GLUON


def test_covers_every_kernel_and_target(records):
    assert len(records) <= 535  # limits the time of the compilation
    compiled = {(record["kernel"], record["cc"]) for record in records}
    for cc in TARGETS:
        for kernel in get_kernels(cc=cc, metadata_filter=compiles_here):
            # Some kernels run another kernel's code.
            kernel = getattr(kernel, "compiled_as", kernel)
            assert (kernel.metadata.kernel_name, cc) in compiled


# Bytes per thread that some kernels spill, by Triton version and start of the kernel's name. A warp-specialised kernel
# spills once per tile, never in a step of the reduction.
SPILLS = {
    (3, 6): {"grouped_gemm_pointer_float32": 8},  # with every optional operand at once
    (3, 7): {"gemm_pointer_": 8},
    (3, 8): {"gemm_pointer_": 8, "ws": 64},
    (3, 9): {"weighted_activation_backward_kernel": 8, "ws": 128},
}


def spills_allowed(record):
    allowed, name = SPILLS.get(TRITON_VERSION[:2], {}), record["kernel"]
    if "_ws_" in name:
        return allowed.get("ws", 0)
    return next((size for start, size in allowed.items() if name.startswith(start)), 0)


# By rule, a function of a record that is true if the kernel breaks the rule.
IS_BROKEN = {
    "few spills": lambda record: record["spilled_bytes"] > spills_allowed(record),
    "no spill in a reduction step": lambda record: record["gemm"] and record["spills_in_reductions"],
    "no trigger of a known miscompilation": lambda record: record["hazards"],
    "shared memory fits": lambda record: record["shared_bytes"] > SHARED_BYTES[record["cc"]],
    "registers fit": lambda record: record["registers"] * record["num_warps"] * 32 > 65_536,
    "workspace sizes count the descriptors": lambda r: r["gemm"] and r["scratch_bytes"] != r["said_scratch_bytes"],
    "artifacts launch as the JIT does": lambda record: record["gemm"] and not record["artifact_launches_alike"],
    "each tensor has one descriptor": lambda record: record["gemm"] and record["described_twice"],
}


@pytest.mark.parametrize("rule", IS_BROKEN)
def test_every_kernel_keeps_each_rule(rule, records):
    assert not [(where(record), broken) for record in records if (broken := IS_BROKEN[rule](record))]


def test_gradients_of_activations_stay_behind_the_products_of_a_step(records):
    gradients = [record for record in records if record["kernel"].startswith("activation_gradient_ws_")]
    assert gradients or not KNOWS_GLUON
    assert not [where(record) for record in gradients if record["functions_between_multiplications"]]


def test_no_multiply_adds_between_the_copies_of_a_gather(records):
    """`hopper/ring.py` moves pointers by additions. Weight gradients find other rows in each step, and a second pair of
    operands has few steps."""
    kernels = "grouped_gemm_ws_bfloat16", "grouped_gemm_ws_float16", "activation_gradient_ws"
    gathers = [record for record in records if record["kernel"].startswith(kernels)]
    gathers = [record for record in gathers if record["kernel"].endswith("gather") and record["case"] != "extra"]
    assert gathers or not KNOWS_GLUON
    assert not [where(record) for record in gathers if record["multiply_adds_between_copies"]]


def test_loop_bounds_of_weight_gradients_follow_the_tile(records):
    """Triton 3.6's inliner keeps the first tile's number of steps, in the producer and both consumers, unless the
    number passes through assembly."""
    specialized = [record for record in records if record["kernel"].startswith("wgrad_ws_")]
    assert specialized or not KNOWS_GLUON
    assert not [(where(r), r["moved"]) for r in specialized if len(r["moved"]) < 3 or not all(r["moved"])]


def test_rows_between_tiles_move_several_elements_at_once(records):
    found = [record for record in records if record["case"] == "between tiles"]
    assert {"_permute_kernel", "_combine_kernel", "activation_kernel"} < {record["kernel"] for record in found}
    assert not [where(record) for record in found if record["narrow_accesses"]]


def test_words_of_warp_specialize_have_barriers_between(records):
    """Barriers separate the accesses that `tests/machine_code/racecheck.py` lets pass, so they are no races."""
    specialized = [record for record in records if "_ws_" in record["kernel"]]
    assert specialized or not KNOWS_GLUON
    assert not [(where(record), record["unordered"]) for record in specialized if record["unordered"] != []]


def test_gemms_of_16_bits_or_fewer_use_tensor_cores(records):
    gemms = [record for record in records if record["gemm"] and "float32" not in record["kernel"]]
    assert gemms
    for record in gemms:
        # Tiles lower than 64 rows are too small for wgmma and tcgen05.
        is_low = any(f"_{rows}x" in record["kernel"] for rows in (8, 16, 32))
        instructions = {INSTRUCTION[record["cc"]], *(["mma.sync"] if is_low else [])}
        assert record["tensor_core"] in instructions, where(record)
