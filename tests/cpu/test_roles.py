"""Blocks of one engine are taken by another, with other ranks: the answers have the bits of one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.common.ports import free_port
from preheat.core import BlockSource, SamplingParams
from preheat.execution.whole_blocks import WholeBlocks
from preheat.kv_transfer import client, messages, server
from preheat.kv_transfer.client import Pull, Target
from preheat.kv_transfer.line import Line
from preheat.kv_transfer.sends import Sends
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import pulled_path
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import REDUCED, Prompt
from tests.adapters import write_adapter
from tests.waiting import until

OPTIONS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 96, "max_model_len": 96, "block_size": 16, "skip_warmup": True,
    "boot_check": "off", "on_cold": "off", "num_threads": 1, "execution_mode": "eager", "role": "both",
    "kv_transfer_config": {"kv_role": "kv_both", "kv_buffer_size": 2e6}, "kv_transfer_timeout_s": 20.0,
    "tp_invariant": True, "num_gpu_blocks_override": 40, "kv_cache_dtype": "fp8", "enable_lora": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2},
}  # fmt: skip
KEY = {"kv_transfer_key": "a key"}
BLOCK, LENGTH = 16, 70
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=4, seed=7, presence_penalty=1.0, ignore_eos=True)
KINDS = [(DRAWN, "", ""), (GREEDY, "", "an-adapter"), (DRAWN, "apart", "")]
PROMPTS = [
    Prompt([(7 * at + 31 * number) % 400 for at in range(LENGTH)], params, salt=salt, lora_name=name)
    for number, (params, salt, name) in enumerate(KINDS)
]


class Served:
    """An engine whose loop also runs in a thread, while another engine takes its blocks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.engine = Engine(boot_engine, Settings.load(OPTIONS | options))
        self.loop = self.engine.loop
        assert self.engine.ready.sends is not None
        self.source = msgspec.structs.replace(self.engine.ready.sends, tokens=LENGTH)

    @contextmanager
    def sending(self) -> Iterator[BlockSource]:
        """Run the loop in a thread."""
        over = threading.Event()

        def run() -> None:
            while not over.is_set():
                self.loop.take(0)
                self.loop.step()
                over.wait(0.001)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield self.source
        finally:
            over.set()
            thread.join()

    def answers(self, source: BlockSource | None = None) -> tuple[list[list[int]], list[Any], list[int]]:
        """Return tokens, bits of logits and cached tokens of all prompts, which find nothing cached here."""
        self.engine.forget_prefixes()
        bits = self.engine.run([replace(prompt, source=source) for prompt in PROMPTS])
        found = self.engine.answers
        return [each.tokens for each in found], [each.bits for each in bits], [each.cached for each in found]

    @property
    def stats(self) -> Any:
        return self.loop._transferred()


@pytest.fixture(scope="module")
def model(shallow: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = write_adapter(tmp_path_factory.mktemp("adapters") / "one", seed=1, model=Path(shallow))
    return {"model": shallow, "lora_modules": [f"an-adapter={folder}"]}


@pytest.fixture(scope="module")
def one(model: dict[str, object]) -> Iterator[Served]:
    served = Served(model | KEY)
    yield served
    served.loop.close()


@pytest.fixture(scope="module")
def two(model: dict[str, object]) -> Iterator[Served]:
    served = Served(model | KEY | {"tensor_parallel_size": 2})
    yield served
    served.loop.close()


@pytest.fixture(scope="module")
def expected(one: Served) -> tuple[list[list[int]], list[Any]]:
    return one.answers()[:2]


def check_places(*served: Served) -> None:
    """Check that every place on the host is free or has a block: none is held any more."""
    for each in served:
        tier = each.loop.scheduler.pool.tier

        def settled(loop: Any = each.loop, tier: Any = tier) -> bool:
            loop.step()
            loop.admission.pulls.take()
            return not tier._held and len(tier._free) + len(tier) == tier.places

        assert until(settled)


@pytest.mark.parametrize("way", ["2 ranks to 1", "1 rank to 2"])
def test_the_answers_have_the_bits_of_one_process(way, one, two, expected):
    sender, taker = (two, one) if way == "2 ranks to 1" else (one, two)
    assert sender.answers()[:2] == expected
    before = taker.stats
    with sender.sending() as source:
        tokens, bits, cached = taker.answers(source)
    assert (tokens, bits) == expected
    whole = LENGTH // BLOCK
    assert cached == [whole * BLOCK] * len(PROMPTS)
    after = taker.stats
    assert after.received_blocks - before.received_blocks == whole * len(PROMPTS) and not after.failures
    check_places(sender, taker)


def test_only_missing_blocks_are_pulled(one, two, expected):
    two.answers()
    one.engine.forget_prefixes()
    one.engine.run([replace(PROMPTS[0], tokens=PROMPTS[0].tokens[: 2 * BLOCK + 1])])
    before = one.stats.received_blocks
    with two.sending() as source:
        one.engine.run([replace(prompt, source=source) for prompt in PROMPTS])
    assert [each.tokens for each in one.engine.answers] == expected[0]
    assert one.stats.received_blocks - before == LENGTH // BLOCK * len(PROMPTS) - 2


def test_a_request_that_moves_goes_on_with_the_blocks_of_its_prompt(one, two, expected):
    two.answers()
    one.engine.forget_prefixes()
    with two.sending() as source:
        moved = [
            replace(prompt, source=source, delivered=tuple(tokens[:2]))
            for prompt, tokens in zip(PROMPTS, expected[0], strict=True)
        ]
        bits = one.engine.run(moved)
    assert [each.bits for each in bits] == [each[2:] for each in expected[1]]
    assert [each.cached for each in one.engine.answers] == [LENGTH // BLOCK * BLOCK] * len(PROMPTS)


def failed(taker: Served, reason: str, source: BlockSource, expected: object) -> int:
    """Check that pulls fail for ``reason``, and change no answer. Return the blocks that arrived."""
    before = taker.stats
    assert taker.answers(source)[:2] == expected
    after = taker.stats
    assert after.failures.get(reason, 0) - before.failures.get(reason, 0) == len(PROMPTS)
    check_places(taker)
    return after.received_blocks - before.received_blocks


@pytest.mark.parametrize("checked", [True, False], ids=["", "planted: no digest"])
def test_a_flipped_bit_is_found(checked, one, two, expected, monkeypatch):
    two.answers()
    right = Line.send_raw

    def flipped(self: Line, data: Any) -> None:
        if isinstance(data, memoryview):
            data = bytes([data[0] ^ 64, *data[1:]])
        right(self, data)

    monkeypatch.setattr(Line, "send_raw", flipped)
    with two.sending() as source:
        if checked:
            assert failed(one, "corrupt", source, expected) == 0
        else:
            monkeypatch.setattr(messages, "digest_of_block", lambda _: b"")
            monkeypatch.setattr(client, "digest_of_block", lambda _: b"")
            monkeypatch.setattr(server, "digest_of_block", lambda _: b"")
            assert one.answers(source)[1] != expected[1]


@pytest.mark.parametrize("planted", ["", "a flipped bit", "a flipped bit, no digest"])
def test_the_path_of_verify_sees_a_changed_bit_of_a_pulled_block(planted, two, monkeypatch):
    """A digest finds the bit, so a block does not arrive. Without digests the logits show it."""
    stage, send = pulled_path.Copies.stage, Line.send_raw

    def flipped(data: Any) -> memoryview:
        return memoryview(bytes([data[0] ^ 64, *data[1:]]))

    def staged(self: pulled_path.Copies, block_hash: bytes) -> Any:
        block = stage(self, block_hash)
        return block._replace(view=flipped(block.view))

    if planted == "a flipped bit":
        monkeypatch.setattr(Line, "send_raw", lambda self, data: send(self, flipped(data)))
    elif planted:
        monkeypatch.setattr(pulled_path.Copies, "stage", staged)
    (result,) = PathRunner(replace(REDUCED, outputs=4), lambda engine: []).on(two.engine, "asked", ["pulled blocks"])
    arrived = 0 if planted == "a flipped bit" else 9
    assert result.note == f"{arrived} of 9 blocks from a peer"
    assert (result.identical, result.first is None) == ((0, False) if planted else (3, True))


def test_a_block_of_another_place_is_seen(one, two, expected, monkeypatch):
    """Control: an engine that sends a prompt's first block for each of its blocks."""
    two.answers()
    right, first = WholeBlocks.stage, []

    def stage(self: WholeBlocks, block_hash: bytes) -> Any:
        first.append(block_hash)
        staged = right(self, first[0])
        return staged._replace(hash=block_hash)

    monkeypatch.setattr(WholeBlocks, "stage", stage)
    with two.sending() as source:
        assert one.answers(source)[1] != expected[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda hello: {"contract": msgspec.structs.replace(hello.contract, weights="others")}, "contract.weights"),
        (lambda hello: {"layout": msgspec.structs.replace(hello.layout, dtype="float64")}, "layout.dtype"),
        (lambda hello: {"contents": "another key"}, "contents"),
        (lambda hello: {"version": 2}, "version: 1 -> 2"),
    ],
)
def test_another_contract_is_refused_by_its_first_difference(change, named, one, two, expected, monkeypatch, caplog):
    pulls = one.loop.admission.pulls
    mine = pulls._hello()
    monkeypatch.setattr(pulls, "_hello", lambda: msgspec.structs.replace(mine, **change(mine)))
    pulls._told.clear()
    two.answers()
    with two.sending() as source, caplog.at_level("WARNING"):
        assert failed(one, "refused", source, expected) == 0
    assert f"refused: {named}" in caplog.text and two.stats.refused_peers


def test_a_peer_that_dies_costs_a_recomputation(one, two, expected, monkeypatch):
    two.answers()
    right, sent = server.BlockServer._send, dict[object, int]()

    def send(self: server.BlockServer, line: Line, answer: Any, staged: Any) -> None:
        sent[answer] = sent.get(answer, 0) + 1
        if sent[answer] == 3:
            line.hang_up()
        right(self, line, answer, staged)

    monkeypatch.setattr(server.BlockServer, "_send", send)
    with two.sending() as source:
        assert failed(one, "lost", source, expected) == 2 * len(PROMPTS)
    check_places(two)
    nobody = msgspec.structs.replace(two.source, port=free_port())
    assert failed(one, "lost", nobody, expected) == 0


def test_blocks_that_are_gone_are_computed(one, two, expected):
    two.engine.forget_prefixes()
    with two.sending() as source:
        assert failed(one, "missing", source, expected) == 0


def test_the_answer_to_a_request_that_has_ended_changes_nothing(one, two, expected):
    two.answers()
    one.engine.forget_prefixes()
    before = one.stats
    loop, request = one.loop, replace(PROMPTS[0], source=two.source).request(77_777)
    loop.admission.add(request)
    assert loop.admission.pending and loop.admission.cancel(request.id) and loop.idle
    with two.sending():  # nobody has answered before
        check_places(one)
    assert one.stats.failures == before.failures and one.answers()[:2] == expected


def test_a_server_closes_though_a_peer_waits_for_a_block(one, monkeypatch):
    monkeypatch.setattr(server, "BLOCK_SECONDS", 1e6)
    hello = one.loop.admission.pulls._hello()
    sends = Sends(one.loop.sends.departures, lambda: hello, lambda: None)  # no loop fills the answer
    serving = server.BlockServer(sends, "127.0.0.1", 0, b"")
    target = Target(bytes(16), 0, memoryview(bytearray(16)), lambda: None)
    pull = Pull(BlockSource("127.0.0.1", serving.port, LENGTH), b"", hello, [target], 60.0)
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(pull.run()))
    thread.start()
    assert until(lambda: sends.pending)
    serving.close()
    thread.join()
    assert found[0].reason == "lost" and not any(each.is_alive() for each in serving._peers)


def test_another_key_is_not_heard(one, two, expected, monkeypatch):
    monkeypatch.setattr(one.loop.admission.pulls, "_key", b"another key")
    before = two.stats.sent_blocks
    with two.sending() as source:
        assert failed(one, "lost", source, expected) == 0
    assert two.stats.sent_blocks == before


def test_a_frozen_peer_delays_no_request_for_longer_than_one_pull(one):
    target = Target(bytes(16), 0, memoryview(bytearray(16)), lambda: None)
    pull = Pull(one.source, b"", one.loop.admission.pulls._hello(), [target], 5.0)
    pull.began -= 6.0  # it has waited for a thread
    found = pull.run()
    assert (found.reason, found.blocks) == ("lost", 0) and "other pulls" in found.why


def test_copies_are_items_of_the_plan(one):
    record = one.loop.listener.record.by_name()
    assert {"(offload, store)", "(offload, load)"} <= set(record)


def test_a_silent_peer_holds_a_pull_for_a_bounded_time(one):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = BlockSource("127.0.0.1", silent.getsockname()[1], LENGTH)
        target = Target(bytes(16), 0, memoryview(bytearray(16)), lambda: None)
        found = Pull(source, b"", one.loop.admission.pulls._hello(), [target], 0.05).run()
    assert (found.reason, found.blocks) == ("lost", 0)


def test_sizes_are_compared_before_bytes_are_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((2**32 - 1).to_bytes(4, "big"))
        with pytest.raises(OSError, match="a frame has 4294967295 bytes, and at most 1024 are read"):
            Line(ours, 5.0).recv_bytes(messages.MOST_PART)


@pytest.mark.parametrize(
    "hashes", [[b"short"], [bytes(16)] * (messages.MOST_BLOCKS + 1)], ids=["a short hash", "too many hashes"]
)
def test_wrong_hashes_are_refused(hashes):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(messages.Want(hashes)), type=messages.Want)
