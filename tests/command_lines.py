"""Pairs of command lines in the documentation: another server's and preheat's."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
SHOWN = re.compile(r"<!-- served -->\n```diff\n(.*?)```", re.DOTALL)


def pairs(page: str) -> list[tuple[str, str]]:
    """Return the command lines of the other server and of preheat."""
    text = "\n".join(SHOWN.findall((DOCS / page).read_text()))
    lines = [line for line in text.splitlines() if line]
    assert [line[:2] for line in lines] == ["- ", "+ "] * (len(lines) // 2)
    return [(theirs[2:], ours[2:]) for theirs, ours in zip(lines[::2], lines[1::2], strict=True)]
