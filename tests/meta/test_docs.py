"""The documents tell the truth: settings are generated, paths and links exist, examples run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.model.families import FAMILIES
from preheat.model.quantization import ONLINE
from preheat.model.quantization_methods import METHODS
from preheat.options.vllm_flags import FOREIGN, SHORT
from preheat.settings import OPTIONS
from tests import shared_code
from tests.forked import Forked, Forks
from tests.meta.source import PACKAGE, ROOT
from tools import gen_folders_doc, gen_models_doc, gen_quantization_doc, gen_vllm_doc
from tools.gen_settings_doc import BEGIN, END, render, with_tables

DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCS += sorted((ROOT / "docs").rglob("*.md"))
ADDING, DECISIONS = ROOT / "docs" / "adding.md", ROOT / "docs" / "decisions.md"
ANCHOR = re.compile(r'<a id="([^"]*)"></a>')
RECORD = re.compile(r'<a id="([^"]*)"></a>\n\n## ([^\n]*)\n\n([-0-9]{10}.*?)\n\n(.*?)(?=\n<a id=|\Z)', re.DOTALL)
"""A decision: anchor, title, date with its remarks, and body."""
INDEXED = re.compile(r'^- <a id="(.*)"></a>([-0-9]{10}) \[(.*)\]\(decisions/(.*?)#([^)]*)\)', re.MULTILINE)
"""A line of the index of decisions: anchor, date, title, file and the anchor there."""
PARTS = ["*Context", "*Decision", "*Consequences"]
FIGURES = {
    "ready, cold start, s": "ready, cold, s",
    "first request ÷ steady, worst case": "first request ÷ steady, offline, worst",
    "time between tokens, 1 sequence, ms": "ITL, batch 1, ms",
    "time between tokens, 256 sequences, ms": "ITL, batch 256, ms",
    "time to first token, 2,048 tokens, ms": "TTFT of 2,048 tokens, ms",
    "prefill 32 × 2,048, tokens/s": "prefill 32 × 2,048, tokens/s",
    "throughput, mixed lengths, tokens/s": "nanobench, tokens/s",
}
"""Rows of figures in the README, with their names in docs/performance.md."""
RUNS = re.compile(r"<!-- run -->\n```(python|sh)\n(.*?)```", re.DOTALL)


def blocks(path: Path, language: str) -> str:
    """Return all blocks of ``language`` that are marked to run, one after the other."""
    return "\n".join(code for kind, code in RUNS.findall(path.read_text()) if kind == language)


def test_settings_are_documented_as_they_are():
    assert (ROOT / "docs" / "settings.md").read_text() == render(), "run: python -m tools.gen_settings_doc"


def test_the_options_of_warm_up_are_documented_as_they_are():
    text = (ROOT / "docs" / "warm-up.md").read_text()
    assert text == with_tables(text), "run: python -m tools.gen_settings_doc"
    options = text.partition(BEGIN)[2].partition(END)[0]
    owned = [opt for opt in OPTIONS.values() if opt.group in ("Buckets", "Warm-up", "Device graphs", "Defragmenter")]
    assert [opt.flag for opt in owned if f"| `{opt.flag}` |" not in options] == []


def test_the_quantization_page_is_current():
    text = gen_quantization_doc.DOC.read_text()
    assert text == gen_quantization_doc.with_tables(text), "run: python -m tools.gen_quantization_doc"
    assert {method for method, *_ in gen_quantization_doc.FORMATS} == METHODS.keys() | ONLINE.keys()
    for facts in (CPU, CUDA):
        assert {kind for _, _, kind, _ in gen_quantization_doc.FORMATS} == facts.quantized.keys()


def test_models_are_documented_as_they_are():
    assert (ROOT / "docs" / "models.md").read_text() == gen_models_doc.render(), "run: python -m tools.gen_models_doc"
    rows = gen_models_doc.render().splitlines()
    assert [name for name in FAMILIES if not any(row.startswith("|") and f"`{name}`" in row for row in rows)] == []


def test_folders_are_documented_as_they_are():
    page = gen_folders_doc.PAGE.read_text()
    assert page == gen_folders_doc.written(page), "run: python -m tools.gen_folders_doc"
    assert [name for name, purpose in gen_folders_doc.folders() if not purpose.endswith(".")] == []
    source = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*/*.py")}
    assert {name for name, _ in gen_folders_doc.folders()} == source  # each has a docstring


def test_the_page_of_architectures_is_current():
    from tools import gen_architectures_doc  # here: it imports transformers

    found, text = gen_architectures_doc.render(), gen_architectures_doc.PAGE.read_text()
    assert text == found, "run: python -m tools.gen_architectures_doc"


def test_options_in_prose_exist():
    known = {opt.flag for opt in OPTIONS.values()} | {f"--no-{opt.flag[2:]}" for opt in OPTIONS.values()}
    names = {name for opt in OPTIONS.values() for name in opt.env_names}
    text = (ROOT / "docs" / "from-vllm.md").read_text()
    ours = re.findall(r"^\|[^|]*\| `(--[a-z-]+)`", text, re.MULTILINE)
    assert ours
    assert set(ours) - known == set()
    for path in DOCS:
        found = set(re.findall(r"\bPREHEAT_[A-Z_]+\b", path.read_text())) - {"PREHEAT_"}
        assert {name for name in found if not name.endswith("_")} - names == set(), path.name


def test_flags_of_vllm_are_documented_as_they_are():
    assert gen_vllm_doc.DOC.read_text() == gen_vllm_doc.render(), "run: python -m tools.gen_vllm_doc"


def test_flags_of_vllm_in_prose_have_an_answer():
    """Every flag on the page for users of vLLM is known.

    The parser knows it as an option, or the table has it.
    """
    known = {opt.flag for opt in OPTIONS.values()} | {row.flag for row in FOREIGN.values()} | SHORT.keys()
    text = (ROOT / "docs" / "from-vllm.md").read_text()
    named = re.findall(r"`(--?[a-z][a-z0-9-]*)", re.sub(r"`-(address|backend)`|`preheat [^`]*`", "", text))
    assert len(named) > 100
    assert {flag for flag in named if flag not in known} <= {"--object", "--flag", "--switch"}


def test_sampling_parameters_are_documented_with_their_defaults():
    text = (ROOT / "docs" / "sampling.md").read_text()
    found = {
        name: default
        for names, default in re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    params = SamplingParams()
    assert found == {name: str(getattr(params, name)) for name in SAMPLING_FIELDS}


def test_stations_of_a_request_exist():
    text = (ROOT / "docs" / "life-of-a-request.md").read_text()
    stations = re.findall(r"`([a-z_/]+\.py)`", text)
    assert len(stations) >= 10
    assert [station for station in stations if not (PACKAGE / station).is_file()] == []


def test_files_named_in_the_guide_to_additions_exist():
    text = ADDING.read_text()
    files = re.findall(r"`((?:src|tests|docs)/[\w./]+)`", text)
    assert len(files) >= 40
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_sections_on_adding_are_short():
    _, *sections = re.split(r"^## ", ADDING.read_text(), flags=re.MULTILINE)
    assert len(sections) >= 7
    assert [section.partition("\n")[0] for section in sections if len(section.strip().splitlines()) > 30] == []


EXAMPLE = re.compile(r"^Example: `(test_\w+)` in `(tests/[\w/]+\.py)`\.$", re.MULTILINE)


def examples(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the tests that the sections of the guide to additions name as examples."""
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    return {section.partition("\n")[0]: EXAMPLE.findall(section) for section in sections}


def test_each_section_on_adding_ends_with_an_example_that_runs():
    found = examples(ADDING.read_text())
    assert len(found) >= 12 and [section for section, named in found.items() if len(named) != 1] == []
    for name, path in (each for named in found.values() for each in named):
        defined = ast.parse((ROOT / path).read_text()).body
        assert name in {node.name for node in defined if isinstance(node, ast.FunctionDef)}, (name, path)
    assert examples("## A thing\n\n1. A line.\n") == {"A thing": []}


def test_every_decision_is_a_dated_record():
    """Each has an anchor, a date and three parts, and one line in the index with the same anchor, date and title."""
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    found = [(file.name, *record) for file in files for record in RECORD.findall(file.read_text())]
    assert len(found) == sum(file.read_text().count("\n## ") for file in files)
    for _, slug, _, head, body in found:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug), slug
        assert [part.partition(".*")[0] for part in body.strip().split("\n\n")] == PARTS, slug
        assert "superseded" not in head or re.search(r"superseded\*\* on [-0-9]{10} by\s\[", head), slug
    index = INDEXED.findall(DECISIONS.read_text())
    assert all(slug == target for slug, *_, target in index)
    assert len({slug for slug, *_ in index}) == len(index)
    assert sorted(line[:4] for line in index) == sorted(
        (slug, head[:10], title, name) for name, slug, title, head, _ in found
    )


def test_figures_of_the_readme_equal_the_performance_page():
    """The README's figures equal the page's.

    tests/meta/test_performance_doc.py compares the page with its files.
    """
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.partition("### Llama-3.1-8B\n")[2].partition("### Qwen3")[0]
    engines, *lines = cells(section)
    figures = {name: dict(zip(engines, found, strict=True)) for name, *found in lines if len(found) == len(engines)}
    names, *rows = cells((ROOT / "README.md").read_text())
    names = [name.replace("batch invariant", "`VLLM_BATCH_INVARIANT=1`") for name in names]
    shown = {name: dict(zip(names, found, strict=True)) for name, *found in rows if len(found) == len(names)}
    *others, ours, _ = names  # the last one names a benchmark
    for name, there in FIGURES.items():
        assert {engine: shown[name][engine] for engine in others} == {each: figures[there][each] for each in others}
        assert shown[name][ours] == f"**{figures[there][ours]}**"


def cells(text: str) -> list[list[str]]:
    """Return the rows of the tables in ``text``."""
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in text.splitlines() if row.startswith("| ")]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", path.read_text())
    local = [a or b for a, b in links if not (a or b).startswith(("http:", "https:"))]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_to_a_section_find_it(path):
    links = re.findall(r"\]\(((?!http)[^)#]*)#([^)]+)\)", path.read_text())
    assert [link for link in links if link[1] not in anchors(path.parent / link[0] if link[0] else path)] == []


def anchors(path: Path) -> set[str]:
    """Return the link targets of a document: its headings, as GitHub names them, and its own anchors."""
    text = path.read_text()
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads} | set(ANCHOR.findall(text))


@pytest.fixture(scope="session")
def forks():
    """Fork processes from one that has imported the engine: imports take longer than an example."""
    forks = Forks("preheat.llm", "preheat.boot.engine", "preheat.backends.cpu.backend", process=Forked)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def variables(tmp_path_factory):
    """Return the environment of the examples, with a cache that has the machine code of other tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = str(shared_code.folder_of(tmp_path_factory))
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PREHEAT_CACHE_DIR": cache}


@pytest.mark.parametrize("path", [path for path in DOCS if blocks(path, "python")], ids=lambda path: path.name)
def test_python_examples_run(path, tmp_path, variables, forks, monkeypatch):
    if path.name == "ray.md":
        pytest.importorskip("ray", reason="Ray is not installed: pip install preheat[ray]")
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "errors").open("w+") as errors:
        if forks.fit(variables):
            started = forks.run(blocks(path, "python"), environment=variables, errors=errors.fileno())
        else:
            started = subprocess.Popen([sys.executable, "-c", blocks(path, "python")], env=variables, stderr=errors)
        try:
            assert started.wait(120) == 0, (tmp_path / "errors").read_text()
        finally:
            started.kill()


@pytest.mark.parametrize("path", [path for path in DOCS if blocks(path, "sh")], ids=lambda path: path.name)
def test_shell_examples_run(path, tmp_path, variables):
    done = subprocess.run(
        ["sh", "-eu", "-c", blocks(path, "sh")], check=False, cwd=tmp_path, env=variables, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
