"""Memory that sleeps at addresses that stay: ranges and handles, on a driver that only counts."""

from __future__ import annotations

from ctypes import sizeof

import pytest
import torch

from preheat.backends.cuda.device.memory import AccessDesc, AllocationProp, VirtualMemory

UNIT = 1 << 21


class FakeDriver:
    """Driver of addresses that are never used twice, and ``room`` units of memory.

    While ``busy`` no range may be unmapped.
    """

    def __init__(self, room: int) -> None:
        self.room, self.next, self.mapped, self.reserved = room, UNIT, {}, {}
        self.busy = False

    def synchronize(self) -> None:
        self.busy = False

    def granularity(self) -> int:
        return UNIT

    def reserve(self, size: int) -> int:
        assert size % UNIT == 0
        self.next += size
        self.reserved[self.next - size] = size
        return self.next - size

    def map(self, address: int, size: int) -> int:
        assert self.reserved[address] == size and address not in self.mapped
        if sum(self.mapped.values()) + size > self.room * UNIT:
            raise RuntimeError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.mapped[address] = size
        return address + 1

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert not self.busy and handle == address + 1 and self.mapped.pop(address) == size

    def free(self, address: int, size: int) -> None:
        assert address not in self.mapped and self.reserved.pop(address) == size


@pytest.fixture
def memory(monkeypatch) -> VirtualMemory:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return VirtualMemory(torch.device("cuda", 0), FakeDriver(room=5))


def take(memory: VirtualMemory, tag: str, size: int) -> int | None:
    memory._tag = tag
    return memory._allocate(size, 0, None)


def test_structures_have_the_sizes_of_the_driver():
    assert sizeof(AllocationProp) == 32 and sizeof(AccessDesc) == 12


def test_a_tag_sleeps_alone_and_wakes_where_it_was(memory):
    driver = memory._driver
    one, two, other = take(memory, "a", 1), take(memory, "a", UNIT + 1), take(memory, "b", UNIT)
    assert driver.mapped == {one: UNIT, two: 2 * UNIT, other: UNIT}
    memory.sleep("a", keep=False)
    assert driver.mapped == {other: UNIT} and driver.reserved.keys() == {one, two, other}
    memory.wake("a")
    assert driver.mapped == {one: UNIT, two: 2 * UNIT, other: UNIT}
    memory._release(two, UNIT + 1, 0, None)
    assert driver.reserved.keys() == {one, other}


def test_a_segment_is_given_up_once_the_device_is_idle(memory):
    """A segment is freed only after all earlier launches have ended.

    torch gives it up with its last tensor.
    """
    address = take(memory, "a", UNIT)
    memory._driver.busy = True
    memory._release(address, UNIT, 0, None)
    assert not memory._driver.mapped and not memory._driver.reserved


def test_without_room_nothing_is_awake_and_it_can_be_tried_again(memory):
    driver = memory._driver
    one, two = take(memory, "a", UNIT), take(memory, "a", 3 * UNIT)
    memory.sleep("a", keep=False)
    driver.room = 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
            memory.wake("a")
        assert not driver.mapped
    driver.room = 4
    memory.wake("a")
    assert driver.mapped.keys() == {one, two}


def test_an_allocation_without_room_is_none_and_reserves_nothing(memory):
    assert take(memory, "a", 6 * UNIT) is None and not memory._driver.reserved
