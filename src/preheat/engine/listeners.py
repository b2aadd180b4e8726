"""Optional reports about every step.

They are a log of compilations and fallbacks, and the fields of trace events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import StepCounter
from preheat.backends.base.facts import Mode
from preheat.core import Schedule, Swaps
from preheat.engine.step_listener import StepListener
from preheat.settings import Settings
from preheat.utils.trace import Describe

if TYPE_CHECKING:
    from preheat.execution.input_batch import InputBatch

logger = logging.getLogger(__name__)


@dataclass
class Meter:
    """Log of a counter's growth per step, under ``name``.

    ``read`` returns the counter, and the seconds that its events took, if known. It logs ``every`` step, or only steps
    with growth.
    """

    name: str
    every: bool
    read: StepCounter
    _before: tuple[int, float | None] = field(init=False)

    def __post_init__(self) -> None:
        self._before = self.read()

    def log(self, event: InputBatch | Swaps) -> None:
        now, before = self.read(), self._before
        self._before = now
        grown = now[0] - before[0]
        if grown or self.every:
            took = "" if now[1] is None or before[1] is None else f" in {now[1] - before[1]:.3f} s"
            if isinstance(event, Swaps):
                what = f"a swap of {event.size}"
            else:
                what = f"{event.bucket}, {len(event.sampled_rows)} tokens sampled"
            logger.info("%s: %d%s, %s", self.name, grown, took, what)


class StepLog:
    """Listener that logs each step, then passes it on to ``inner``."""

    def __init__(self, inner: StepListener, meters: Sequence[Meter]) -> None:
        self._inner, self._meters = inner, meters

    def step(self, event: InputBatch | Swaps) -> None:
        for meter in self._meters:
            meter.log(event)
        self._inner.step(event)

    def report(self) -> bytes:
        return self._inner.report()


def with_step_log(settings: Settings, mode: Mode, backend: Backend, inner: StepListener) -> StepListener:
    """Wrap ``inner`` in the log that the settings enable.

    The log counts the events of ``backend`` from now on.
    """
    meters, counters = [], backend.step_counters()
    if settings.log_step_graph_compilation or settings.log_step_graph_compilation_all:
        every = settings.log_step_graph_compilation_all
        meters.append(Meter("STEP_GRAPH_COMPILATION", every, counters["compilations"]))
    if settings.log_step_cpu_fallbacks or settings.log_step_cpu_fallbacks_all:
        meters.append(Meter("STEP_CPU_FALLBACKS", settings.log_step_cpu_fallbacks_all, counters["fallbacks"]))
        if mode != "compile" and backend.cold_sources()["host fallback"].how == "none":
            logger.warning(
                "Execution mode %s compiles nothing, so no operation can fall back: the log of CPU fallbacks only "
                "counts graph breaks of other users of torch.compile in this process",
                mode,
            )
    return StepLog(inner, meters) if meters else inner


def _of_schedule(schedule: Schedule | None) -> dict[str, Any]:
    return {"rows": schedule.rows, "tokens": schedule.tokens} if schedule else {}


STEP_EVENTS: dict[str, Describe] = {
    "schedule": lambda _, schedule: _of_schedule(schedule),
    "pack": lambda args, batch: _of_schedule(args[0]) | {"bucket": str(batch.bucket)},
    "launch": lambda args, _: {
        "bucket": str(args[0].bucket),
        "padded_tokens": args[0].padded_tokens,
        "sampled": len(args[0].sampled_rows),
    },
    "process_results": lambda args, _: _of_schedule(args[0]),
}
"""The fields that a trace shows for each part of a step."""
