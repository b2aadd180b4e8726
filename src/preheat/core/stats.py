"""Counters and gauges of the engine, for ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec


class Stats(msgspec.Struct, tag="stats"):
    """Counters (since the start) and gauges of the engine, for ``/metrics``."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0  # tokens looked up on the host after misses in the device's cache
    external_hits: int = 0
    preemptions: int = 0
    blocks_moved: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0  # rows with draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = []  # accepted tokens, by their position among a row's drafts
    grammars: GrammarStats | None = None
    audit: AuditStats | None = None  # sent after a pass
    kv_transfer: KvTransferStats | None = None
    engine: int = 0  # the replica; the server sets it
    corrupted_requests: int = 0  # requests that ended because of numbers that are not finite


class AuditStats(msgspec.Struct):
    """Counters of the audit. ``checks`` are checks of the boot that ran; ``slowest`` is the longest turn in seconds."""

    passes: int = 0
    slices: int = 0
    checks: int = 0
    faults: int = 0
    seconds: float = 0.0
    slowest: float = 0.0


class KvTransferStats(msgspec.Struct):
    """Counters of blocks that other engines send and take. ``failures`` are pulls that ended early, by reason."""

    pulls: int = 0
    received_blocks: int = 0
    received_bytes: int = 0
    pull_seconds: float = 0.0
    failures: dict[str, int] = {}
    sent_blocks: int = 0
    sent_bytes: int = 0
    refused_peers: int = 0

    @classmethod
    def sum(cls, each: Sequence[KvTransferStats]) -> KvTransferStats:
        """Return the sums of all counters."""
        failures: Counter[str] = Counter()
        for one in each:
            failures.update(one.failures)
        names = [name for name in cls.__struct_fields__ if name != "failures"]
        return cls(failures=dict(failures), **{name: sum(getattr(one, name) for one in each) for name in names})


class GrammarStats(msgspec.Struct):
    """Counters of structured outputs.

    ``mask_seconds`` is the time to compute masks, ``wait_seconds`` the part of it that the model did not hide.
    ``slowest_mask`` is the longest time for one step's masks; a state's first mask is slower than later ones.
    """

    compiled: int = 0
    reused: int = 0
    refused: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    wait_seconds: float = 0.0
    slowest_mask: float = 0.0
