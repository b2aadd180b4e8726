"""A server reads prompts and another decodes: vLLM's fields, the example's proxy, and a server that is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from examples import prefill_decode_proxy
from preheat.core import BlockSource, Request, SamplingParams
from preheat.server.replicas.relay_wire import MEDIA, Sent
from tests.api.conftest import Answer, Server, serving
from tests.waiting import until

OPTIONS: dict[str, Any] = {
    "engine": None, "num_threads": 1, "skip_warmup": True, "boot_check": "off", "on_cold": "off",
    "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_size": 1e8},
    "block_size": 16,
}  # fmt: skip
PROMPT = "def add(a, b):\n    return a + b\n\n" * 8
DRAWN = {"max_tokens": 6, "temperature": 1, "seed": 3, "ignore_eos": True, "logprobs": 2}
ASK: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
READS = ASK | {"max_tokens": 1}


@pytest.fixture(scope="module")
def prefill() -> Iterator[Server]:
    with serving("bundled", wait=False, **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def decode(prefill: Server) -> Iterator[Server]:
    own = {name: value for name, value in OPTIONS.items() if name != "kv_transfer_config"}
    with serving("bundled", role="decode", kv_offloading_size=0.1, **own) as server:
        prefill.wait_until_ready()
        yield server


def params(prefill: Server, prompt: str) -> dict[str, Any]:
    """Have a server read ``prompt``, and return the parameters to decode with."""
    found: dict[str, Any] = prefill.post("/v1/completions", {"prompt": prompt, **READS}).json["kv_transfer_params"]
    return found


def parts(answer: Answer) -> tuple[str, Any, int]:
    """Return text, log-probabilities and cached tokens of an answer."""
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    return choice["text"], choice["logprobs"], answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_fields_are_vllms(prefill: Server, decode: Server) -> None:
    alone = parts(prefill.post("/v1/completions", {"prompt": PROMPT, **DRAWN}))
    told = params(prefill, PROMPT)
    names = "do_remote_prefill do_remote_decode remote_engine_id remote_request_id remote_block_ids remote_host"
    assert [*told] == [*names.split(), "remote_port", "remote_num_tokens"]
    assert told["do_remote_prefill"] and not told["do_remote_decode"] and told["remote_host"] == "127.0.0.1"
    found = parts(decode.post("/v1/completions", {"prompt": PROMPT, **DRAWN, "kv_transfer_params": told}))
    assert found[:2] == alone[:2]
    assert found[2] == 16 * ((told["remote_num_tokens"] - 1) // 16) and len(told["remote_block_ids"]) * 16 >= found[2]
    assert until(lambda: decode.metric("kv_transfer_received_blocks_total") == found[2] // 16)
    body = {"prompt": PROMPT, **DRAWN, "receipt": True}
    kept = [server.post("/v1/completions", body).json["choices"][0]["receipt"] for server in (prefill, decode)]
    assert kept[0]["chain"] == kept[1]["chain"] and kept[0]["contract"] == kept[1]["contract"]
    assert until(lambda: prefill.metric("kv_transfer_sent_blocks_total") == found[2] // 16)


def test_chats_pass_through_the_proxy_of_the_example(prefill: Server, decode: Server) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT[::-1]}], "max_tokens": 5, "temperature": 0}
    path, servers = "/v1/chat/completions", [f"127.0.0.1:{each.port}" for each in (prefill, decode)]
    before = decode.metric("kv_transfer_received_blocks_total")
    with prefill_decode_proxy.proxying(servers[:1], servers[1:]) as address:
        proxy = Server(prefill.process, int(address.rpartition(":")[2]), "bundled")
        choose = {"x-prefiller-host-port": servers[0], "x-data-parallel-host-port": servers[1]}
        found = proxy.post(path, chat, **choose).json["choices"][0]["message"]
        assert until(lambda: decode.metric("kv_transfer_received_blocks_total") > before)
        assert b'"content":' in proxy.post(path, chat | {"stream": True}).body
        assert proxy.post(path, chat, **{"x-prefiller-host-port": "127.0.0.1:1"}).status == 400
    assert found == prefill.post(path, chat).json["choices"][0]["message"]


def test_tokens_are_generated_from_blocks_too(prefill: Server, decode: Server) -> None:
    path, body = "/inference/v1/generate", {"token_ids": list(range(70, 140))}
    asked = {"sampling_params": {"temperature": 0, "max_tokens": 4}}
    told = prefill.post(path, body | {**ASK, "sampling_params": {"max_tokens": 1}}).json["kv_transfer_params"]
    found = decode.post(path, body | asked | {"kv_transfer_params": told}).json
    alone = prefill.post(path, body | asked).json
    assert found["choices"] == alone["choices"] and "kv_transfer_params" not in found
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_a_front_names_no_server_to_pull_from(decode: Server) -> None:
    """A request of a front is an engine's, and the hosts that clients may name are not checked there."""
    source = BlockSource("10.0.0.1", 80, 64)
    asked = Request(1, [1] * 64, SamplingParams(), 1, 1, source=source)
    sent = msgspec.msgpack.encode(Sent(decode.get("/ready").json["contract_id"], asked))
    answer = decode.post("/inference/v1/generate", sent, **{"content-type": MEDIA})
    assert answer.status == 400 and "leave the source out" in answer.error["message"]


@pytest.mark.parametrize(
    ("asked", "more", "why"),
    [
        ({"do_remote_decode": True}, {}, "do_remote_decode needs a server that sends blocks, and this one has --role"),
        ({"do_remote_prefill": True}, {}, "remote_host is missing"),
        ({"do_remote_prefill": True, "remote_host": "localhost"}, {}, "remote_port is missing"),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}, {}, "(--kv-transfer-peers)"),
        ({"do_remote_prefill": True, "remote_host": "::1", "remote_port": 0}, {}, "`int` >= 1"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, {}, "cannot be true beside do_remote_decode"),
        ({"do_remote_prefill": True}, {"use_beam_search": True, "n": 2}, "beam search does not support"),
        (
            {"do_remote_prefill": True, "remote_host": "::1", "remote_port": 1, "transfer_mode": "push"},
            {},
            "transfer_mode must be pull, got 'push'",
        ),
    ],
)
def test_wrong_fields_are_refused_by_name(asked: object, more: dict[str, Any], why: str, decode: Server) -> None:
    answer = decode.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "kv_transfer_params": asked, **more})
    assert answer.status == 400 and why in answer.error["message"]
    assert answer.error["param"].startswith("kv_transfer_params")


def test_a_stream_cannot_be_read_for_others_and_idle_fields_ask_for_nothing(prefill: Server, server: Server) -> None:
    answer = prefill.post("/v1/completions", {"prompt": "x", "stream": True, **READS})
    assert answer.status == 400 and "set stream to false" in answer.error["message"]
    nothing = {"do_remote_decode": False, "do_remote_prefill": False, "remote_host": None}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "kv_transfer_params": nothing}).status == 200
    refused = server.post("/v1/completions", {"prompt": "x", **READS})
    assert refused.status == 400 and "has no --role" in refused.error["message"]


def test_a_server_that_is_killed_in_the_middle_costs_a_recomputation(prefill: Server, decode: Server) -> None:
    prompt = PROMPT[7:]
    alone, told = parts(prefill.post("/v1/completions", {"prompt": prompt, **DRAWN})), params(prefill, prompt)
    (victim,) = prefill.engine_pids
    os.kill(victim, signal.SIGSTOP)  # it takes the connection, and answers nothing
    found = list[Answer]()
    body = {"prompt": prompt, **DRAWN, "kv_transfer_params": told}
    asking = threading.Thread(target=lambda: found.append(decode.post("/v1/completions", body)))
    asking.start()
    assert until(lambda: decode.get("/load").json["server_load"] == 1)
    os.kill(victim, signal.SIGKILL)
    asking.join(60)
    assert parts(found[0])[:2] == alone[:2]
    assert until(lambda: decode.metric("kv_transfer_failures_total", reason="lost") == 1)
