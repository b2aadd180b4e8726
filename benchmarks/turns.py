"""Two commits in turns on one machine: each figure of a benchmark, and how much slower the new commit is.

    python -m benchmarks turns [--tree FOLDER] [--turns 2] [--output FOLDER] COMMIT BENCHMARK [ARGUMENT ...]

COMMIT is the old one, this checkout the new one. Each turn runs ``python -m benchmarks BENCHMARK ARGUMENT ...`` in both
trees, in processes of their own. The tree that was last in a turn is first in the next one. A figure is the best of its
turns. ``--tree``: the files of COMMIT lie in FOLDER, for machines without the history.

A figure in tokens a second is better if it is higher, others if they are lower. Figures that only one of both commits
has are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.common.compared import Figures, best, in_turns, percent_slower
from benchmarks.common.machine import ROOT
from benchmarks.common.report import RESULTS, parser, save

NEEDED = ("src", "benchmarks")
"""Folders of a commit that its benchmarks need."""

NO_FIGURES = ("arithmetic", "options", "machine", "started", "bytes")
"""Keys of reports that hold no measurements."""


def figures_in(report: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of each number in the figures of a ``report``.

    Entries of a list count if they have a name.
    """
    if isinstance(report, Mapping):
        for key, value in report.items():
            if key not in NO_FIGURES:
                yield from figures_in(value, f"{name} {key}".strip())
    elif isinstance(report, list):
        for entry in report:
            if isinstance(entry, Mapping) and "name" in entry:
                yield from figures_in(entry, f"{name} {entry['name']}")
    elif isinstance(report, int | float) and not isinstance(report, bool):
        yield name, float(report)


def run(tree: Path, words: Sequence[str]) -> Figures:
    """Return the figures of a benchmark in ``tree``."""
    path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", *words, "--output", folder]
        subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=sys.stderr)
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(folder).glob("*.json"))]
    found = [part["figures"] for each in reports for part in each.get("parts", {"": each}).values()]
    return {name: value for each in found for name, value in figures_in(each)}


def git(*words: str) -> bytes:
    """Return what git prints in this checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


@contextmanager
def tree_of(commit: str, folder: Path | None) -> Iterator[Path]:
    """Yield the folder with the files of ``commit``: ``folder``, or a temporary one."""
    if folder is not None:
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(fileobj=BytesIO(git("archive", commit, *NEEDED))) as archive:
            archive.extractall(name, filter="data")
        yield Path(name)


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("commit")
    flags.add_argument("--tree", type=Path)
    flags.add_argument("--turns", type=int, default=2)
    flags.add_argument("--output", type=Path, default=RESULTS)
    flags.add_argument("words", nargs=argparse.REMAINDER, metavar="BENCHMARK ...")
    args = flags.parse_args(words)
    if not args.words or args.words[0].startswith("-") or args.turns < 1:
        flags.error("after the options, name a commit, a benchmark and its arguments; take at least one turn")
    taken: dict[str, list[Figures]] = {"old": [], "new": []}
    name = args.commit if args.tree else git("rev-parse", "--short", args.commit).decode().strip()
    with tree_of(name, args.tree) as old:
        trees = {"old": old, "new": ROOT}
        for which in in_turns("old", "new", args.turns):
            taken[which].append(run(trees[which], args.words))
    figures = {which: best(turns) for which, turns in taken.items()}
    change = percent_slower(figures["old"], figures["new"])
    for each, percent in change.items():
        print(f"{figures['old'][each]:12.3f} {figures['new'][each]:12.3f} {percent:+7.2f} %  {each}")
    found = {"old_commit": name, "command": args.words, "turns": args.turns}
    found |= {**figures, "slower_percent": change}
    save("turns_" + "_".join(word for word in args.words if not word.startswith("-")), found, args.output)
