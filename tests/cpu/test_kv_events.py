"""Events of the prefix cache, as a subscriber over ZeroMQ sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from benchmarks.common.ports import free_port
from preheat import LLM, LoRARequest, SamplingParams
from preheat.engine.kv_publisher import END
from preheat.errors import SettingsError
from preheat.schedule.kv_events import KvEventBatch, KvEvents
from preheat.settings import Settings
from tests.adapters import write_adapter
from tests.cpu.test_boot_check import SMALL, few_items

__all__ = ["few_items"]

BLOCK = 16
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def ask(llm: LLM, tokens: list[int]) -> None:
    llm.generate({"prompt_token_ids": tokens}, PARAMS, use_tqdm=False)


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * place) % 400 for place in range(40)]


class Subscriber:
    """Follower of the events, as a router is.

    It decodes them without our classes.
    """

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
        """Receive until the known blocks are the blocks of the engine's cache."""
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


def test_a_subscriber_knows_the_cached_blocks(published):
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
    """Assert that a subscriber that has missed everything asks for it again, and then knows the same."""
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


def stored(config: dict[str, Any], ask: Callable[[LLM], object]) -> list[dict[str, Any]]:
    """Return the events of blocks that are stored while ``ask`` runs."""
    llm = LLM(**SMALL | {"boot_check": "off", "skip_warmup": True, "max_model_len": 128} | config)
    batches: list[KvEventBatch] = []
    llm.loop.scheduler.pool.events = KvEvents(batches.append)
    ask(llm)
    sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) for batch in batches]
    return [event for _, events, _ in sent for event in events if event["type"] == "BlockStored"]


def test_blocks_of_embeddings_have_keys_beside_token_id_0():
    """As in vLLM, blocks of embeddings have keys beside token id 0, and other rows have other keys."""

    def ask(llm: LLM) -> None:
        hidden = llm.loop.executor.decoder.weights.embedding[:80]
        for rows in (hidden, hidden * 2):
            llm.generate({"prompt_embeds": rows, "cache_salt": "s"}, PARAMS, use_tqdm=False)

    first, second = stored({"enable_prompt_embeds": True}, ask)
    assert first["token_ids"] == second["token_ids"] == [0] * 5 * BLOCK
    (*begin, salt), last = first["extra_keys"][0], first["extra_keys"][4]
    assert salt == "s" and [place for _, place in begin] == [0] and [place for _, place in last] == [0]
    assert [keys[0][1] for keys in first["extra_keys"][:4]] == [0, -16, -32, -48]
    assert len({keys[0][0] for keys in first["extra_keys"]}) == 2
    assert not {keys[0][0] for keys in first["extra_keys"]} & {keys[0][0] for keys in second["extra_keys"]}


def test_blocks_of_an_adapter_have_its_name(tmp_path):
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", 1)))

    def ask(llm: LLM) -> None:
        for request in (adapter, None):
            llm.generate({"prompt_token_ids": prompt(0)}, PARAMS, use_tqdm=False, lora_request=request)

    adapted, plain = stored({"enable_lora": True}, ask)
    assert adapted["token_ids"] == plain["token_ids"] and adapted["block_hashes"] != plain["block_hashes"]
    assert (adapted["lora_name"], adapted["extra_keys"]) == ("one", [["one"], ["one"]])
    assert (plain["lora_name"], plain["extra_keys"]) == (None, [None, None])


def test_wrong_event_configs_are_refused(published):
    for config, message in (
        ({"publisher": "kafka"}, "publisher"),
        ({"port": 5557}, "port"),
        ({"hwm": 0}, "between 1 and"),
    ):
        with pytest.raises(SettingsError, match=message):
            Settings(kv_events_config=config)
    with pytest.raises(SettingsError, match="enable_prefix_caching"):
        Settings(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    taken = {"enable_kv_cache_events": True, "endpoint": published[1]}
    with pytest.raises(SettingsError, match="cannot listen on tcp://127"):
        LLM(**SMALL | {"boot_check": "off", "skip_warmup": True}, kv_events_config=taken)
