"""Long texts take turns.

Few long texts are worked on at once. Medium texts do not wait for long ones, and no text waits for a lost client.
"""

from __future__ import annotations

import asyncio
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from preheat.core import SamplingParams, TokenLogprobs
from preheat.frontend.request_state import FREED_AT_ONCE, Choice, OutputDelta, RequestState
from preheat.server.http import turns as module
from preheat.server.http.stream import PIECE_BYTES, send_pieces, tokens_at_once
from preheat.server.http.turns import (
    INLINE_BYTES,
    INLINE_CHARS,
    INLINE_VALUES,
    LONG_AT_ONCE,
    LONG_CHARS,
    MEDIUM_AT_ONCE,
    SLICE_SECONDS,
    Turns,
    in_slices,
    in_turn,
)
from tests.waiting import until_in_loop


def request(turns: Turns, gone: bool = False) -> Request:
    async def receive() -> dict[str, str]:
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    app = types.SimpleNamespace(state=types.SimpleNamespace(service=types.SimpleNamespace(turns=turns)))
    return Request({"type": "http", "app": app, "headers": []}, receive)


class Work:
    """Holds its thread until released."""

    def __init__(self) -> None:
        self.running, self.release = 0, threading.Event()

    def __call__(self) -> str:
        self.running += 1
        self.release.wait(60)
        return "done"


def test_few_texts_run_at_once_and_long_texts_apart() -> None:
    async def scenario() -> None:
        turns, long, medium = Turns(), Work(), Work()
        tasks = [asyncio.create_task(in_turn(request(turns), LONG_CHARS, long)) for _ in range(5)]
        tasks += [asyncio.create_task(in_turn(request(turns), INLINE_CHARS, medium)) for _ in range(5)]
        assert await until_in_loop(lambda: (long.running, medium.running) == (LONG_AT_ONCE, MEDIUM_AT_ONCE))
        await asyncio.sleep(0.1)  # time for too many
        assert (long.running, medium.running) == (LONG_AT_ONCE, MEDIUM_AT_ONCE)
        medium.release.set()
        assert await asyncio.gather(*tasks[5:]) == ["done"] * 5 and long.running == LONG_AT_ONCE
        long.release.set()
        assert await asyncio.gather(*tasks[:5]) == ["done"] * 5

    asyncio.run(scenario())


def test_short_texts_do_not_wait() -> None:
    async def scenario() -> None:
        turns, busy = Turns(), Work()
        tasks = [asyncio.create_task(in_turn(request(turns), INLINE_CHARS, busy)) for _ in range(5)]
        assert await until_in_loop(lambda: busy.running)
        thread = await in_turn(request(turns), INLINE_CHARS - 1, threading.get_ident)
        assert thread == threading.get_ident()
        busy.release.set()
        await asyncio.gather(*tasks)
        other = await in_turn(request(turns), 10, threading.get_ident, total=INLINE_CHARS)  # one of many short ones
        assert other != thread

    asyncio.run(scenario())


def test_the_work_of_a_lost_client_is_not_done() -> None:
    async def scenario() -> None:
        work = Work()
        with pytest.raises(ClientDisconnect):
            await in_turn(request(Turns(), gone=True), LONG_CHARS, work)
        assert work.running == 0

    asyncio.run(scenario())


def test_long_answers_are_written_beside_the_loop() -> None:
    async def scenario() -> None:
        turns, loop = Turns(), threading.get_ident()
        assert await turns.answer(INLINE_VALUES - 1, threading.get_ident) == loop
        assert await turns.answer(INLINE_VALUES, threading.get_ident) != loop

    asyncio.run(scenario())


def test_long_bodies_are_joined_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        short, long = [b"ab", b"c"], [b"x" * 999] * (INLINE_BYTES // 999 + 1)
        assert await turns.join(long, sum(map(len, long))) == b"".join(long)
        monkeypatch.setattr(loop, "run_in_executor", None)
        assert await turns.join(short, 3) == b"abc"
        with pytest.raises(TypeError):  # the control: a long one needs a thread
            await turns.join(long, INLINE_BYTES)

    asyncio.run(scenario())


def test_long_work_takes_no_threads_from_files() -> None:
    """All turns at once hold no thread of the loop's own. Work on files needs these threads."""

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        turns, works = Turns(), [Work() for _ in range(4)]
        tasks = [in_turn(request(turns), LONG_CHARS, works[0]), in_turn(request(turns), INLINE_CHARS, works[1])]
        tasks += [turns.decode(request(turns), works[2]), turns.answer(INLINE_VALUES, works[3])]
        running = asyncio.gather(*tasks)
        assert await until_in_loop(lambda: all(work.running for work in works))
        assert await asyncio.wait_for(asyncio.to_thread(int), 60) == 0
        for work in works:
            work.release.set()
        assert await running == ["done"] * 4

    asyncio.run(scenario())


@pytest.mark.parametrize("shared", [True, False])
def test_a_turn_of_the_loop_has_one_slice_for_all_requests(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control gives each request a slice of its own in each turn of the loop."""
    if not shared:
        monkeypatch.setattr(module, "_SLICING", types.SimpleNamespace(setdefault=lambda loop, lock: lock))
    worked, most = 0, 0

    def step() -> None:
        nonlocal worked
        worked += 1
        time.sleep(1.1 * SLICE_SECONDS)

    async def turning() -> None:
        nonlocal worked, most
        while True:
            most, worked = max(most, worked), 0
            await asyncio.sleep(0)

    async def scenario() -> None:
        turn = asyncio.create_task(turning())
        await asyncio.gather(*(in_slices(step() for _ in range(4)) for _ in range(4)))
        turn.cancel()

    asyncio.run(scenario())
    assert (most == 1) == shared


def test_an_answer_is_sent_in_pieces() -> None:
    async def scenario(size: int, last: bool) -> list[Message]:
        sent = list[Message]()

        async def send(message: Message) -> None:
            sent.append(message)

        await send_pieces(b"x" * size, send, last=last)
        return sent

    for last in (True, False):
        for size in (0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES):
            sent = asyncio.run(scenario(size, last))
            assert [len(each["body"]) for each in sent[:-1]] == [PIECE_BYTES] * (len(sent) - 1)
            assert sum(len(each["body"]) for each in sent) == size
            assert [each["more_body"] for each in sent] == [True] * (len(sent) - last) + [False] * last


def spoken() -> Choice:
    """Return a choice of 50 tokens; some have no text of their own."""
    silent = [0, 3, 4, 30]
    detokenizer = types.SimpleNamespace(push=lambda token: "" if token in silent else f"{token} ", finish=lambda: "end")
    state = RequestState("x", None, [1], SamplingParams(logprobs=0), 100, tokenizer=None)  # type: ignore[arg-type]
    choice = Choice(state, 0, 0, detokenizer, None)  # type: ignore[arg-type]
    for token in range(50):
        choice.push(token, TokenLogprobs(token, -0.5, 1, ()), False)
    return choice


@pytest.mark.parametrize("most", [1, 7, 2_000, None])
@pytest.mark.parametrize("late", [False, True])
def test_a_slow_client_gets_bounded_parts_of_an_answer(most: int | None, late: bool) -> None:
    """Parts are bounded, together they are the answer, and the last one alone has its end.

    The first text is not held together with later text, unless the answer has ended before (``late``).
    """
    choice = spoken()
    parts, ends = list[OutputDelta](), list[str | None]()
    if late:
        choice.finish("length")
    while choice.has_delta:
        parts.append(choice.take_delta(most))
        ends.append(choice.shown_end[0])
        if choice.finish_reason is None:
            choice.finish("length")
    assert (
        [id for part in parts for id in part.token_ids]
        == list(range(50))
        == [entry.token for part in parts for entry in part.logprobs or ()]
    )
    assert "".join(part.text for part in parts) == "".join(choice.parts) and choice.parts[-1] == "end"
    assert ends == [None] * (len(parts) - 1) + ["length"]
    assert max(len(part.token_ids) for part in parts) <= (most or 50)
    if most is not None and not late:
        assert (parts[0].text, parts[0].token_ids) == ("1 ", [0, 1][:most])
    assert (len(parts) == 1 + (not late)) == (most in (2_000, None))


@pytest.mark.parametrize("alternatives", [0, 1, 20, 1_998, 1_999, 2_000, 4_096, 300_000])
def test_an_event_has_a_token_whatever_its_alternatives(alternatives: int) -> None:
    """An event of no token would come again and again."""
    tokens = tokens_at_once(alternatives)
    assert tokens >= 1 and (tokens == 1 or tokens * (1 + alternatives) <= INLINE_VALUES)


def test_steps_let_others_run_between_slices() -> None:
    async def scenario() -> int:
        others, steps = 0, 8

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await in_slices(time.sleep(1.1 * SLICE_SECONDS) for _ in range(steps))
        assert others >= steps
        others = 0
        await in_slices(iter(range(steps)))  # the control: without slices, no other text has a turn
        task.cancel()
        return others

    assert asyncio.run(scenario()) == 0


def test_log_probabilities_are_freed_in_steps() -> None:
    entries = [TokenLogprobs(1, -0.5, 1, ())] * (2 * FREED_AT_ONCE + 1)
    state = RequestState("x", None, [1], SamplingParams(), 1, tokenizer=None, prompt_logprobs=entries)  # type: ignore[arg-type]
    left = [len(entries) for _ in state.forgetting()]
    assert left == [FREED_AT_ONCE + 1, 1, 0, 0] and state.prompt_logprobs == []
