"""The memory budget of device graphs.

Source: vLLM on Gaudi. A share of the usable memory is reserved for graphs and divided between the phase that prefills
and decode. Each phase captures its buckets in order, skips a bucket that is not expected to fit, and measures each
capture. The remainder of a completed phase goes to the other. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from preheat.errors import SettingsError
from preheat.plan.buckets import Bucket, Phase

Capture = Callable[[Phase, Bucket, int], int]
"""Captures a bucket, the n-th (from 1) of its phase's queue.

Returns the bytes taken. MemoryError skips it.
"""


@dataclass(frozen=True)
class MemorySplit:
    """The division of the free memory, in bytes.

    A block of the cache takes ``block_bytes``.
    """

    free: int
    usable: int
    graphs: int
    cache: int
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks that fit into ``cache``, the pad block included."""
        return self.cache // self.block_bytes

    def graph_pool(self, free: int) -> int:
        """Return the bytes for graphs when ``free`` bytes remain besides the cache.

        These are the bytes reserved for graphs and the cache's remainder of less than a block, at most the rest of the
        usable memory.
        """
        usable_left = free - (self.free - self.usable)
        return max(min(self.graphs + self.cache % self.block_bytes, usable_left), 0)


def split_memory(free: int, block_bytes: int, *, utilization: float = 0.9, reserved: float = 0.1) -> MemorySplit:
    """Divide ``free`` bytes between the cache and graphs.

    ``utilization`` is the usable share; ``reserved`` is the graphs' share of the usable bytes. Raises SettingsError if
    not even two blocks fit into the rest.
    """
    usable = int(free * utilization)
    graphs = int(usable * reserved)
    split = MemorySplit(free, usable, graphs, usable - graphs, block_bytes)
    if split.num_blocks < 2:
        raise SettingsError(
            f"{split.cache:,} bytes remain for the KV cache and a block takes {block_bytes:,}: free memory on the "
            "device, raise --gpu-memory-utilization or lower --graph-reserved-mem"
        )
    return split


@dataclass(frozen=True)
class Skipped:
    """A bucket that runs without a graph.

    ``failed`` if its capture was tried.
    """

    bucket: Bucket
    reason: str
    failed: bool = False


@dataclass
class PhaseCaptures:
    """The captures of one phase.

    ``captured`` are buckets in order with their bytes; ``notes`` are on exceeded shares.
    """

    phase: Phase
    total: int
    captured: dict[Bucket, int] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(self.captured.values())

    @property
    def complete(self) -> bool:
        """Whether every bucket was tried, so that more memory would not help."""
        return len(self.captured) + sum(skipped.failed for skipped in self.skipped) == self.total


def capture_order(buckets: Sequence[Bucket], strategy: str) -> list[Bucket]:
    """Return ``buckets`` in capture order.

    ``min_tokens``: fewest padded tokens first. ``max_bs``: most rows first, shorter before longer.
    """
    if strategy == "min_tokens":
        return sorted(buckets, key=lambda bucket: (_area(bucket), _length(bucket), bucket.rows))
    return sorted(buckets, key=lambda bucket: (-bucket.rows, _length(bucket)))


def graph_shares(pool: int, prefill: Phase, decode: Phase, prompt_ratio: float = 0.3) -> dict[Phase, int]:
    """Return the bytes of ``pool`` that each phase may take at first."""
    share = int(pool * prompt_ratio)
    return {prefill: share, decode: pool - share}


def capture_graphs(
    pool: int,
    queues: Mapping[Phase, Sequence[Bucket]],
    capture: Capture,
    *,
    expected: Mapping[Bucket, int],
    prompt_ratio: float = 0.3,
) -> dict[Phase, PhaseCaptures]:
    """Capture graphs within ``pool`` bytes from two queues: the phase that prefills, then decode.

    ``prompt_ratio`` of the pool goes to the first queue. The plan's ``expected`` bytes are used until something of the
    phase was measured, then the measured bytes per token. If exactly one phase is then complete, the other tries again
    with all the rest. Only the error of an estimate can exceed a share, and a note then says so.
    """
    first, second = queues
    done = {phase: PhaseCaptures(phase, len(queue)) for phase, queue in queues.items()}
    for phase, share in graph_shares(pool, first, second, prompt_ratio).items():
        _run(done[phase], queues[phase], share, capture, expected)
    left = pool - done[first].used - done[second].used
    if done[first].complete != done[second].complete and left > 0:
        again = second if done[first].complete else first
        done[again].skipped = [skipped for skipped in done[again].skipped if skipped.failed]
        _run(done[again], queues[again], left, capture, expected)
    return done


def _run(
    done: PhaseCaptures, queue: Sequence[Bucket], available: int, capture: Capture, expected: Mapping[Bucket, int]
) -> None:
    """Pass once over a queue with ``available`` bytes, without the buckets tried already."""
    tried = {*done.captured, *(skipped.bucket for skipped in done.skipped)}
    for number, bucket in enumerate(queue, 1):
        if bucket in tried:
            continue
        estimate = _estimate(done, bucket, expected)
        if estimate > available:
            done.skipped.append(Skipped(bucket, f"{estimate:,} bytes are expected, {max(available, 0):,} are left"))
            continue
        try:
            used = capture(done.phase, bucket, number)
        except MemoryError as error:
            done.skipped.append(Skipped(bucket, f"out of memory: {error}", failed=True))
            continue
        done.captured[bucket] = used
        available -= used
        if available < 0:
            done.notes.append(
                f"{bucket} took {used:,} bytes where {estimate:,} were expected: {-available:,} over the share"
            )


def _estimate(done: PhaseCaptures, bucket: Bucket, expected: Mapping[Bucket, int]) -> int:
    tokens = sum(captured.tokens for captured in done.captured)
    return bucket.tokens * done.used // tokens if done.used else expected[bucket]


def _area(bucket: Bucket) -> int:
    return bucket.rows * _length(bucket) if bucket.phase == "decode" else bucket.tokens


def _length(bucket: Bucket) -> int:
    return bucket.longest or bucket.blocks or (bucket.tokens if bucket.phase == "mixed" else 1)
