"""The least bytes of a decoding step, its limit by a card's memory, and the experts that a step visits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from preheat.model.specs import ModelSpec
from preheat.plan.cost import ModelSizes

SPEEDS = {"4.8 TB/s, an H200's data sheet": 4.8e12, "4.2 TB/s, a copy on an H200": 4.2e12}
"""Bytes a second, by the source of the figure."""

EAGER_STEPS = 3


def step_bytes(spec: ModelSpec, rows: int, context: int, *, touched: float | None = None) -> dict[str, float]:
    """Return the bytes that a step of ``rows`` decoding rows reads, each with ``context`` tokens before it.

    Each weight is read once, and of the experts as many of each layer as are ``touched``: by default the mean of rows
    that choose with equal chances. A layer with a window reads the window. Plain weights and the cache have two bytes a
    number.
    """
    sizes = ModelSizes.of(spec)
    share = 1 - (1 - sizes.expert_share) ** rows
    if touched is not None:
        share = touched / count_of(spec)
    cache = sum(
        layer.attention.kv.bytes(2) * min(context, layer.attention.window or context)
        for layer in spec.layers
        if layer.attention.kv.num_kv_heads
    )
    states = 2 * spec.state_bytes(2) if spec.has_states else 0
    return {
        "weights": float(sizes.layer_bytes + sizes.head_bytes),
        "experts": sizes.expert_bytes * share,
        "cache": float(rows * (cache + states)),
    }


def count_of(spec: ModelSpec) -> int:
    """Return the number of routed experts of a layer, 0 without any."""
    return max((getattr(getattr(layer.mlp, "experts", None), "num_experts", 0) for layer in spec.layers), default=0)


def limits(spec: ModelSpec, rows: int, context: int, touched: float | None = None) -> dict[str, Any]:
    """Return the arithmetic of a step: gigabytes, experts of a layer, and milliseconds by each of ``SPEEDS``.

    ``touched`` are the counted experts; then there is a limit for them beside the limit of equal chances.
    """
    experts, sizes = count_of(spec), step_bytes(spec, rows, context)
    found: dict[str, Any] = {"gb": {name: round(size / 1e9, 3) for name, size in sizes.items()}}
    if experts:
        uniform = experts * (1 - (1 - ModelSizes.of(spec).expert_share) ** rows)
        found["experts"] = {"of": experts, "equal_chances": round(uniform, 1), "counted": touched}
    found["ms"] = {name: round(sum(sizes.values()) / speed * 1e3, 3) for name, speed in SPEEDS.items()}
    if touched is not None:
        real = sum(step_bytes(spec, rows, context, touched=touched).values())
        found["ms_of_counted"] = {name: round(real / speed * 1e3, 3) for name, speed in SPEEDS.items()}
    return found


def render(parts: Mapping[str, Any]) -> str:
    """Return the arithmetic of the figures as text, with our time over the limit; empty without any."""
    figures = parts.get("latency", {}).get("figures", {})
    ours = figures.get("itl_ms", {})
    lines = [line for batch, found in figures.get("arithmetic", {}).items() for line in _lines(batch, found, ours)]
    return "\n".join(["\n", "The least of a step:", *lines]) if lines else ""


def _lines(batch: str, found: Mapping[str, Any], ours: Mapping[str, float]) -> Iterator[str]:
    gigabytes = ", ".join(f"{name} {size:g}" for name, size in found["gb"].items() if size)
    text = f"  batch {batch}, GB: {gigabytes}"
    if (experts := found.get("experts")) is not None:
        counted = "not counted" if experts["counted"] is None else f"counted {experts['counted']:g}"
        text += f"; experts of a layer: {experts['equal_chances']:g} of {experts['of']} by equal chances, {counted}"
    yield text
    for name, least in found["ms"].items():
        real = found.get("ms_of_counted", {}).get(name)
        text = f"    {name}: {least:g} ms" + ("" if real is None else f", {real:g} ms with the counted experts")
        yield text + (f"; measured {ours[batch] / (real or least):.2f} times it" if batch in ours else "")


def touched_by_step(llm: Any, decoding: Any) -> float | None:
    """Return the mean number of experts that a layer visits in steps of ``decoding`` rows, padding included.

    The steps run without graphs. None if no choice was seen: the model has no experts, other processes run it, or
    compiled functions route.
    """
    counts: list[int] = []
    forwards = getattr(llm.loop.executor, "forwards", None)
    if forwards is None:
        return None
    with decoding, _counting(counts.append), mock.patch.object(forwards, "run", _eager(forwards.run)):
        for _ in range(EAGER_STEPS):
            llm.advance()
    return round(sum(counts) / len(counts), 1) if counts else None


def _eager(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` without graphs, also where its caller asks for one: a graph's replay routes unseen."""
    return lambda part, **_: run(part, eager=True)


@contextmanager
def _counting(tell: Callable[[int], None]) -> Iterator[None]:
    """Tell the number of visited experts at each choice of a device's experts."""
    with ExitStack() as stack:
        for module, name, visited in (
            ("preheat.backends.cuda.matmul.moe.experts", "arrange", _arranged),
            ("preheat.backends.cpu.experts", "route", lambda found: len(found[0].unique())),
        ):
            if (home := sys.modules.get(module)) is not None:
                told = partial(_told, getattr(home, name), visited, tell)
                stack.enter_context(mock.patch.object(home, name, told))
        yield


def _told(
    right: Callable[..., Any], visited: Callable[[Any], int], tell: Callable[[int], None], *args: Any, **more: Any
) -> Any:
    found = right(*args, **more)
    tell(visited(found))
    return found


def _arranged(found: Any) -> int:
    """Return the experts with rows in an arrangement; one of blocks of one row has only the experts of blocks."""
    return len(found.experts.unique()) if found.block == 1 else int((found.rows_of_experts > 0).sum())
