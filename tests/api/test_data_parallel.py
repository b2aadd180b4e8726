"""A server with two replicas of the bundled model.

The tests are of bits, routing, metrics of each replica, and answers while a replica dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.common.crowd import Answer, mixed, normal, together
from preheat import LLM
from preheat.backends.base.facts import Facts
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.core import Ready
from preheat.errors import SettingsError
from preheat.parallel.share import for_replica
from preheat.settings import Settings
from preheat.settings.combinations import check, traits_of
from preheat.transport import EngineTransport
from tests.adapters import write_adapter
from tests.api.conftest import Server, serving
from tests.api.scripted import BLOCKS, MAX_MODEL_LEN, ScriptedEngine
from tests.qwen_vl import save_model_and_tokenizer

COMPLETIONS = "/v1/completions"
ENGINES = ("0", "1")
SMALL = {"num_threads": 1, "kv_cache_memory_bytes": 256 << 20}
BODY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "small", 1)
    options = {"enable_lora": True, "max_lora_rank": 4, "lora_modules": [f"small={adapter}"]}
    options |= {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "audit_every": 1e6}
    with serving("bundled", engine=None, data_parallel_size=2, block_size=16, **SMALL, **options) as server:
        yield server


def queried(server: Server) -> list[float]:
    """Return the tokens that each engine has looked up in its prefix cache.

    Every prompt adds to them.
    """
    return [server.metric("prefix_cache_queries_total", engine=engine) for engine in ENGINES]


def found(server: Server) -> list[float]:
    return [server.metric("prefix_cache_hits_total", engine=engine) for engine in ENGINES]


def grown(before: list[float], after: list[float]) -> list[int]:
    return [engine for engine, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]


def answered(server: Server, prompt: str, **headers: str) -> dict:
    answer = server.post(COMPLETIONS, {"prompt": prompt, **BODY}, **headers)
    assert answer.status == 200, answer.body
    return dict(answer.json["choices"][0])


def test_replicas_give_the_bits_of_one_engine(pair: Server, server: Server) -> None:
    for prompt in ("def add(a, b):", "import os\n"):
        alone = answered(server, prompt)
        for engine in ENGINES:
            before = queried(pair)
            assert answered(pair, prompt, **{"X-data-parallel-rank": engine}) == alone
            assert grown(before, queried(pair)) == [int(engine)]
    one = server.get("/warmup?format=json").json["proof"]["digest"]
    assert {each["proof"]["digest"] for each in pair.get("/warmup?format=json").json["engines"]} == {one}


def test_a_prompt_goes_where_its_prefix_is(pair: Server) -> None:
    for engine, prefix in zip(ENGINES, ("# the first file\n" * 12, "# another file\n" * 12), strict=True):
        answered(pair, prefix, **{"X-data-parallel-rank": engine})
        for more in ("x = 1\n", "y = 2\n"):
            before, hits = queried(pair), found(pair)
            answered(pair, prefix + more)
            assert grown(before, queried(pair)) == grown(hits, found(pair)) == [int(engine)]


def test_routing_ignores_an_emptied_prefix_cache(pair: Server) -> None:
    prompt = "# something else\n" * 12
    answered(pair, prompt, **{"X-data-parallel-rank": "1"})
    assert pair.post("/reset_prefix_cache", {}).status == 200
    hits = found(pair)
    for engine in ENGINES:  # both replicas have got the adapter
        answered(pair, prompt, **{"X-data-parallel-rank": engine})
    assert found(pair) == hits


def test_new_prompts_are_spread(pair: Server) -> None:
    before = queried(pair)
    for number in range(4):
        answered(pair, f"{number} " * 40)
    assert grown(before, queried(pair)) == [0, 1]


@pytest.mark.parametrize("rank", ["2", "-1", "x"])
def test_a_replica_that_is_not_there(pair: Server, rank: str) -> None:
    answer = pair.post(COMPLETIONS, {"prompt": "x", **BODY}, **{"X-data-parallel-rank": rank})
    assert answer.status == 400 and "from 0 to 1" in answer.error["message"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_abort_reaches_the_right_replica(pair: Server, engine: str) -> None:
    def counts() -> list[float]:
        return [pair.metric("num_requests_running", engine=each) for each in ENGINES]

    async def scenario() -> None:
        body = {"prompt": "def f(x):", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nX-data-parallel-rank: {engine}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        await reader.readexactly(1000)
        assert counts() == [float(each == engine) for each in ENGINES]
        assert pair.metric("kv_cache_usage_perc", engine=engine) > 0
        writer.transport.abort()

    asyncio.run(scenario())
    end = time.monotonic() + 20
    while counts() != [0, 0] or any(pair.metric("kv_cache_usage_perc", engine=each) for each in ENGINES):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_each_replica_has_its_own_record_and_metrics(pair: Server) -> None:
    records = pair.get("/warmup?format=json").json["engines"]
    assert len(records) == 2
    for engine, record in enumerate(records):
        one = pair.get(f"/warmup?format=json&engine={engine}").json
        assert one["created"] == record["created"] and one["entries"]
        warmed = sum(entry["outcome"] == one["entries"][0]["outcome"] for entry in one["entries"])
        assert pair.metric("warmup_items", engine=str(engine), outcome=one["entries"][0]["outcome"]) == warmed
    assert records[0]["created"] != records[1]["created"]
    assert pair.get("/warmup?format=html&engine=1").body.startswith(b"<!")
    assert pair.get("/warmup?engine=2").status == 400
    ready = pair.get("/ready").json
    cold = sum(count for record in records for count in record["cold"].values())
    assert ready["status"] == "ready" and ready["cold_events"] == cold
    assert sum(ready["items"].values()) == sum(len(record["entries"]) for record in records)


def test_replicas_with_ranks_of_their_own() -> None:
    with serving("bundled", engine=None, data_parallel_size=2, tensor_parallel_size=2, **SMALL) as server:
        records = server.get("/warmup?format=json").json["engines"]
        assert [record["proof"]["parts"]["ranks"] for record in records] == [2, 2]
        answers = [answered(server, "def add(a, b):", **{"X-data-parallel-rank": engine}) for engine in ENGINES]
        assert answers[0] == answers[1]


def test_replicas_of_a_model_with_states(tmp_path: Path) -> None:
    """Each has the answers of one engine, also behind a kept state."""
    save_model_and_tokenizer(tmp_path, family="Qwen3_5")
    options = SMALL | {"device": "cpu", "execution_mode": "eager", "max_num_seqs": 4, "block_size": 16}
    prompts = ("def add(a, b):\n    return a + b\n" * 3, "def add(a, b):\n    return a + b\n" * 3 + "import os")
    with serving(str(tmp_path), engine=None, **options) as server:
        alone = [answered(server, prompt) for prompt in prompts]
    with serving(str(tmp_path), engine=None, data_parallel_size=2, **options) as server:
        for engine in ENGINES:
            asked = partial(answered, server, **{"X-data-parallel-rank": engine})
            assert [asked(prompt) for prompt in prompts] == alone
        assert all(hits > 0 for hits in found(server))


def test_adapters_are_read_by_all(pair: Server) -> None:
    answers = [
        pair.post(COMPLETIONS, {"model": model, "prompt": "def add(", **BODY}, **{"X-data-parallel-rank": engine})
        for model in ("small", "bundled") for engine in ENGINES
    ]  # fmt: skip
    texts = [answer.json["choices"] for answer in answers]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_the_memory_of_all_replicas_is_read_on_demand(pair: Server) -> None:
    assert pair.get("/health?deep=1").status == 200
    assert [pair.metric("audit_passes_total", engine=engine) for engine in ENGINES] == [1, 1]


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)

    def threads(facts: Facts, **options: int) -> int | None:
        return for_replica(Settings(**options), facts).num_threads

    assert threads(CPU) is None and threads(CUDA, data_parallel_size=2) is None
    assert threads(CPU, data_parallel_size=2) == 8 and threads(CPU, data_parallel_size=32) == 1
    assert threads(CPU, data_parallel_size=2, tensor_parallel_size=2) == 2
    assert threads(CPU, data_parallel_size=2, num_threads=5) == 5
    with pytest.raises(SettingsError, match="Gaudi"):
        check(traits_of(Settings(data_parallel_size=2)), {"on hpu": HPU.lacks})


def killing(victim: int) -> Callable[[list[Answer]], None]:
    """Return a function of the answers so far, which kills the process ``victim``."""
    return lambda _: os.kill(victim, signal.SIGKILL)


def test_a_killed_replica_changes_no_answer(pair: Server) -> None:
    """Each engine is killed once while it answers requests of every kind, each at another of its tokens."""
    asked = [replace(each, body=each.body | {"receipt": True}) for each in mixed(24, 1, "small", 64)]
    expected = asyncio.run(together(pair.port, asked))
    parts = sum(len(each.times) for each in expected)
    for victim in pair.engine_pids:
        moved = pair.metric("request_moves_total", reason="died")
        answers = asyncio.run(together(pair.port, asked, parts // 8, killing(victim)))
        for each, one, other in zip(asked, expected, answers, strict=True):
            assert normal(one)["status"] == "200" and normal(one) == normal(other), each
            assert all(choice["receipt"] for choice in normal(one)["choices"].values())
        assert pair.metric("request_moves_total", reason="died") > moved + 3
        pair.wait_for_engines(2)


def test_replicas_that_differ_never_serve(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(
        "bundled", engine="tests.api.test_data_parallel:run_unlike", wait=False, log=log, data_parallel_size=2, **SMALL
    ) as server:
        assert server.process.wait(60) == 1
    said = log.read_text()
    assert re.search(r"do not agree.* digest: ipc://\S+ on engine 0, ipc://\S+ on engine 1\.", said), said[-2000:]


def run_unlike(settings: Settings, address: str) -> None:
    """Run an engine with a digest that no other engine has: the address of its sockets."""
    transport = EngineTransport(address)
    record = ScriptedEngine(transport).record.to_json()
    transport.put(Ready(MAX_MODEL_LEN, BLOCKS, 64, 0.0, record, digest=address))
    transport.take(None)
    transport.close()


def test_an_engine_within_a_process_is_one() -> None:
    with pytest.raises(SettingsError, match="data_parallel_size needs `preheat serve`"):
        LLM("bundled", data_parallel_size=2, **SMALL)
