"""The files of the oracles: written before a change, compared after it.

A file holds everything besides the code that its numbers depend on (``of``), and the numbers themselves (``cells``).
Numbers of another machine or library are not compared: the command prints the differences, and its status is 2.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Cells = Mapping[str, Any]

SHOWN = 40
"""The most differences that are printed."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``--write FILE`` or ``--against FILE``, and ``--only PATTERN``."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    way = made.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", metavar="FILE", type=Path, help="store what is found")
    way.add_argument(
        "--against", metavar="FILE", type=Path, help="compare with what was stored; status 1 if it differs"
    )
    made.add_argument("--only", metavar="PATTERN", default="", help="a regular expression that names of cells match")
    return made


def chosen(names: list[str], only: str) -> list[str]:
    """Return the ``names`` in which the pattern ``only`` occurs."""
    return [name for name in names if re.search(only, name)]


def finish(
    args: argparse.Namespace, of: Cells, find: Callable[[], Cells], change: Callable[[Any], Any] | None = None
) -> int:
    """Find the cells, then store or compare them as ``args`` say.

    Returns the exit status. ``change`` reduces a cell to the part that is compared.
    """
    if args.write is not None:
        cells = dict(sorted(find().items()))
        if (args.only or getattr(args, "missing", False)) and args.write.exists():
            cells = dict(sorted((cells_in(args.write) | cells).items()))
        args.write.write_text(_text({"of": of, "cells": cells}))
        print(f"{len(cells):,} cells in {args.write}")
        return 0
    stored = json.loads(args.against.read_text())
    if differing := {name: (stored["of"].get(name), now) for name, now in of.items() if stored["of"].get(name) != now}:
        for name, (was, now) in differing.items():
            print(f"{name}: {was} -> {now}")
        print("Not compared: these numbers were taken elsewhere. Take them here, at a commit before the change.")
        return 2
    was = {name: cell for name, cell in _cells(stored).items() if re.search(args.only, name)}
    now = json.loads(json.dumps(find()))
    if change is not None:
        was, now = ({name: change(cell) for name, cell in cells.items()} for cells in (was, now))
    return _compare(was, now)


def _compare(was: Cells, now: Cells) -> int:
    names = sorted(was.keys() | now.keys())
    differ = [name for name in names if was.get(name) != now.get(name)]
    for name in differ[:SHOWN]:
        print(f"{name}: {_short(was.get(name, 'no such cell'))} -> {_short(now.get(name, 'no such cell'))}")
    print(f"{len(names) - len(differ):,} of {len(names):,} cells are equal")
    return 1 if differ else 0


def _short(cell: Any) -> str:
    text = cell if isinstance(cell, str) else json.dumps(cell)
    return text if len(text) <= 300 else f"{text[:300]}…"


def _text(content: Cells) -> str:
    """Return JSON with a cell in each line.

    A difference between two files can then be read. The texts of cells that are lists are written once; such a cell has
    their numbers.
    """
    texts: dict[str, int] = {}
    lines = []
    for name, cell in content["cells"].items():
        held = [texts.setdefault(text, len(texts)) for text in cell] if isinstance(cell, list) else cell
        lines.append(f"{json.dumps(name)}: {json.dumps(held)}")
    parts = [f'"of": {json.dumps(content["of"])}', '"cells": {\n' + ",\n".join(lines) + "\n}"]
    if texts:
        parts.append('"texts": [\n' + ",\n".join(map(json.dumps, texts)) + "\n]")
    return "{" + ",\n".join(parts) + "}\n"


def cells_in(path: Path) -> dict[str, Any]:
    """Return the cells of the file ``path``.

    The result is empty if it does not exist.
    """
    return _cells(json.loads(path.read_text())) if path.exists() else {}


def _cells(content: Cells) -> dict[str, Any]:
    """Return the cells of a file, with their texts."""
    texts = content.get("texts", [])
    cells = content["cells"].items()
    return {name: [texts[at] for at in cell] if isinstance(cell, list) else cell for name, cell in cells}


def end(status: int) -> None:
    """End the process."""
    sys.exit(status)
