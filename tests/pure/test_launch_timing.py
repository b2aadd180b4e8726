"""The time to prepare the next step: requests that arrive meanwhile take part, and the device never waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core import Drain, Request, ToEngine
from preheat.engine.launch_timer import LEAST, LaunchTimer
from preheat.engine.loop import Loop
from preheat.transport import InlineTransport
from tests.pure.paper import Harness, limits, request

SECONDS = st.floats(1e-4, 0.1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 2), SECONDS, st.floats(0, 0.01)), min_size=1, max_size=30))
def test_a_step_is_prepared_before_the_one_in_flight_can_end(steps) -> None:
    """The next step is ready before the one in flight can end.

    A step takes at least as long as the last of its shape.
    """
    clock, last = Clock(), {}
    launch_timer = LaunchTimer(clock)
    for shape, took, preparing in steps:
        launch_timer.preparing()
        clock.now += preparing
        assert launch_timer.spare() == 0  # nothing is in flight
        launch_timer.launched(shape)
        end = clock.now + took
        spare = launch_timer.spare()
        assert spare == 0 or shape in last
        if spare and took >= last[shape]:
            assert clock.now + spare + 2 * preparing + LEAST <= end + 1e-9
        clock.now = end
        launch_timer.finished()
        last[shape] = took


def test_spare_time_is_the_shapes_time_less_the_preparation() -> None:
    clock = Clock()
    launch_timer = LaunchTimer(clock)
    for _ in range(2):
        launch_timer.preparing()
        clock.now += 0.001
        launch_timer.launched("shape")
        spare = launch_timer.spare()
        clock.now += 0.020
        launch_timer.finished()
    assert spare == pytest.approx(0.020 - 2 * 0.001 - LEAST)
    launch_timer.launched("shape")
    launch_timer.launched("shape")
    assert launch_timer.spare() == 0  # the next one is prepared already


class Listening(InlineTransport):
    """Transport with a late request.

    The request arrives while the engine listens; if the engine never listens, it arrives at the next look.
    """

    def __init__(self, late: Request, clock: Clock) -> None:
        super().__init__()
        self._late, self._clock, self.listened = [late], clock, False

    def take(self, timeout: float | None) -> list[ToEngine]:
        if timeout:
            self.listened = True
            self._clock.now += timeout
        late = self._late if self.listened else []
        self._late = self._late if not self.listened else []
        return [*super().take(timeout), *late]


@pytest.mark.parametrize("listens", [True, False])
def test_who_arrives_while_a_step_runs_takes_part_in_the_next(listens) -> None:
    """The fourth step is prepared while the third runs.

    Without spare time the late request is not in it.
    """
    clock, harness = Clock(), Harness(limits(), overlap=True)
    transport = Listening(request(1, [1, 2], 2), clock)
    loop: Loop = harness.loop
    loop.transport, loop.launch_timer = transport, LaunchTimer(clock if listens else lambda: 100.0)
    rows: list[int] = []
    result = harness.parts.device.launch

    def launch(step):
        rows.append(len(step.rows))
        return result(step)

    harness.parts.device.launch = launch
    waited = harness.scheduler.process_results

    def process_results(*step):
        clock.now += 0.02  # the duration of a step
        return waited(*step)

    harness.scheduler.process_results = process_results
    harness.add(request(0, [3, 4], 8))
    transport.send(Drain())
    loop.run()
    assert transport.listened == listens
    assert (max(rows) == 2) == listens


def test_how_long_the_device_has_been_at_a_step() -> None:
    now = 10.0
    launch_timer = LaunchTimer(lambda: now)
    assert launch_timer.running() == 0
    launch_timer.launched("first")
    now = 12.0
    launch_timer.launched("second")
    now = 13.0
    assert launch_timer.running() == 3  # of the first one
    launch_timer.finished()
    now = 17.0
    assert launch_timer.running() == 4  # the second began when the first had ended
    launch_timer.finished()
    assert launch_timer.running() == 0
