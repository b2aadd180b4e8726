"""The replica of a request: the rule against a plain model of it, and its forgetting."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.visible import visible_devices
from preheat.core import Delta, Finish, Image, Progress, Ready, Request, SamplingParams, Segment
from preheat.errors import SettingsError
from preheat.server.replicas.replicas import disagreement, together
from preheat.server.replicas.routing import AHEAD, Router
from preheat.settings import Settings
from preheat.utils.contract import Contract
from tests import records

BLOCK = 4
MANY = 10_000


def request(id: int, prompt: list[int], **more: object) -> Request:
    return Request(id, prompt, SamplingParams(), 0, 4, **more)


def router(size: int, blocks: int = MANY) -> Router:
    made = Router(size)
    made.open(BLOCK, [blocks] * size)
    return made


@dataclass
class Model:
    """Plain form of the rule.

    It keeps all prompts given to a replica, and compares them block by block.
    """

    size: int
    prompts: list[list[list[int]]] = field(default_factory=list)
    unfinished: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = [[] for _ in range(self.size)]
        self.unfinished = [set() for _ in range(self.size)]

    def common(self, replica: int, prompt: list[int]) -> int:
        def blocks(other: list[int]) -> int:
            most = min(len(prompt), len(other)) // BLOCK
            return next((n for n in range(most) if prompt[: (n + 1) * BLOCK] != other[: (n + 1) * BLOCK]), most)

        return max(map(blocks, self.prompts[replica]), default=0)

    def best(self, prompt: list[int]) -> set[int]:
        """Return all replicas that the two parts of the rule leave."""
        loads = list(map(len, self.unfinished))
        allowed = [replica for replica in range(self.size) if loads[replica] - min(loads) <= AHEAD]
        longest = max(self.common(replica, prompt) for replica in allowed)
        left = [replica for replica in allowed if self.common(replica, prompt) == longest]
        return {replica for replica in left if loads[replica] == min(loads[other] for other in left)}


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4 * BLOCK)  # few tokens: prefixes are often shared
actions = st.lists(st.one_of(prompts, st.integers(0, 50)), max_size=120)


@given(st.integers(1, 4), actions)
def test_the_longest_prefix_then_the_fewest_requests(size: int, actions: list) -> None:
    tested, model, owners = router(size), Model(size), dict[int, int]()
    for id, action in enumerate(actions, 1):
        if isinstance(action, int):  # the request with this place among the unfinished ends
            if owners:
                ended = list(owners)[action % len(owners)]
                model.unfinished[owners[ended]].discard(ended)
                assert tested.end(ended) == owners.pop(ended)
            continue
        replica = tested.route(request(id, action))
        assert replica in model.best(action)
        owners[id] = replica
        model.prompts[replica].append(action)
        model.unfinished[replica].add(id)
    assert [tested.requests(replica) for replica in range(size)] == model.unfinished


@given(st.lists(prompts, max_size=60), st.integers(0, 6))
def test_the_routers_memory_is_bounded(asked: list[list[int]], blocks: int) -> None:
    tested = router(2, blocks)
    for id, prompt in enumerate(asked):
        tested.route(request(id, prompt))
        assert all(len(seen) <= blocks for seen in tested._seen)


def test_the_end_of_a_chain_is_forgotten_first() -> None:
    tested = router(2, blocks=3)
    prompt = list(range(3 * BLOCK))
    first = tested.route(request(1, prompt))
    tested.end(1)
    tested.route(request(2, [99] * BLOCK, data_parallel_rank=first))
    assert tested.prefix(first, tested._hashes(request(3, prompt))) == 2


def test_nothing_is_left_out_of_a_prefix() -> None:
    """Another salt, adapter or image makes another prompt.

    That holds for the router as for the cache, even if the tokens are equal.
    """
    tested = router(2)
    prompt = list(range(2 * BLOCK))
    image = Segment(0, 2, Image(b"a", b""))
    plain = tested.route(request(1, prompt))
    for more in ({"cache_salt": "x"}, {"lora_name": "x"}, {"segments": [image]}):
        assert tested.prefix(plain, tested._hashes(request(2, prompt, **more))) == 0
    assert tested.prefix(plain, tested._hashes(request(2, prompt))) == 2


def test_a_popular_prefix_does_not_starve_the_others() -> None:
    tested = router(2)
    prompt = [7] * BLOCK
    chosen = [tested.route(request(id, prompt)) for id in range(4 * AHEAD)]
    assert chosen[: AHEAD + 1] == [chosen[0]] * (AHEAD + 1)
    running = [tested.load(replica) for replica in range(2)]
    assert abs(running[0] - running[1]) <= AHEAD + 1 and min(running) > 0


def test_equal_replicas_take_turns() -> None:
    tested, chosen = router(3), []
    for id in range(6):
        chosen.append(tested.route(request(id, [id] * BLOCK)))
        tested.end(id)
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [0, 1, 2]


def test_a_replica_that_is_asked_for() -> None:
    tested = router(2)
    prompt = [1] * BLOCK
    assert tested.route(request(1, prompt, data_parallel_rank=1)) == 1
    assert tested.route(request(2, prompt)) == 1
    assert tested.route(request(3, prompt, data_parallel_rank=0)) == 0


def test_the_router_books_the_engines_reports() -> None:
    tested = router(2)
    one, other = tested.route(request(1, [1])), tested.route(request(2, [2]))
    assert {one, other} == {0, 1} and tested.loads() == [(0, 1), (0, 1)]
    tested.handle(Delta(started={1: 0}))
    assert tested.loads()[one] == (1, 0)
    tested.handle(Delta(started={1: 0}, finished={1: Finish("length")}))
    assert tested.load(one) == 0 and tested.end(1) is None and tested.load(other) == 1


def test_empty_caches_attract_nobody() -> None:
    tested = router(2)
    prompt = [1] * BLOCK
    first = tested.route(request(1, prompt))
    tested.forget()
    assert tested.route(request(2, prompt)) == 1 - first
    assert router(2, blocks=0)._hashes(request(1, prompt)) == []


def ready(engine: int, **more: object) -> Ready:
    record = records.warmed(records.make(max_num_seqs=8), hits=False)
    fields = {"max_model_len": 64, "num_blocks": 10, "block_size": 16, "seconds": 1.0, "digest": "d", **more}
    return Ready(record=record.to_json(), engine=engine, **fields)


def test_engines_that_differ_are_named() -> None:
    assert disagreement([ready(0), ready(1), ready(2, num_blocks=9)]) is None
    error = disagreement([ready(0), ready(1), ready(2, digest="e")])
    assert error is not None and "digest: d on engine 0, e on engine 2" in error.message
    contracts = [Contract(weights=weights, numerics={"dtype": dtype}) for weights, dtype in ("wa", "wb")]
    error = disagreement([ready(engine, contract=each) for engine, each in enumerate(contracts)])
    assert error is not None and "numerics.dtype: a on engine 0, b on engine 1" in error.message


def test_progress_of_several() -> None:
    assert together([Progress(1, 4, "a", 3.0), Progress(2, 4, "b", 1.0)], "b") == Progress(3, 8, "b", 3.0)
    assert together([Progress(1, 4, "a", None), Progress(2, 4, "b", 1.0)], "b").eta_s is None


def test_each_replica_sees_its_own_gpus() -> None:
    settings = Settings(data_parallel_size=2, tensor_parallel_size=2)

    def seen(environment: dict[str, str]) -> list[dict[str, str]]:
        return [visible_devices(settings, replica, environment) for replica in range(2)]

    assert seen({}) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert seen({"CUDA_VISIBLE_DEVICES": "7,GPU-x,3,1,0"}) == [
        {"CUDA_VISIBLE_DEVICES": "7,GPU-x"}, {"CUDA_VISIBLE_DEVICES": "3,1"},
    ]  # fmt: skip
    assert seen({"CUDA_VISIBLE_DEVICES": ""}) == [{}, {}]
    with pytest.raises(SettingsError, match="4 GPUs, CUDA_VISIBLE_DEVICES names 3"):
        seen({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert visible_devices(Settings(data_parallel_size=2, device="cpu"), 1, {}) == {}
    assert visible_devices(Settings(), 0, {"CUDA_VISIBLE_DEVICES": "3"}) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"server_dev_mode": True}, {"enable_sleep_mode": True},
        {"enable_lora": True, "allow_runtime_lora_updating": True},
        {"kv_events_config": {"enable_kv_cache_events": True}},
    ],
)  # fmt: skip
def test_options_that_exclude_replicas_are_refused_by_name(more: dict) -> None:
    with pytest.raises(SettingsError, match=f"data_parallel_size.* leave {list(more)[-1]} out"):
        Settings(data_parallel_size=2, **more)
    Settings(**more)
