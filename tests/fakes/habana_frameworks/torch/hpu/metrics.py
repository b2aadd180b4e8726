"""The fake of ``habana_frameworks.torch.hpu.metrics``: counters that only grow."""

from __future__ import annotations

import os
from typing import Any

from habana_frameworks.simulator import DEVICE


class Metric:
    def __init__(self, name: str) -> None:
        self._name = name

    def stats(self) -> list[tuple[str, Any]]:
        """Return pairs of a name and a number.

        With PT_HPU_METRICS_GC_DETAILS they include the details of each event.
        """
        count = DEVICE.counts[self._name]
        found: list[tuple[str, Any]] = [("TotalNumber", count), ("TotalTime", 0), ("AvgTime", 0.0)]
        if os.environ.get("PT_HPU_METRICS_GC_DETAILS", "0").lower() in ("1", "true"):
            found.append(("Details", list(DEVICE.details[self._name])))
        return found


def metric_global(name: str) -> Metric:
    if name not in DEVICE.counts:
        raise ValueError(f"there is no metric {name}")
    return Metric(name)
