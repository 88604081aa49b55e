"""benchmarks/rule_of_thumb.py on a table of small shapes."""

from functools import partial

import pytest

from benchmarks import rule_of_thumb
from benchmarks.common import shapes
from benchmarks.rule_of_thumb import WITHIN, main, summary
from moe_kernels import get_kernels
from moe_kernels.gemm.measurements import Table, write
from moe_kernels.gemm.rule import best_first
from moe_kernels.gemm.selection import Copies
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.tools.tune import candidates

from .commands import measure

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels to choose from")

KEYS = [
    "grouped_gemm B=row gather=none epilogue=none float32 G=2 K=32 N=64 rows=16",
    "wgrad gather=none float32 G=2 K=32 N=64 rows=16",
    "grouped_gemm_list A=row B=row float32 G=2 M=32 N=64 K=16 area=4096",
]


def kernels_of(key, device):
    args = arguments_of(key, device)
    return best_first(get_kernels(args), args, measured=None)


def test_small_run_writes_a_results_file(tmp_path, capsys, device):
    ordered = {key: [kernel.metadata.kernel_name for kernel in kernels_of(key, device)] for key in KEYS}
    # The table's entry for the first key is the rule's first choice; for other keys it is the rule's last.
    table = {key: names[-1 if i else 0] for i, (key, names) in enumerate(ordered.items())}
    write(tmp_path / "table.json", Table(table, {}))
    output, options = tmp_path / "results.json", ["--table", str(tmp_path / "table.json")]
    rows = measure(main, output, *options)
    assert [row["key"] for row in rows] == KEYS and all(row["commit"] == "abc" for row in rows)
    for row in rows:
        assert row["rule_kernel"] == ordered[row["key"]][0] and row["table_kernel"] == table[row["key"]]
        assert row["rule_ms_p20"] <= row["rule_ms"] <= row["rule_ms_p80"]
        assert row["ratio"] == row["rule_ms"] / row["table_ms"]
        assert (row["ratio"] == 1.0) or row["rule_kernel"] != row["table_kernel"]
    printed = capsys.readouterr().out
    assert "geometric_mean" in printed and "\nall " in printed
    assert [row["op"] for row in measure(main, output, *options, "--ops", "wgrad")] == ["wgrad"]


def test_small_run_of_a_layer(monkeypatch, tmp_path, device):
    calls = []
    # In the interpreter the op of every choice of copies would take half a minute.
    choices = Copies(False, False, False), Copies(True, True, True)
    steps = {copies: partial(calls.append, copies) for copies in choices}
    monkeypatch.setattr(rule_of_thumb, "copies_steps", lambda layer: steps)
    monkeypatch.setitem(shapes.OFF_GRID, "small", shapes.Shape("small", 16, 16, 8, 2, 1))
    output = tmp_path / "results.json"
    options = ["--layers", "small", "--forms", "up", "up_wgrad", "copies", "--tile-orders"]
    options += ["--time-limit-s", "600", "--resume"]
    up, wgrad, copies = rows = measure(main, output, *options)
    assert [row["form"] for row in rows] == ["up", "up_wgrad", "copies"]
    assert all({"shape": "small", "T": 16, "D": 16, "F": 8, "E": 2, "K": 1}.items() <= row.items() for row in rows)
    if device == "cpu":
        assert up["times_ms"] == {} and "ratio" not in up  # no kernel has this epilogue in the interpreter
    args = arguments_of(wgrad["key"], device)
    names = [kernel.metadata.kernel_name for kernel in best_first(candidates(args), args, measured=None)]
    rule = names[0]
    assert wgrad["rule_kernel"] == rule
    assert wgrad["times_ms"].keys() == {*names, *(f"{rule} of {n}" for n in (4, 8, 16))}
    assert wgrad["table_ms"] == min(wgrad["times_ms"].values()) == wgrad["times_ms"][wgrad["table_kernel"]]
    assert wgrad["ratio"] == wgrad["times_ms"][rule] / wgrad["table_ms"] >= 1
    assert copies["rule_kernel"] == "(0, 0, 0)" and copies["times_ms"].keys() == {"(0, 0, 0)", "(1, 1, 1)"}
    assert set(calls) == set(steps)
    num_calls = len(calls)
    assert measure(main, output, *options) == rows and len(calls) == num_calls


def test_summary_by_hand():
    rows = [
        {"op": "b", "ratio": 1.0, "rule_kernel": "x", "table_kernel": "x"},
        {"op": "a", "ratio": 4.0, "rule_kernel": "x", "table_kernel": "y"},
        {"op": "b", "ratio": WITHIN, "rule_kernel": "x", "table_kernel": "y"},
    ]
    of_a, of_b, of_all = summary(rows)
    assert (of_a["op"], of_a["entries"], of_a["same_kernel"], of_a["worst"], of_a["beyond"]) == ("a", 1, 0, 4.0, 1)
    assert (of_b["op"], of_b["entries"], of_b["same_kernel"], of_b["worst"], of_b["beyond"]) == ("b", 2, 1, WITHIN, 0)
    assert of_all["entries"] == 3 and of_all["geometric_mean"] == pytest.approx((4 * WITHIN) ** (1 / 3))


def test_what_cannot_be_compared_is_named(tmp_path):
    path = tmp_path / "table.json"
    write(path, Table({KEYS[0]: "no_such_kernel"}, {}))
    with pytest.raises(ValueError, match=r"the table's kernel must support '.*', got no_such_kernel"):
        main(["--table", str(path)])
    with pytest.raises(SystemExit, match=r"the table has no entry of \['wgrad'\]"):
        main(["--table", str(path), "--ops", "wgrad"])
