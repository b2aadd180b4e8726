"""The site builds strictly from docs/, and works without a network."""

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.meta.source import ROOT

DOCS = ROOT / "docs"
INCLUDED = re.compile(r"\A```\{include\} \.\./[A-Z]+\.md\n")
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "furo", "myst_parser")),
    reason="Sphinx is not installed: scripts/install docs",
)


class Page(HTMLParser):
    """The ids of a page, its links, and the files that a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a":
            self.links |= {values["href"]} if "href" in values else set()
        else:
            self.loaded |= {values[name] for name in ("src", "href") if name in values}


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-c", DOCS, "-d", site / "doctrees"]
    return subprocess.run([*command, source, site / "html"], check=False, capture_output=True, text=True, timeout=600)


@pytest.mark.timeout(600)  # half a minute of work
@needs_sphinx
def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    root = tmp_path / "html"
    pages = {path: Page(path) for path in root.rglob("*.html")}
    assert len(pages) > 40
    broken, remote = [], []
    for path, page in pages.items():
        for link in page.links | page.loaded:
            url = urlsplit(link)
            if url.scheme in ("data", "mailto") or (url.scheme and link in page.links):
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if url.scheme or url.netloc:
                remote.append(f"{path.name}: {link}")
            elif not target.is_file() or (
                url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids
            ):
                broken.append(f"{path.name}: {link}")
    styles = [path for kind in ("*.css", "*.js") for path in root.rglob(kind)]
    far = re.compile(r"""(?:url\(|@import\s|import\(|\.src\s*=)\s*["']?(?:https?:)?//""")
    remote += [path.name for path in styles if far.search(path.read_text(encoding="utf-8"))]
    assert broken == []
    assert remote == []


@needs_sphinx
def test_broken_links_and_lost_pages_fail_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "site.css", tmp_path / "docs")
    (tmp_path / "docs" / "index.md").write_text(
        "# Home\n\n[a](none.md) [b](page.md#none) [c](page.md#two-words) [d](page.md#row) [e](#none)\n\n"
        "```{toctree}\npage\n```\n"
    )
    (tmp_path / "docs" / "page.md").write_text('# Page\n\n## Two words\n\n| A |\n| --- |\n| <a id="row"></a>b |\n')
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    done = build(tmp_path / "docs", tmp_path)
    warnings = done.stderr.splitlines()
    assert done.returncode != 0
    for sign in ("none.md", "local id not found in doc 'page': 'none'", "target not found: 'none'", "lost.md"):
        assert any(sign in line for line in warnings), sign
    assert not any("two-words" in line or "'row'" in line for line in warnings)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_a_page_begins_with_sentences(path):
    """They say what a reader can do with the page, before any list, table or code."""
    text = path.read_text(encoding="utf-8")
    if INCLUDED.match(text):
        return
    title, first, *_ = [part for part in re.split(r"\n{2,}", text) if not part.startswith("<!--")]
    assert re.fullmatch(r"# .+", title), title
    assert re.match(r"(\*\*)?[A-Z`\[]|preheat\b", first), first
    assert re.search(r"[.:](\*\*)?(\s|$)", first), first
