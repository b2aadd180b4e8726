"""Bucket sizes solved from recorded traffic.

They have the least padded work and boot together. No torch. The record of a server (``/warmup``) counts the steps of
each size and the boot seconds of each bucket. For like traffic the best sizes have the least sum of steps x seconds of
their bucket and of the boot seconds of each bucket. They are found as a shortest path over the sizes that occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from preheat.errors import SettingsError

ALIGN = {"decode": 1, "mixed": 8}
"""Sizes are multiples of this, by phase.

Kernels take a few tokens more in the same time.
"""

Seconds = Callable[[int], float]


@dataclass(frozen=True)
class Measured:
    """Seconds by bucket size: interpolated between measured sizes, proportional beyond, and never falling."""

    sizes: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, size: int) -> float:
        rising = np.maximum.accumulate(self.seconds)
        if size > self.sizes[-1]:
            return float(rising[-1] * size / self.sizes[-1])
        return float(np.interp(size, self.sizes, rising))


def best_sizes(steps: Mapping[int, int], run: Seconds, boot: Seconds, largest: int, align: int = 1) -> tuple[int, ...]:
    """Return the bucket sizes with the least cost.

    ``largest`` is the last of them. The cost is the sum of ``boot`` over the sizes, and of ``run`` of the smallest size
    that holds it for each step. ``steps`` counts steps by size.
    """
    counts: dict[int, int] = {largest: 0}
    for size, count in steps.items():
        padded = min(-(-size // align) * align, largest)
        counts[padded] = counts.get(padded, 0) + count
    sizes = sorted(counts)
    below = np.cumsum([0, *(counts[size] for size in sizes)])
    least, cut = np.zeros(len(sizes) + 1), np.zeros(len(sizes) + 1, np.int64)
    for number, size in enumerate(sizes, 1):
        paid = least[:number] + (below[number] - below[:number]) * run(size)
        cut[number] = paid.argmin()
        least[number] = paid[cut[number]] + boot(size)
    found, number = [], len(sizes)
    while number:
        found.append(sizes[number - 1])
        number = int(cut[number])
    return tuple(reversed(found))


def paid(steps: Mapping[int, int], sizes: Sequence[int], run: Seconds) -> tuple[float, float]:
    """Return the seconds of ``steps``, and their padding.

    ``sizes`` are the buckets, rising. The padding is the computed tokens over the asked ones, less 1.
    """
    buckets = [sizes[min(int(np.searchsorted(sizes, size)), len(sizes) - 1)] for size in steps]
    seconds = sum(count * run(bucket) for bucket, count in zip(buckets, steps.values(), strict=True))
    computed = sum(count * bucket for bucket, count in zip(buckets, steps.values(), strict=True))
    return seconds, computed / sum(size * count for size, count in steps.items()) - 1


def bucket_file(
    traffic: Mapping[str, Mapping[int, int]], measured: Mapping[str, Mapping[int, tuple[float, float]]], rows: int
) -> str:
    """Return a bucket file with the best sizes for ``traffic``.

    ``traffic`` counts steps by size, by phase. Comments in the file state the gain. ``measured`` gives, by phase and
    size of today's buckets, the seconds of a step and of the boot. A phase without steps keeps today's sizes. ``rows``:
    the most of a step. Raises SettingsError if there was no traffic.
    """
    if not any(traffic.values()):
        raise SettingsError("the record has counted no steps yet: take it from /warmup of a server that has served")
    text = [
        "# Made by `preheat plan --from-traffic`; use it with",
        "# --bucketing-policy unified --bucketing-strategy file --bucketing-from-file FILE",
        f"# {'phase':<8}{'sizes':>14}{'padding':>20}{'seconds of steps':>24}{'of the boot':>20}",
    ]
    lines = []
    for phase, today in measured.items():
        old = sorted(today)
        run = Measured(old, [today[size][0] for size in old])
        boot = Measured(old, [today[size][1] for size in old])
        steps = traffic.get(phase) or {}
        new = best_sizes(steps, run, boot, old[-1], ALIGN[phase]) if steps else tuple(old)
        if steps:
            (before, wide), (after, narrow) = paid(steps, old, run), paid(steps, new, run)
            boots = sum(map(boot, old)), sum(map(boot, new))
            text.append(
                f"# {phase:<8}{f'{len(old)} -> {len(new)}':>14}{f'{wide:.1%} -> {narrow:.1%}':>20}"
                f"{f'{before:.2f} -> {after:.2f}':>24}{f'{boots[0]:.2f} -> {boots[1]:.2f}':>20}"
            )
        lines.append(f"({rows}, {list(new)})" if phase == "mixed" else f"({list(new)}, 1)")
    return "\n".join([*text, *lines])
