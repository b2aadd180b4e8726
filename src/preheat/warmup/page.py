"""The record as a self-contained HTML page.

It works from a disk and without scripts.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from preheat import __version__
from preheat.core import Progress
from preheat.plan.lines import format_bytes
from preheat.warmup.charts import format_seconds, grids, timeline
from preheat.warmup.record import DONE, OUTCOMES, ItemRecord, Record

MOST_DROPPED = 1_000
"""Dropped candidates listed in the table; the JSON has all."""


class Figure(NamedTuple):
    """A figure in large type with its name and a note."""

    name: str
    value: str
    note: str
    style: str = ""


def render(record: Record) -> str:
    """Return the page of a record.

    The same record gives the same bytes.
    """
    listed = _listed(record)
    return _template("record.html").render(
        record=record,
        verdict=_verdict(record),
        tiles=_tiles(record),
        timeline=timeline(record),
        grids=grids(record),
        outcomes=[outcome for outcome in OUTCOMES if record.states[outcome]],
        kinds=list(dict.fromkeys(entry.kind for entry in record.entries)),
        listed=listed,
        hidden=len(record.entries) - len(listed),
        most_memory=max(record.memory.values(), default=0) or 1,
    )


def render_progress(progress: Progress, model: str) -> str:
    """Return the page before there is a record.

    It reloads itself until there is one.
    """
    return _template("starting.html").render(progress=progress, model=model)


@cache
def _template(name: str) -> jinja2.Template:
    folder = jinja2.FileSystemLoader(Path(__file__).parent / "html")
    environment = jinja2.Environment(
        loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(_FILTERS)
    environment.globals["version"] = __version__
    return environment.get_template(name)


def _verdict(record: Record) -> tuple[str, str, str]:
    """Return a style, a word and a sentence about the worst in the record."""
    failed, cold, misses = record.states["failed"], sum(record.cold.values()), sum(record.misses.values())
    pending = record.states["pending"]
    if failed:
        return "bad", f"{failed:,} failed", "Not everything that may run could be run before the first request."
    if cold:
        return "bad", "Cold", f"{cold:,} cold {_plural('event', cold)} since ready."
    if pending:
        return "warn", "Not warmed up", f"{pending:,} {_plural('item', pending)} will first run in a request."
    if misses:
        return "warn", "Hot", f"Nothing cold since ready; {misses:,} {_plural('step', misses)} ran in a fallback."
    return "good", "Hot", "Everything was run before the first request, and nothing cold has happened since."


def _tiles(record: Record) -> list[Figure]:
    planned = [entry for entry in record.entries if entry.outcome != "dropped"]
    done = [entry for entry in planned if entry.outcome in DONE]
    hit = sum(entry.hits > 0 for entry in planned)
    sources = [source for source, count in record.cold.items() if count]
    cold, misses = sum(record.cold.values()), sum(record.misses.values())
    reused = record.states["reused"]
    padding = " · ".join(f"{100 * padding['mean']:.0f} %" for padding in record.padding.values())
    return [
        Figure(
            "items warmed", f"{len(done):,}", f"of {len(planned):,}" + (f", {reused:,} from the store" * bool(reused))
        ),
        Figure("warm-up", format_seconds(record.seconds), _boot(record)),
        Figure("items hit", f"{100 * hit / max(len(planned), 1):.0f} %", f"{hit:,} have served a request"),
        Figure("cold events", f"{cold:,}", ", ".join(sources) or "none since ready", "bad" if cold else "good"),
        Figure("misses", f"{misses:,}", "steps beyond the buckets", "warn" if misses else "good"),
        Figure("padding", padding or "–", " · ".join(record.padding) + ", on average"),
    ]


def _boot(record: Record) -> str:
    end = max((step.started + step.seconds for step in record.steps), default=0.0)
    return f"boot {format_seconds(end)} in all" if end else "of the boot"


def _listed(record: Record) -> list[tuple[int, ItemRecord]]:
    """Return the lines of the table: all items, and the first `MOST_DROPPED` dropped candidates."""
    dropped = (index for index, entry in enumerate(record.entries) if entry.outcome == "dropped")
    hidden = set(islice(dropped, MOST_DROPPED, None))
    return [(index, entry) for index, entry in enumerate(record.entries) if index not in hidden]


def _time(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"


_FILTERS: dict[str, Callable[[Any], object]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "count": lambda value: f"{value:,}",
    "percent": lambda value: f"{100 * value:.1f} %",
    "px": lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
    "time": _time,
    "outcomes": lambda entries: Counter(entry.outcome for entry in entries),
}
