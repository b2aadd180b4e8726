"""Dummy requests go through the loop and leave nothing behind."""

from __future__ import annotations

import pytest

from preheat.schedule.scheduler import Scheduler
from preheat.warmup.dummy_requests import LOOP_ROUNDS, warm_up_loop
from tests.pure.paper import Harness, limits, request


@pytest.mark.parametrize("overlap", [False, True])
def test_a_scheduler_is_as_new_after_dummy_requests(overlap) -> None:
    harness = Harness(limits(), overlap=overlap)
    warm_up_loop(harness.loop)
    assert harness.device.rows_run > 2 * LOOP_ROUNDS
    harness.transport.receive()
    scheduler, new = harness.scheduler, Scheduler(limits())
    assert scheduler.idle
    assert scheduler.stats() == new.stats()
    assert (scheduler.slots.num_free, scheduler.pool.num_used) == (new.slots.num_free, 0)
    harness.add(request(0, [1, 2, 4], 9))
    harness.run()
    harness.verify()


def test_a_model_of_one_token_runs_none() -> None:
    harness = Harness(limits(max_model_len=1))
    warm_up_loop(harness.loop)
    assert harness.device.rows_run == 0
