"""The README and the guides: each code block runs, and every name in them exists."""

import importlib
import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from ..markdown import QUICK, Block, blocks_of, commands_of, is_quick, run_page
from ..processes import ROOT, run_python, run_torchrun
from ..tiers import default_tier, slow

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]  # their code runs
CHECKED = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("performance*.md"))]  # their commands exist
LINKED = dict.fromkeys([*CHECKED, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))])

# Environment that torchrun gives to a single process.
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def skip_without_transformers(page):
    text = "".join(block.text for block in blocks_of(page))
    if "transformers" in text:
        oldest = "5.23" if "reading_shares" in text else "5.7"
        pytest.importorskip(
            "transformers", minversion=oldest, reason=f"transformers {oldest} or later is not installed"
        )


# Each page runs in a process of its own. The default tier runs the README, and checks names and commands on every page.
@pytest.mark.parametrize("page", default_tier(PAGES, PAGES[:1]), ids=lambda page: page.stem)
def test_blocks_run(page, tmp_path):
    skip_without_transformers(page)
    # As for a user: without a GPU the modules run in plain PyTorch, not in the interpreter.
    run_python(["-m", "tests.markdown", page], cwd=tmp_path, **TORCHRUN)


@slow  # test_blocks_run runs the same pages in one process
@pytest.mark.parametrize("page", [PAGES[0], ROOT / "docs" / "guides" / "several_gpus.md"], ids=lambda page: page.stem)
def test_several_gpus_in_two_processes(page, tmp_path):
    skip_without_transformers(page)
    run_torchrun(["-m", "tests.markdown", str(page)], 2, tmp_path)


def as_python(words):
    """Return the command of each process that torchrun starts."""
    return ("python", *words[3:]) if words[:2] == ("torchrun", "--nproc-per-node") else words


def source_of(words):
    """Return the files that read a command's options, or None for a command that is not ours."""
    if Path(words[0]).name != "python":
        return None
    if words[1] != "-m":
        path = ROOT / words[1]
        return [path, path.parent / "_language_model.py"]
    if words[2] == "pytest":
        return [ROOT / "tests" / "conftest.py", Path(importlib.util.find_spec("xdist.plugin").origin)]
    spec = importlib.util.find_spec(words[2])
    assert spec is not None, f"there is no module {words[2]}"
    is_package = spec.submodule_search_locations is not None
    if words[2] == "moe_kernels":
        return [ROOT / "moe_kernels" / "tools" / name for name in ("explain.py", "measure.py")]
    own = Path(spec.origin).parent / "__main__.py" if is_package else Path(spec.origin)
    shared = [ROOT / "benchmarks" / "common" / name for name in ("command.py", "shapes.py")]
    return [own, *shared] if words[2].startswith("benchmarks.") else [own]


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: page.stem)
def test_commands_exist(page):
    for command in (command for block in blocks_of(page) if block.language == "sh" for command in commands_of(block)):
        words = as_python(command.words)
        files = source_of(words)
        if files is None:
            continue
        assert files[0].is_file(), f"{' '.join(words)}: there is no {files[0]}"
        text = "".join(path.read_text() for path in files if path.is_file())
        options = {word.split("=")[0] for word in words if word.startswith("-")} - {"-m"}
        unknown = {option for option in options if f'"{option}"' not in text}
        assert not unknown, f"{' '.join(words)}: no option {unknown}"
        ours = "".join(path.read_text() for path in (ROOT / "moe_kernels").rglob("*.py"))
        assert all(f'"{variable}"' in ours for variable in command.variables), command.variables


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_links_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), f"link to {target}"
    for path in re.findall(r"`(?:python )?((?:examples|benchmarks|tests|moe_kernels|moe_layers)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for results in re.findall(r"`(\w+_\w+\.(?:json|png))`", text):
        assert (ROOT / "benchmarks" / "results" / results).is_file(), results
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert module == "venv" or importlib.util.find_spec(module) is not None, module
    for module, rest in re.findall(r"python -m (moe_kernels|moe_layers\.checkpoint)((?: [a-z]+)+)", text):
        words = rest.split()[: 2 if rest.startswith(" lora ") else 1]
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"{module}.__main__").main([*words, "--help"])
        assert ended.value.code == 0, f"python -m {module}{rest}"


def test_readme_links_every_guide():
    linked = set(re.findall(r"\((docs/guides/\w+\.md)\)", PAGES[0].read_text()))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]} and linked


@pytest.fixture(scope="module")
def render():
    """Return a function from Markdown to HTML with the extensions of the site."""
    load_config = pytest.importorskip("mkdocs.config", reason="the extra docs is not installed").load_config
    config = load_config(str(ROOT / "mkdocs.yml"))
    extensions = {"extensions": config["markdown_extensions"], "extension_configs": config["mdx_configs"]}
    return partial(importlib.import_module("markdown").markdown, **extensions)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_site_shows_each_heading_block_and_table(page, render):
    html = render(page.read_text())
    text = re.sub(r"(?ms)^```.*?^```$", "BLOCK", page.read_text())
    headings = [re.sub(r"[`\\]", "", heading) for heading in re.findall(r"(?m)^#+ (.*)$", text)]
    assert re.findall(r"<h\d.*?>(.*?)</h\d>", re.sub("</?code>", "", html)) == headings
    assert html.count("<pre>") >= text.count("BLOCK")
    assert html.count("<table>") == len(re.findall(r"(?m)^\|[ -|]*---", text))


def write(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_a_wrong_block_is_named_by_its_line(tmp_path):
    page = write(tmp_path, "# Page\n\n```python\nx = 1\n\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_page(page)
    assert failure.traceback[-1].lineno + 1 == 6
    page = write(tmp_path, "```python\nx = 1\n```\n\n```pycon\n>>> x\n1\n>>> int('a')\n2\n```\n")
    with pytest.raises(AssertionError, match=r"(?s)page.md\", line 8.*invalid literal"):
        run_page(page)
    for fence in ("rust", "python gpu"):  # the site takes no words after the language for a block
        with pytest.raises(ValueError, match=rf"page.md:1: a block must be one of .*, got '{fence}'"):
            run_page(write(tmp_path, f"```{fence}\n```\n"))


def test_a_block_runs_where_there_is_what_it_needs(tmp_path):
    needs = "bitsandbytes" if importlib.util.find_spec("bitsandbytes") is None else "gpu"
    page = write(tmp_path, f"<!-- needs: {needs} -->\n```python\nraise SystemExit\n```\n")
    if needs == "gpu" and torch.cuda.is_available():
        pytest.skip("everything is here")
    run_page(page)


def test_commands_are_read_as_a_shell_does():
    text = "A=1 python -m moe_kernels explain '1 2' # why\npython3 -m venv .venv && .venv/bin/pip install x\n"
    commands = commands_of(Block("sh", "", text, 1))
    assert [command.words for command in commands] == [
        ("python", "-m", "moe_kernels", "explain", "1 2"),
        ("python3", "-m", "venv", ".venv"),
        (".venv/bin/pip", "install", "x"),
    ]
    assert commands[0].variables == ("A",)
    assert [is_quick(command) for command in commands] == [True, False, False]
    assert not is_quick(commands_of(Block("sh", "", f"{QUICK[0]} DIR", 1))[0])
    assert as_python(("torchrun", "--nproc-per-node", "2", "a.py", "--b")) == ("python", "a.py", "--b")
