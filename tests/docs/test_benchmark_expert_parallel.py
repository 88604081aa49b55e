"""benchmarks/expert_parallel.py, on sizes small enough for seconds: it compares, times and reports."""

import json
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import expert_parallel, parallel_best, parallel_comparison, parallel_timing
from benchmarks.layer import make_tokens
from benchmarks.parallel_comparison import differing, rows_between, token_collectives
from benchmarks.parallel_compilation import compile_kernels, stand_in
from benchmarks.parallel_layers import (
    BASELINE,
    IMPLEMENTATIONS,
    STYLES,
    dtype_for,
    held,
    local_layer,
    make_implementation,
    make_layer,
    results,
)
from benchmarks.parallel_memory import peak_bytes
from benchmarks.shapes import TINY, Shape
from moe_layers.parallel.collectives import Ranks, wait

from ..processes import failures_fixture

ARGUMENTS = ["--shapes", "tiny", "--routing", "zipf", "--rounds", "1", "--round-ms", "1", "--commit", "abc"]


def run(device, *arguments):
    rows, options = [], expert_parallel.parse([*ARGUMENTS, *arguments])
    expert_parallel.run(options, device, rows, time.monotonic())
    return rows


def small_run(device):
    rows = run(device, "--ep", "1", "2", "--megabytes", "1")
    bandwidths = [row for row in rows if "collective" in row]
    assert [row["collective"] for row in bandwidths[:2]] == ["all_gather", "reduce_scatter"]
    assert all(row["gb_per_s"] > 0 for row in bandwidths)
    layers = [row for row in rows if "shape" in row]
    assert len(layers) == 2 * 2 * len(expert_parallel.DEFAULT_IMPLEMENTATIONS)
    for row in layers:
        assert row["commit"] == "abc" and row["processes"] == distributed.get_world_size()
        assert row["share_of_model"] > 0 and row["best"] in STYLES
        assert row["implementation"] != BASELINE or row["times_baseline"] == 1
        assert 1 < row["busiest"] <= 2 if row["ep"] == 2 else row["busiest"] == 1
        assert row["share_of_model"] <= row["share_of_busiest"] <= row["busiest"] * row["share_of_model"]


def rows_of_the_busiest(device):
    """All rows of both ranks go to the first rank."""
    mesh, dtype = expert_parallel.expert_mesh(device, 2), dtype_for(device)
    layer, ranks = make_layer(TINY, mesh, dtype), Ranks.of(mesh.get_group())
    sent, received = rows_between(layer, make_tokens(layer, TINY, "first", dtype), ranks)
    assert sent == [TINY.num_rows, 0]
    assert received == ([TINY.num_rows] * 2 if ranks.rank == 0 else [0, 0])


def chosen_implementations(device):
    rows = run(
        device, "--ep", "2", "--megabytes", "--implementations", "allgather", "alltoall/4 chunks, 16 SMs reserved"
    )
    assert len(rows) == 2 * 2
    assert {row["implementation"] for row in rows} == {"allgather", "alltoall/4 chunks, 16 SMs reserved"}
    assert all(row["times_baseline"] is None for row in rows)


def what_is_skipped_says_why(device):
    (row,) = run(device, "--ep", "2", "--megabytes", "--seconds", "0")
    assert row["skipped"] == "may end after the 0 seconds that there are"
    with mock.patch.object(expert_parallel, "memory_bytes", return_value=1000):
        (row,) = run(device, "--ep", "2", "--megabytes")
    assert row["skipped"] == "takes 0.0 GB of memory, and there are 0.0" and row["planned_gb"] > 0


class Wrong(torch.nn.Module):
    def __init__(self, layer, error):
        super().__init__()
        self.layer, self.error = layer, error

    def forward(self, tokens):
        return (1 + self.error) * self.layer(tokens)


def what_differs_in_one_process_is_not_timed(device):
    error = 0.01 if dtype_for(device) == torch.float32 else 0.05  # in bfloat16, 2 % are allowed

    def make(name, *arguments):
        made = make_implementation(name, *arguments)
        return Wrong(made, error) if name == "alltoall" and distributed.get_rank() == 1 else made

    with mock.patch.object(parallel_comparison, "make_implementation", make):
        rows = run(device, "--ep", "2", "--megabytes", "--implementations", "allgather", "alltoall")
    assert [row["implementation"] for row in rows] == ["allgather", "allgather", "alltoall"]
    assert rows[2]["skipped"].startswith(f"differs from allgather, result by result, by [{error}, {error},")


def parameters_are_shared(device):
    """All implementations share the parameters, and none leaves a gradient."""
    mesh, dtype = expert_parallel.expert_mesh(device, 2), dtype_for(device)
    layer = make_layer(TINY, mesh, dtype)
    others = [make_implementation(name, layer, mesh) for name in IMPLEMENTATIONS]
    local = local_layer(layer)
    tokens = make_tokens(layer, TINY, "even", dtype)
    for other in others:
        results(other, tokens, tokens)
        assert [p is q for p, q in zip(other.parameters(), layer.parameters(), strict=True)] == [True] * 3
        assert all(parameter.grad is None for parameter in other.parameters())
    for name in ("w_up", "w_down"):
        shard = held(getattr(layer.experts, name).detach())
        assert shard.untyped_storage().nbytes() == shard.nbytes
        assert getattr(local.experts, name).data_ptr() == shard.data_ptr()


def experts_are_others_in_each_process(device):
    """Experts differ between ranks, so that rows sent to a wrong rank show. Routers are equal."""
    mesh, dtype = expert_parallel.expert_mesh(device, 2), dtype_for(device)
    layer = make_layer(TINY, mesh, dtype)
    ranks = Ranks.of(mesh.get_group())
    for parameter in layer.parameters():
        first, second = wait(ranks.all_gather(held(parameter.detach()))).chunk(2)
        assert torch.equal(first, second) == (parameter is layer.router.weight)
    tokens = make_tokens(layer, TINY, "even", dtype)
    modules = {name: make_implementation(name, layer, mesh) for name in ("alltoall", "allgather")}
    assert differing(modules, tokens, tokens) == {}
    modules["allgather"].dispatcher.ranks = replace(ranks, rank=1 - ranks.rank)
    assert set(differing(modules, tokens, tokens)) == {"allgather"}


def stand_ins_have_the_shapes_of_the_others(device):
    """Fake ranks give the same shapes, so that code compiled without communication is the code that runs."""
    mesh, dtype = expert_parallel.expert_mesh(device, 2), dtype_for(device)
    shape = replace(TINY, num_tokens=64)  # every chunk of which is also even
    layer = make_layer(shape, mesh, dtype)
    tokens = make_tokens(layer, shape, "even", dtype)
    for name in STYLES:
        seen = []
        for kind in (stand_in, lambda module: module):
            module, shapes = kind(make_implementation(name, layer, mesh)), []

            def note(_, inputs, out, to=shapes):
                (rows,) = inputs
                slots = rows.permutation
                indices = [] if slots is None else [slots.slot_to_row, slots.row_to_token]
                to.append([tensor.shape for tensor in (rows.tokens, rows.topk_weights, *indices, out)])

            handle = module.experts.register_forward_hook(note)
            shapes += [tensor.shape for tensor in results(module, tokens, tokens)]
            handle.remove()
            seen.append(shapes)
        assert seen[0] == seen[1], name
    compile_kernels([(TINY, mesh)] * 3, ["even"], list(IMPLEMENTATIONS), dtype)


class LiveBytes(TorchDispatchMode):
    """Records the most bytes alive at once, of tensors made inside the context."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        known = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.alive.values()))
        return result


def memory_is_within_the_plan(device):
    """Checks `grouped_mm`, which takes the most memory, together with all memory that stays allocated."""
    mesh, dtype = expert_parallel.expert_mesh(device, 2), dtype_for(device)
    for shape in (Shape("many rows", 512, 64, 32, 8, 4), Shape("large experts", 32, 128, 256, 16, 2)):
        for routing in ("even", "first"):  # "first" sends all rows to one rank
            with LiveBytes() as seen:
                layer = make_layer(shape, mesh, dtype)
                tokens = make_tokens(layer, shape, routing, dtype)
                module = make_implementation(BASELINE, layer, mesh)
                ranks = Ranks.of(mesh.get_group())
                sent, received = rows_between(layer, tokens, ranks)
                collectives = token_collectives(tokens, sent, received, ranks)
                results(module, tokens, torch.randn_like(tokens))
                for run_collectives in collectives.values():
                    run_collectives()
            share = parallel_timing.largest([seen.peak / peak_bytes(shape, 2, routing, dtype.itemsize)], device)
            assert 0.4 < share < 1, (shape, routing, share)


CASES = [
    small_run,
    rows_of_the_busiest,
    chosen_implementations,
    what_is_skipped_says_why,
    what_differs_in_one_process_is_not_timed,
    parameters_are_shared,
    experts_are_others_in_each_process,
    stand_ins_have_the_shapes_of_the_others,
    memory_is_within_the_plan,
]

failures = failures_fixture(CASES, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_processes(case, failures):
    assert not failures[case.__name__], failures[case.__name__]


@pytest.mark.parametrize("name", ["qwen3-235b", "deepseek-v3"])
def test_two_processes_stand_for_eight(name):
    model, two = expert_parallel.SHAPES[name], expert_parallel.SHAPES[f"{name}-of-eight"]
    one_of_two, one_of_eight = two.of_one_process(2), model.of_one_process(8)
    for same in ("num_rows", "num_experts", "d_model", "d_ff"):
        assert getattr(one_of_two, same) == getattr(one_of_eight, same)
    assert two.num_tokens * (2 - 1) / (model.num_tokens * (8 - 1)) == pytest.approx(4 / 7)


def test_a_stopped_run_leaves_whole_results(tmp_path):
    """The run is stopped in its second configuration."""
    path = tmp_path / "results" / "some.json"
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    measure, calls = expert_parallel.measure, []

    def stopped(configuration, *arguments):
        calls.append(configuration)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(configuration, *arguments)

    try:
        with mock.patch.object(expert_parallel, "measure", stopped), pytest.raises(KeyboardInterrupt):
            run(
                torch.device("cpu"),
                "--routing",
                "even",
                "zipf",
                "--implementations",
                "allgather",
                "--output",
                str(path),
            )
    finally:
        distributed.destroy_process_group()
    rows = json.loads(path.read_text())
    assert [(row["routing"], row["pass"]) for row in rows] == [("even", "forward"), ("even", "forward+backward")]


def test_what_is_written_replaces_all_or_nothing(tmp_path):
    path = tmp_path / "some.json"
    expert_parallel.write_whole(path, "[1]")
    with mock.patch.object(Path, "write_text", side_effect=OSError), pytest.raises(OSError):
        expert_parallel.write_whole(path, "[1, 2]")
    assert json.loads(path.read_text()) == [1]
    expert_parallel.write_whole(path, "[1, 2]")
    assert json.loads(path.read_text()) == [1, 2] and list(tmp_path.iterdir()) == [path]


def test_the_best_form_is_the_simplest_of_the_fastest():
    times = {"allgather": 10.1, "alltoall": 12.0, "allgather/2 chunks": 10.0, BASELINE: 5.0}
    assert parallel_best.best_form(times) == "allgather"
    assert parallel_best.best_form(times | {"alltoall/2 chunks": 9.0}) == "alltoall/2 chunks"
    assert parallel_best.best_form({BASELINE: 1.0}) is None
    about = {"shape": "some", "ep": 2, "pass": "forward"}
    rows = [about | {"routing": r, "implementation": name, "ms": ms} for r in "ab" for name, ms in times.items()]
    rows += [{"shape": "other", "ep": 4, "routing": "even", "skipped": "no time"}, {"collective": "all_gather"}]
    rows += [about | {"routing": "a", "implementation": "alltoall/2 chunks", "ms": 16.0}]
    rows[2]["ms"] = 6.0  # two chunks with the first routing
    (best,) = parallel_best.best_forms(rows)
    assert best == about | {"best": "allgather/2 chunks", "times_whole": 20.2 / 16, "times_baseline": 10 / 16}


def test_the_best_form_was_timed_for_every_routing():
    """A form that one routing left out, for an error or lack of time, would have the smaller sum."""
    about = {"shape": "some", "ep": 2, "pass": "forward"}
    times = {"a": {"allgather": 10.0, "alltoall": 8.0, BASELINE: 16.0}, "b": {"allgather": 10.0, BASELINE: 16.0}}
    rows = [about | {"routing": r, "implementation": n, "ms": ms} for r, of in times.items() for n, ms in of.items()]
    rows += [{"shape": "some", "ep": 2, "routing": "b", "implementation": "alltoall", "skipped": "differs"}]
    (best,) = parallel_best.best_forms(rows)
    assert best == about | {"best": "allgather", "times_whole": 1.0, "times_baseline": 1.6}
    rows = [row for row in rows if (row["routing"], row["implementation"]) != ("b", BASELINE)]
    (best,) = parallel_best.best_forms(rows)
    assert best == about | {"best": "allgather", "times_whole": 1.0, "times_baseline": None}


def test_plan_and_best_need_no_processes(tmp_path, capsys):
    expert_parallel.main(["--plan", "--shapes", "deepseek-v3", "--ep", "1", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["shape", "ep", "routing", "planned_gb"] and len(lines) == 1 + 2 * 2
    path = tmp_path / "some.json"
    row = {"shape": "some", "ep": 2, "routing": "even", "pass": "forward", "implementation": "allgather", "ms": 1.0}
    path.write_text(json.dumps([row]))
    expert_parallel.main(["--best", str(path)])
    assert "allgather" in capsys.readouterr().out


def test_zipf_splits():
    assert parallel_timing.zipf_splits(110, 3) == [60, 30, 20]
    assert parallel_timing.zipf_splits(0, 2) == [0, 0]
