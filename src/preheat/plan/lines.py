"""Log lines of planning and warm-up.

They have the words of vLLM on Gaudi, without its device names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from preheat.plan.buckets import Bucket, Phase
from preheat.plan.budget import MemorySplit
from preheat.plan.candidates import Candidates

SHOWN = 4
"""Buckets at each end of a shortened list."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: float) -> str:
    """Return ``size`` in its largest unit, with four significant digits.

    For example 15.83 GiB, 504 MiB, -252 KiB, 0 B.
    """
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def bucket_config(phase: Candidates) -> str:
    """Return the line on the ranges of a phase.

    For example ``Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[...]``.
    """
    ranges = ", ".join(f"{axis.label}:[{axis.low}, {axis.step}, {axis.high}]" for axis in phase.axes)
    return f"{phase.phase.capitalize()} bucket config (min, step, max_warmup) {ranges or 'from file'}"


def generated(phase: Phase, buckets: Iterable[Bucket], *, whole: bool = True) -> str:
    """Return the line with a phase's buckets in ascending order.

    Only the first and the last unless ``whole``.
    """
    buckets = list(buckets)
    return f"Generated {len(buckets)} {phase} buckets: {_listed(buckets, whole=whole)}"


def running(phase: Phase, bucket: Bucket, number: int, total: int, free: int, *, graph: bool = False) -> str:
    """Return the line before bucket ``number`` of ``total`` runs.

    ``free`` bytes of device memory are left.
    """
    label = ("Graph/" if graph else "") + phase.capitalize()
    labels = {"tokens": "num_tokens", "rows": "batch_size", "longest": "seq_len", "blocks": "num_blocks"}
    dims = " ".join(f"{labels[name]}:{value}" for name, value in bucket.named_dims().items())
    return f"[Warmup][{label}][{number}/{total}] {dims} free_mem:{format_bytes(free)}"


def captured(phase: Phase, buckets: Sequence[Bucket], total: int, used: int, *, whole: bool = True) -> str:
    """Return the line that lists a phase's captured buckets.

    Only the first and the last unless ``whole``.
    """
    share = 100 * len(buckets) / total if total else 100.0
    return (
        f"Graph/{phase.capitalize()} captured:{len(buckets)} ({share:.1f}%) used_mem:{format_bytes(used)} "
        f"buckets:{_listed(buckets, whole=whole)}"
    )


def progress(done: int, total: int, current: str, seconds: float) -> str:
    """Return a line on the progress of warm-up; ``seconds`` are left."""
    return f"Warming up: {done:,} of {total:,} items, {time_left(seconds)} ({current})"


def time_left(seconds: float) -> str:
    """Return ``about 12 s left``.

    At least 1 s, since something is left.
    """
    return f"about {max(round(seconds), 1)} s left"


def finished(seconds: float, used: int, *, place: str = "device") -> str:
    """Return the last line of warm-up.

    It took ``used`` bytes of the memory of ``place``.
    """
    return f"Warmup finished in {seconds:.0f} secs, allocated {format_bytes(used)} of {place} memory"


def memory_step(
    what: str, device: tuple[int, int, int] | None, host: tuple[int, int, int], *, in_total: bool = False
) -> str:
    """Return the line on memory taken by a step of the boot.

    With ``in_total`` it is on several steps. ``device`` and ``host`` are (taken, used now, total) in bytes; negative
    numbers are released memory. ``device`` is None if the device has no memory of its own.
    """
    figures = {"host": host} if device is None else {"device": device, "host": host}
    parts = [
        f"{format_bytes(taken)} of {place} memory ({format_bytes(used)}/{format_bytes(total)} used)"
        for place, (taken, used, total) in figures.items()
    ]
    return f"{what} took {'in total ' if in_total else ''}{' and '.join(parts)}"


def known_peak(size: int) -> str:
    """Return the line on a profiling run that is left out: an earlier boot measured ``size`` bytes."""
    return f"Model profiling run left out: an earlier boot measured {format_bytes(size)}"


def free_memory(split: MemorySplit, cache: int, utilization: float, reserved: float, mode: str = "") -> str:
    """Return the line on how free memory is divided.

    ``cache`` bytes of it are for the KV cache. ``reserved`` is the share of usable memory asked for graphs. An
    execution mode in ``mode`` captures no graphs.
    """
    none = f"; execution mode {mode} captures none" if mode else ""
    return (
        f"Free device memory: {format_bytes(split.free)}, {format_bytes(split.usable)} usable "
        f"(gpu_memory_utilization={utilization:g}), {format_bytes(split.graphs)} reserved for graphs "
        f"(VLLM_GRAPH_RESERVED_MEM={reserved:g}{none}), {format_bytes(cache)} reserved for KV cache"
    )


def graph_shares(pool: int, free: int, shares: Mapping[Phase, int], ratio: float) -> str:
    """Return the line on how the graphs' ``pool`` is divided.

    The pool comes out of ``free`` bytes and is divided between the phases.
    """
    parts = " and ".join(f"{format_bytes(size)} for {phase}" for phase, size in shares.items())
    return (
        f"Using {format_bytes(pool)}/{format_bytes(free)} of free device memory for graphs, {parts} "
        f"(VLLM_GRAPH_PROMPT_RATIO={ratio:g})"
    )


def sampler_start(sizes: Sequence[int], settings: Iterable[tuple[str, bool]]) -> list[str]:
    """Return the lines before the sampler's items.

    ``settings`` are (text, batch_changed) pairs in their order.
    """
    lines = [f"Warming up sampler with batch sizes: {list(sizes)} and following configs:"]
    lines += [f"{text}, batch_changed={changed}" for text, changed in settings]
    return [*lines, "Starting sampler warmup..."]


def _listed(buckets: Iterable[Bucket], *, whole: bool) -> str:
    dims = [str(dims) for dims in sorted(bucket.dims for bucket in buckets)]
    shown = dims if whole or len(dims) <= 2 * SHOWN else [*dims[:SHOWN], "...", *dims[-SHOWN:]]
    return f"[{', '.join(shown)}]"
