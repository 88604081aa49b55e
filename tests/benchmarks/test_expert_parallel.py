"""benchmarks/expert_parallel.py, on sizes small enough for seconds: it compares, times and reports."""

import json
from dataclasses import replace
from unittest import mock

import torch
from torch import distributed

from benchmarks import expert_parallel
from benchmarks.common.layers import make_tokens
from benchmarks.common.results_file import ResultsFile
from benchmarks.common.shapes import TINY
from benchmarks.parallel import comparison
from benchmarks.parallel.compilation import compile_kernels, stand_in
from benchmarks.parallel.implementations import (
    BASELINE,
    IMPLEMENTATIONS,
    STYLES,
    make_implementation,
    make_layer,
    results,
)

from ..processes import make_test
from ..tiers import slow
from .commands import QUICK


def run(device, *arguments):
    small = ["--shapes", "tiny", "--routing", "zipf", "--device", device.type]
    options = expert_parallel.main.parse([*QUICK.split(), *small, *arguments])
    file = ResultsFile(options, dict)
    return [row for rows in file.measure(expert_parallel.measurements(options, device)) for row in rows]


def small_run(device):
    rows = run(device, "--ep", "1", "2", "--megabytes", "1")
    bandwidths = [row for row in rows if "collective" in row]
    assert [row["collective"] for row in bandwidths[:2]] == ["all_gather", "reduce_scatter"]
    assert all(row["gb_per_s"] > 0 for row in bandwidths)
    layers = [row for row in rows if "shape" in row]
    assert len(layers) == 2 * 2 * len(expert_parallel.DEFAULT_IMPLEMENTATIONS)
    for row in layers:
        assert row["processes"] == distributed.get_world_size()
        assert row["share_of_model"] > 0 and row["best"] in STYLES
        assert row["implementation"] != BASELINE or row["times_baseline"] == 1
        assert 1 < row["busiest"] <= 2 if row["ep"] == 2 else row["busiest"] == 1
        assert row["share_of_model"] <= row["share_of_busiest"] <= row["busiest"] * row["share_of_model"]


class Wrong(torch.nn.Module):
    def __init__(self, layer, error):
        super().__init__()
        self.layer, self.error = layer, error

    def forward(self, tokens):
        return (1 + self.error) * self.layer(tokens)


def what_differs_in_one_process_is_not_timed(device):
    error = 0.01 if device.type == "cpu" else 0.05  # in bfloat16, 2 % are allowed

    def make(name, *arguments):
        made = make_implementation(name, *arguments)
        return Wrong(made, error) if name == "alltoall" and distributed.get_rank() == 1 else made

    with mock.patch.object(comparison, "make_implementation", make):
        rows = run(device, "--ep", "2", "--megabytes", "--implementations", "allgather", "alltoall")
    assert [row["implementation"] for row in rows] == ["allgather", "allgather", "alltoall"]
    assert rows[2]["skipped"].startswith(f"differs from allgather, result by result, by [{error}, {error},")


def stand_ins_have_the_shapes_of_the_others(device):
    """Fake ranks give the same shapes, so that code compiled without communication is the code that runs."""
    mesh, dtype = expert_parallel.expert_mesh(device, 2), expert_parallel.main.parse(["--device", device.type]).dtype
    shape = replace(TINY, num_tokens=64)  # every chunk of which is also even
    layer = make_layer(shape, mesh, dtype)
    tokens = make_tokens(layer, shape, "even")
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


CASES = [small_run, what_differs_in_one_process_is_not_timed, stand_ins_have_the_shapes_of_the_others]
# Timing every dispatcher takes two processes half a minute; the tests below need none.
test_two_processes = slow(make_test(CASES, 2))


def test_the_best_form_is_the_simplest_of_the_fastest():
    times = {"allgather": 10.1, "alltoall": 12.0, "allgather/2 chunks": 10.0, BASELINE: 5.0}
    assert comparison.best_form(times) == "allgather"
    assert comparison.best_form(times | {"alltoall/2 chunks": 9.0}) == "alltoall/2 chunks"
    assert comparison.best_form({BASELINE: 1.0}) is None
    about = {"shape": "some", "ep": 2, "pass": "forward"}
    rows = [about | {"routing": r, "implementation": name, "ms": ms} for r in "ab" for name, ms in times.items()]
    rows += [{"shape": "other", "ep": 4, "routing": "even", "skipped": "no time"}, {"collective": "all_gather"}]
    rows += [about | {"routing": "a", "implementation": "alltoall/2 chunks", "ms": 16.0}]
    rows[2]["ms"] = 6.0  # two chunks with the first routing
    (found,) = comparison.best_forms(rows)
    assert found == about | {"best": "allgather/2 chunks", "times_whole": 20.2 / 16, "times_baseline": 10 / 16}


def test_plan_and_best_need_no_processes(tmp_path, capsys):
    expert_parallel.main(["--plan", "--shapes", "deepseek-v3", "--ep", "1", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["shape", "ep", "routing", "planned_gb"] and len(lines) == 1 + 2 * 2
    path = tmp_path / "some.json"
    row = {"shape": "some", "ep": 2, "routing": "even", "pass": "forward", "implementation": "allgather", "ms": 1.0}
    path.write_text(json.dumps([row]))
    expert_parallel.main(["--best", str(path)])
    assert "allgather" in capsys.readouterr().out
