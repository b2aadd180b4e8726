"""Records as after a boot, without a boot: made from a real plan, with random times and counts."""

import random
from typing import Any

from preheat.limits import Limits
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.warmup.record import BootStep, ColdEvent, Record

STEPS = (("torch", 2.1, 0), ("weights", 3.4, 16 << 30), ("plan", 0.1, 0), ("cache", 0.2, 22 << 30))


def make(options: dict[str, Any] | None = None, **limits: Any) -> Plan:
    defaults = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_num_prefill_seqs": None}
    return make_plan(
        Limits(**{**defaults, "block_size": 64, "num_blocks": 512, **limits}), PlanOptions(**(options or {}))
    )


def warmed(plan: Plan, *, hits: bool = True, seed: int = 0) -> Record:
    """Return a record of all items ready, one in nine reused.

    With ``hits``, it is the record after a day of requests.
    """
    draw = random.Random(seed)
    record = Record.of(plan, model="org/model-8b", platform="cpu", dtype="bfloat16", mode="eager", fingerprint="f00d")
    begin = 0.0
    for name, seconds, size in STEPS:
        record.steps.append(BootStep(name, begin, seconds, size))
        begin += seconds
    now = 0.0
    for index, entry in enumerate(record.entries):
        if entry.outcome == "dropped":
            continue
        work = max((value for value in entry.shape.values() if isinstance(value, int)), default=1)
        entry.outcome = "reused" if index % 9 == 8 else "ready"
        entry.started = now
        entry.compile_seconds = draw.uniform(0.01, 0.05) if entry.outcome == "ready" else 0.0
        entry.touch_seconds = 0.002 + work * draw.uniform(3e-5, 5e-5)
        entry.bytes = work * 4096
        entry.hits = int(draw.paretovariate(0.5)) if hits and draw.random() < 0.8 else 0
        now += entry.compile_seconds + entry.touch_seconds
    record.steps.append(BootStep("warm-up", begin, now))
    record.seconds = now
    record.memory = {"free": 79 << 30, "weights": 16 << 30, "kv_cache": 22 << 30, "graphs": 3 << 29}
    record.created = 1_780_000_000.0
    return record


def troubled(plan: Plan) -> Record:
    """Return a record with everything that can go wrong in it."""
    record = warmed(plan)
    record.entries[1].outcome, record.entries[1].reason = "failed", "RuntimeError: <out> of memory & patience"
    record.entries[2].outcome = "pending"
    record.cold = {"first run": 2, "allocator": 1}
    record.events = [ColdEvent(source, f"({source}, 7)", 1_780_000_100.0) for source in ("first run", "allocator")]
    record.misses = {"(decode, 99)": 12}
    record.notes = ["the store was made by another version & is not used"]
    return record
