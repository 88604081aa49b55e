"""Querying, compiling and running kernels: status, order, artifacts, streams, workspaces, DLPack."""

import dataclasses
import re
from functools import partial

import numpy as np
import pytest
import torch

from moe_kernels import (
    GemmArguments,
    GroupedGemmArguments,
    JaggedGemmArguments,
    PointerDesign,
    WarpSpecializedDesign,
    WgradArguments,
    get_kernels,
    reference,
)
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Kernel, StreamingDesign, TmaDesign, is_device_cc_supported

FLOAT16 = torch.float16


def grouped_arguments(device, dtype=FLOAT16, num_rows=40, size_k=64, **options):
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(num_rows, size_k, device=device, generator=generator).to(dtype)
    b = torch.randn(3, size_k, 48, device=device, generator=generator).to(dtype)
    offsets = torch.tensor([num_rows // 3, num_rows // 3, num_rows - 2], dtype=torch.int32, device=device)
    out = torch.full((num_rows, 48), torch.nan, dtype=dtype, device=device)
    return GroupedGemmArguments(a, b, out, offsets=offsets, **options)


def wgrad_arguments(device, dtype=FLOAT16):
    args = grouped_arguments(device, dtype)
    return WgradArguments(args.A, args.A, torch.empty(3, 64, 64, dtype=dtype, device=device), offsets=args.offsets)


def gemm_arguments(device, dtype=FLOAT16):
    args = grouped_arguments(device, dtype)
    return GemmArguments(args.A, args.B[0], args.out)


def jagged_arguments(device, dtype=FLOAT16):
    args = grouped_arguments(device, dtype)
    return JaggedGemmArguments(args.A, args.B[0], args.out, torch.tensor([3, 20, 37], device=device))


ARGUMENTS = {
    "grouped": grouped_arguments,
    "wgrad": wgrad_arguments,
    "gemm": gemm_arguments,
    "jagged": jagged_arguments,
}


def expected_result(args):
    if isinstance(args, GroupedGemmArguments):
        return reference.grouped_gemm(args.A, args.B, args.offsets)
    if isinstance(args, WgradArguments):
        return reference.grouped_gemm_wgrad(args.A, args.dout, args.offsets)
    if isinstance(args, JaggedGemmArguments):
        return reference.jagged_gemm(args.A, args.B, args.group_offsets)
    return args.A @ args.B


@pytest.mark.parametrize("form", ARGUMENTS)
def test_best_first(form, device, monkeypatch):
    args = ARGUMENTS[form](device)
    kernels = get_kernels(args)
    assert len(kernels) > 1 and all(kernel.supports(args) for kernel in kernels)
    assert kernels[0] is selection.select(args)
    last = kernels[-1].metadata.kernel_name
    table = selection.Table({args.table_key(): last}, {})
    monkeypatch.setattr(selection, "table_for", lambda device: table)
    assert get_kernels(args) == [kernels[-1], *kernels[:-1]]


@pytest.mark.parametrize("form", ["grouped", "wgrad"])
def test_reserved_sms_are_left_alone(form, device):
    """With reserved SMs, a persistent kernel has fewer programs and computes the same bits."""
    args = ARGUMENTS[form](device)
    persistent = [kernel for kernel in get_kernels(args) if kernel.metadata.design.persistent]
    assert persistent
    for kernel in persistent[:: 1 if device == "cuda" else len(persistent)]:
        (programs,) = kernel.launch(args).grid
        kernel.run(args)
        expected = args.out.clone()
        for reserved, left in ((2, programs - 2), (10_000, 1)):
            fewer = dataclasses.replace(args, out=torch.full_like(args.out, torch.nan), reserved_sms=reserved)
            assert kernel.launch(fewer).grid == (left,)
            kernel.run(fewer)
            assert torch.equal(fewer.out, expected)


@pytest.mark.parametrize("form", ["grouped", "wgrad"])
def test_long_work_computes_the_same_bits(form, device):
    """A program of many steps computes half-width tiles as whole ones. Here the only program is one of many steps."""
    num_rows, size_k = (2600, 6400) if form == "grouped" else (18432, 1024)
    rows = torch.randn(num_rows, size_k, device=device, generator=torch.Generator(device).manual_seed(0)).to(FLOAT16)
    offsets = torch.tensor([num_rows // 4, num_rows // 2, num_rows], dtype=torch.int32, device=device)
    if form == "grouped":
        weights, out = rows[:960].view(3, 320, size_k).mT, rows.new_empty(num_rows, 320)
        args = GroupedGemmArguments(rows, weights, out, offsets=offsets)
    else:
        args = WgradArguments(rows, rows[:, :320].contiguous(), rows.new_empty(3, size_k, 320), offsets=offsets)
    kernels = [kernel for kernel in get_kernels(args) if isinstance(kernel.metadata.design, WarpSpecializedDesign)]
    if not kernels:
        pytest.skip("no warp-specialised kernel runs here")
    for kernel in kernels:
        alone = dataclasses.replace(args, out=torch.full_like(args.out, torch.nan), reserved_sms=10_000)
        kernel.run(args)
        kernel.run(alone)
        assert torch.equal(args.out, alone.out)


def test_a_small_product_makes_no_table(device):
    """The two launches of a table pay only for large products."""
    small = gemm_arguments(device)
    assert not selection.select(small).metadata_bytes(small)
    rows = small.out.new_empty(1, 4096).expand(65536, 4096)  # without allocating it
    large = GemmArguments(rows, rows[:4096], rows)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels with a table are for capability 9.0")
    assert get_kernels(large)[0].metadata_bytes(large)


def test_filters():
    def names(**options):
        return {kernel.metadata.kernel_name for kernel in get_kernels(**options)}

    every = names()
    classes = PointerDesign, TmaDesign, WarpSpecializedDesign, StreamingDesign
    designs = [names(metadata_filter=lambda m, d=d: isinstance(m.design, d)) for d in classes]
    assert all(designs) and every == set.union(*designs) and len(every) == sum(map(len, designs))
    tiles = names(metadata_filter=lambda m: m.design.tile_shape == (128, 128, 64))
    assert tiles and all("128x128x64" in name for name in tiles) and not tiles & {n for n in every if "64x64" in n}
    float8 = names(metadata_filter=lambda m: m.operands.A.dtype == torch.float8_e4m3fn)
    assert float8 and not float8 & names(cc=80) and float8 <= names(cc=89) | names(cc=90)
    assert {name.split("_pointer")[0] for name in float8 & names(cc=89)} >= {"grouped_gemm", "grouped_gemm_list"}
    assert names(metadata_filter=lambda m: torch.float32 in m.operands.out.dtypes and m.operands.A.dtype == FLOAT16)
    assert names(metadata_filter=lambda m: "bias" in m.optional_operands) & float8
    for kernel in get_kernels():
        for name in kernel.metadata.optional_operands:
            assert name in kernel.arguments_class.__dataclass_fields__


def float32_kernel(arguments_class):
    """Return a kernel without a gather."""
    return next(
        kernel
        for kernel in get_kernels(metadata_filter=lambda m: m.operands.A.dtype == torch.float32 and not m.design.gather)
        if kernel.arguments_class is arguments_class
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"A": torch.zeros(40)}, "Operand `A`: expected a matrix"),
        ({"A": torch.zeros(39, 64)}, "Operand `A`: expected shape [40, 64], got [39, 64]"),
        ({"B": torch.zeros(3, 63, 48)}, "Operand `B`: expected shape [3, 64, 48], got [3, 63, 48]"),
        ({"B": torch.zeros(64, 48)}, "Operand `B`: expected 3 axes, got shape [64, 48]"),
        ({"out": torch.zeros(40, 47)}, "Operand `out`: expected shape [40, 48], got [40, 47]"),
        ({"out": torch.zeros(40, 48).half()}, "Operand `out`: expected torch.float32, got torch.float16"),
        ({"offsets": None}, "Operand `offsets`: expected it or tile_table, got neither"),
        ({"offsets": torch.zeros(3)}, "Operand `offsets`: expected torch.int32, got torch.float32"),
        ({"offsets": torch.zeros(2).int()}, "Operand `offsets`: expected shape [3], got [2]"),
        ({"bias": torch.zeros(3, 47)}, "Operand `bias`: expected shape [3, 48], got [3, 47]"),
        ({"row_scale": torch.zeros(40).half()}, "Operand `row_scale`: expected torch.float32, got torch.float16"),
        ({"scale_a": torch.zeros(40)}, "Operand `scale_a`: this kernel takes none"),
        ({"bias": torch.zeros(3, 48, device="meta")}, "Operand `bias`: expected device cpu as A, got meta"),
    ],
)
def test_status_names_the_operand(changes, error):
    args = dataclasses.replace(grouped_arguments("cpu", torch.float32), **changes)
    kernel = float32_kernel(GroupedGemmArguments)
    status = kernel.supports(args)
    assert not status and status.error.startswith(error)
    with pytest.raises(ValueError, match=f"{kernel.metadata.kernel_name}: Operand"):
        kernel.run(args)


@pytest.mark.parametrize("form", ["grouped", "wgrad"])
@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("bounds", lambda t: t[1:], "expected shape [5], got [4]"),
        ("tiles", lambda t: t.flatten(), "expected shape [8, 2], got [8]"),
        ("num_tiles", lambda t: t[:2], "expected shape [4], got [2]"),  # kernels write to the counters
        ("order", lambda t: t.long(), "expected contiguous int32 on {0}, got torch.int64 on {0}"),
        ("order", lambda t: t[:, None].repeat(1, 2)[:, 0], "expected contiguous int32 on {0}, got torch.int32 on {0}"),
    ],
)
def test_a_tile_table_fits(form, name, change, error, device):
    args = ARGUMENTS[form](device, torch.float32)
    kernel, table = float32_kernel(type(args)), reference.tile_table(args.offsets, 40, 128)
    wrong = table._replace(**{name: change(getattr(table, name))})
    error = error.replace("{0}", str(table.order.device))
    with pytest.raises(ValueError, match=re.escape(f"Operand `tile_table.{name}`: {error}")):
        kernel.run(dataclasses.replace(args, tile_table=wrong))


def test_status_of_other_forms():
    gemm, wgrad = GemmArguments, partial(WgradArguments, offsets=torch.zeros(2).int())
    for make, shapes, error in [
        (gemm, [(2, 4, 3), (3, 3, 5), (2, 4, 5)], "Operand `B`: expected a batch of 2 as A, got [3, 3, 5]"),
        (gemm, [(4, 3), (2, 5), (4, 5)], "Operand `B`: expected shape [3, 5], got [2, 5]"),
        (gemm, [(4, 3), (2, 3, 5), (4, 5)], "Operand `out`: expected shape [2, 4, 5], got [4, 5]"),
        (wgrad, [(4, 3), (5, 6), (2, 3, 6)], "Operand `dout`: expected shape [4, 6], got [5, 6]"),
        (wgrad, [(4, 3), (4, 6), (2, 3, 5)], "Operand `out`: expected shape [2, 3, 6], got [2, 3, 5]"),
    ]:
        args = make(*map(torch.zeros, shapes))
        assert float32_kernel(type(args)).supports(args).error == error


def test_an_index_must_be_contiguous():
    index = torch.zeros(40, 2, dtype=torch.int32)[:, 0]
    gathering = get_kernels(metadata_filter=lambda m: m.operands.A.dtype == torch.float32 and m.design.gather)
    args = dataclasses.replace(grouped_arguments("cpu", torch.float32), row_to_token=index)
    grouped = [kernel for kernel in gathering if kernel.arguments_class is GroupedGemmArguments]
    error = "Operand `row_to_token`: expected contiguous, got strides (2,)"
    assert {kernel.supports(args).error for kernel in grouped} == {error}
    wgrad = [kernel for kernel in gathering if kernel.arguments_class is WgradArguments]
    for name in ("a_row_to_token", "dout_row_to_token"):
        args = dataclasses.replace(wgrad_arguments("cpu", torch.float32), **{name: index})
        assert {kernel.supports(args).error for kernel in wgrad} == {error.replace("row_to_token", name)}


def test_a_preactivation_is_stored_as_the_output():
    """An epilogue writes both results by rows. The copy engine needs halves of a gated product aligned to 16 bytes."""
    args = grouped_arguments("cpu", size_k=1024)
    args = dataclasses.replace(args, B=args.B.mT.contiguous().mT, out=args.out[:, :24].clone(), epilogue="swiglu")
    product = torch.zeros(40, 48, dtype=FLOAT16)
    kernels = [kernel for kernel in get_kernels() if kernel.takes(dataclasses.replace(args, preactivation=product))]
    aligning = [kernel for kernel in kernels if kernel.metadata.operands.out.alignment_bytes == 16]
    assert len(kernels) > len(aligning) > 1
    for stored, refusing in (
        (torch.zeros(40, 96).half()[:, ::2], kernels),
        (torch.zeros(48, 40).half().t(), kernels),
        (torch.zeros(40, 52).half()[:, :48], aligning),
    ):
        other = dataclasses.replace(args, preactivation=stored)
        assert all("Operand `preactivation`: expected" in kernel.takes(other).error for kernel in refusing)
    narrow = {"B": args.B[..., :40], "out": torch.zeros(40, 24).half()[:, :20]}
    narrow |= {"preactivation": torch.zeros(40, 40, dtype=FLOAT16)}
    narrow = dataclasses.replace(args, **narrow)
    assert all("halves of rows of whole 16 bytes" in kernel.takes(narrow).error for kernel in aligning)


@pytest.mark.parametrize("form", ["wgrad", "jagged"])
def test_forms_without_an_epilogue_say_so(form, device):
    args = dataclasses.replace(ARGUMENTS[form](device), epilogue="relu")
    assert get_kernels(args) == []
    kernel = get_kernels(dataclasses.replace(args, epilogue=None))[0]
    assert kernel.supports(args).error == "applies no epilogue, requested relu"
    with pytest.raises(ValueError, match="applies no epilogue, requested relu"):
        kernel.run(args)
    with pytest.raises(NotImplementedError, match="applies no epilogue, requested relu"):
        selection.select(args)


def test_gated_epilogues_beside_the_listed_one(device):
    args = grouped_arguments(device, epilogue="reglu")
    b = args.B.mT.contiguous().mT
    args = dataclasses.replace(args, B=b, out=args.out.new_empty(40, 24), preactivation=args.out)
    listed = get_kernels(dataclasses.replace(args, epilogue="swiglu"))
    kernels = get_kernels(args)
    assert [k.metadata.design for k in kernels] == [k.metadata.design for k in listed]
    assert all(kernel.metadata.epilogue == "reglu" for kernel in kernels)
    assert {selection.select(args)} <= set(kernels) if kernels else selection.find(args) is None


def test_run_asks_unless_told_or_selected(device, monkeypatch):
    args = grouped_arguments(device)
    kernel = selection.select(args)
    monkeypatch.setattr(Kernel, "supports", lambda self, args: pytest.fail("asked"))
    selection.run(args)  # the selection is now cached
    kernel.run(args, assume_supported_args=True)
    with pytest.raises(pytest.fail.Exception, match="asked"):
        kernel.run(args)


@pytest.mark.parametrize("form", ARGUMENTS)
def test_autograd_sees_what_is_written(form, device):
    args = ARGUMENTS[form](device)
    before = args.out._version
    get_kernels(args)[0].run(args)
    assert args.out._version > before


@pytest.mark.parametrize("form", ARGUMENTS)
def test_compiled_artifact(form, device):
    args = ARGUMENTS[form](device)
    for kernel in get_kernels(args):
        args.out.fill_(torch.nan)
        artifact = kernel.compile(args)
        assert args.out.isnan().all(), "compiling writes nothing"
        kernel.run(args, artifact)
        torch.testing.assert_close(args.out, expected_result(args), rtol=1e-2, atol=1e-2)
        again = dataclasses.replace(args, out=torch.full_like(args.out, torch.nan))
        kernel.run(again, artifact, assume_supported_args=True)
        assert torch.equal(again.out, args.out)


def test_an_artifact_serves_any_number_of_rows(device):
    for kernel in get_kernels(args := grouped_arguments(device)):
        artifact = kernel.compile(args)
        for num_rows in (41, 300, 16):
            other = grouped_arguments(device, num_rows=num_rows)
            kernel.run(other, artifact)
            torch.testing.assert_close(other.out, expected_result(other), rtol=1e-2, atol=1e-2)


def test_an_artifact_of_other_properties_is_refused(device):
    args = grouped_arguments(device)
    pointer = get_kernels(args, metadata_filter=lambda m: isinstance(m.design, PointerDesign))[0]
    artifact = pointer.compile(args)
    changes = {
        "a size that is no multiple of 16": grouped_arguments(device, size_k=60),
        "an optional operand": dataclasses.replace(args, bias=torch.zeros(3, 48, device=device)),
        "another dtype of the result": dataclasses.replace(args, out=args.out.float()),
        "another layout": dataclasses.replace(args, B=args.B.mT.contiguous().mT),
        "an unaligned pointer": dataclasses.replace(args, out=args.out.new_empty(40 * 48 + 1)[1:].view(40, 48)),
    }
    for change, other in changes.items():
        assert pointer.supports(other), change
        with pytest.raises(ValueError, match="must be compiled for arguments with the same static properties"):
            pointer.run(other, artifact)
    with pytest.raises(ValueError, match="nothing to compile for empty operands"):
        pointer.compile(dataclasses.replace(args, A=args.A[:0], out=args.out[:0]))
    with pytest.raises(ValueError, match="Operand `out`"):
        pointer.compile(dataclasses.replace(args, out=args.out[:, :3]))


@pytest.mark.parametrize("form", ARGUMENTS)
def test_workspace(form, device):
    args = ARGUMENTS[form](device)
    for kernel in get_kernels(args):
        num_bytes = kernel.get_workspace_size(args)
        # Warp-specialised kernels walk the offsets of this few groups, and pointer kernels need no table for a batch.
        free = {"gemm": PointerDesign, "grouped": WarpSpecializedDesign}
        assert (num_bytes == 0) == (form in free and isinstance(kernel.metadata.design, free[form]))
        kernel.run(args)
        expected = args.out.clone()
        # Exactly the requested size, with poisoned memory after it.
        memory = torch.full((num_bytes + 256,), 255, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % 128 :]
        args.out.fill_(torch.nan)
        kernel.run(args, workspace=memory[:num_bytes])
        assert torch.equal(args.out, expected) and (memory[num_bytes:] == 255).all()
        table_bytes = kernel.metadata_bytes(args)
        assert not table_bytes or (memory[num_bytes - table_bytes : num_bytes] != 255).any()
        if num_bytes:
            for wrong in (memory[: num_bytes - 1], memory[1:], memory[::2]):
                with pytest.raises(ValueError, match=f"workspace must be .* hold {num_bytes} bytes"):
                    kernel.run(args, workspace=wrong)


def test_no_workspace_for_a_table_beside_the_arguments(device):
    args = grouped_arguments(device)
    for kernel in get_kernels(args):
        table = reference.tile_table(args.offsets, len(args.out), kernel.metadata.design.tile_shape[0])
        assert kernel.get_workspace_size(dataclasses.replace(args, tile_table=table)) == kernel.scratch_bytes(args)
        assert isinstance(kernel.metadata.design, TmaDesign) == bool(kernel.scratch_bytes(args))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ARGUMENTS)
def test_a_stream_and_no_allocation(form):
    args = ARGUMENTS[form]("cuda")
    stream = torch.cuda.Stream()
    for kernel in get_kernels(args):
        artifact = kernel.compile(args)
        workspace = torch.empty(kernel.get_workspace_size(args), dtype=torch.uint8, device="cuda")
        kernel.run(args, artifact, workspace=workspace)  # compiles the kernels that make the table
        args.out.fill_(torch.nan)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
        kernel.run(args, artifact, stream=stream, workspace=workspace)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not stream.query(), "it waits for what the stream does"
        stream.synchronize()
        torch.testing.assert_close(args.out, expected_result(args), rtol=1e-2, atol=1e-2)


def test_any_dlpack_tensor():
    """NumPy arrays are used in place."""
    a, b = np.eye(4, 8, dtype=np.float32), np.ones((2, 8, 16), dtype=np.float32)
    out, offsets = np.full((4, 16), np.nan, dtype=np.float32), np.array([1, 3], dtype=np.int32)
    args = GroupedGemmArguments(a, b, out, offsets=offsets)
    assert isinstance(args.A, torch.Tensor) and args.A.data_ptr() == a.ctypes.data
    if torch.cuda.is_available():
        assert get_kernels(args) == []  # the arrays are on the CPU
    else:
        get_kernels(args)[0].run(args)
        assert (out[:3] == 1).all() and (out[3] == 0).all()


def test_is_device_cc_supported():
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        assert is_device_cc_supported({10 * major + minor, 30})
        assert f"30, the current one has {10 * major + minor}" in is_device_cc_supported({30}).error
    else:
        status = is_device_cc_supported({100, 90})
        assert not status and status.error == "needs a GPU of compute capability 90, 100, there is no CUDA device"
