"""Tuning ahead of time: entries, resuming, the time budget, and the output of `show` and `verify`."""

import pytest
import torch

from benchmarks.rule_of_thumb import FORMS
from moe_kernels import GroupedGemmArguments, get_kernels
from moe_kernels.__main__ import main
from moe_kernels.experts import row_products
from moe_kernels.gemm import measurements, selection
from moe_kernels.gemm.kernels.families import GroupedGemmKernel
from moe_kernels.gemm.measurements import Table, read, table_name, write
from moe_kernels.runtime.triton import HAS_TRITON
from moe_kernels.testing import Case
from moe_kernels.tools import tune as tuner
from moe_kernels.tools.layers import layer_of
from moe_kernels.tools.measure import verify
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.tools.tune import Entry, Job, jagged_job, kernel_entry, layer_job, product_job, tune

from ..gemm.test_verify import CASES, fused_arguments

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels to tune")

SMALL = Case(24, 16, 8, 4, 2)
SIXTEENS = Case(24, 48, 16, 4, 2)
EVERY_SECOND = 10.0


@pytest.fixture(autouse=True)
def fresh_selection(monkeypatch):
    """Discard selections made by tuning in these tests."""
    monkeypatch.setattr(selection, "_selected", {})
    monkeypatch.setattr(selection, "_copies", {})


@pytest.fixture
def last_is_fastest(monkeypatch):
    """Fake a clock by which each kernel is ten times as fast as the one before."""
    for name in ("measure", "measure_replays"):
        monkeypatch.setattr(tuner, name, lambda functions: {name: 10.0**-i for i, name in enumerate(functions)})


def job_of(measured, names=("a", "b", "c")):
    """Return a job whose entries record when they are measured."""

    def entry(name):
        def measure():
            measured.append(name)
            return Table({name: f"kernel {len(measured)}"}, {}, {name: float(len(measured))})

        return Entry(name, lambda table: name in table.kernels, measure)

    return Job("job", lambda: map(entry, names))


def test_goes_on_where_it_was_stopped(tmp_path):
    path, measured = tmp_path / "table.json", []
    assert tune([job_of(measured, "ab")], path, seconds=100, again=False, gpu="GPU X")
    assert measured == ["a", "b"]
    assert tune([job_of(measured, "abc")], path, seconds=100, again=False)
    assert measured == ["a", "b", "c"]
    assert read(path).kernels == {"a": "kernel 1", "b": "kernel 2", "c": "kernel 3"}
    assert tune([job_of(measured, "c")], path, seconds=100, again=True)
    assert measured == ["a", "b", "c", "c"] and read(path).kernels["c"] == "kernel 4"
    assert read(path).milliseconds == {"a": 1.0, "b": 2.0, "c": 4.0}


def test_an_interrupted_run_leaves_what_it_measured(tmp_path):
    path, measured = tmp_path / "table.json", []
    good = job_of(measured)

    def stop():
        raise KeyboardInterrupt

    bad = Job("bad", lambda: iter([Entry("d", lambda table: False, stop)]))
    with pytest.raises(KeyboardInterrupt):
        tune([good, bad], path, seconds=100, again=False)
    assert set(read(path).kernels) == {"a", "b", "c"}


def test_starts_no_measurement_after_its_time(tmp_path, monkeypatch):
    path, measured = tmp_path / "table.json", []
    monkeypatch.setattr(tuner.time, "monotonic", lambda: EVERY_SECOND * len(measured))
    assert not tune([job_of(measured)], path, seconds=15, again=False)
    assert measured == ["a", "b"] and set(read(path).kernels) == {"a", "b"}
    # Known entries take no time.
    assert tune([job_of(measured, "ab")], path, seconds=0, again=False)


def test_tunes_a_layer(tmp_path, device, last_is_fastest):
    path = tmp_path / "table.json"
    job = layer_job(SMALL, torch.float32, device, "swiglu")
    assert tune([job], path, seconds=1000, again=False)
    table = read(path)
    forms = {name: step.args for name, step in layer_of(SMALL, torch.float32, device).forms()}
    assert list(forms) == [form for form in FORMS if form != "copies"]
    listed = {args.table_key(): args for args in forms.values() if get_kernels(args)}
    assert set(table.kernels) == set(table.milliseconds) == set(listed)
    for key, args in listed.items():
        assert selection.find(args).metadata.kernel_name == table.kernels[key]
    (copies,) = table.copies.values()
    assert copies == [True, True, True]  # the last measured choice
    assert not verify(table, device)


@pytest.mark.parametrize(
    ("case", "dtype", "settings", "form"),
    [
        (SMALL, torch.float16, {"format": "fp8"}, "decoding_gemm weight=fp8"),
        (SIXTEENS, torch.bfloat16, {"precision": "fp8"}, "block_scaled_gemm"),
    ],
    ids=["quantised weights", "e4m3 operands"],
)
def test_tunes_products(case, dtype, settings, form, tmp_path, device, last_is_fastest):
    path = tmp_path / "table.json"
    assert tune([product_job(case, dtype, device, **settings)], path, seconds=1000, again=False)
    table = read(path)
    assert len(table.kernels) == 4
    for key, name in table.kernels.items():
        assert key.startswith(form) and selection.find(arguments_of(key, device)).metadata.kernel_name == name
    assert not verify(table, device)


def test_says_that_many_rows_decode_no_weights(device, monkeypatch, capsys):
    monkeypatch.setattr(row_products, "MAX_ROWS", 0)
    assert not list(product_job(SMALL, torch.float16, device, format="fp8").entries())
    assert "fp8 24,16,8,4,2: nothing to measure" in capsys.readouterr().out


def test_a_known_entry_is_selected(device, last_is_fastest):
    (first, *_) = jagged_job(64, 16, 16, 4, torch.float32, device).entries()
    args = arguments_of(first.key, device)
    slow = get_kernels(args)[-1]
    assert selection.find(args) is not slow
    assert first.is_known(Table({first.key: slow.metadata.kernel_name}, {}))
    assert selection.find(arguments_of(first.key, device)) is slow
    assert not first.is_known(Table({first.key: "a kernel of another version"}, {}))
    assert not first.is_known(Table({}, {}))


def test_a_wrong_kernel_enters_no_table(tmp_path, device, last_is_fastest, monkeypatch):
    args = CASES["grouped"](device)
    spoil(monkeypatch)
    path = tmp_path / "table.json"
    job = Job("grouped", lambda: iter([kernel_entry(args, tuner.fastest)]))
    with pytest.raises(AssertionError, match=r"grouped_gemm_.*: error .* exceeds"):
        tune([job], path, seconds=100, again=False)
    assert not path.exists()


def spoil(monkeypatch):
    run = GroupedGemmKernel.run

    def wrong(self, args, *rest, **options):
        run(self, args, *rest, **options)
        args.out[0] += 1

    monkeypatch.setattr(GroupedGemmKernel, "run", wrong)


def test_arguments_of_a_key_have_this_key(device):
    for make in (*CASES.values(), fused_arguments):
        args = make(device)
        made = arguments_of(args.table_key(), device)
        assert type(made) is type(args) and made.error() is None
        if not made.table_key().startswith("grouped_gemm_list"):  # all problems of a list have the largest sizes
            assert made.table_key() == args.table_key()


@pytest.mark.parametrize("key", ["", "gemm", "wgrad bfloat17 G=1", "wgrad bfloat16 G=1", "experts bfloat16 E=8"])
def test_a_key_of_no_form_is_named(key):
    with pytest.raises(ValueError, match=rf"tuning: a key .*, got '{key}'"):
        arguments_of(key, "cpu")


def test_verify_finds_wrong_entries(device, monkeypatch):
    args = CASES["grouped"](device)
    gathering = CASES["gathering"](device)
    name = selection.select(args).metadata.kernel_name
    wgrad = CASES["wgrad"](device)
    table = Table({args.table_key(): name, wgrad.table_key(): selection.select(wgrad).metadata.kernel_name}, {})
    assert verify(table, device) == {}
    misplaced = Table({gathering.table_key(): name, args.table_key(): "of_another_version"}, {})
    errors = verify(misplaced, device)
    assert errors[args.table_key()] == "of_another_version is not in the catalog"
    assert errors[gathering.table_key()] == f"{name}: Operand `row_to_token`: this kernel takes no index"
    spoil(monkeypatch)
    errors = verify(table, device)
    assert list(errors) == [args.table_key()] and errors[args.table_key()].startswith(f"{name}: error")


def test_show(tmp_path, capsys):
    kernel = next(k for k in get_kernels() if k.arguments_class is GroupedGemmArguments)
    path = tmp_path / "table.json"
    write(path, Table({"key 1": kernel.metadata.kernel_name, "key 2": "gone"}, {"key 3": [True] * 3}, {"key 1": 0.5}))
    assert main(["show", "--table", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"key 1: {kernel.metadata.kernel_name}, 0.5000 ms" in printed
    assert (
        "key 2: gone (not in the catalog: never selected)" in printed and "key 3: copies [True, True, True]" in printed
    )
    with pytest.raises(SystemExit, match=r"show: there is no no_such_gpu\.json"):
        main(["show", "--gpu", "No such GPU"])


def test_commands_say_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (["tune", "64,64,64,4,2"], ["verify"]):
        with pytest.raises(SystemExit, match=f"{command[0]}: kernels run on a CUDA GPU, got none"):
            main(command)


def test_show_without_a_gpu_lists_all_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measurements, "USER", tmp_path)
    assert main(["show"]) == 0
    assert "show: there are no tables; tune writes them" in capsys.readouterr().out
    write(tmp_path / table_name("GPU X"), Table({"key 1": "gone"}, {}))
    assert main(["show"]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'gpu_x.json'}\n  key 1: gone" in printed


@pytest.mark.gpu
def test_commands_on_the_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measurements, "USER", tmp_path)
    command = ["tune", "--jagged", "512,64,64,4", "--dtype", "float16"]
    assert main([*command, "--seconds", "0"]) == 1
    assert main(command) == 0
    (path,) = tmp_path.iterdir()
    assert len(read(path).kernels) == 2 and all(ms > 0 for ms in read(path).milliseconds.values())
    assert main(["verify", "--table", str(path)]) == 0
    assert "2 of 2 kernels agree with the reference" in capsys.readouterr().out
    assert main(["show"]) == 0 and str(path) in capsys.readouterr().out
    monkeypatch.setattr(measurements, "USER", None)
    with pytest.raises(SystemExit, match="MOE_KERNELS_TUNING is off: name the table to write by --output"):
        main(command)
