"""Without a proposer, the scheduler's steps equal its steps of before rows could have draft tokens."""

from __future__ import annotations

import hashlib
import random

import pytest

from tests.pure.paper import Harness, limits, request

BEFORE = {
    (False, False): "1db50fa6c0530f12",
    (False, True): "3de9639805df6e06",
    (True, False): "4adc471b929b394a",
    (True, True): "1b77e977efdfe5e9",
}
"""Hashes of all steps of 40 random workloads, by overlap and mixed steps.

They come from the scheduler as it was.
"""


def workload(seed: int, overlap: bool, mixed: bool, **options) -> Harness:
    """Return requests that share prefixes, are preempted, compacted, cancelled and stopped, under cramped limits.

    The limits are random.
    """
    rng = random.Random(seed)
    size = limits(
        max_model_len=36,
        num_blocks=10 + rng.randrange(12),
        max_num_batched_tokens=rng.choice([6, 12, 30]),
        max_num_prefill_seqs=rng.choice([None, 1]),
    )
    threshold = rng.choice([None, 0, 2])
    mixed_tokens = rng.choice([None, 6])
    harness = Harness(
        size, overlap=overlap, mixed_steps=mixed, defrag_threshold=threshold, mixed_tokens=mixed_tokens, **options
    )
    harness.rng = rng
    return harness


def steps_of(harness: Harness) -> list[tuple[object, ...]]:
    """Run the workload of ``harness``, and return the contents of its schedules."""
    rng, seen = harness.rng, []

    def step() -> None:
        schedule = harness.step()
        if schedule is not None:
            arrays = (schedule.slots, schedule.first, schedule.extend, schedule.samples, schedule.ids, schedule.ends)
            started = sorted(schedule.started.items())
            parts = [array.tolist() for array in arrays]
            seen.append((*parts, schedule.num_decode, schedule.persistent_batch, started))

    for number in range(8):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        stop_ids = rng.sample(range(7), rng.randrange(2))
        harness.add(request(number, prompt, rng.randrange(1, 14), stop_ids=stop_ids))
        for _ in range(rng.randrange(4)):
            step()
        if rng.random() < 0.1:
            harness.cancel(rng.randrange(number + 1))
    while not harness.scheduler.idle:
        step()
    harness.verify()
    return seen


@pytest.mark.parametrize(("overlap", "mixed"), BEFORE)
def test_schedules_match_recorded_hashes(overlap, mixed) -> None:
    text = repr([steps_of(workload(seed, overlap, mixed)) for seed in range(40)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == BEFORE[overlap, mixed]
