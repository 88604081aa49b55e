"""The launch cache: GEMMs launched as an earlier one was give the same results, of the tensors that are given now."""

import contextlib
import dataclasses
import gc
import weakref
from types import FunctionType, ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from moe_kernels import GroupedGemmArguments, WgradArguments, get_kernels, reference
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Kernel
from moe_kernels.gemm.ops.grouped import grouped_gemm_wgrad
from moe_kernels.gemm.templates import make_template
from moe_kernels.gemm.tile_table import make_tile_table
from moe_kernels.runtime.launch import Launch
from moe_kernels.runtime.triton import HAS_TRITON

from ..processes import run_python
from .kernel_arguments import _arguments_for
from .launch_variants import grouped_variants, shifted, table_of, wgrad_variants

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    for name in ("_selected", "_launches"):
        monkeypatch.setattr(selection, name, {})


@contextlib.contextmanager
def launched():
    """Record the names of kernels whose `launch` runs inside the context."""
    names = []

    def noting(launch):
        return lambda kernel, args: names.append(kernel.metadata.kernel_name) or launch(kernel, args)

    with contextlib.ExitStack() as stack:
        for cls in {type(kernel) for kernel in get_kernels()}:
            stack.enter_context(mock.patch.object(cls, "launch", noting(cls.launch)))
        yield names


def product(num_rows=40, dtype=torch.float16, device="cpu", **options):
    """Return arguments with other values and other memory each time."""
    a = torch.randn(num_rows, 64, device=device).to(dtype)
    b = torch.randn(3, 64, 48, device=device).to(dtype)
    offsets = torch.tensor([num_rows // 4, num_rows // 2, num_rows - 2], dtype=torch.int32, device=device)
    out = torch.full((num_rows, 48), torch.nan, device=device).to(dtype)
    return GroupedGemmArguments(a, b, out, offsets=offsets, **options)


def gradient(num_rows=40, dtype=torch.float16, device="cpu", **options):
    args = product(num_rows, dtype, device)
    dout = torch.randn(num_rows, 48, device=device).to(dtype)
    return WgradArguments(args.A, dout, torch.full_like(args.B, torch.nan), offsets=args.offsets, **options)


def with_table(args, height=128):
    num_rows = args.out.shape[0] if isinstance(args, GroupedGemmArguments) else args.A.shape[0]
    return dataclasses.replace(args, tile_table=make_tile_table(args.offsets, num_rows, height))


def with_own_table(args):
    return with_table(args, selection.find(args).metadata.design.tile_shape[0])


def check_run(args):
    """Run as ops do and hold the result to the reference."""
    selection.run(args)
    if isinstance(args, GroupedGemmArguments):
        a = args.A if args.row_to_token is None else args.A[args.row_to_token.long()]
        options = {"bias": None if args.bias is None else args.bias.float(), "row_scale": args.row_scale}
        expected = reference.grouped_gemm(a.float(), args.B.float(), args.offsets, **options)
    else:
        expected = reference.grouped_gemm_wgrad(args.A.float(), args.dout.float(), args.offsets)
    torch.testing.assert_close(args.out.float(), expected, atol=0.05, rtol=0.01)


FORMS = {
    "walked or made table": lambda device: product(device=device),
    "table": lambda device: with_own_table(product(device=device)),
    "table of another height": lambda device: with_table(product(device=device), 48),
    "float32": lambda device: product(dtype=torch.float32, device=device),
    "bias": lambda device: product(device=device, bias=torch.randn(3, 48, device=device)),
    "gather": lambda device: with_own_table(
        product(device=device, row_to_token=torch.randperm(40, device=device).int())
    ),
    "wgrad": lambda device: gradient(device=device),
    "wgrad with a table": lambda device: with_table(gradient(device=device)),
}


@pytest.mark.parametrize("form", FORMS)
def test_replays_take_the_tensors_that_they_are_given(form, device):
    for _ in range(2):
        check_run(FORMS[form](device))
    others = [FORMS[form](device) for _ in range(3)]
    with launched() as names:
        for args in others:
            check_run(args)
    assert names == []
    with launched() as names:
        selection._launches.clear()
        check_run(FORMS[form](device))
    assert len(names) == 1


def test_the_second_launch_of_a_key_makes_its_template(device):
    with launched() as names:
        for num_rows in (40, 41, 42):
            check_run(product(num_rows, device=device))
        assert len(names) == 3  # and no more, because numbers of rows may not recur
        check_run(product(41, device=device))
        assert len(names) == 4
        check_run(product(41, device=device))
        assert len(names) == 4


@pytest.mark.parametrize("variants", [grouped_variants, wgrad_variants])
def test_whatever_launches_differ_in_differs_in_launch_keys(variants, device):
    with torch.device(device):
        plain, others = variants()
        tables = {height: table_of(plain.offsets, rows, 0) for rows, height in ((40, 64), (80, 63))}
    changes = {
        "reserved SMs": {"reserved_sms": 1},
        "a larger table": {"tile_table": tables[63]},
        "a table": {"tile_table": tables[64]},
    }
    every = {"plain": plain, **others}
    every |= {what: dataclasses.replace(plain, **change) for what, change in changes.items()}
    if variants is grouped_variants:
        every["rows"] = dataclasses.replace(plain, A=plain.A[:39], out=plain.out[:39])
        every["tokens"] = dataclasses.replace(others["gather"], A=torch.cat([plain.A, plain.A]))
        every["assumed rows"] = dataclasses.replace(plain, assumed_rows=7)
    else:
        every["rows"] = dataclasses.replace(plain, A=plain.A[:39], dout=plain.dout[:39])
        fewer = others["gather of A"].a_row_to_token[:30]
        every["rows of the index"] = dataclasses.replace(others["gather of A"], a_row_to_token=fewer)
        every["alignment of out"] = dataclasses.replace(plain, out=shifted(plain.out))
    assert len({args.launch_key() for args in every.values()}) == len(every)
    templates = {}
    for what, args in every.items():
        kernel = selection.find(args)
        template = templates.setdefault(args.launch_key(), make_template(kernel, args))
        assert_same(template(args), kernel.launch(args), what, has_table=not kernel.metadata_bytes(args))


def test_launch_keys_know_the_precision_of_float32():
    args = product(dtype=torch.float32)
    before = args.launch_key()
    torch.set_float32_matmul_precision("high")
    try:
        assert args.launch_key() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert args.launch_key() == before


def assert_same(actual, expected, what, has_table=True):
    assert actual.function is expected.function and actual.grid == expected.grid, what
    assert actual.options == expected.options, what
    for one, other in zip(actual.arguments, expected.arguments, strict=True):
        assert type(one) is type(other), what
        if hasattr(one, "block_shape"):
            assert one is not other and one.base is other.base and one.__dict__ == other.__dict__, what
        elif isinstance(one, torch.Tensor):
            assert one is other if has_table else one.shape == other.shape, what
        else:
            assert one == other, what


def test_reserved_sms_shrink_the_grid(device):
    """Which is no part of what a kernel is compiled for."""
    args = with_table(product(device=device))
    persistent = [kernel for kernel in get_kernels(args) if kernel.metadata.design.persistent]
    if not persistent:
        pytest.skip("no persistent kernel here")
    kernel = persistent[0]
    selection.pin(args, kernel)
    grids = []
    with mock.patch.object(selection, "run_launch", lambda launch, *_: grids.append(launch.grid[0])):
        for _ in range(3):
            for reserved in (0, 1):
                selection.run(dataclasses.replace(args, reserved_sms=reserved))
    assert grids[0::2] == [grids[0]] * 3 and grids[1::2] == [grids[0] - 1] * 3


@pytest.mark.parametrize("same_first", [True, False])
def test_one_tensor_in_two_fields(same_first, device):
    """wgrad(a, a), as in orthogonality losses, and wgrad(a, b) of the same sizes have one key."""
    offsets = torch.tensor([10, 20, 38], dtype=torch.int32, device=device)
    for turn in range(6):
        a, b = (torch.randn(40, 64, device=device).half() for _ in range(2))
        dout = a if (turn < 3) == same_first else b
        actual = grouped_gemm_wgrad(a, dout, offsets, implementation="triton")
        expected = reference.grouped_gemm_wgrad(a.float(), dout.float(), offsets)
        torch.testing.assert_close(actual.float(), expected, atol=0.05, rtol=0.01)
    assert len(selection._launches) == 1


def test_a_table_is_made_for_every_launch(device):
    """Arguments without a table get a new one each time, because memory may hold other offsets."""
    args = product(device=device)
    for end in (20, 24, 30, 36):
        args.offsets[1] = end
        args.out.fill_(torch.nan)
        check_run(args)


class OfPart(Kernel):
    """A kernel that launches on part of a tensor that is not among its arguments."""

    arguments_class = GroupedGemmArguments
    supports_design = estimate = None

    def __init__(self, make_arguments):
        self.make_arguments = make_arguments

    def launch(self, args):
        return Launch(print, (1,), self.make_arguments(args), {"BLOCK": 16})


STRANGERS = {
    "a view": lambda args: (args.A, args.B[0]),
    "a view below a descriptor": lambda args: (args.A, TensorDescriptor.from_tensor(args.out.view(-1), [16])),
    "a list": lambda args: (args.A, [args.B]),
    "a tuple with a tensor": lambda args: (args.A, (args.B, 3)),
}


@pytest.mark.parametrize("which", STRANGERS)
def test_no_template_with_other_tensors(which, device):
    args = product(device=device)
    assert make_template(OfPart(STRANGERS[which]), args) is None
    kernel = OfPart(lambda args: (args.A, args.B, (args.A.stride(0), None), True))
    template = make_template(kernel, args)
    other = product(device=device)
    assert_same(template(other), kernel.launch(other), which)


def test_what_has_no_template_runs_all_the_same(device):
    with mock.patch.object(selection, "make_template", return_value=None) as make, launched() as names:
        for _ in range(4):
            check_run(product(device=device))
    assert make.call_count == 1 and len(names) == 4


def held_tensors(template):
    """Return tensors reachable from the closure, except through modules, classes, kernels and JIT functions."""
    seen, found, left = set(), [], [template]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, Kernel)) or hasattr(value, "arg_names"):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        is_function = isinstance(value, FunctionType)
        left += (value.__closure__ or ()) if is_function else gc.get_referents(value)
    return found


def test_descriptors_are_new_each_time(device):
    def arguments(args):
        return (
            TensorDescriptor.from_tensor(args.A, [16, 16]),
            TensorDescriptor(args.B, [192, 48], [48, 1], [16, 16], padding="nan"),
            args.A.shape[0],
        )

    kernel = OfPart(arguments)
    template = make_template(kernel, product(device=device))
    assert held_tensors(template) == []
    first, second = product(device=device), product(device=device)
    launches = template(first), template(second)
    assert_same(launches[0], kernel.launch(first), "first")
    assert_same(launches[1], kernel.launch(second), "second")
    assert launches[0].arguments[0] is not launches[1].arguments[0]


@pytest.mark.parametrize("form", ["table", "wgrad"])
def test_what_is_kept_holds_no_tensors(form, device):
    args = FORMS[form](device)
    for _ in range(3):
        selection.run(args)
    (plan,) = selection._launches.values()
    assert plan.make_launch is not None and held_tensors(plan.make_launch) == []
    held = [args.A, args.out, args.offsets, *([] if args.tile_table is None else args.tile_table[:4])]
    tensors = [weakref.ref(tensor) for tensor in held]
    del args, held
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_replays_do_not_pile_up(device, monkeypatch):
    monkeypatch.setattr(selection, "_MOST_LAUNCHES", 4)
    for _ in range(3):
        for num_rows in range(33, 43):
            check_run(product(num_rows, device=device))
            check_run(product(num_rows, device=device))
            assert len(selection._launches) <= 4
    kept = list(selection._launches)
    check_run(product(42, device=device))
    assert list(selection._launches) == kept


def test_a_pinned_kernel_runs_instead_of_replays(device):
    args = product(device=device)
    for _ in range(3):
        check_run(args)
    first, *_, last = get_kernels(args)
    assert {plan.kernel for plan in selection._launches.values()} == {first}
    selection.pin(args, last)
    with launched() as names:
        check_run(args)
    assert names == [last.metadata.kernel_name] != [first.metadata.kernel_name]
    assert {plan.kernel for plan in selection._launches.values()} == {last}


def test_later_launches_take_what_the_first_left(device, monkeypatch):
    """The compiled kernel, so that hooks, scratch memory and streams are seen to as for every launch."""
    ready, runs = SimpleNamespace(needs_scratch=True), []
    monkeypatch.setattr(selection, "run_launch", lambda *given: runs.append(given) or ready)
    args = product(device=device)
    for _ in range(4):
        selection.run(args)
    assert [given[2:] for given in runs] == [(), (ready,), (ready,), (ready,)]
    assert all(type(launch) is Launch and of is args.A for launch, of, *_ in runs)


def test_a_launch_compiled_for_another_target_is_not_kept(device, monkeypatch):
    monkeypatch.setattr(selection, "INTERPRET", False)
    monkeypatch.setattr(selection, "run_launch", lambda *given: None)
    selection.run(product(device=device))
    assert selection._launches == {}


def test_no_kernel_is_remembered(device, monkeypatch):
    """A GPU without a fused kernel is asked once, not in every forward."""
    args = product(device=device, scale_a=torch.ones(40, device=device))
    assert not selection.run_if_supported(args)
    monkeypatch.setattr(selection, "find", lambda args: pytest.fail("asked again"))
    assert not selection.run_if_supported(args)
    other = product(device=device)
    monkeypatch.setattr(selection, "find", lambda args: None)
    with pytest.raises(NotImplementedError, match="no kernel supports"):
        selection.run(dataclasses.replace(other, scale_a=args.scale_a, scale_b=torch.ones(3, 48, device=device)))


def check_every_kernel():
    """Check that a template of each kernel makes the kernel's launch, without launching."""
    checked = 0
    for kernel in get_kernels():
        if kernel.obstacle is not None or kernel.arguments_class not in (GroupedGemmArguments, WgradArguments):
            continue
        given = [_arguments_for(kernel, "cpu") for _ in range(2)]
        table = reference.tile_table(given[0].offsets, len(given[0].A), kernel.metadata.design.tile_shape[0])
        for first, second in (given, [dataclasses.replace(args, tile_table=table) for args in given]):
            if kernel.metadata_bytes(second) == 0:
                assert first.launch_key() == second.launch_key()
                template = make_template(kernel, first)
                assert_same(template(second), kernel.launch(second), kernel.metadata.kernel_name)
                checked += 1
    print("checked", checked)


def test_templates_of_every_kernel():
    """Run outside the interpreter, where more kernels have a launch."""
    code = "from tests.unit.test_launch_cache import check_every_kernel; check_every_kernel()"
    result = run_python(["-c", code])
    assert int(result.stdout.split()[-1]) >= 20
