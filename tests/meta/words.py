"""Words of docstrings and comments that point at a thing instead of naming it.

``python -m tests.meta.words [FOLDER ...]`` prints the files that point most, and ``--lines FILE`` the lines that do.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.meta.source import ROOT

POINTING = re.compile(r"\b(those|what|which|whose|all that)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"``[^`]*``|:\w+:`[^`]*`|`[^`]*`")
_PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")
FOLDERS = ("src", "tests", "tools", "benchmarks")


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


def count(texts: Iterator[str] | list[str]) -> Count:
    plain = [_CODE.sub("name", text) for text in texts]
    return Count(sum(len(_WORD.findall(text)) for text in plain), sum(len(POINTING.findall(text)) for text in plain))


def count_files(folder: Path) -> dict[str, Count]:
    """Return the counts of all Python files below ``folder``, by their paths from the root."""
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    return {
        str(file.relative_to(ROOT)): count([text for _, text in prose(file.read_text(encoding="utf-8"))])
        for file in files
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", default=FOLDERS)
    parser.add_argument("--lines", action="store_true", help="print each line that points")
    asked = parser.parse_args()
    found = {name: each for path in asked.paths for name, each in count_files(ROOT / path).items()}
    for name, each in sorted(found.items(), key=lambda item: item[1].rate):
        if each.pointing:
            print(f"{each.rate:6.1f}  {each.pointing:4} of {each.words:5}  {name}")
        if asked.lines:
            for line, text in prose((ROOT / name).read_text(encoding="utf-8")):
                for offset, part in enumerate(text.splitlines()):
                    if POINTING.search(_CODE.sub("name", part)):
                        print(f"        {line + offset}: {part.strip()}")
    whole = Count(sum(each.words for each in found.values()), sum(each.pointing for each in found.values()))
    print(f"{whole.rate:6.1f}  {whole.pointing:4} of {whole.words:5}  all")


if __name__ == "__main__":
    main()
