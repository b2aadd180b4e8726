"""Images of several clients: each client gets its turn, and waits for no client that left."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import types
from collections.abc import Callable

import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from preheat.errors import ContextTooLong, InvalidRequest
from preheat.frontend.image_config import PixelConfig
from preheat.frontend.image_decoder import Decoder
from preheat.frontend.image_processes import ImageProcesses, job_of
from preheat.frontend.media import MediaReader
from preheat.frontend.room import Room
from preheat.server.http import image_lanes
from preheat.server.http.fair_share import FairShare, client_of
from preheat.server.http.image_lanes import ImageLanes
from tests.waiting import until_in_loop

CONFIG = PixelConfig(
    shortest_edge=28, height=None, width=None, resample=3, crop=(28, 28), rescale=None, mean=None, std=None
)
MOST = 40_000_000


def room() -> Room:
    return Room(1 << 20, lambda positions: ContextTooLong(f"{positions}"))


# --- shares ---

PARTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 3)), max_size=30)


@settings(max_examples=60)
@given(PARTS)
def test_no_more_than_the_total_is_taken_and_everybody_gets_a_turn(asked):
    async def scenario() -> None:
        share, taken, begun = FairShare(4), 0, []

        async def work(client: str, part: int, ticks: int) -> None:
            nonlocal taken
            async with share.of((client, ""), part):
                taken += part
                begun.append(client)
                assert taken <= 4
                for _ in range(ticks):
                    await asyncio.sleep(0)
                taken -= part

        await asyncio.wait_for(asyncio.gather(*(work(*each) for each in asked)), 60)
        assert len(begun) == len(asked) and share._left == 4 and not share._waiting

    asyncio.run(scenario())


@settings(max_examples=60)
@given(PARTS, st.sets(st.integers(0, 29)))
def test_a_leaving_client_gives_back_its_share(asked, leaving):
    async def scenario() -> None:
        share, release = FairShare(4), asyncio.Event()

        async def work(client: str, part: int) -> None:
            async with share.of((client, ""), part):
                await release.wait()

        tasks = [asyncio.create_task(work(client, part)) for client, part, _ in asked]
        await asyncio.sleep(0)
        for place in leaving:
            if place < len(tasks):
                tasks[place].cancel()
        await asyncio.sleep(0)
        release.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert share._left == 4 and not share._waiting

    asyncio.run(scenario())


def test_a_client_waits_for_one_turn_of_another_who_sent_many():
    async def scenario() -> list[str]:
        share, begun = FairShare(1), []

        async def work(client: str) -> None:
            async with share.of((client, ""), 1):
                begun.append(client)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(client) for client in "aaaaaaaab"))
        return begun

    assert "".join(asyncio.run(scenario())) == "aabaaaaaa"  # of the eight, two had come first


# --- lanes ---


@pytest.fixture(scope="module")
def images() -> types.SimpleNamespace:
    """Return the parts of a model's images that the lanes need."""
    decoder = Decoder(CONFIG, MOST)
    processes = ImageProcesses(decoder)
    processes.warm_up()
    reader = MediaReader(max_bytes=1 << 25, timeout=5)
    return types.SimpleNamespace(decoder=decoder, processes=processes, reader=reader, tokens=1)


class Client:
    """Sends requests, and may leave."""

    def __init__(self, name: str) -> None:
        self.name, self.left = name, asyncio.Event()

    def request(self) -> Request:
        async def receive() -> dict[str, str]:
            await self.left.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "client": (self.name, 1), "headers": [(b"authorization", b"Bearer k")]}
        return Request(scope, receive)


def url(width: int, height: int, form: str = "PNG") -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (1, 2, 3)).save(file, form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(file.getvalue()).decode()


SMALL, LARGE = url(50, 40), url(6000, 4000, "JPEG")


def test_a_client_is_its_address_and_its_key():
    assert client_of(Client("a").request()) == ("a", "Bearer k")
    assert client_of(Request({"type": "http", "headers": []})) == ("", "")


def test_images_equal_the_decoders_in_order(images):
    async def scenario() -> None:
        found = await ImageLanes(images).load(Client("a").request(), [SMALL, LARGE, SMALL], room())
        assert found == [images.decoder.decode(images.reader.read(each)) for each in (SMALL, LARGE, SMALL)]

    asyncio.run(scenario())


def test_an_error_of_an_image_reaches_its_client(images):
    async def scenario() -> None:
        lanes, client = ImageLanes(images), Client("a")
        for bad, message in (
            ("data:image/png;base64,AAAA", "no PNG"), ("data:text", "must begin"), (url(9000, 9000), "larger than the")
        ):  # fmt: skip
            with pytest.raises(InvalidRequest, match=message):
                await lanes.load(client.request(), [bad], room())

    asyncio.run(scenario())


def slow(monkeypatch: pytest.MonkeyPatch, images, turns: threading.Semaphore) -> Callable[[], int]:
    """Make each reading of http://slow/ wait for one of ``turns``.

    Return the count of reads at once.
    """
    reading, lock = 0, threading.Lock()

    def read(url: str) -> bytes:
        nonlocal reading
        with lock:
            reading += 1
        if url == "http://slow/":
            turns.acquire(timeout=60)
        with lock:
            reading -= 1
        return MediaReader(max_bytes=1 << 25, timeout=5).read(SMALL)

    monkeypatch.setattr(images, "reader", types.SimpleNamespace(read=read))
    return lambda: reading


def test_fetched_images_of_one_client_hold_up_neither_sent_nor_fetched_ones_of_another(images, monkeypatch):
    turns = threading.Semaphore(0)
    count = slow(monkeypatch, images, turns)
    monkeypatch.setattr(image_lanes, "READ_AT_ONCE", 2)

    async def scenario() -> None:
        lanes = ImageLanes(images)
        slow_ones = [asyncio.create_task(lanes.load(Client("a").request(), ["http://slow/"], room())) for _ in range(9)]
        assert await until_in_loop(lambda: count() == 2)
        await asyncio.wait_for(lanes.load(Client("b").request(), [SMALL], room()), 60)
        quick = asyncio.create_task(lanes.load(Client("b").request(), ["http://quick/"], room()))
        await asyncio.sleep(0.1)
        assert count() == 2 and not quick.done()
        turns.release(3)
        await asyncio.wait_for(quick, 60)  # not all nine before it
        assert sum(task.done() for task in slow_ones) <= 3
        turns.release(6)
        await asyncio.gather(*slow_ones)

    asyncio.run(scenario())


def test_the_work_of_a_client_that_leaves_ends(images):
    """A client that leaves ends its work, here a process that decodes for ever.

    No other client waits.
    """

    async def scenario() -> None:
        lanes, client = ImageLanes(images), Client("a")
        stopped = [helper._process for helper in list(images.processes.small._idle.queue)]
        for process in stopped:
            process.send_signal(19)
        tasks = [asyncio.create_task(lanes.load(client.request(), [SMALL], room())) for _ in range(5)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        client.left.set()
        left = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert [type(each) for each in left] == [ClientDisconnect] * 5
        assert await until_in_loop(lambda: all(process.poll() is not None for process in stopped))
        assert await asyncio.wait_for(lanes.load(Client("b").request(), [SMALL], room()), 60)

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_ends_its_work(images):
    async def scenario() -> None:
        lanes, client = ImageLanes(images), Client("a")
        for helper in list(images.processes.small._idle.queue):
            helper.run(job_of(b"", None))  # it may have been given up before
            helper._process.send_signal(19)
        task = asyncio.create_task(lanes.load(client.request(), [SMALL], room()))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        for helper in list(images.processes.small._idle.queue):
            helper._process.send_signal(18)
        assert await asyncio.wait_for(lanes.load(client.request(), [SMALL], room()), 60)

    asyncio.run(scenario())
