"""What warm-up and planning log, line by line, as vLLM on Gaudi words it; device names are left out.

Functions that return text; the callers log it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from preheat.plan.buckets import Bucket, Phase
from preheat.plan.budget import MemorySplit
from preheat.plan.candidates import Candidates

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: float) -> str:
    """``size`` in its largest unit, with four significant digits: 15.83 GiB, 504 MiB, -252 KiB, 0 B."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def bucket_config(phase: Candidates) -> str:
    """The ranges of a phase, such as ``Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[...]``."""
    ranges = ", ".join(f"{axis.label}:[{axis.low}, {axis.step}, {axis.high}]" for axis in phase.axes)
    return f"{phase.phase.capitalize()} bucket config (min, step, max_warmup) {ranges or 'from file'}"


def generated(phase: Phase, buckets: Iterable[Bucket]) -> str:
    """The buckets of a phase, in ascending order."""
    dims = _dims(buckets)
    return f"Generated {len(dims)} {phase} buckets: {dims}"


def running(phase: Phase, bucket: Bucket, number: int, total: int, free: int, *, graph: bool = False) -> str:
    """One bucket's turn, ``number`` of ``total``; ``free`` bytes of device memory before it."""
    label = ("Graph/" if graph else "") + phase.capitalize()
    if bucket.phase == "mixed":
        dims = f"num_tokens:{bucket.tokens} batch_size:{bucket.rows}"
    else:
        second = (
            f" num_blocks:{bucket.blocks}" if bucket.blocks else f" seq_len:{bucket.longest}" if bucket.longest else ""
        )
        dims = f"batch_size:{bucket.rows}{second}"
    return f"[Warmup][{label}][{number}/{total}] {dims} free_mem:{format_bytes(free)}"


def captured(phase: Phase, buckets: Sequence[Bucket], total: int, used: int) -> str:
    """What became of a phase's captures."""
    share = 100 * len(buckets) / total if total else 100.0
    return (
        f"Graph/{phase.capitalize()} captured:{len(buckets)} ({share:.1f}%) used_mem:{format_bytes(used)} "
        f"buckets:{_dims(buckets)}"
    )


def finished(seconds: float, used: int) -> str:
    """The last line."""
    return f"Warmup finished in {seconds:.0f} secs, allocated {format_bytes(used)} of device memory"


def memory_step(what: str, device: tuple[int, int, int], host: tuple[int, int, int], *, in_total: bool = False) -> str:
    """What a step of the boot took, or several ``in_total``; device and host are (taken, used now, total) in bytes, a
    negative number is released memory.
    """
    (taken, used, total), (host_taken, host_used, host_total) = device, host
    return (
        f"{what} took {'in total ' if in_total else ''}{format_bytes(taken)} of device memory "
        f"({format_bytes(used)}/{format_bytes(total)} used) and "
        f"{format_bytes(host_taken)} of host memory ({format_bytes(host_used)}/{format_bytes(host_total)} used)"
    )


def free_memory(split: MemorySplit, utilization: float, reserved: float) -> str:
    """How the free memory is divided."""
    return (
        f"Free device memory: {format_bytes(split.free)}, {format_bytes(split.usable)} usable "
        f"(gpu_memory_utilization={utilization:g}), {format_bytes(split.graphs)} reserved for graphs "
        f"(VLLM_GRAPH_RESERVED_MEM={reserved:g}), {format_bytes(split.cache)} reserved for KV cache"
    )


def cache_blocks(num_blocks: int) -> str:
    """How many blocks the cache has got."""
    return f"# device blocks: {num_blocks}, # CPU blocks: 0"


def graph_shares(pool: int, free: int, shares: Mapping[Phase, int], ratio: float) -> str:
    """How the graphs' ``pool`` is divided between the phase that prefills and decode, out of ``free`` bytes."""
    parts = " and ".join(f"{format_bytes(size)} for {phase}" for phase, size in shares.items())
    return (
        f"Using {format_bytes(pool)}/{format_bytes(free)} of free device memory for graphs, {parts} "
        f"(VLLM_GRAPH_PROMPT_RATIO={ratio:g})"
    )


def sampler_start(sizes: Sequence[int], settings: Iterable[tuple[str, bool]]) -> list[str]:
    """The lines before the sampler's items run; ``settings`` are (text, batch_changed) pairs in their order."""
    lines = [f"Warming up sampler with batch sizes: {list(sizes)} and following configs:"]
    lines += [f"{text}, batch_changed={changed}" for text, changed in settings]
    return [*lines, "Starting sampler warmup..."]


def sampler_finished() -> str:
    """The line after the sampler's items."""
    return "Sampler warmup completed successfully"


def defragmenter_start(sizes: Sequence[int]) -> str:
    """The line before the swaps run; ``sizes`` are their padded sizes."""
    return f"Warming up defragmenter with thresholds: {list(sizes)}"


def defragmenter_finished() -> str:
    """The line after the swaps."""
    return "Defragmenter warmup completed successfully"


def defragmenter_skipped(num_blocks: int) -> str:
    """The line in place of the swaps where fewer than two blocks exist."""
    return f"Skipping defragmenter warmup, insufficient blocks ({num_blocks})"


def _dims(buckets: Iterable[Bucket]) -> list[tuple[int, ...]]:
    return sorted(bucket.dims for bucket in buckets)
