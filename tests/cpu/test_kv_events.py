"""Events of the prefix cache, as a subscriber over ZeroMQ sees them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from preheat import LLM, SamplingParams
from preheat.engine.kv_publisher import END
from preheat.errors import SettingsError
from preheat.settings import Settings
from tests.cpu.test_boot_check import SMALL, few_items

__all__ = ["few_items"]

BLOCK = 16
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def ask(llm: LLM, tokens: list[int]) -> None:
    llm.generate({"prompt_token_ids": tokens}, PARAMS, use_tqdm=False)


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * place) % 400 for place in range(40)]


class Subscriber:
    """Follows the events as a router does; decoded without our classes."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.known: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self.kinds: list[str] = []
        self.numbers: list[int] = []

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, seconds: float = 10) -> None:
        """Apply the next batch."""
        assert self._socket.poll(int(seconds * 1000)), "nothing was published"
        topic, number, payload = self._socket.recv_multipart()
        assert topic == b"kv-events"
        self.numbers.append(int.from_bytes(number, "big"))
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1.7e9 and events and rank is None
        for event in events:
            self.kinds.append(event["type"])
            match event["type"]:
                case "BlockStored":
                    assert event["block_size"] == BLOCK and event["medium"] == "GPU" and event["lora_id"] is None
                    parent, tokens = event["parent_block_hash"], event["token_ids"]
                    assert parent is None or parent in self.known
                    for place, name in enumerate(event["block_hashes"]):
                        self.known[name] = parent, tokens[place * BLOCK : (place + 1) * BLOCK]
                        parent = name
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        del self.known[name]
                case "AllBlocksCleared":
                    self.known.clear()

    def until(self, llm: LLM) -> None:
        """Receive until what is known is what the engine's cache holds."""
        while self.known.keys() != llm.loop.scheduler.pool._block_of.keys():
            self.receive()


@pytest.fixture(scope="module")
def published() -> Iterator[tuple[LLM, str, str]]:
    endpoint, replay = free_endpoint(), free_endpoint()
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv-events"}
    quick = SMALL | {"boot_check": "off", "skip_warmup": True}
    llm = LLM(**quick, num_gpu_blocks_override=8, kv_events_config=config)
    yield llm, endpoint, replay
    llm.loop.kv_publisher.close()


def test_a_subscriber_knows_what_is_cached(published):
    llm, endpoint, replay = published
    subscriber = Subscriber(endpoint)
    while not subscriber.numbers:  # a subscription takes its time to arrive
        llm.reset_prefix_cache()
        if subscriber._socket.poll(20):
            subscriber.receive()
    ask(llm, prompt(0))
    subscriber.until(llm)
    assert [tokens for _, tokens in subscriber.known.values()] == [prompt(0)[:16], prompt(0)[16:32]]
    assert next(iter(subscriber.known.values()))[0] is None
    for number in range(1, 6):
        ask(llm, prompt(number))
    subscriber.until(llm)
    assert "BlockRemoved" in subscriber.kinds
    llm.reset_prefix_cache()
    subscriber.until(llm)
    assert subscriber.kinds[-1] == "AllBlocksCleared" and not subscriber.known
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))
    replayed(replay, subscriber)
    subscriber.close()


def replayed(endpoint: str, subscriber: Subscriber) -> None:
    """One that has missed everything asks for it again, and knows the same."""
    late, context = Subscriber(endpoint), zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(endpoint)
    asking.send_multipart((b"", subscriber.numbers[0].to_bytes(8, "big")))
    numbers = []
    while True:
        assert asking.poll(10_000)
        _, number, payload = asking.recv_multipart()
        if number == END:
            break
        numbers.append(int.from_bytes(number, "big"))
        late.apply(payload)
    assert numbers == subscriber.numbers and late.kinds == subscriber.kinds and late.known == subscriber.known
    context.destroy(linger=0)
    late.close()


def test_what_is_refused(published):
    for config, message in (
        ({"publisher": "kafka"}, "publisher"),
        ({"port": 5557}, "port"),
        ({"hwm": 0}, "positive"),
    ):
        with pytest.raises(SettingsError, match=message):
            Settings(kv_events_config=config)
    with pytest.raises(SettingsError, match="enable_prefix_caching"):
        Settings(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    taken = {"enable_kv_cache_events": True, "endpoint": published[1]}
    with pytest.raises(SettingsError, match="cannot listen on tcp://127"):
        LLM(**SMALL | {"boot_check": "off", "skip_warmup": True}, kv_events_config=taken)
