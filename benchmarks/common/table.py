"""Figures beside those of other engines, as rows that a terminal and a document can show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.shapes import WEIGHTS

ANCHORS = Path(__file__).parents[1] / "results" / "anchors.json"
Row = tuple[str, Sequence[float | None]]
"""A figure's name, and the figure of each of :func:`columns`. None: there is no figure."""


class Column(NamedTuple):
    """The figures of an engine, by descriptive names."""

    engine: str
    figures: Mapping[str, float]


@cache
def anchors() -> dict[str, Any]:
    """Return vLLM's figures for the same workloads.

    They have its name with its version, the machine, and figures by shape.
    """
    found: dict[str, Any] = json.loads(ANCHORS.read_text(encoding="utf-8"))
    return found


def anchor(shape: str) -> dict[str, Any]:
    """Return vLLM's figures of ``shape``, with the version and the machine that gave them.

    Its dummy weights are narrow, so figures of a shape stand beside ours with either weights.
    """
    every = anchors()
    return {
        "engine": every["engine"], "machine": every["machine"],
        **every["shapes"].get(shape.removesuffix(f"_{WEIGHTS[1]}"), {}),
    }  # fmt: skip


def columns(shape: str, parts: Mapping[str, Any]) -> list[Column]:
    """Return our figures of ``shape``, those of the newest engines, and vLLM's with and without batch invariance.

    ``parts``: see ``report.read_parts``.
    """
    theirs = anchor(shape)
    others: dict[str, Any] = theirs.get("newest", {}) | {theirs["engine"]: theirs.get("default", {})}
    others[f"{theirs['engine']}, `VLLM_BATCH_INVARIANT=1`"] = theirs.get("invariant", {})
    return [Column("preheat", flat(parts)), *(Column(name, _flat_anchor(each)) for name, each in others.items())]


def rows(shape: str, parts: Mapping[str, Any]) -> list[Row]:
    """Return a line for each figure that an engine has, in the order of ours."""
    ours, *others = (each.figures for each in columns(shape, parts))
    names = dict.fromkeys(name for figures in (ours, *others) for name in figures)
    order = {name: place for place, name in enumerate([*others[-2], *ours])}
    found = sorted(names, key=lambda name: order.get(name, len(order)))
    return [(name, [ours.get(name), *(figures.get(name) for figures in others)]) for name in found]


def flat(parts: Mapping[str, Any]) -> dict[str, float]:
    """Return our figures by descriptive names."""
    figures = {part: entry["figures"] for part, entry in parts.items()}
    startup, latency = figures.get("startup", {}), figures.get("latency", {})
    serve = figures.get("serve", {})
    found = {f"ready, {name}, s": startup.get(f"ready_{name}_s") for name in ("cold", "second")}
    files = figures.get("startup from files", {})
    found |= {f"ready, {name}, weights from files, s": files.get(f"ready_{name}_s") for name in ("cold", "second")}
    found |= _latencies(latency)
    found |= {f"prefill of {n} tokens, tokens/s": v for n, v in latency.get("prefill_tok_s_by_length", {}).items()}
    found |= _visited(latency.get("arithmetic", {}))
    found["nanobench, tokens/s"] = figures.get("throughput", {}).get("nanobench", {}).get("tok_s")
    found |= {f"ITL, {n}, ms": v for n, v in figures.get("long", {}).get("itl_ms_long", {}).items()}
    found["first request ÷ steady, offline, worst"] = figures.get("first", {}).get("worst_ratio")
    found["first request ÷ steady, HTTP, worst"] = serve.get("first_worst_ratio")
    found |= _sweep(serve.get("sweep", []))
    found["ITL p50 of 64 streams, HTTP, ms"] = serve.get("streams", {}).get("itl_p50")
    found["requests/s at saturation, HTTP"] = serve.get("saturation", {}).get("requests_s")
    return {name: value for name, value in found.items() if value is not None}


def _flat_anchor(figures: Mapping[str, Any]) -> dict[str, float]:
    found = {f"ready, {name}, s": figures.get(f"ready_{name}_s") for name in ("cold", "second")}
    found |= _latencies(figures)
    found["nanobench, tokens/s"] = figures.get("nanobench_tok_s")
    found["first request ÷ steady, offline, worst"] = figures.get("first_worst_ratio")
    found["first request ÷ steady, HTTP, worst"] = figures.get("served_first_worst_ratio")
    found |= _sweep(figures.get("sweep", []))
    return {name: value for name, value in found.items() if value is not None}


def _latencies(figures: Mapping[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {f"ITL, batch {n}, ms": value for n, value in figures.get("itl_ms", {}).items()}
    found["TTFT of 2,048 tokens, ms"] = figures.get("ttft_ms")
    found["prefill 32 × 2,048, tokens/s"] = figures.get("prefill_tok_s")
    return found


def _visited(arithmetic: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the counted experts that a step visits in a layer."""
    counts = ((batch, found.get("experts") or {}) for batch, found in arithmetic.items())
    return {f"experts visited, batch {batch}, of {each['of']}": each["counted"] for batch, each in counts if each}


def _sweep(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    names = {"ttft_p50": "TTFT p50", "ttft_p99": "TTFT p99", "itl_p50": "ITL p50", "itl_p99": "ITL p99"}
    names["itl_max"] = "ITL max"
    return {f"{line['rate']:g} requests/s: {text}, ms": line[key] for line in lines for key, text in names.items()}


def render(shape: str, parts: Mapping[str, Any]) -> str:
    """Return the rows as text, for a terminal."""
    lines = [("", *(each.engine.replace("`", "") for each in columns(shape, parts)))]
    lines += [(name, *map(shown, figures)) for name, figures in rows(shape, parts)]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        f"{what:<{first}}  " + "  ".join(f"{text:>{width}}" for text, width in zip(rest, widths, strict=True))
        for what, *rest in lines
    )


def shown(figure: float | None) -> str:
    """Return a figure with its significant digits; a dash for none."""
    if figure is None:
        return "–"
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:g}"
