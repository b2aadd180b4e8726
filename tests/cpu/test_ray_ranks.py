"""Ranks that are actors of Ray: the bits are those of one process, and a dead actor ends all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, SamplingParams
from preheat.errors import RankDied, SettingsError
from preheat.settings import Settings

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install preheat[ray]")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

OPTIONS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 4, "max_model_len": 256,
    "skip_warmup": False,
}  # fmt: skip
ON_RAY = {**OPTIONS, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def answers(llm: LLM) -> list[tuple[int, ...]]:
    prompts = ["def add(a, b):", "class Queue:", "import os"]
    results = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0), use_tqdm=False)
    return [tuple(result.outputs[0].token_ids) for result in results]


def actors() -> list[int]:
    """The processes of ranks, whose title Ray sets."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_Rank.run"):
                found.append(int(path.parent.name))
        except OSError:  # it has gone
            continue
    return found


def test_actors_give_the_bits_of_one_process(cluster: None) -> None:
    alone = LLM(**OPTIONS, tp_invariant=True)
    shared = LLM(**ON_RAY)
    try:
        assert len(actors()) == 1
        assert answers(shared) == answers(alone)
        one, two = alone.loop.listener.record.proof, shared.loop.listener.record.proof
        assert one.digest == two.digest and len(one.digest) == 32
        assert [one.parts["ranks"], two.parts["ranks"]] == [1, 2]
        assert ray.available_resources().get("CPU", 0) == 0
    finally:
        shared.loop.executor.ranks.close()
    until = time.monotonic() + 5
    while actors() and time.monotonic() < until:
        time.sleep(0.05)
    assert actors() == []


def answers_until(llm: LLM, end: float) -> None:
    while time.monotonic() < end:
        answers(llm)


def test_a_dead_actor_ends_all(cluster: None) -> None:
    llm = LLM(**ON_RAY)
    answers(llm)
    (actor,) = actors()
    os.kill(actor, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RankDied, match="Rank 1 ended"):
        answers_until(llm, killed + 10)
    assert time.monotonic() < killed + 10
    llm.loop.executor.ranks.close()


def test_too_few_places_on_a_node_are_refused(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.parallel import ray_actors

    monkeypatch.setattr(ray_actors, "_PLACE_SECONDS", 1.0)
    with pytest.raises(SettingsError, match="several nodes cannot share a model"):
        LLM(**ON_RAY | {"tensor_parallel_size": 4})


def test_actors_of_one_rank_are_refused() -> None:
    with pytest.raises(SettingsError, match="leave it out"):
        Settings(distributed_executor_backend="ray")
