"""Launches through the compiled kernels of earlier launches."""

import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from moe_kernels import fused_experts
from moe_kernels.activation.kernels import activation_kernel
from moe_kernels.permutation.permute import _permute_kernel, launch_permute
from moe_kernels.runtime import launch as launching
from moe_kernels.runtime.gluon import KNOWS_GLUON
from moe_kernels.runtime.launch import Launch, static_properties
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.testing import CASES, make_inputs, make_permutation

from ...processes import run_python

if HAS_TRITON:
    import triton
    from triton.runtime.jit import JITFunction


def spread_launch(tokens, weights, index, rows, d_model=32, top_k=2):
    options = {"TOP_K": top_k, "ALIGNED": 1, "BLOCK_T": 1, "BLOCK_D": 32}
    arguments = tokens, tokens.stride(), weights, index, rows, rows.stride(), len(tokens), d_model
    return Launch(_permute_kernel, (4, 1), arguments, options)


def spread_launches():
    """Yield a launch, one that compiles alike, and others by what distinguishes them."""
    tokens, rows = torch.zeros(4, 32), torch.zeros(8, 32)
    weights, index = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    plain = spread_launch(tokens, weights, index, rows)
    alike = spread_launch(torch.ones(7, 32), weights, index, rows)
    others = {
        "dtype": spread_launch(tokens.half(), weights, index, rows),
        "alignment": spread_launch(torch.zeros(129)[1:].view(4, 32), weights, index, rows),
        "a stride of 1": spread_launch(torch.zeros(32, 4).t(), weights, index, rows),
        "a stride's divisors": spread_launch(torch.zeros(4, 33)[:, :32], weights, index, rows),
        "a stride of 64 bits": spread_launch(tokens.as_strided((1, 32), (2**31, 1)), weights, index, rows),
        "an absent operand": spread_launch(tokens, None, index, rows),
        "a size's divisors": spread_launch(tokens, weights, index, rows, d_model=33),
        "a constant": spread_launch(tokens, weights, index, rows, top_k=1),
    }
    return plain, alike, others


def test_static_properties_tell_apart_what_triton_compiles_for():
    plain, alike, others = spread_launches()
    for what, launch in others.items():
        assert static_properties(launch) != static_properties(plain), what
    assert static_properties(alike) == static_properties(plain)


def activation_launch(preactivation, num_rows, limit):
    out = preactivation, preactivation.stride(0)
    arguments = preactivation, preactivation.stride(), None, None, *out, None, num_rows, 16, limit, None
    options = {"FORWARD": None, "GATED": True, "ALIGNED": 1, "BLOCK_R": 1, "BLOCK_F": 16}
    return Launch(activation_kernel, (1,), arguments, options)


def test_static_properties_of_numbers():
    """A number of rows counts by its bits, a non-integer by its type; and 1, 1.0 and True differ."""
    rows = torch.zeros(4, 32)
    plain = activation_launch(rows, 4, 7.0)
    for alike in (activation_launch(rows, 5, 7.0), activation_launch(rows, 16, 1.0)):
        assert static_properties(alike) == static_properties(plain)
    others = [activation_launch(rows, 2**31, 7.0), *(activation_launch(rows, 4, limit) for limit in (1, True, None))]
    assert len({static_properties(launch) for launch in (plain, *others)}) == 5


class Compiled:
    """A fake of Triton's compiled kernel: knows what it was compiled for, and records its launches."""

    function, packed_metadata = "function", "packed"

    def __init__(self, launch, scratch_bytes=0):
        self.properties = static_properties(launch)
        self.metadata = SimpleNamespace(global_scratch_size=scratch_bytes)
        self.launches = []

    def run(self, *launch):
        self.launches.append(launch)

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


@pytest.fixture
def launches(monkeypatch):
    """Return launches on CPU tensors that `launching` takes for launches on a GPU. Triton's JIT only records its
    calls."""
    plain, alike, others = spread_launches()
    launches = [plain, alike, *others.values()]
    for launch in launches:
        static_properties(launch)  # reads the kernel's parameters where there is an interpreter

    def compile_and_launch(function, grid):
        def run(*arguments, **options):
            options.pop("enable_fp_fusion", None)
            jitted.append(Launch(function, grid, arguments, options))
            return Compiled(jitted[-1])

        return run

    jitted = []
    monkeypatch.setattr(type(_permute_kernel), "__getitem__", compile_and_launch)
    monkeypatch.setattr(launching, "_ready", {})
    monkeypatch.setattr(launching, "INTERPRET", False)
    monkeypatch.setattr(launching, "_is_on_gpu", lambda launch: True)
    fake = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    return launches


def run(launch):
    launching.run_launch(launch, launch.arguments[0])


def ready(launch):
    return launching._ready[static_properties(launch)].compiled


def found(launch):
    ran = []
    with launching.observing_launches(lambda launch, run: ran.append(run())):
        run(launch)
    return ran[0].properties


def test_each_launch_finds_its_own_kernel(launches):
    for _ in range(2):
        for launch in launches:
            assert found(launch) == static_properties(launch)
    assert len(launching._ready) == len(launches) - 1  # two are alike


def test_numbers_of_rows_share_what_is_kept(launches):
    for num_tokens in (4, 5, 16, 1000):
        tokens, rows = (torch.zeros(many, 32) for many in (num_tokens, 2 * num_tokens))
        run(spread_launch(tokens, torch.zeros(num_tokens, 2), torch.zeros(num_tokens, 2).int(), rows))
    assert len(launching._ready) == 1


def test_cpu_tensors_leave_nothing(launches, monkeypatch):
    """Kernels of CPU tensors are compiled for a target that the static properties do not name."""
    monkeypatch.undo()
    monkeypatch.setattr(launching, "_ready", {})
    monkeypatch.setattr(launching, "INTERPRET", False)
    monkeypatch.setattr(type(_permute_kernel), "__getitem__", lambda function, grid: lambda *_, **options: "compiled")
    run(launches[0])
    assert launching._ready == {}


def test_threads_find_their_own_kernels(launches):
    all_run = threading.Barrier(4)

    def wrong_ones(first):
        all_run.wait()
        in_turn = launches[first:] + launches[:first]
        return [launch for _ in range(50) for launch in in_turn if found(launch) != static_properties(launch)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong_ones, range(4))) == [[]] * 4


def test_a_launch_gets_its_own_arguments_and_constants(launches):
    """The cache holds compiled code, but neither the tensors nor the grid of an earlier launch."""
    plain, alike, *others = launches
    more = alike._replace(grid=(7,))
    for launch in launches:
        run(launch)
    for launch in (plain, more, *others, alike, plain):
        launching.launch_kernel(launch.function, launch.grid, *launch.arguments, **launch.options)
        handed = ready(launch).launches[-1]
        grid = (*launch.grid, 1, 1)[:3]
        stream = f"stream of {launch.arguments[0].get_device()}"
        assert handed[:9] == (*grid, stream, "function", "packed", None, None, None)
        arguments = handed[9:]
        assert len(arguments) == len(launch.function.arg_names)
        assert all(is_ is was for is_, was in zip(arguments, launch.arguments, strict=False))
        constants = dict(zip(launch.function.arg_names, arguments, strict=True))
        assert constants.items() >= launch.options.items()


def test_hooks_that_come_later_are_prepared_for(launches, monkeypatch):
    """A profiler may start after the first launches."""
    plain = launches[0]
    run(plain)
    compiled = ready(plain)
    for which in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(triton.knobs.runtime, which), "calls", [print])
            launching.launch_kernel(plain.function, plain.grid, *plain.arguments, **plain.options)
        grid, arguments = compiled.launches.pop()
        assert grid == (*plain.grid, 1) and len(arguments) == len(plain.function.arg_names)
    launching.launch_kernel(plain.function, plain.grid, *plain.arguments, **plain.options)
    assert compiled.launches.pop()[3] == f"stream of {plain.arguments[0].get_device()}"


def test_descriptors_made_on_the_device_get_memory(launches, monkeypatch):
    plain = launches[0]
    compiled = Compiled(plain, scratch_bytes=128)
    launching._ready[static_properties(plain)] = launching._make_ready(plain, compiled)
    allocators = []
    monkeypatch.setattr(triton, "set_allocator", allocators.append)
    for memory in (None, torch.zeros(300, dtype=torch.int8), torch.zeros(100, dtype=torch.int8)):
        launching.run_launch(plain, plain.arguments[0], scratch=memory)
        given = allocators.pop()(256, 128, 0)
        assert len(given) >= 256 and (given is memory) == (memory is not None and len(memory) >= 256)
    assert len(compiled.launches) == 3


def test_what_ran_for_an_artifact_outlives_it(launches, monkeypatch):
    """A CUDA graph may still hold its code."""
    plain = launches[0]
    monkeypatch.setattr(launching, "_from_artifacts", {})
    artifact = launching.CompiledArtifact("kernel", (), Compiled(plain))
    compiled = weakref.ref(artifact.compiled)
    for _ in range(2):
        launching.run_launch(plain, plain.arguments[0], artifact=artifact)
    del artifact
    gc.collect()
    assert len(compiled().launches) == 2 and list(launching._from_artifacts.values()) == [compiled()]


ARTIFACTS = """
import json
from moe_kernels import get_kernels
from tests.machine_code.aot import compile_gemm

# Launches of every kind: strides and absent operands, dtypes as constants, descriptors made on the device and on the
# host, activations.
KERNELS = [
    ("grouped_gemm_pointer_float16_16x128x64_w4_s3", 80, None),
    ("grouped_gemm_list_pointer_float8_e4m3fn_128x128x128_w8_s3_p1", 90, None),
    ("grouped_gemm_list_tma_bfloat16_64x64x64_w4_s4_p3", 90, None),
    ("grouped_gemm_ws_bfloat16_128x128x64_w12_s5_b_column_swiglu", 90, "reglu"),
    ("gemm_pointer_float16_128x128x64_w8_s3_relu", 100, None),
]
obstacles = {kernel.metadata.kernel_name: kernel.obstacle for kernel in get_kernels()}
compiled = [compile_gemm(name, "plain", cc, epilogue) for name, cc, epilogue in KERNELS if obstacles[name] is None]
print(json.dumps({record["kernel"]: record["artifact_launches_alike"] for record in compiled}))
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_compiled_artifacts_launch_as_the_jit_does():
    # Triton 3.9 warns if the variable is unset.
    alike = json.loads(run_python(["-c", ARTIFACTS], TRITON_DEFAULT_FP_FUSION="1").stdout)
    assert len(alike) == 4 + KNOWS_GLUON and all(alike.values()), alike


def test_a_tensor_for_none_and_a_parameter_for_a_tensor(launches):
    """A parameter runs the kernel of a tensor; an absent tensor needs another."""
    plain = launches[0]
    tokens, strides, weights, *rest = plain.arguments
    absent = plain._replace(arguments=(tokens, strides, None, *rest))
    trained = plain._replace(arguments=(torch.nn.Parameter(tokens), strides, weights, *rest))
    half = plain._replace(arguments=(torch.nn.Parameter(tokens.half()), strides, weights, *rest))
    for _ in range(2):
        for launch in (plain, absent, trained, half):
            assert found(launch) == static_properties(launch)
    assert found(trained) == found(plain) and len({found(w) for w in (plain, absent, half)}) == 3
    assert len(launching._ready) == 3


@pytest.mark.gpu
def test_a_launch_like_an_earlier_one_spares_the_jit(device, monkeypatch):
    inputs = make_inputs(CASES["ordinary"], torch.bfloat16, device)
    weights, permutation = make_permutation(inputs, CASES["ordinary"].top_k)
    operands = (inputs.tokens, weights, permutation, inputs.w_up, inputs.w_down)
    expected = fused_experts(*operands)
    monkeypatch.setattr(JITFunction, "run", None)
    assert torch.equal(fused_experts(*operands), expected)


@pytest.mark.gpu
def test_other_properties_get_a_kernel_of_their_own(device):
    """Each combination runs after the others, so that a wrongly reused kernel would show."""
    index = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    weights = torch.rand(4, 2, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        for shift, columns in ((0, 32), (1, 32), (0, 33), (1, 33)):
            tokens = torch.randn(shift + 4 * columns, device=device).to(dtype)[shift:].view(4, columns)
            for scale in (None, weights):
                rows = tokens.new_empty(8, columns)
                launch_permute(tokens, scale, index, rows)
                factors = weights.new_ones(4, 2, 1) if scale is None else scale[:, :, None]
                assert torch.equal(rows, (tokens[:, None].float() * factors).to(dtype).view(8, columns))
