"""What may be asked to be told of every step: the log of compilations and fallbacks, and the trace.

Neither is known to the loop: the log is its observer, in front of the one that it always has; the trace wraps the
methods of its parts. Without the options nothing is wrapped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from preheat.backends.base import Mode
from preheat.backends.cpu.compile import compilations, compile_seconds, graph_breaks
from preheat.core import Swaps
from preheat.engine.loop import Loop, StepListener
from preheat.execution.input_batch import InputBatch
from preheat.settings import Settings
from preheat.utils.trace import Trace

logger = logging.getLogger(__name__)


@dataclass
class Meter:
    """Logs under ``name`` how much ``count``, and ``seconds`` if there are any, grew in a step.

    Of ``every`` step, or only of those in which it grew.
    """

    name: str
    every: bool
    count: Callable[[], int]
    seconds: Callable[[], float] | None = None
    _before: tuple[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._now()

    def _now(self) -> tuple[int, float]:
        return self.count(), self.seconds() if self.seconds else 0.0

    def log(self, event: InputBatch | Swaps) -> None:
        now, before = self._now(), self._before
        self._before = now
        grown = now[0] - before[0]
        if grown or self.every:
            took = f" in {now[1] - before[1]:.3f} s" if self.seconds else ""
            what = f"a swap of {event.size}" if isinstance(event, Swaps) else _step_text(event)
            logger.info("%s: %d%s, %s", self.name, grown, took, what)


def _step_text(batch: InputBatch) -> str:
    return f"{batch.bucket}, {len(batch.sampled_rows)} tokens sampled"


class StepLog:
    """Logs each step, then tells ``inner`` of it."""

    def __init__(self, inner: StepListener, meters: Sequence[Meter]) -> None:
        self._inner, self._meters = inner, meters

    def step(self, event: InputBatch | Swaps) -> None:
        for meter in self._meters:
            meter.log(event)
        self._inner.step(event)

    def report(self) -> bytes:
        return self._inner.report()


def with_step_log(settings: Settings, mode: Mode, inner: StepListener) -> StepListener:
    """``inner``, behind the log that the settings ask for. What happened until now is nobody's step."""
    meters = []
    if settings.log_step_graph_compilation or settings.log_step_graph_compilation_all:
        every = settings.log_step_graph_compilation_all
        meters.append(Meter("STEP_GRAPH_COMPILATION", every, compilations, compile_seconds))
    if settings.log_step_cpu_fallbacks or settings.log_step_cpu_fallbacks_all:
        meters.append(Meter("STEP_CPU_FALLBACKS", settings.log_step_cpu_fallbacks_all, graph_breaks))
        if mode != "compile":
            logger.warning(
                "In execution mode %s nothing is compiled that an operation could fall back from: the log of CPU "
                "fallbacks only counts graph breaks of other users of torch.compile in this process",
                mode,
            )
    return StepLog(inner, meters) if meters else inner


def trace_steps(trace: Trace, loop: Loop) -> None:
    """Events of each step and of its parts: schedule, pack, launch, settle."""
    trace.watch(loop, "step", lambda _, ran: {} if ran else None)
    trace.watch(loop.scheduler, "schedule", lambda _, schedule: schedule and _of_schedule(schedule))
    trace.watch(loop.packer, "pack", lambda args, batch: _of_schedule(args[0]) | {"shape": str(batch.bucket)})
    trace.watch(loop.executor, "launch", lambda args, _: _of_batch(args[0]))
    trace.watch(loop.scheduler, "settle", lambda args, _: _of_schedule(args[0]))


def _of_schedule(schedule: Any) -> dict[str, Any]:
    return {"rows": schedule.rows, "tokens": schedule.tokens}


def _of_batch(batch: InputBatch) -> dict[str, Any]:
    return {"shape": str(batch.bucket), "padded_tokens": batch.padded_tokens, "sampled": len(batch.sampled_rows)}
