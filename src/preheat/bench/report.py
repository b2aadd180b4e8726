"""Where figures go: one JSON file for each model, which grows part by part and is whole at every moment."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.bench.machine import fingerprint, fingerprint_from_outside


@dataclass
class Clock:
    """How many seconds a command has left."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.started + self.seconds - time.monotonic()


class Report:
    """The figures of one ``part``, in ``path``. Other parts that the file holds stay as they are."""

    def __init__(self, path: Path, part: str, options: dict[str, Any]) -> None:
        self._path, self._part = path, part
        self.figures: dict[str, Any] = {}
        machine = fingerprint() if "torch" in sys.modules else fingerprint_from_outside()
        self._entry = {"options": options, "machine": machine, "figures": self.figures}
        self._write()

    def put(self, value: object, *keys: str) -> None:
        """Set ``figures[keys[0]][keys[1]]...``, write the file, say so."""
        place = self.figures
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self._write()
        print(f"{self._part}: {' '.join(keys)} = {json.dumps(value)}", file=sys.stderr, flush=True)  # noqa: T201

    def leave_out(self, what: str, why: str) -> None:
        """Note what was not measured."""
        self.put([*self.figures.get("left_out", []), f"{what}: {why}"], "left_out")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        parts = read_parts(self._path)
        parts[self._part] = self._entry
        fresh = self._path.with_suffix(".part")
        fresh.write_text(json.dumps({"parts": parts}, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, self._path)


def read_parts(path: Path) -> dict[str, Any]:
    """What a file of figures holds, by part; empty where there is none yet."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return found
