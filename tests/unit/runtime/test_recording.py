"""Recordings of plain functions: what is repeated, and what is not."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_kernels.runtime import record, replay
from moe_kernels.runtime.launch import launch_kernel, launching
from moe_kernels.runtime.replay import Replayed
from moe_kernels.runtime.triton import HAS_TRITON, tl, triton

from .test_replay import assert_same, draw, replays  # noqa: F401  # a fixture of every test

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no ops without Triton")


@triton.jit
def _one_kernel(out_ptr):
    tl.store(out_ptr, 1)


@triton.jit
def _copy_kernel(from_ptr, to_ptr):
    tl.store(to_ptr, tl.load(from_ptr))


@pytest.fixture
def replayed(monkeypatch):
    """Return a function that makes a function of tensors a replayed one, which first launches a kernel."""
    monkeypatch.setattr(replay, "_all", [])

    def make(function, launches=True):
        op = Replayed("op")

        def run(given):
            if launches:
                launch_kernel(_one_kernel, (1,), given[0].new_empty(1))
            return function(*given)

        def call(*tensors):
            return op.run(None, [*tensors], run)

        call.states = op.states
        return call

    return make


def test_operands_that_share_memory_are_not_recorded(replayed, device):
    """A record could not tell which of the two operands to read."""
    first, second = draw(device), draw(device)
    subtract = replayed(lambda a, b: a - b)
    for _ in range(2):
        assert not subtract(first, first).any()
        assert not subtract(first, first.view_as(first)).any()
    assert subtract.states() == ["called 0 times, recorded after 1"]
    for _ in range(3):
        assert_same([subtract(first, second)], [first - second])
    assert subtract.states() == ["replayed"]

    subtract = replayed(lambda a, b: a - b)
    both = draw(device, 4)
    for _ in range(3):
        assert_same([subtract(first, second)], [first - second])
    assert subtract.states() == ["replayed"]
    assert not subtract(first, first).any()
    assert_same([subtract(both[:3], both[1:])], [both[:3] - both[1:]])


def in_place(x, index):
    y = x.clone()
    y.add_(1)
    y[:, index] = x[:, :2] + 2
    y[0, 0].mul_(3)
    values, order = y.sort()
    return torch.cat([values, order.to(y.dtype)]), y[1:]


def test_operations_of_pytorch_are_repeated(replayed, device):
    run = replayed(in_place)
    for seed in range(3):
        index = torch.tensor([seed, 5], device=device)
        tokens = draw(device)
        made = run(tokens, index)
        assert_same(made, in_place(tokens, index))
    assert run.states() == ["replayed"]


def test_results_that_no_step_writes(replayed, device):
    run = replayed(lambda x: (x.new_empty(2, 3), x[1:], x.new_empty(0)))
    for _ in range(3):
        made = run(draw(device))
        assert [list(tensor.shape) for tensor in made] == [[2, 3], [2, 16], [0]]
    assert run.states() == ["replayed"]


def test_a_function_without_kernels_may_read_values(replayed, device):
    """A recording does not see that `tolist` reads memory of the host."""
    run = replayed(lambda x: x * x[0].tolist()[0], launches=False)
    for _ in range(3):
        tokens = draw(device)
        assert_same([run(tokens)], [tokens * tokens[0, 0]])
    (state,) = run.states()
    assert state == "launches no kernel" or "copies a tensor to the host" in state


def with_list(x):
    y = x.clone()
    torch._foreach_add_([y], 1)
    return y


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * x.sum().item(), "reads values"),
        (lambda x: x[x > 0], "reads values"),
        (lambda x: x + CONSTANT.to(x), "no operand"),
        (with_list, "returns no tensor"),
        pytest.param(lambda x: x * x[0].tolist()[0], "copies a tensor to the host", marks=pytest.mark.gpu),
    ],
)
def test_what_cannot_be_repeated_runs_as_it_is(function, reason, replayed, device):
    run = replayed(function)
    for _ in range(3):
        tokens = draw(device)
        assert_same([run(tokens)], [function(tokens)])
    (state,) = run.states()
    assert reason in state


CONSTANT = torch.arange(16.0)


def test_an_error_while_recording_leaves_nothing(replayed, device):
    fails = []

    def function(x):
        if fails:
            raise KeyError("x")
        return x + 1

    run, tokens = replayed(function), draw(device)
    run(tokens)
    fails.append(1)
    with pytest.raises(KeyError):
        run(tokens)
    assert launching.observer is None
    assert not torch._C._len_torch_dispatch_stack()
    fails.clear()
    for _ in range(3):
        assert_same([run(tokens)], [tokens + 1])
    assert run.states() == ["replayed"]


def test_results_of_replays_are_not_shared(replayed, device):
    run, tokens = replayed(lambda x: (x + 1, x.new_zeros(3))), draw(device)
    made = [run(tokens) for _ in range(4)]
    made[2][0].zero_()
    made[2][1].add_(1)
    assert_same(made[3], [tokens + 1, tokens.new_zeros(3)])


# One block holds a temporary of 1 KiB and two of 4 KiB, which share bytes. With the output, 1 KiB more is in use
# than in the function.
@pytest.mark.parametrize(("most_extra", "want"), [(1024, [1024, 6144]), (1023, [4096, 5120, 5120, 5120])])
def test_a_record_allocates_everything_first_unless_the_peak_rises(most_extra, want, replayed, device, monkeypatch):
    monkeypatch.setattr(record, "_MOST_EXTRA_BYTES", most_extra)
    monkeypatch.setattr(record, "_MOST_SMALL_BYTES", 0)
    allocated, in_use = [], []

    def allocate(*form):
        gc.collect()  # the interpreter's launches leave cycles
        out = empty(*form)
        allocated.append((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()))
        in_use.append(sum(num_bytes for storage, num_bytes in allocated if not storage.expired()))
        return out

    empty = record.EMPTY_STRIDED[device]
    monkeypatch.setitem(record.EMPTY_STRIDED, device, allocate)

    def copies(x):
        for num_elements in (1024, 256, 1024, 256):
            x, given = x.new_empty(num_elements), x
            launch_kernel(_copy_kernel, (1,), given, x)
        return x

    run = replayed(copies, launches=False)
    for seed in range(3):
        x = torch.full((256,), float(seed), device=device)
        allocated.clear()
        in_use.clear()
        assert run(x)[0] == seed
    assert run.states() == ["replayed"]
    assert in_use == want
