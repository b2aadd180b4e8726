"""Words that point at a thing instead of naming it, in docstrings, comments and Markdown pages.

``python -m tests.meta.words [PATH ...]`` prints the files that point most, and ``--lines`` the lines that point.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.meta.source import ROOT

POINTING = re.compile(r"\b(those|what|which|whose|all that)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"``[^`]*``|:\w+:`[^`]*`|`[^`]*`")
_PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")
_FENCE = re.compile(r"^[ ]*(`{3,}|~{3,}).*?^[ ]*\1[ ]*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n)+(?=\n)")
_WRITTEN = re.compile(r"<!-- (?:\w+: )?written by .*?-->.*?<!-- end.*?-->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"<[a-z/][^>]*>")
_TARGET = re.compile(r"\]\([^)\s]*\)")
FOLDERS = ("src", "tests", "tools", "benchmarks")
WRITTEN_PAGE = "<!-- Written by "
"""The sign of a page that a tool writes as a whole."""


@dataclass(frozen=True)
class Count:
    """The ``words`` of a text, and how many of them point."""

    words: int
    pointing: int

    @property
    def rate(self) -> float:
        """Pointing words in 1,000."""
        return 1e3 * self.pointing / max(self.words, 1)


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring and comment with the number of its first line.

    Names of code count as one word.
    """
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _PRAGMA.match(token.string):
            yield token.start[0], token.string.lstrip("# ")


def prose_of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown page with their numbers.

    Blocks of code, targets of links, HTML and the parts that a tool writes are left out. A page that a tool writes as a
    whole has no prose.
    """
    if WRITTEN_PAGE in source:
        return
    for left_out in (_WRITTEN, _FENCE, _INDENTED, _COMMENT):
        source = left_out.sub(lambda found: "\n" * found[0].count("\n"), source)
    for number, line in enumerate(source.splitlines(), 1):
        yield number, _TARGET.sub("]", _TAG.sub("", line))


def prose_of_file(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a Python file or a Markdown page, with line numbers."""
    return (prose_of_page if file.suffix == ".md" else prose)(file.read_text(encoding="utf-8"))


def count(texts: Iterable[str]) -> Count:
    """Return the counts of all ``texts`` together."""
    plain = [_CODE.sub("name", text) for text in texts]
    return Count(sum(len(_WORD.findall(text)) for text in plain), sum(len(POINTING.findall(text)) for text in plain))


def count_files(files: Iterable[Path]) -> dict[str, Count]:
    """Return the counts of ``files``, by their paths from the root."""
    return {str(file.relative_to(ROOT)): count(text for _, text in prose_of_file(file)) for file in files}


def files_below(path: Path) -> list[Path]:
    """Return the Python files and the pages below ``path``, or ``path`` itself if it is a file."""
    return sorted((*path.rglob("*.py"), *path.rglob("*.md"))) if path.is_dir() else [path]


def together(counts: Iterable[Count]) -> Count:
    """Return the sum of ``counts``."""
    every = list(counts)
    return Count(sum(each.words for each in every), sum(each.pointing for each in every))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", default=FOLDERS)
    parser.add_argument("--lines", action="store_true", help="print each line that points")
    asked = parser.parse_args()
    found = {name: each for path in asked.paths for name, each in count_files(files_below(ROOT / path)).items()}
    for name, each in sorted(found.items(), key=lambda item: item[1].rate):
        if each.pointing:
            print(f"{each.rate:6.1f}  {each.pointing:4} of {each.words:5}  {name}")
        if asked.lines:
            for line, text in prose_of_file(ROOT / name):
                for offset, part in enumerate(text.splitlines()):
                    if POINTING.search(_CODE.sub("name", part)):
                        print(f"        {line + offset}: {part.strip()}")
    whole = together(found.values())
    print(f"{whole.rate:6.1f}  {whole.pointing:4} of {whole.words:5}  all")


if __name__ == "__main__":
    main()
