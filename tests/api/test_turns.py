"""Long texts take turns.

Few long texts are worked on at once. Medium texts do not wait for long ones, and no text waits for a lost client.
"""

from __future__ import annotations

import asyncio
import threading
import time
import types

import pytest
from starlette.requests import ClientDisconnect, Request

from preheat.server.turns import (
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
