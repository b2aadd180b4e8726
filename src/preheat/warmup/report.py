"""The record as text for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from preheat.plan.lines import format_bytes
from preheat.warmup.charts import format_seconds
from preheat.warmup.record import OUTCOMES, ItemRecord, Record


def describe(record: Record) -> str:
    """Return the steps of the boot, items by kind, padding, memory, and problems."""
    parts = ["\n".join(part(record)) for part in (_head, _steps, _kinds, _figures, _troubles)]
    return "\n\n".join(part for part in parts if part)


def _head(record: Record) -> Iterator[str]:
    words = [record.model, record.platform, record.dtype, record.mode, f"{record.policy} policy", record.strategy]
    yield " · ".join(word for word in words if word)
    yield f"{len(record.entries):,} items, warmed up in {format_seconds(record.seconds)}"


def _steps(record: Record) -> Iterator[str]:
    for step in record.steps:
        size = format_bytes(step.bytes) if step.bytes else ""
        yield f"{step.name:<24}{format_seconds(step.seconds):>10}{size:>12}".rstrip()


def _kinds(record: Record) -> Iterator[str]:
    groups: dict[str, list[ItemRecord]] = defaultdict(list)
    for entry in record.entries:
        groups[entry.kind].append(entry)
    shown = [outcome for outcome in OUTCOMES if record.states[outcome]]
    yield f"{'kind':<12}" + "".join(f"{name:>11}" for name in [*shown, "compile", "run", "memory"])
    for kind, entries in groups.items():
        counts = Counter(entry.outcome for entry in entries)
        figures = [f"{counts[outcome]:,}" for outcome in shown]
        figures += [format_seconds(sum(entry.compile_seconds for entry in entries))]
        figures += [format_seconds(sum(entry.touch_seconds for entry in entries))]
        figures += [format_bytes(sum(entry.bytes for entry in entries))]
        yield f"{kind:<12}" + "".join(f"{figure:>11}" for figure in figures)


def _figures(record: Record) -> Iterator[str]:
    for phase, padding in record.padding.items():
        mean, worst, need = padding["mean"], padding["worst"], padding["worst_need"]
        yield f"padding of {phase}: {mean:.1%} on average, at most {worst:.0%} at {need}"
    for name, size in record.memory.items():
        yield f"{name.replace('_', ' ')}: {format_bytes(size)}"


def _troubles(record: Record) -> Iterator[str]:
    for entry in record.entries:
        if entry.outcome == "failed":
            yield f"FAILED {entry.name}: {entry.reason}"
    yield from (f"cold: {source}, {count:,} times" for source, count in record.cold.items() if count)
    yield from (f"missed: {name}, {count:,} times" for name, count in record.misses.items())
    yield from (f"note: {note}" for note in record.notes)
