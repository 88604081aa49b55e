"""Tables of measured kernels, and the selector that reads them."""

from pathlib import Path

import pytest
import torch

from moe_kernels import GroupedGemmArguments, WarpSpecializedDesign, get_kernels
from moe_kernels.gemm import measurements, selection
from moe_kernels.gemm.kernel import Kernel
from moe_kernels.gemm.measurements import Table, read, table_name, table_of, user_folder, write
from moe_kernels.runtime.triton import HAS_TRITON

from ...processes import run_python

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="without Triton nothing is selected")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "USER", tmp_path)
    return tmp_path


def test_later_entries_replace_earlier_ones():
    earlier = Table({"a": "earlier", "b": "earlier"}, {"c": [True] * 3, "d": [True] * 3}, {"a": 1.0, "b": 2.0})
    merged = earlier.merged(Table({"a": "later", "e": "later"}, {"c": [False] * 3}))
    assert merged.kernels == {"a": "later", "b": "earlier", "e": "later"}
    assert merged.copies == {"c": [False] * 3, "d": [True] * 3}
    assert merged.milliseconds == {"b": 2.0}  # an earlier kernel's time does not apply to the later one


def test_a_gpu_has_its_own_table(folder, monkeypatch):
    table = Table({"a": "own"}, {})
    write(folder / table_name("GPU X"), table, gpu="GPU X")
    assert table_of("GPU X") == table and table_of("GPU Y") == Table({}, {})
    monkeypatch.setattr(measurements, "USER", None)  # off
    assert table_of("GPU X") == Table({}, {})


def test_a_folder_is_named_once_at_import():
    assert user_folder(None, None) == Path.home() / ".cache" / "moe_kernels"
    assert user_folder(None, "/somewhere") == Path("/somewhere/moe_kernels")
    assert user_folder("~/tables", "/somewhere") == Path.home() / "tables"
    assert user_folder("off", "/somewhere") is None
    code = "from moe_kernels.gemm import measurements; print(measurements.USER)"
    assert run_python(["-c", code], MOE_KERNELS_TUNING="/pinned").stdout.strip() == "/pinned"


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = Table({"a": "kernel"}, {"c": [True, False, True]}, {"a": 0.5})
    write(tmp_path / "new" / "table.json", table, gpu="GPU X")
    assert read(tmp_path / "new" / "table.json") == table
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["table.json"]


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"table": {"wrong": {}}}'])
def test_a_file_without_a_table_is_named(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tuning: .*broken\.json must hold a table"):
        read(path)


def test_the_selector_takes_what_ones_own_table_names(folder, monkeypatch, device):
    rows = torch.randn(40, 32, device=device)
    offsets = torch.tensor([10, 40], dtype=torch.int32, device=device)
    args = GroupedGemmArguments(rows, rows.new_ones(2, 32, 48), rows.new_empty(40, 48), offsets=offsets)
    last = get_kernels(args)[-1]
    assert selection.select(args) is not last
    write(folder / table_name("GPU X"), Table({args.table_key(): last.metadata.kernel_name}, {}))
    monkeypatch.setattr(selection, "table_for", lambda device: table_of("GPU X"))
    monkeypatch.setattr(selection, "_selected", {})
    assert selection.select(args) is last


def test_an_activation_measured_itself_takes_its_own_entry(monkeypatch):
    rows, offsets = torch.empty(40, 1024, dtype=torch.float16), torch.tensor([10, 40], dtype=torch.int32)
    b = rows.new_empty(2, 96, 1024).transpose(1, 2)
    out, product = rows.new_empty(40, 48), rows.new_empty(40, 96)
    args = GroupedGemmArguments(rows, b, out, offsets=offsets, epilogue="geglu", preactivation=product)
    monkeypatch.setattr(Kernel, "supports", Kernel.takes)  # on any GPU, because nothing runs
    first, *_, last = get_kernels(args)
    monkeypatch.setattr(selection, "_selected", {})
    assert selection.find(args) is first
    table = Table({args.table_key(): last.metadata.kernel_name}, {})
    monkeypatch.setattr(selection, "table_for", lambda device: table)
    monkeypatch.setattr(selection, "_selected", {})
    assert selection.find(args) is last


def test_copies_by_width():
    """A plain activation halves the columns before it, and a GEMM computes it only after a copy."""

    class Specialized:
        metadata = next(k.metadata for k in get_kernels() if isinstance(k.metadata.design, WarpSpecializedDesign))

    decide = selection.decide_copies
    assert decide(Specialized, 1408, 2816, None) == (True, True, True)
    assert decide(Specialized, 1408, 1408, None) == (True, True, False)
    assert decide(Specialized, 1024, 2048, None) == (False, False, False)
    assert decide(Specialized, 768, 768, [False, True, True]) == (False, True, True)
    assert decide(None, 1408, 2816, [True, True, True]) == (False, False, False)


def test_plain_and_gated_layers_have_keys_of_their_own():
    tokens = torch.empty(0, 64)
    keys = {selection.copies_key(tokens, tokens.new_empty(4, columns, 64), 32, 128) for columns in (32, 64)}
    assert keys == {"experts float32 E=4 D=64 F=32 rows=32", "experts float32 E=4 D=64 F=32 plain rows=32"}
