"""The record of a boot.

It has the outcome of every item of the plan, and the events after ready.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Literal, get_args

import msgspec

from preheat.plan.item import Dropped, Item
from preheat.plan.plan import Plan

Outcome = Literal["pending", "ready", "reused", "dropped", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

DONE: tuple[Outcome, ...] = ("ready", "reused")
"""Outcomes of items that ran."""

MAX_EVENTS = 100
"""Cold events that are kept in full; all are counted."""


class ItemRecord(msgspec.Struct):
    """An item of the plan with its outcome.

    ``started`` is in seconds from the start of warm-up; ``bytes`` is the growth of device memory.

    ``ready``: it was run. ``reused``: it was run, and its compiled code came from the store; with a ``reason``, an
    earlier boot ran it and this one ran its program as another item. ``dropped`` and ``failed`` items have a
    ``reason``, and so have items without a ``graph`` if others have one. ``hits`` counts steps after ready.
    """

    name: str
    kind: str
    shape: dict[str, Any]
    stage: str = ""
    outcome: Outcome = "pending"
    reason: str = ""
    fallback: bool = False
    graph: bool = False
    started: float = 0.0
    compile_seconds: float = 0.0
    touch_seconds: float = 0.0
    bytes: int = 0
    hits: int = 0

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.touch_seconds


class BootStep(msgspec.Struct):
    """A step of the boot, with its time and bytes.

    It began ``started`` seconds after the boot.
    """

    name: str
    started: float
    seconds: float
    bytes: int = 0


class ColdEvent(msgspec.Struct):
    """An event after ready.

    Something was compiled, captured, loaded or grown, or a planned item ran for the first time.
    """

    source: str
    detail: str
    at: float  # Unix time


class Proof(msgspec.Struct):
    """The result of the cross-check at boot.

    ``digest`` is over the bits of all logits, ``compared`` the number of comparisons. ``parts`` are everything that
    bits may depend on: versions, device, threads and so on.
    """

    level: str = "off"
    digest: str = ""
    compared: int = 0
    parts: dict[str, Any] = {}


class Record(msgspec.Struct):
    """The record of one boot.

    ``simulated`` marks a fake device, so nothing follows from the numbers. ``cold`` counts events by source. ``misses``
    counts steps beyond the bucket sizes by size. ``traffic`` counts all steps after ready by phase and tokens, before
    padding.
    """

    model: str = ""
    platform: str = ""
    dtype: str = ""
    mode: str = ""
    simulated: bool = False
    policy: str = ""
    strategy: str = ""
    invariant: bool = True
    fingerprint: str = ""
    created: float = 0.0  # Unix time
    seconds: float = 0.0  # of warm-up
    steps: list[BootStep] = []
    entries: list[ItemRecord] = []
    padding: dict[str, dict[str, Any]] = {}
    memory: dict[str, int] = {}
    notes: list[str] = []
    cold: dict[str, int] = {}
    events: list[ColdEvent] = []
    misses: dict[str, int] = {}
    traffic: dict[str, dict[int, int]] = {}
    proof: Proof = msgspec.field(default_factory=Proof)

    @classmethod
    def of(cls, plan: Plan, **more: Any) -> Record:
        """Return a record with every item of ``plan`` pending.

        The plan's dropped candidates are dropped.
        """
        entries = [_entry(item) for item in plan.items]
        entries += [_entry(dropped, outcome="dropped", reason=dropped.reason) for dropped in plan.dropped]
        return cls(
            policy=plan.policy.name,
            strategy=plan.strategy,
            entries=entries,
            padding={phase: padding.to_dict() for phase, padding in plan.padding.items()},
            created=time.time(),
            **more,
        )

    def by_name(self) -> dict[str, ItemRecord]:
        return {entry.name: entry for entry in self.entries}

    @property
    def states(self) -> Counter[str]:
        return Counter(entry.outcome for entry in self.entries)

    def unproved(self, *, dropped: bool = False) -> list[str]:
        """Return the reasons of failed checks.

        With ``dropped`` also the reasons of checks that were not run.
        """
        bad = ("failed", "dropped") if dropped else ("failed",)
        return [entry.reason for entry in self.entries if entry.kind == "check" and entry.outcome in bad]

    def summary(self) -> dict[str, Any]:
        """Return the record's part of /ready."""
        return {
            "items": dict(self.states),
            "seconds": round(self.seconds, 3),
            "invariant": self.invariant,
            "digest": self.proof.digest,
            "cold_events": sum(self.cold.values()),
            "misses": sum(self.misses.values()),
            "fingerprint": self.fingerprint,
            "notes": self.notes,
        } | ({"simulated": True} if self.simulated else {})

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Record:
        """Decode a record. Raises msgspec.ValidationError for anything else."""
        return msgspec.json.decode(data, type=cls)


def _entry(of: Item | Dropped, **more: Any) -> ItemRecord:
    fields = of.to_dict()
    return ItemRecord(
        name=fields["name"],
        kind=fields["kind"],
        shape=fields["shape"],
        stage=fields.get("stage", ""),
        fallback=fields.get("fallback", False),
        **more,
    )
