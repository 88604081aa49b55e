"""The README's size, the API reference, and tables that are taken from results files."""

import ast
import inspect
import itertools
import json
import pkgutil
import re
from pathlib import Path

import pytest

import moe_kernels
import moe_layers
from benchmarks import fp8_convergence
from benchmarks.common.shapes import UNSEEN
from benchmarks.layer import markdown_table
from benchmarks.profile_step import explain
from moe_kernels import WarpSpecializedDesign, get_kernels
from moe_kernels.gemm.selection import decide_copies
from moe_kernels.tools.tune import copies_name
from moe_layers.architectures import ARCHITECTURES, OWN_MODEL_TYPE

from ..markdown import blocks_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
API = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
DOCUMENTED = re.findall(r"^::: (\S+)$", API, re.MULTILINE)
PERFORMANCE = "\n".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "performance_history.md"))


def load(name):
    return json.loads((RESULTS / name).read_text())


def resolve(name):
    if name.startswith("moe_layers.integrations.transformers"):
        pytest.importorskip("transformers", minversion="5.7", reason="transformers 5.7 or later is not installed")
    return pkgutil.resolve_name(name)


def test_readme_is_short():
    assert len(README.split()) <= 1300


def test_api_reference_holds_every_public_name():
    documented = re.findall(r"^::: (moe_\w+)\.(\w+)$", API, re.MULTILINE)
    for package in (moe_kernels, moe_layers):
        names = [name for owner, name in documented if owner == package.__name__]
        assert sorted(names) == sorted(package.__all__)


def test_every_shown_name_is_public():
    """`__all__` of its module holds each name that the API reference shows or a code block imports."""
    shown = {tuple(name.rsplit(".", 1)) for name in DOCUMENTED}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))):
        for block in blocks_of(page):
            if block.language == "python":
                nodes = (node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ImportFrom))
                shown |= {(node.module, alias.name) for node in nodes for alias in node.names}
    hidden = []
    for module, name in sorted(shown):
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.startswith("moe_") and name not in listed(file):
            hidden.append(f"{module}.{name}")
    assert not hidden


def listed(file):
    """Return `__all__` of a module, which may need packages that are not installed."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


# The part of a shape comment of the source that the docstring repeats.
DTYPE = r"(?: (?:float|int)\w+(?: or \w+)?| bool| integers)?"
SHAPE = re.compile(rf"(as out|scalar|\[[^]]*\](?: each)?(?: or \[[^]]*\])*{DTYPE})")


def documented_shapes(lines):
    """Yield "name shape" of every parameter or field whose line has a shape comment, and "result shape"."""
    for line in lines:
        if comment := re.search(r"^\s*(?:(\w+): .*|.*\).* -> .*:)  # (.*)$", line):
            name, text = comment[1] or "result", comment[2]
            if shape := SHAPE.match(text):
                others = re.findall(r"(?:;|, or) (\[[^]]*\])", text[shape.end() :])
                yield f"{name} {' or '.join([shape[1], *others])}"
        if re.search(r"^\s*(?:def .*)?\).*:(?:  #.*)?$", line):
            return


def members(entity):
    """Return a function, or a class with its public functions."""
    if not inspect.isclass(entity):
        return [inspect.unwrap(entity)]
    own = [value for name, value in vars(entity).items() if name[0] != "_"]
    own = (inspect.unwrap(getattr(value, "__func__", value)) for value in own)
    return [entity, *(each for each in own if inspect.isfunction(each) and Path(each.__code__.co_filename).exists())]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_help_shows_shapes(name):
    """Docstrings repeat the shape comments of the source. Importing the Trainer of transformers takes seconds."""
    for entity in members(resolve(name)):
        lines = inspect.getsource(entity).splitlines()
        if inspect.isclass(entity):
            lines = itertools.takewhile(lambda line: not re.match(r"    (def|@)", line), lines)
        shown = " ".join((inspect.getdoc(entity) or "").split())
        assert not [text for text in documented_shapes(lines) if text not in shown], entity.__qualname__


KINDS = (
    "moe_layers.LayerRouting",
    "moe_layers.balance.routing_statistics.RoutingStatistics",
    "moe_layers.integrations.transformers.EnableReport",
)


@pytest.mark.parametrize("name", KINDS)
def test_help_describes_every_field(name):
    kind = resolve(name)
    fields = getattr(kind, "_fields", None) or kind.__dataclass_fields__
    assert all(f"{name}: " in kind.__doc__ for name in fields)


def test_navigation_holds_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert re.search(rf"[ :-] {re.escape(str(page.relative_to(ROOT / 'docs')))}$", navigation, re.MULTILINE), page


def test_every_results_file_is_named():
    """Results that no page, log, test or benchmark names belong in the git history alone."""
    kinds = {"docs": "*.md", "tests": "*.py", "benchmarks": "*.py"}
    folders = [(ROOT / folder).rglob(kind) for folder, kind in kinds.items()]
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", RESULTS / "LOG.md", *itertools.chain(*folders)]
    text = "\n".join(page.read_text() for page in pages)
    assert not [path.name for path in RESULTS.iterdir() if path.name not in text and path.suffix != ".md"]


def test_layer_tables_equal_their_results_files():
    tables = re.findall(r"<!-- table: (\S+) -->\n\n((?:\|.*\n)+)", PERFORMANCE)
    assert len(tables) == 9
    for name, table in tables:
        assert table == markdown_table(load(name)), name


def mean(values):
    return sum(values) / len(values)


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def only(rows, **wanted):
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


SONICMOE = {
    "h200": ("b6f26876", "b6f26876_second_gpu"),
    "h100": ("9ef2af6", "b053251", "44bbd32", "fe5d81e", "92b2444", "2fcc36e"),  # later rows replace earlier ones
}


@pytest.mark.parametrize("gpu", SONICMOE)
def test_sonicmoe_numbers_equal_their_results_files(gpu):
    rows = [row for part in SONICMOE[gpu] for row in load(f"sonicmoe_{gpu}_{part}.json")]
    ms = {(r["shape"], r["pass"], r["implementation"]): r["ms"] for r in rows}
    names = {key[0] for key in ms}
    assert len(names) == 8
    ratios = {which: {} for which in ("forward", "forward+backward")}
    for name in names:
        cells = [name]
        for which, found in ratios.items():
            ours, theirs = (ms[name, which, side] for side in ("triton", "SonicMoE"))
            found[name] = theirs / ours
            cells.append(f"{ours:.2f} / {theirs:.2f}")
        cells.append(" / ".join(f"{found[name]:.2f}" for found in ratios.values()))
        assert f"| {' | '.join(cells)} | " in PERFORMANCE
    forward, both = (span(found.values()) for found in ratios.values())
    assert f"With backward the ratios are\n{both}, in forward {forward}.\n" in PERFORMANCE
    if gpu == "h200":
        assert f"| SonicMoE, hub version 2 | eight layers; forward alone | {both}; {forward} |\n" in README


def test_earlier_ratios_of_sonicmoe_equal_their_results_file():
    layers = [result for result in load("sonicmoe_h100_7547394.json").values() if isinstance(result, dict)]
    assert len(layers) == 7
    inference, forward, both = (
        span([mean(layer["sonic2"][which]) / mean(layer["ours"][which]) for layer in layers])
        for which in ("inf", "fwd", "fwdbwd")
    )
    assert f"\n{both} times as fast with backward, {forward} in forward and {inference} in inference." in PERFORMANCE


def test_host_times_equal_their_results_file():
    rows, sizes = load("small_batches_host_h200_b6f26876.json"), ("T", "D", "F", "E", "K")
    names = ["dense_mlp", "moe_layers", "dense_mlp_compiled", "moe_layers_compiled", "grouped_mm_compiled"]
    passes = ("inference", "forward", "forward+backward")
    us = {(*(row[s] for s in sizes), row["implementation"], row["pass"]): row["host_us"] for row in rows}
    for shape in {key[:5] for key in us}:
        cells = [", ".join(map(str, shape))]
        cells += [" / ".join(f"{us[(*shape, name, which)]:.0f}" for which in passes) for name in names]
        assert f"| {' | '.join(cells)} |\n" in PERFORMANCE, shape
    limits = [
        span([row["over_dense"] for row in rows if (row["implementation"], row["pass"]) == ("moe_layers", which)])
        for which in passes
    ]
    assert f"the layer takes {limits[0]}, {limits[1]} and {limits[2]} times as long." in PERFORMANCE


def whole_model_cells(row, *others):
    """Return the cells of the page's tables of whole models: tokens, milliseconds, ratio, host time and peak."""
    rows = (row, *others)
    return {
        "tokens": f"{row['batch']} x {row['length']}",
        "ms": " / ".join(f"{each['ms']:.1f}" for each in rows),
        "ratio": f"{others[0]['ms'] / row['ms']:.2f}",
        "host": " / ".join(f"{each['host_ms']:.1f}" for each in rows),
        "peak": " / ".join(f"{each['peak_mib']:.0f}" for each in rows[:2]),
    }


def test_whole_models_numbers_equal_their_results_file():
    keys = ("mode", "batch", "length", "implementation")
    files = "whole_model_h200_3925f249.json", "whole_model_h200_3925f249_compiled.json"
    found = [row for file in files for row in load(file) if row["pass"] != "generate"]
    rows = {tuple(row[key] for key in keys): row for row in found}
    ratios = {}
    for key in {key[:3] for key in rows}:
        compared = [rows[(*key, name)] for name in ("moe_layers", "grouped_mm", "no_experts")]
        tokens, ms, ratios[key], host, peak = whole_model_cells(*compared).values()
        of_bound = f"{compared[1]['ms'] / compared[2]['ms']:.2f}"
        assert f"| {key[0]} | {tokens} | {ms} | {ratios[key]} | {of_bound} | {host} | {peak} |\n" in PERFORMANCE, key
    for mode, what in (
        ("eager", "transformers' `grouped_mm`, eager | six layers of a Qwen3-MoE,"),
        ("compiled", "the same, compiled layers |"),
    ):
        numbers = "; ".join(ratios[mode, 1, length] for length in (1024, 4096))
        assert f"| {what} 1024; 4096 tokens | {numbers} |\n" in README


def test_whole_models_numbers_with_lora_equal_their_results_files():
    name = "whole_model_lora_h200_0f71880b"
    keys, rows, ratios = ("model", "mode", "batch", "length", "implementation"), {}, {}
    for file in (name, f"{name}_compiled", f"{name}_gpt_oss"):
        rows |= {tuple(row[key] for key in keys): row for row in load(f"{file}.json") if row["ms"] is not None}
    for key in {key[:4] for key in rows if key[4] == "moe_layers"}:
        cells = whole_model_cells(*(rows[(*key, implementation)] for implementation in ("moe_layers", "grouped_mm")))
        ratios[key] = cells["ratio"]
        assert f"| {' | '.join((*key[:2], *cells.values()))} |\n" in PERFORMANCE, key
    for mode, what in (("eager", "eager"), ("compiled", "compiled layers")):
        numbers = "; ".join(ratios["qwen3-30b-a3b", mode, b, s] for b, s in ((1, 1024), (1, 4096), (4, 4096)))
        assert f"| training steps with PEFT's LoRA, {what} | 1024; 4096; 16384 tokens | {numbers} |\n" in README
    ours, theirs = (rows["qwen3-30b-a3b", "eager", 1, 4096, each]["peak_mib"] for each in ("moe_layers", "grouped_mm"))
    assert f"Six layers peak at {ours:.0f} MiB,\n  PEFT alone at {theirs:.0f}." in README


def baseline_over_ours(name):
    """Return each layer's ratio of the time of compiled `grouped_mm` to ours, with backward and even routing."""
    rows = [row for row in load(name) if row["routing"] == "even" and row["pass"] == "forward+backward"]
    ms = {(row["shape"], row["implementation"]): row["ms"] for row in rows}
    return {shape: base / ms[shape, "triton"] for (shape, form), base in ms.items() if form == "torch_grouped_mm"}


def test_readmes_ratios_to_compiled_layers_are_in_the_results():
    name = re.search(r"results/(layer_\w+)\.png", README)[1] + ".json"
    ratios = span(baseline_over_ours(name).values())
    assert f"{ratios} times as fast as compiled `grouped_mm` on seven layers" in README
    assert f"| `grouped_mm`, compiled | seven layers, 8192 to 32768 tokens | {ratios} |" in README
    ratios = span(baseline_over_ours("layer_h100_ddf3e9d_seven.json").values())
    assert f"| `grouped_mm`, compiled, H100 | the seven, 16384 and 65536 tokens | {ratios} |" in README
    saved = [
        only(load(name), shape="qwen3-30b-a3b", routing="even", implementation=form, **{"pass": "forward+backward"})
        for form in ("triton", "torch_grouped_mm")
    ]
    ours, baseline = (f"{row['saved_mib']:.0f}" for row in saved)
    assert f"saves {ours} MiB for backward; compiled `grouped_mm` saves {baseline}." in README
    files = [load(f"lora_h200_c384e63_{shape}.json") for shape in ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")]
    ratios = span([1 / only(rows, form="grouped_mm_split")["lora_over_form"] for rows in files])
    assert f"| split LoRA of `grouped_mm`, compiled | three layers | {ratios} |" in README
    assert f"our adapters is {ratios} times" in PERFORMANCE


def test_every_layer_slower_than_its_baseline_is_named():
    """README and the page list the layers that are slower than compiled `grouped_mm` with backward."""
    slower = {}
    for name in re.findall(r"<!-- table: (\S+) -->", PERFORMANCE):
        for shape, ratio in baseline_over_ours(name).items():
            if ratio < 0.995:
                slower.setdefault(shape, {})[name] = f"{ratio:.2f}"
    again = baseline_over_ours("layer_h100_56ee173_few_tokens.json")
    assert min(again.values()) > 1 and all(slower.pop(shape) for shape in again)  # slower before, no longer
    text = README[README.index("layers were slower than compiled") :].partition("\n\n")[0].replace("\n", " ")
    assert len(slower) == 2 and text.count("(0.") == len(slower)
    for shape, ratios in slower.items():
        files = " and ".join(f"{ratio} (`{name}`)" for name, ratio in ratios.items())
        assert f"* {shape}: {files}" in PERFORMANCE, shape
        assert re.search(rf"{re.sub('-t[0-9]+$', '', shape)}[\w ]* \({', '.join(ratios.values())}", text), shape
    again = baseline_over_ours("layer_h100_608d34b.json")["gpt-oss-20b"]
    assert f"in another run {again:.2f})" in text


def test_readmes_ratios_to_eager_models_are_in_the_results():
    wanted = {"shape": "qwen3-235b", "ep": 2, "routing": "even", "implementation": "allgather"}
    row = only(load("expert_parallel_h200_3bff595.json"), **wanted, **{"pass": "forward+backward"})
    ratio = f"{row['times_baseline']:.2f}"
    assert f"| `grouped_mm` with all-to-all, eager | Qwen3-235B, two GPUs | {ratio} |" in README
    ratios = span([row["times_as_fast"] for row in load("vllm_experts_h100_1864657.json")])
    assert f"| vLLM's Triton kernel, H100 | experts' forward in CUDA graphs | {ratios} |" in README
    published = ARCHITECTURES.keys() - {OWN_MODEL_TYPE}
    assert f"{len(published)} architectures load" in README


def test_readme_states_the_time_of_the_tests():
    seconds = re.findall(r"default tier\*\* of the tests took (\d+) s", (RESULTS / "LOG.md").read_text())[-1]
    assert f"The tests take about {int(seconds) / 60:.1f} minutes on two idle CPU cores." in README


def test_account_table_equals_its_results_file():
    steps = explain(load("account_h100_f13c729.json"))
    assert len(steps) == 7
    for step in steps:
        points = {line["stage"]: line["points"] for line in step["stages"]}
        gemms = sum(line["points"] for line in step["stages"] if line["dense_ms"] is not None)
        moved = [points.get(name, 0.0) for name in ("tokens to rows", "rows to tokens", "activation gradient")]
        share = step["share_of_dense_bound"]
        cells = [step["shape"], f"{step['step_ms']:.2f}", f"{share:.2f}"]
        cells += [f"{value:.1f}" for value in (gemms, *moved, 100 - 100 * share - gemms - sum(moved))]
        assert f"| {' | '.join(cells)} |\n" in PERFORMANCE


def test_rule_of_thumb_table_equals_its_results_files():
    rows = re.findall(r"^\| (\d+) \| H\d00 \| (\d+) \| (\S+) to (\S+) \| `(rule\S+)` \|$", PERFORMANCE, re.MULTILINE)
    assert len(rows) == 5
    for tokens, layers, *bounds, name in rows:
        sums = {}
        for row in load(name):
            assert row["T"] in (int(tokens), int(tokens) * 8)  # an expert-parallel share has eight times the tokens
            if row["form"] != "copies" and row["times_ms"]:
                rule, best = sums.get(row["shape"], (0.0, 0.0))
                sums[row["shape"]] = rule + row["rule_ms"], best + row["table_ms"]
        ratios = [rule / best for rule, best in sums.values()]
        assert len(ratios) == int(layers) and bounds == [f"{min(ratios):.3f}", f"{max(ratios):.3f}"]
    rows = load("rule_of_thumb_h100_ddf3e9d_copies.json")
    copies = [row["ratio"] for row in rows]
    assert f"took {min(copies):.3f} to {max(copies):.3f} of the fastest choice's time" in PERFORMANCE
    kernel = next(k for k in get_kernels() if isinstance(k.metadata.design, WarpSpecializedDesign))
    by_rule = [decide_copies(kernel, row["F"], UNSEEN[row["shape"]].up_columns, None) for row in rows]
    now = sorted(row["times_ms"][copies_name(rule)] / row["table_ms"] for row, rule in zip(rows, by_rule, strict=True))
    assert f"take {now[0]:.3f} to {now[-1]:.3f}, and {now[-2]:.3f} without" in PERFORMANCE.replace("\n", " ")


def test_vllm_table_equals_its_results_file():
    rows = load("vllm_experts_h100_1864657.json")
    assert len(rows) == 12
    for row in rows:
        times = f"{1e3 * row['ours_ms']:.0f} | {1e3 * row['vllm_ms']:.0f}"
        ratios = f"{row['times_as_fast']:.2f} | {row['ours_over_bound']:.2f}"
        assert f"| {row['shape']}, {row['T']} | {times} | {ratios} |\n" in PERFORMANCE


def test_quantised_decoding_table_equals_its_results_file():
    rows = load("quantized_h200_6d70fd1.json")
    found = {(row["shape"], row["num_tokens"], row["form"]): row for row in rows if row["case"] == "decode"}
    assert len(found) == 24
    for shape, num_tokens in {key[:2] for key in found}:
        plain, fp8, mxfp4 = (found[shape, num_tokens, form] for form in ("plain", "fp8", "mxfp4"))
        cells = [f"{shape}, {num_tokens}", f"{1e3 * plain['ms']:.0f}"]
        cells += [f"{1e3 * row['ms']:.0f} ({row['over_plain']:.2f})" for row in (fp8, mxfp4)]
        assert f"| {' | '.join(cells)} |\n" in PERFORMANCE


def test_fp8_tables_equal_their_results_files():
    rows = load("fp8_h100_bef970e.json")
    found = {(row["shape"], row["implementation"], row["pass"]): row for row in rows if row["case"] == "layer"}
    passes = ("forward", "forward+backward")
    for shape in {key[0] for key in found}:
        cells = [shape, " / ".join(f"{found[shape, 'bf16', which]['ms']:.2f}" for which in passes)]
        for form in ("fp8", "fp8 new weights", "fp8_saved"):
            cells.append(" / ".join(f"{found[shape, form, which]['over_bf16']:.2f}" for which in passes))
        cells.append(" / ".join(f"{found[shape, form, 'forward']['saved_mib']:.0f}" for form in ("bf16", "fp8_saved")))
        assert f"| {' | '.join(cells)} |\n" in PERFORMANCE
    curves = fp8_convergence.curves_of(load("fp8_convergence_h100.json"))
    guide = (ROOT / "docs" / "guides" / "fp8.md").read_text()
    for precision in ("bfloat16", "fp8", "float32"):
        losses = [curves[precision, seed][2000] for seed in range(3)]
        assert ", ".join(f"{loss:.4f}" for loss in losses) in PERFORMANCE.replace("\n", " ")
        assert f"{mean(losses):.4f}" in guide


def test_lora_table_equals_its_results_files():
    found = re.findall(
        r"^\| ([\w.-]+) \| (\d+), (\d+)[^|]*\| (.*) \| `(lora_\w[\w.-]+)` \|$", PERFORMANCE, re.MULTILINE
    )
    assert len(found) == 6
    for name, num_tokens, rank, text, file in found:
        rows = [row for row in load(file) if (row["num_tokens"], row["rank"]) == (int(num_tokens), int(rank))]
        forms = {row["form"]: row for row in rows if row["shape"] == name}
        ours = forms["lora"]
        cells = [f"{ours['ms']:.2f}"]
        for form in ("full", "materialised", "grouped_mm", "grouped_mm_split"):
            cells.append(f"{ours['ms'] / forms[form]['ms']:.2f}" if form in forms else "-")
        cells.append(f"{forms['frozen']['saved_mib']:.0f} / {ours['saved_mib']:.0f}")
        assert cells == text.split(" | "), (name, num_tokens, rank)
