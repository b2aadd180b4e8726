"""Ranks that are actors of Ray.

On one node and on two, bits equal one process's, and a dead actor ends all.
"""

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
from tests.waiting import until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install preheat[ray]")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray's own

OPTIONS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 4, "max_model_len": 256,
    "skip_warmup": False,
}  # fmt: skip
ON_RAY = {**OPTIONS, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start two nodes on this machine, with two CPUs and one."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def _crowded(cluster: None) -> Iterator[None]:
    """Leave room for only one rank on this node."""
    here = ray.get_runtime_context().get_node_id()
    other = placement_group([{"CPU": 1}], bundle_label_selector=[{"ray.io/node-id": here}])
    assert other.wait(10)
    yield
    remove_placement_group(other)


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(**OPTIONS, tp_invariant=True)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    prompts = ["def add(a, b):", "class Queue:", "import os"]
    results = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0), use_tqdm=False)
    return [tuple(result.outputs[0].token_ids) for result in results]


def actors() -> list[int]:
    """Return the processes of ranks, known by the title that Ray sets."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_Rank.run"):
                found.append(int(path.parent.name))
        except OSError:  # it has gone
            continue
    return found


def shares_memory(process: int) -> bool:
    return "/dev/shm/preheat-" in Path(f"/proc/{process}/maps").read_text()


def has_the_bits(shared: LLM, alone: LLM) -> bool:
    one, two = alone.loop.listener.record.proof, shared.loop.listener.record.proof
    assert [one.parts["ranks"], two.parts["ranks"]] == [1, 2]
    return answers(shared) == answers(alone) and one.digest == two.digest and len(one.digest) == 32


def test_actors_give_the_bits_of_one_process(cluster: None, alone: LLM) -> None:
    """Two actors on one node give the bits of one process."""
    shared = LLM(**ON_RAY)
    try:
        (actor,) = actors()
        assert shares_memory(actor) and shared.loop.executor.ranks.on_a_node == 2
        assert has_the_bits(shared, alone)
        assert ray.available_resources()["CPU"] == 1
    finally:
        shared.loop.executor.ranks.close()
    assert until(lambda: actors() == [])


def answers_until(llm: LLM, end: float) -> None:
    while time.monotonic() < end:
        answers(llm)


@pytest.mark.usefixtures("_crowded")
def test_actors_on_two_nodes_give_the_same_bits_and_a_dead_actor_ends_all(alone: LLM) -> None:
    llm = LLM(**ON_RAY)
    (actor,) = actors()
    assert not shares_memory(actor) and llm.loop.executor.ranks.on_a_node == 1
    assert has_the_bits(llm, alone)
    os.kill(actor, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RankDied, match="Rank 1 ended"):
        answers_until(llm, killed + 60)
    llm.loop.executor.ranks.close()


def test_too_few_places_are_refused(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.parallel import ray_actors

    monkeypatch.setattr(ray_actors, "_HINT_SECONDS", 0.5)
    monkeypatch.setattr(ray_actors, "_PLACE_SECONDS", 0.5)
    with pytest.raises(SettingsError, match="Ray could not reserve 4 CPU, one of them on this node"):
        LLM(**ON_RAY | {"tensor_parallel_size": 4})


def test_actors_of_one_rank_are_refused() -> None:
    with pytest.raises(SettingsError, match="leave it out"):
        Settings(distributed_executor_backend="ray")
