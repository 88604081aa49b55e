"""Launches through what earlier ones were compiled to."""

import dataclasses
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from moe_kernels import GroupedGemmArguments, WgradArguments, fused_experts, get_kernels, reference
from moe_kernels.activation.ops import _activation_kernel
from moe_kernels.gemm import selection
from moe_kernels.permutation.permute import _spread_kernel, launch_permute
from moe_kernels.runtime import launch as launching
from moe_kernels.runtime.launch import Launch, signature, static_properties
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.testing import CASES, make_inputs, make_permutation

if HAS_TRITON:
    import triton
    from triton.runtime.jit import JITFunction


def spread_launch(tokens, weights, index, rows, d_model=32, top_k=2):
    options = {"TOP_K": top_k, "BLOCK_T": 1, "BLOCK_D": 32}
    arguments = tokens, tokens.stride(), weights, index, rows, len(tokens), d_model
    return Launch(_spread_kernel, (4, 1), arguments, options)


def spread_launches():
    """A launch, one that is compiled alike, and others by what tells them apart."""
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


@pytest.mark.parametrize("facts", [static_properties, signature])
def test_static_properties_tell_apart_what_triton_compiles_for(facts):
    plain, alike, others = spread_launches()
    for what, launch in others.items():
        assert facts(launch) != facts(plain), what
    assert facts(alike) == facts(plain) and hash(facts(alike)) == hash(facts(plain))


def activation_launch(preactivation, num_rows, limit):
    arguments = (preactivation, preactivation.stride(), None, None, preactivation, num_rows, 16, limit, None)
    return Launch(_activation_kernel, (1,), arguments, {"FORWARD": None, "GATED": True, "BLOCK_R": 1, "BLOCK_F": 16})


def test_signatures_of_numbers():
    """A number of rows counts by its bits, one that is no integer by its type, and 1, 1.0 and True are three things."""
    rows = torch.zeros(4, 32)
    plain = activation_launch(rows, 4, 7.0)
    for alike in (activation_launch(rows, 5, 7.0), activation_launch(rows, 16, 1.0)):
        assert signature(alike) == signature(plain)
    others = [activation_launch(rows, 2**31, 7.0), *(activation_launch(rows, 4, limit) for limit in (1, True, None))]
    found = {signature(launch) for launch in (plain, *others)}
    assert len(found) == len({static_properties(launch) for launch in (plain, *others)}) == 5


class Compiled:
    """Stands for Triton's compiled kernel: says what it was compiled for, and writes down its launches."""

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
def kept(monkeypatch):
    """What a GPU would keep: compiled kernels by static properties."""
    plain, alike, others = spread_launches()
    launches = [plain, alike, *others.values()]
    monkeypatch.setattr(launching, "_compiled", {static_properties(launch): Compiled(launch) for launch in launches})
    monkeypatch.setattr(launching, "_by_signature", {})
    monkeypatch.setattr(launching, "INTERPRET", False)
    return launches


def found(launch):
    return launching.find_ready(launch).compiled.properties


def test_each_launch_finds_its_own_kernel(kept):
    for _ in range(2):
        for launch in kept:
            assert found(launch) == static_properties(launch)
    assert len(launching._by_signature) == len(kept) - 1  # two are alike
    launching._compiled.clear()
    assert all(found(launch) == static_properties(launch) for launch in kept)


def test_strides_that_change_do_not_pile_up(kept, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_SIGNATURES", 3)
    plain = kept[0]
    for columns in range(48, 48 + 16 * 20, 16):
        tokens = torch.zeros(4, columns)[:, :32]
        launch = plain._replace(arguments=(tokens, tokens.stride(), *plain.arguments[2:]))
        assert found(launch) == static_properties(launch) == static_properties(plain)
        assert len(launching._by_signature) <= 3


def test_threads_find_their_own_kernels(kept, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_SIGNATURES", 2)  # so that they also forget under each other's feet
    wrong = []

    def find(launches):
        wrong.extend(w for _ in range(200) for w in launches if found(w) != static_properties(w))

    threads = [threading.Thread(target=find, args=(kept[first:] + kept[:first],)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def driver(monkeypatch):
    fake = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)


def test_a_launch_gets_its_own_arguments_and_constants(kept, driver):
    """What is kept holds what is compiled, not what an earlier launch wrote to or how large its grid was."""
    plain, alike, *others = kept
    more = alike._replace(grid=(7,))
    for launch in (plain, more, *others, alike, plain):
        launching.launch_kernel(launch.function, launch.grid, *launch.arguments, **launch.options)
        handed = launching.find_ready(launch).compiled.launches[-1]
        grid = (*launch.grid, 1, 1)[:3]
        stream = f"stream of {launch.arguments[0].get_device()}"
        assert handed[:9] == (*grid, stream, "function", "packed", None, None, None)
        arguments = handed[9:]
        assert len(arguments) == len(launch.function.arg_names)
        assert all(is_ is was for is_, was in zip(arguments, launch.arguments, strict=False))
        constants = dict(zip(launch.function.arg_names, arguments, strict=True))
        assert constants.items() >= launch.options.items()


def test_hooks_that_come_later_are_prepared_for(kept, driver, monkeypatch):
    """As when a profiler starts after the first launches."""
    plain = kept[0]
    compiled = launching.find_ready(plain).compiled
    for which in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(triton.knobs.runtime, which), "calls", [print])
            launching.launch_kernel(plain.function, plain.grid, *plain.arguments, **plain.options)
        grid, arguments = compiled.launches.pop()
        assert grid == (*plain.grid, 1) and len(arguments) == len(plain.function.arg_names)
    launching.launch_kernel(plain.function, plain.grid, *plain.arguments, **plain.options)
    assert compiled.launches.pop()[3] == f"stream of {plain.arguments[0].get_device()}"


def test_descriptors_made_on_the_device_get_memory(kept, driver, monkeypatch):
    plain = kept[0]
    compiled = Compiled(plain, scratch_bytes=128)
    ready = launching.make_ready(plain, compiled)
    allocators = []
    monkeypatch.setattr(triton, "set_allocator", allocators.append)
    for memory in (None, torch.zeros(300, dtype=torch.int8), torch.zeros(100, dtype=torch.int8)):
        launching.run_ready(plain, ready, plain.arguments[0], memory)
        given = allocators.pop()(256, 128, 0)
        assert len(given) >= 256 and (given is memory) == (memory is not None and len(memory) >= 256)
    assert len(compiled.launches) == 3


def test_what_ran_for_an_artifact_outlives_it(kept, driver, monkeypatch):
    """A CUDA graph may still hold its code."""
    plain = kept[0]
    monkeypatch.setattr(launching, "_from_artifacts", {})
    artifact = launching.CompiledArtifact("kernel", (), Compiled(plain))
    compiled = weakref.ref(artifact.compiled)
    for _ in range(2):
        launching.run_launch(plain, artifact, plain.arguments[0], None)
    del artifact
    gc.collect()
    assert len(compiled().launches) == 2 and list(launching._from_artifacts.values()) == [compiled()]


def test_a_tensor_for_none_and_a_parameter_for_a_tensor(kept):
    """What has another type is read in another way."""
    plain = kept[0]
    tokens, strides, weights, *rest = plain.arguments
    absent = plain._replace(arguments=(tokens, strides, None, *rest))
    trained = plain._replace(arguments=(torch.nn.Parameter(tokens), strides, weights, *rest))
    half = plain._replace(arguments=(torch.nn.Parameter(tokens.half()), strides, weights, *rest))
    for _ in range(2):
        for launch in (plain, absent, trained, half):
            assert found(launch) == static_properties(launch)
    assert found(trained) == found(plain) and len({found(w) for w in (plain, absent, half)}) == 3


def table_of(offsets, num_rows, shift):
    """A tile table whose tensors start `shift` numbers behind an aligned address."""
    tensors = [
        torch.cat([t.new_zeros(shift), t.flatten()])[shift:].view(t.shape)
        for t in reference.tile_table(offsets, num_rows, 64)[:4]
    ]
    return reference.TileTable(*tensors, 64)


def shifted(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def grouped_variants():
    """Arguments of one shape and, by what differs, others that want another kernel or are compiled for otherwise."""
    a, b, out = torch.randn(40, 64).half(), torch.randn(3, 64, 48).half(), torch.empty(40, 48).half()
    offsets = torch.tensor([10, 20, 38], dtype=torch.int32)
    plain = GroupedGemmArguments(a, b, out, offsets=offsets)
    index = torch.arange(40, dtype=torch.int32)
    changes = {
        "dtype": {"A": a.float(), "B": b.float(), "out": out.float()},
        "dtype of the result": {"out": out.float()},
        "alignment of A": {"A": shifted(a)},
        "alignment of B": {"B": shifted(b)},
        "alignment of out": {"out": shifted(out)},
        "layout of B": {"B": b.mT.contiguous().mT},
        "strides of A": {"A": torch.zeros(40, 65).half()[:, :64]},
        "strides of out": {"out": torch.zeros(40, 49).half()[:, :48]},
        "size K": {"A": a[:, :60], "B": b[:, :60]},
        "size N": {"B": b[..., :47], "out": out[:, :47]},
        "bias": {"bias": torch.zeros(3, 48)},
        "dtype of the bias": {"bias": torch.zeros(3, 48).half()},
        "alignment of the bias": {"bias": shifted(torch.zeros(3, 48))},
        "strides of the bias": {"bias": torch.zeros(1, 48).expand(3, 48)},
        "row scale": {"row_scale": torch.ones(40)},
        "alignment of the row scale": {"row_scale": shifted(torch.ones(40))},
        "gather": {"row_to_token": index},
        "alignment of the index": {"row_to_token": shifted(index)},
        "no zeros behind": {"zero_tail": False},
        "a table": {"tile_table": table_of(offsets, 40, 0)},
        "alignment of a table": {"tile_table": table_of(offsets, 40, 1)},
    }
    return plain, {what: dataclasses.replace(plain, **change) for what, change in changes.items()}


def wgrad_variants():
    a, dout, out = torch.randn(40, 64).half(), torch.randn(40, 48).half(), torch.empty(3, 64, 48).half()
    offsets = torch.tensor([10, 20, 38], dtype=torch.int32)
    plain = WgradArguments(a, dout, out, offsets=offsets)
    index = torch.arange(40, dtype=torch.int32)
    changes = {
        "dtype": {"A": a.float(), "dout": dout.float(), "out": out.float()},
        "dtype of the result": {"out": out.float()},
        "alignment of A": {"A": shifted(a)},
        "alignment of dout": {"dout": shifted(dout)},
        "layout of out": {"out": out.mT.contiguous().mT},
        "strides of dout": {"dout": torch.zeros(40, 49).half()[:, :48]},
        "size K": {"A": a[:, :60], "out": out[:, :60]},
        "gather of A": {"a_row_to_token": index},
        "gather of dout": {"dout_row_to_token": index},
        "alignment of a table": {"tile_table": table_of(offsets, 40, 1)},
    }
    return plain, {what: dataclasses.replace(plain, **change) for what, change in changes.items()}


@pytest.mark.parametrize("variants", [grouped_variants, wgrad_variants])
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_launch_keys_tell_apart_what_kernels_are_compiled_for(variants, device):
    with torch.device(device):
        plain, others = variants()
    every = {"plain": plain, **others}
    for args in every.values():
        assert not args.error()

    def compiled_for(args):
        """By each kernel that is asked to, whether it supports the arguments or not."""
        kernel = selection.find(args)
        return kernel, static_properties(kernel.launch(args)), kernel.metadata_bytes(args) == 0

    compiled = {what: compiled_for(args) for what, args in every.items()}
    for what, args in every.items():
        for other_what, other in every.items():
            if compiled[what] != compiled[other_what]:
                assert args.launch_key() != other.launch_key(), (what, other_what)
    assert len({args.launch_key() for args in every.values()}) == len(every)


def test_launch_keys_know_the_precision_of_float32():
    plain, others = grouped_variants()
    args = others["dtype"]
    before = args.launch_key()
    torch.set_float32_matmul_precision("high")
    try:
        assert args.launch_key() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert args.launch_key() == before
    assert plain.launch_key() != before


def test_numbers_of_rows_share_a_launch_key():
    """Within a power of two per group, which the choice of a kernel looks at."""

    def arguments(num_rows):
        a, b = torch.zeros(num_rows, 64).half(), torch.zeros(3, 64, 48).half()
        offsets = torch.full((3,), num_rows, dtype=torch.int32)
        return GroupedGemmArguments(a, b, torch.empty(num_rows, 48).half(), offsets=offsets)

    keys = [arguments(num_rows).launch_key() for num_rows in (25, 40, 48)]
    assert keys[0] == keys[1] == keys[2]
    assert len({arguments(num_rows).launch_key() for num_rows in (0, 1, 48, 49)}) == 4


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_pinned_kernel_runs_from_then_on(device, monkeypatch):
    monkeypatch.setattr(selection, "_selected", {})
    monkeypatch.setattr(selection, "_plans", {})
    monkeypatch.setattr(selection, "_replays", {})
    args = GroupedGemmArguments(
        torch.ones(40, 64, device=device).half(),
        torch.ones(3, 64, 48, device=device).half(),
        torch.empty(40, 48, device=device).half(),
        offsets=torch.full((3,), 40, dtype=torch.int32, device=device),
    )
    selection._run(args)
    first, *_, last = get_kernels(args)
    assert [plan.kernel for plan in selection._plans.values()] == [first]
    selection.pin(args, last)
    selection._run(args)
    assert [plan.kernel for plan in selection._plans.values()] == [last]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_what_is_kept_holds_no_tensor(device):
    args = GroupedGemmArguments(
        torch.ones(40, 64, device=device).half(),
        torch.ones(3, 64, 48, device=device).half(),
        torch.empty(40, 48, device=device).half(),
        offsets=torch.full((3,), 40, dtype=torch.int32, device=device),
    )
    selection._run(args)
    tensors = [weakref.ref(tensor) for tensor in (args.A, args.B, args.out, args.offsets)]
    del args
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 4


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_each_variant_computes_its_own_product(device):
    """In turns, so that what is kept for one would show in the next."""
    _, others = grouped_variants()
    wanted = ["dtype", "alignment of A", "layout of B", "size K", "bias", "row scale", "gather"]
    for _ in range(2):
        for what in wanted:
            args = others[what]
            fields = {name: getattr(args, name) for name in (*args.tensors,)}
            moved = {name: None if tensor is None else tensor.to(device) for name, tensor in fields.items()}
            args = dataclasses.replace(args, **moved)
            args.out.fill_(torch.nan)
            selection._run(args)
            options = {"bias": args.bias, "row_scale": args.row_scale}
            expected = reference.grouped_gemm(args.A, args.B, args.offsets, **options)
            torch.testing.assert_close(args.out, expected, rtol=1e-2, atol=1e-2)


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
    """Each combination after the others, so that a kernel kept for one would show in the next."""
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
