"""Checks of the boot that run again in a serving engine, where nothing is in flight."""

from __future__ import annotations

from collections.abc import Callable

from preheat.errors import CheckFailed, MemoryFault, NotInvariant
from preheat.plan.item import NothingToRun
from preheat.schedule.scheduler import Scheduler
from preheat.verify.boot import BootCheck
from preheat.warmup.cold_monitor import ColdMonitor


def checks_again(
    check: Callable[[], BootCheck], monitor: ColdMonitor, scheduler: Scheduler, changed: Callable[[], None]
) -> list[Callable[[], None]]:
    """Return the plan's checks, to run one at a time.

    Each computes the contexts of the boot anew, and their digest must be the boot's. ``check`` makes a fresh check.
    ``changed`` is called after a check, as checks put adapters into the slots.
    """
    proof = monitor.record.proof

    def run(name: str) -> None:
        expected, fresh = proof.digest, check()
        try:
            fresh.begin()
            if expected and proof.digest != expected:
                raise MemoryFault.at(f"the logits of the boot check have the digest {proof.digest}, not {expected}")
            fresh.run(name)
        except NothingToRun:
            pass
        except (CheckFailed, NotInvariant) as error:
            raise MemoryFault.at(f"the check of the boot fails now, {error.message}") from None
        finally:
            scheduler.forget_inputs()
            changed()
            monitor.forget()

    return [lambda name=name: run(name) for name in check().runner.plan.checks]  # type: ignore[misc]
