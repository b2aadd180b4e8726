"""Messages between two processes arrive whole, in order and at once.

No edge of the descriptor loses a message.
"""

from __future__ import annotations

import select
import threading
import time
from pathlib import Path

import pytest

from preheat.core import Cancel, Delta, Drain, Finish, Ready, Request, SamplingParams, Stats, TokenLogprobs
from preheat.transport import PART_ENTRIES, EngineTransport, FrontendTransport, InlineTransport
from preheat.utils.heartbeat import INTERVAL_SECONDS
from tests.waiting import until

REQUEST = Request(
    7, [1, 2, 3], SamplingParams(stop=["x"], logit_bias={5: 1.0}, seed=2**64 - 1), 2**64 - 1, 9, 1, [0], "salt"
)
DELTA = Delta(
    [7, 8], [1, 2], {7: Finish("stop", stop_id=1)}, {7: TokenLogprobs(1, -0.5, 1, ((1, -0.5),))},
    {8: [None, TokenLogprobs(2, -1.5, 2, ())]}, {8: 64}, Stats(running=2),
)  # fmt: skip


@pytest.fixture
def ends():
    front = FrontendTransport()
    engine = EngineTransport(front.address)
    yield front, engine
    engine.close()
    front.close()


def received(front: FrontendTransport, count: int) -> list:
    messages = []
    while len(messages) < count:
        assert front.behind or select.select([front.fileno()], [], [], 5)[0], "nothing came"
        messages += front.receive()
    return messages


def test_messages_arrive_as_they_were(ends) -> None:
    front, engine = ends
    for message in (REQUEST, Cancel(7), Drain(now=True)):
        front.send(message)
    taken = []
    while len(taken) < 3:
        taken += engine.take(5)
    assert taken == [REQUEST, Cancel(7), Drain(now=True)]
    for message in (Ready(64, 10, 16, 0.5), DELTA):
        engine.put(message)
    assert received(front, 2) == [Ready(64, 10, 16, 0.5), DELTA]


@pytest.mark.parametrize("count", [0, 1, PART_ENTRIES, PART_ENTRIES + 1, 3 * PART_ENTRIES + 7])
def test_a_long_prompt_comes_in_parts_and_arrives_whole(ends, count: int, monkeypatch) -> None:
    """No message is long, and the receiver leaves some for its next call, unread; two prompts do not mix."""
    front, engine = ends
    reads, own = list[int](), front._in

    class In:
        FD = own.FD

        def recv(self, flags: int) -> bytes:
            reads.append(flags)
            return own.recv(flags)

    entries = {id: [TokenLogprobs(id * at, -0.5, 1, ()) for at in range(count)] for id in (3, 4)}
    sent, out = list[bytes](), engine._out

    class Out:
        def send(self, frame: bytes) -> None:
            sent.append(frame)
            out.send(frame)

    monkeypatch.setattr(engine, "_out", Out())
    engine.put(Delta(ids=[3, 4], tokens=[1, 2], prompt_logprobs=entries))
    monkeypatch.undo()
    assert len(sent) == 1 + 2 * (max(count - 1, 0) // PART_ENTRIES)
    messages, calls = list[Delta](), 0
    monkeypatch.setattr(front, "_in", In())
    while not messages:
        assert front.behind or select.select([front.fileno()], [], [], 5)[0], "nothing came"
        messages, calls = front.receive(seconds=0.0), calls + 1
        assert len(reads) <= calls  # each read gives Python's lock away
    assert messages == [Delta(ids=[3, 4], tokens=[1, 2], prompt_logprobs=entries)]
    assert calls >= len(sent) and front.receive(seconds=0.0) == [] and not front.behind


def test_requests_are_receipted(ends) -> None:
    front, engine = ends
    front.send(REQUEST)
    front.send(Cancel(1))
    assert [id for id, _ in front.untaken] == [7]
    engine.take(5)
    assert until(lambda: front.receive() == [] and not front.untaken)


def test_taking_waits_only_as_long_as_asked(ends) -> None:
    front, engine = ends
    started = time.monotonic()
    assert engine.take(0) == [] and engine.take(0.05) == []
    assert time.monotonic() - started > 0.04
    threading.Timer(0.05, front.send, [Cancel(1)]).start()
    assert engine.take(None) == [Cancel(1)]


def test_many_messages_keep_their_order(ends) -> None:
    front, engine = ends
    for number in range(5000):
        engine.put(Delta(ids=[number], tokens=[number]))
    assert [delta.ids[0] for delta in received(front, 5000)] == list(range(5000))


def test_early_messages_wait_for_the_engine() -> None:
    front = FrontendTransport()
    front.send(REQUEST)
    engine = EngineTransport(front.address)
    assert engine.take(5) == [REQUEST]
    engine.close()
    front.close()


def test_sending_without_a_receiver_does_not_block() -> None:
    front = FrontendTransport()
    front.send(REQUEST)
    assert [id for id, _ in front.untaken] == [7] and front.receive() == []
    folder = Path(front.address.removeprefix("ipc://"))
    assert folder.stat().st_mode & 0o777 == 0o700
    front.close()
    assert not folder.exists()


def test_inline() -> None:
    box = InlineTransport()
    box.send(Cancel(1))
    box.put(DELTA)
    assert box.take(None) == [Cancel(1)] and box.take(0) == []
    assert box.receive() == [DELTA] and box.receive() == []


def test_heartbeats_end_while_the_engine_is_stuck(ends) -> None:
    front, engine = ends
    alive = threading.Event()
    alive.set()

    def beats_within(seconds: float) -> bool:
        before, end = front.beat_at, time.monotonic() + seconds
        while time.monotonic() < end and front.beat_at == before:
            assert front.receive() == []
            time.sleep(0.02)
        return front.beat_at != before

    assert front.beat_at is None
    engine.start_heartbeat(alive.is_set)
    assert beats_within(60) and beats_within(60)
    alive.clear()
    assert until(lambda: not beats_within(4 * INTERVAL_SECONDS))  # one may be on its way
    alive.set()
    assert beats_within(5)
