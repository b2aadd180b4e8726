"""The journal: whatever dies, wakes up late or moves, each token is delivered once and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from preheat.core import Delta, Finish, Request, SamplingParams, Stats, TokenLogprobs
from preheat.frontend import journal as module
from preheat.frontend.journal import MOST_MOVES, Journal, Owner, part
from preheat.frontend.receipt import packed, unpacked
from tests.controls import fails

LENGTH = 5
MEMBERS = 3
REQUESTS = 4


def token(id: int, place: int) -> int:
    return 100 * id + place


def request(id: int) -> Request:
    return Request(id, [1, 2], SamplingParams(max_tokens=LENGTH), 0, LENGTH)


@dataclass
class Engine:
    """A member's process: it draws tokens for what it was given, and its messages may be read late."""

    running: dict[int, int] = field(default_factory=dict)  # the place of the next token, by id
    unread: deque[Delta] = field(default_factory=deque)
    new: set[int] = field(default_factory=set)

    def give(self, request: Request) -> None:
        self.running[request.id] = len(request.delivered)
        self.new.add(request.id)

    def step(self) -> None:
        delta = Delta(started=dict.fromkeys(self.new & self.running.keys(), 0))
        self.new.clear()
        for id, place in list(self.running.items()):
            delta.logprobs[len(delta.ids)] = TokenLogprobs(token(id, place), -1.0, 1, ())
            delta.digests += packed([token(id, place)])
            delta.ids.append(id)
            delta.tokens.append(token(id, place))
            self.running[id] = place + 1
            if place + 1 == LENGTH:
                delta.finished[id] = Finish("length")
                del self.running[id]
        self.unread.append(delta)


class World:
    """Members with processes, one journal, and clients that note their tokens."""

    def __init__(self) -> None:
        self.journal, self.epochs = Journal(), [0] * MEMBERS
        self.processes = {self.owner(member): Engine() for member in range(MEMBERS)}
        self.delivered: dict[int, list[int]] = {}
        self.ended = set[int]()
        self.out = set[int]()

    def owner(self, member: int) -> Owner:
        return Owner(member, self.epochs[member])

    def give(self, request: Request) -> None:
        up = [member for member in range(MEMBERS) if member not in self.out]
        if not up:
            self.journal.sent(request, None)
            return
        owner = self.owner(up[request.id % len(up)])
        self.journal.sent(request, owner)
        self.processes[owner].give(request)

    def arrive(self, id: int) -> None:
        self.delivered[id] = []
        self.give(request(id))

    def read(self, owner: Owner) -> None:
        for delta in self.processes[owner].unread:
            counted = self.journal.seen(delta, owner)
            for place, (id, drawn) in enumerate(zip(counted.ids, counted.tokens, strict=True)):
                assert counted.logprobs[place].token == unpacked(counted.digests)[place] == drawn
                self.delivered[id].append(drawn)
            self.ended |= counted.finished.keys()
        self.processes[owner].unread.clear()

    def lose(self, member: int) -> None:
        """Lose a member whose process may go on for a while, as a stopped one does."""
        self.out.add(member)
        lost = self.journal.lost(self.owner(member))
        for again in lost.again:
            self.give(again)
        for id in lost.ended:
            self.ended.add(id)
            del self.delivered[id]

    def restart(self, member: int) -> None:
        self.epochs[member] += 1
        self.out.discard(member)
        self.processes[self.owner(member)] = Engine()
        for waiting in self.journal.waiting():
            self.give(waiting)

    def act(self, action: tuple[str, int]) -> None:
        kind, number = action
        owners = list(self.processes)
        match kind:
            case "arrive" if number not in self.delivered and number not in self.ended:
                self.arrive(number)
            case "step":
                self.processes[owners[number % len(owners)]].step()
            case "read":
                self.read(owners[number % len(owners)])
            case "lose" if number % MEMBERS not in self.out:
                self.lose(number % MEMBERS)
            case "restart" if number % MEMBERS in self.out:
                self.restart(number % MEMBERS)

    def check(self) -> None:
        for id, tokens in self.delivered.items():
            assert tokens == [token(id, place) for place in range(len(tokens))]
        assert len(self.journal) == len(self.delivered.keys() - self.ended)


kinds = st.sampled_from(["arrive", "step", "read", "lose", "restart"])
actions = st.lists(st.tuples(kinds, st.integers(0, 7)), max_size=60)


def run(actions: list[tuple[str, int]]) -> World:
    world = World()
    for id in range(REQUESTS):
        world.arrive(id)
    for action in actions:
        world.act(action)
        world.check()
    return world


@given(actions)
def test_each_token_is_delivered_once_and_in_order(actions: list[tuple[str, int]]) -> None:
    world = run(actions)
    for member in range(MEMBERS):
        if member in world.out:
            world.restart(member)
    for _ in range(LENGTH):
        for owner, process in world.processes.items():
            process.step()
            world.read(owner)
    world.check()
    assert all(len(tokens) == LENGTH for tokens in world.delivered.values())
    assert len(world.journal) == 0


LATE = [("step", 0), ("step", 0), ("lose", 0), ("step", 1), ("step", 2), ("read", 0), ("read", 1), ("read", 2)]


def counts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a journal that counts what a former owner says."""

    def seen(self: Journal, delta: Delta, owner: Owner = module.ALONE) -> Delta:
        for id, drawn in zip(delta.ids, delta.tokens, strict=True):
            if id in self._entries:
                self._entries[id].tokens.append(drawn)
        return delta

    monkeypatch.setattr(Journal, "seen", seen)


def resumes_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a journal that gives the next owner one token less than the client has."""
    right = Journal._resumed

    def late(self: Journal, id: int) -> Request:
        found = right(self, id)
        return replace(found, resume=None) if len(found.delivered) < 2 else found

    monkeypatch.setattr(Journal, "_resumed", late)


@pytest.mark.parametrize(
    ("plant", "actions"),
    [
        (counts_everything, LATE),
        (resumes_a_token_late, [("step", 0), ("read", 0), ("lose", 0), *[("step", 1), ("step", 2)] * 2, ("read", 1),
                                ("read", 2)]),
    ],
)  # fmt: skip
def test_a_planted_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], actions: list[tuple[str, int]]
) -> None:
    run(actions)
    plant(monkeypatch)
    with fails():
        run(actions)


def test_the_part_of_a_delta_keeps_what_belongs_together() -> None:
    entry = TokenLogprobs(7, -1.0, 1, ())
    whole = Delta(
        [1, 2, 2, 3], [5, 6, 7, 8], {2: Finish("stop"), 3: Finish("stop")}, {2: entry}, {1: [None], 3: [None]},
        {1: 0, 2: 4}, Stats(steps=3), {3: b"x"}, {1: "a", 2: "b"}, packed([50, 60, 70, 80]),
    )  # fmt: skip
    assert part(whole, {2}) == Delta(
        [2, 2], [6, 7], {2: Finish("stop")}, {1: entry}, {}, {2: 4}, Stats(steps=3), {}, {2: "b"}, packed([60, 70])
    )
    assert part(whole, set()) == Delta(stats=Stats(steps=3))


def test_a_request_moves_twice_at_most() -> None:
    tested = Journal()
    tested.sent(request(1))
    for epoch in range(MOST_MOVES):
        lost = tested.lost(Owner(0, epoch))
        assert [each.id for each in lost.again] == [1] and not lost.ended
        tested.sent(lost.again[0], Owner(0, epoch + 1))
    lost = tested.lost(Owner(0, MOST_MOVES))
    assert not lost.again and lost.ended == [1] and len(tested) == 0


def test_a_request_waits_for_an_owner() -> None:
    tested = Journal()
    tested.sent(request(2), None)
    tested.sent(request(1), None)
    assert [each.id for each in tested.waiting()] == [1, 2]
    tested.forget(1)
    tested.sent(tested.waiting()[0], Owner(1, 1))
    assert not tested.waiting() and len(tested) == 1


def test_a_started_request_goes_on_behind_its_tokens_and_names_its_adapter() -> None:
    tested = Journal()
    tested.sent(request(1))
    assert tested.resumed()[0].resume is None
    tested.seen(Delta([1], [9], started={1: 0}, adapters={1: "a"}))
    [again] = tested.lost(module.ALONE).again
    assert again.delivered == [9] and again.resume is not None and again.resume.adapter == "a"


def test_requests_of_a_member_with_wrong_results_wait_for_no_other() -> None:
    tested, faulty, sound = Journal(), Owner(0, 0), Owner(1, 0)
    for id, owner in enumerate((faulty, sound, faulty)):
        tested.sent(Request(id, [1, 2], SamplingParams(), 0, LENGTH), owner)
    assert tested.drop(faulty) == [0, 2]
    assert tested.drop(faulty) == [] and not tested.waiting()
    assert [each.id for each in tested.resumed()] == [1]


def test_a_request_that_its_owner_lost_alone_goes_on_behind_its_tokens_and_not_for_ever() -> None:
    journal, owner = Journal(), Owner(0, 0)
    for id in (1, 2):
        journal.sent(request(id), owner)
    journal.seen(Delta(started={1: 0, 2: 0}, ids=[1, 2], tokens=[101, 201]), owner)
    for _ in range(MOST_MOVES):
        again = journal.again(1)
        assert again is not None and again.delivered == [101]
        journal.sent(again, owner)
    assert journal.again(1) is None and len(journal) == 1
    assert journal.seen(Delta(ids=[1], tokens=[102]), owner).ids == []  # its late token does not count
    (other,) = journal.lost(owner).again
    assert other.delivered == [201]
