"""The order of sequences when adapter slots are few.

They run in order, passing over some, but not for ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.backends.hpu.facts import FACTS as HPU
from preheat.core import Schedule, StepResult
from preheat.errors import InvalidRequest, SettingsError
from preheat.schedule.adapters import AdapterSlotTable
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.settings.combinations import check, traits_of
from tests.pure.paper import limits, request


class Adapter(NamedTuple):
    digest: str
    packed: Any = None


def scheduler(max_loras: int = 1, **changes: Any) -> Scheduler:
    return Scheduler(limits(**changes), max_loras=max_loras)


def ask(made: Scheduler, number: int, name: str = "", tokens: int = 2) -> None:
    asked = request(number, [1, 2, 3], tokens)
    asked.lora_name = name
    made.add(asked, None, Adapter(name) if name else None)


def step(made: Scheduler) -> Schedule | None:
    schedule = made.schedule()
    if schedule is not None:
        made.process_results(schedule, StepResult(np.zeros(schedule.total_sampled, np.int32)))
        made.check()
    return schedule


def steps(made: Scheduler, most: int = 1_000) -> list[list[int]]:
    """Return the requests of each step until all have ended."""
    found = []
    while (schedule := step(made)) is not None:
        found.append(sorted(schedule.ids.tolist()))
        assert len(found) < most
    assert made.idle
    return found


def test_rows_without_an_adapter_slot_are_passed_over():
    made = scheduler(max_loras=1)
    for number, name in enumerate(("a", "b", "", "a")):
        ask(made, number, name)
    # 3 has the adapter of 0, but would keep 1 waiting.
    assert steps(made) == [[0, 2], [0, 2], [1], [1], [3], [3]]


def test_a_waiting_adapter_claims_the_least_recently_begun_slot():
    made = scheduler(max_loras=2)
    for number, name in enumerate(("a", "b", "c", "b", "a")):
        ask(made, number, name, tokens=2)
    assert steps(made) == [[0, 1, 3], [0, 1, 3], [2, 4], [2, 4]]
    made = scheduler(max_loras=2)
    ask(made, 0, "a", 4)
    ask(made, 1, "b", 9)
    ask(made, 2, "c", 2)
    ran = [step(made)]
    for number in range(3, 9):
        ask(made, number, "ab"[number % 2], 2)
        ran.append(step(made))
    ids = [sorted(each.ids.tolist()) for each in ran if each is not None]
    begun = [each for each in ids if 2 in each]
    assert begun and ids.index(begun[0]) == 4  # as soon as 0 has ended, though more of a and b came
    assert all(4 not in each for each in ids[: ids.index(begun[0])])


def test_loads_name_new_adapters_and_are_repeated_after_a_failure():
    made = scheduler(max_loras=1)
    ask(made, 0, "a")
    schedule = made.schedule()
    assert schedule is not None and schedule.loads == [(0, Adapter("a"))]
    made.fail(schedule, ValueError("no"))
    ask(made, 1)
    assert (other := step(made)) is not None and other.loads == []
    ask(made, 2, "a")
    schedule = made.schedule()
    assert schedule is not None and schedule.loads == [(0, Adapter("a"))]
    made.process_results(schedule, StepResult(np.zeros(schedule.total_sampled, np.int32)))
    assert [each.loads for each in [made.schedule()] if each] == [[]]


def test_an_adapter_that_is_not_known_is_refused():
    made = scheduler(max_loras=0)
    with pytest.raises(InvalidRequest, match="no adapter 'a'"):
        ask(made, 0, "a")


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["", *"abcd"]), st.integers(1, 6)), max_size=25))
def test_everybody_is_served_and_a_step_has_no_more_adapters_than_slots(slots, asked):
    made = scheduler(max_loras=slots, max_model_len=32, num_blocks=9)
    for number, (name, tokens) in enumerate(asked):
        ask(made, number, name, tokens)
    names = dict(enumerate(name for name, _ in asked))
    ran = steps(made)
    for ids in ran:
        assert len({names[number] for number in ids} - {""}) <= slots
    assert {number for ids in ran for number in ids} == set(names)
    assert not made.adapters.held


def test_slots_are_reused_least_recently_begun_first():
    slots = AdapterSlotTable(2)
    a, b, c = map(Adapter, "abc")
    assert [slots.begin(a), slots.begin(b), slots.begin(a)] == [0, 1, 0]
    assert not slots.has_room_for(c) and slots.has_room_for(a) and slots.has_room_for(None)
    slots.end(b)
    assert slots.begin(c) == 1
    assert [slot for slot, _ in slots.take_loads()] == [0, 1, 1]


@pytest.mark.parametrize("facts", [HPU], ids=lambda facts: facts.name)
def test_devices_without_kernels_for_adapters_refuse_them(facts):
    with pytest.raises(SettingsError, match=f"cannot be used on {facts.name}: it has no kernels for adapters") as error:
        check(traits_of(Settings(enable_lora=True)), {f"on {facts.name}": facts.lacks})
    assert error.value.param == "enable_lora"
