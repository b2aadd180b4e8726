"""What every benchmark shares: where results go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from preheat.bench.machine import fingerprint

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def report(name: str, figures: Any) -> Path:
    """Write ``figures`` with the machine's fingerprint to bench/results/NAME.json, and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"benchmark": name, "figures": figures, "machine": fingerprint()}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
