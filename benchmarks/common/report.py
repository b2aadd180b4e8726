"""The reports of figures: JSON files with the figures and their machine."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.machine import ROOT, fingerprint, fingerprint_from_outside

RESULTS = ROOT / "benchmarks" / "results"


def parser(doc: str | None, module: str) -> argparse.ArgumentParser:
    """Return a parser for the benchmark ``module``.

    The docstring ``doc`` is its help.
    """
    prog = f"benchmarks {module.rpartition('.')[2]}"
    return argparse.ArgumentParser(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def part(words: str) -> tuple[int, int]:
    """Return the number of a part, from 0 on, and the number of parts."""
    number, _, parts = words.partition("/")
    if not (number.isdigit() and parts.isdigit() and int(number) < int(parts)):
        raise argparse.ArgumentTypeError(f"{words} is no part such as 0/4")
    return int(number), int(parts)


def save(name: str, figures: Any, folder: Path = RESULTS) -> Path:
    """Write ``figures`` and the machine's fingerprint to NAME.json in ``folder``, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"benchmark": name, "figures": figures, "machine": _machine()}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


@contextmanager
def alone(name: str, folder: Path = RESULTS) -> Iterator[None]:
    """Hold the record NAME, so that runs side by side add to it one after the other."""
    place = folder / "tmp"
    place.mkdir(parents=True, exist_ok=True)
    with open(place / f"{name}.lock", "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@dataclass
class Clock:
    """The seconds that a command has left."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.started + self.seconds - time.monotonic()


class PartReport:
    """The figures of one ``part`` of the suite in the file ``path``.

    The file is complete after every figure. Other parts in the file stay as they are.
    """

    def __init__(self, path: Path, part: str, options: dict[str, Any]) -> None:
        self._path, self._part = path, part
        self.figures: dict[str, Any] = {}
        self._entry = {"options": options, "machine": _machine(), "figures": self.figures}
        self._write()

    def put(self, value: object, *keys: str) -> None:
        """Set ``figures[keys[0]][keys[1]]...``, write the file, print the figure to standard error."""
        place = self.figures
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self._write()
        print(f"{self._part}: {' '.join(keys)} = {json.dumps(value)}", file=sys.stderr, flush=True)

    def leave_out(self, what: str, why: str) -> None:
        """Note a figure that was not measured, and the reason."""
        self.put([*self.figures.get("left_out", []), f"{what}: {why}"], "left_out")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        parts = read_parts(self._path)
        parts[self._part] = self._entry
        fresh = self._path.with_suffix(".part")
        fresh.write_text(json.dumps({"parts": parts}, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, self._path)


def read_parts(path: Path) -> dict[str, Any]:
    """Return the parts in a file that ``PartReport`` wrote, by name.

    The result is empty if there is no such file.
    """
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return found


def _machine() -> dict[str, Any]:
    """Return the fingerprint, without importing torch into a process that has not imported it."""
    return fingerprint() if "torch" in sys.modules else fingerprint_from_outside()
