"""``preheat plan --from-traffic``: a record's traffic and bucket times, for :mod:`preheat.plan.traffic`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from preheat.errors import SettingsError
from preheat.plan.traffic import bucket_file
from preheat.utils.files import TABLE_BYTES, read_file, shown, why_unread
from preheat.warmup.record import DONE, Record

PHASES = {"decode": "rows", "mixed": "tokens"}
"""The phases of the unified policy.

Each has the name of the number that is its buckets' size.
"""


def solved(path: Path) -> str:
    """Return the bucket file for the traffic of the record in ``path``.

    Raises SettingsError if the record cannot be read or solved.
    """
    try:
        record = Record.from_json(read_file(path, most=TABLE_BYTES))
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise SettingsError(f"--from-traffic {shown(path)}: no record can be read there: {why_unread(error)}") from None
    if record.policy != "unified":
        raise SettingsError(
            f"--from-traffic {path}: its server had the {record.policy} bucketing policy; sizes are solved for unified"
        )
    measured: dict[str, dict[int, tuple[float, float]]] = {}
    rows = 1
    for entry in record.entries:
        if entry.kind in PHASES and entry.outcome in DONE:
            size = entry.shape[PHASES[entry.kind]]
            measured.setdefault(entry.kind, {})[size] = entry.touch_seconds, entry.seconds
            rows = max(rows, entry.shape.get("rows", 1))
    if not measured:
        raise SettingsError(f"--from-traffic {path}: its server did not warm up, so no bucket was measured")
    return bucket_file(record.traffic, measured, rows)
