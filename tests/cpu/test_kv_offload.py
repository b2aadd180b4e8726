"""Blocks that the prefix cache evicts go to the host.

They come back with their bits, or are computed again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import SettingsError
from preheat.execution.kv_cache import KVCache
from preheat.execution.offload import HostTier
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config
from preheat.schedule.prefix import PrefixCache
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompt_sets import PromptSet
from preheat.verify.prompts import Size, make_prompts
from tests.cpu.test_boot_check import SMALL, boot, checks, few_items
from tests.cpu.test_verify import OPTIONS

__all__ = ["few_items"]

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
PROMPTS = [{"prompt_token_ids": [(31 * i + 7 * j) % 400 for j in range(60)]} for i in range(8)]
FEW = SMALL | {"num_gpu_blocks_override": 12}
OFFLOAD = FEW | {"kv_offloading_size": 0.02}
BLOCK = 16


def answers(llm: LLM, prompts=PROMPTS) -> list[object]:
    return [output.outputs[0] for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OFFLOAD)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[object]:
    """Return the answers with nothing cached: each prompt fits alone, and all are different."""
    found = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        found += answers(llm, [prompt])
    return found


@pytest.fixture
def empty(llm: LLM) -> LLM:
    """Return the engine with an empty cache and empty counters."""
    llm.reset_prefix_cache()
    llm.loop.scheduler.forget()
    return llm


def test_loaded_blocks_are_not_computed_again(empty, expected):
    scheduler = empty.loop.scheduler
    assert answers(empty) == expected
    assert scheduler.stats().external_hits == 0 and len(scheduler.pool.tier) > 12
    steps = scheduler.stats().steps
    assert answers(empty) == expected
    stats = scheduler.stats()
    assert stats.external_queries == stats.prefix_queries - stats.prefix_hits
    assert stats.external_hits + stats.prefix_hits == len(PROMPTS) * (60 // BLOCK) * BLOCK
    assert stats.external_hits > 300 and stats.steps - steps <= steps
    scheduler.check()
    record = empty.loop.listener.record.by_name()
    assert all(record[f"(offload, {name})"].hits for name in ("store", "load"))


def test_a_reset_forgets_the_host_too(empty):
    answers(empty)
    empty.reset_prefix_cache()
    assert len(empty.loop.scheduler.pool.tier) == 0


def test_blocks_that_cannot_be_copied_are_computed_again(empty, expected, monkeypatch):
    right = HostTier.copy

    def torn(self: HostTier, transfer: str, block: int, place: int) -> None:
        if transfer == "load" or place % 2:
            raise OSError("no such memory")
        right(self, transfer, block, place)

    monkeypatch.setattr(HostTier, "copy", torn)
    for _ in range(2):
        assert answers(empty) == expected
    assert empty.loop.scheduler.stats().external_hits == 0
    empty.loop.scheduler.check()
    monkeypatch.undo()
    assert answers(empty) == expected


def test_the_least_recently_used_goes():
    spec = read_spec(read_config(BUNDLED_PATH))
    cache = KVCache(spec, 4, BLOCK, torch.float32, torch.device("cpu"))
    each = cache.data[:, 0].numel() * 4
    tier = HostTier(CpuBackend(), [cache], 2 * each + 1)
    for block in (1, 2, 3):
        cache.data[:, block] = block
    tier.store(1, b"1")
    tier.store(2, b"2")
    assert tier.load(3, b"1") and cache.data[:, 3].eq(1).all()
    cache.data[:, 3] = 3
    tier.store(3, b"3")
    assert (b"1" in tier, b"2" in tier, b"3" in tier) == (True, False, True) and not tier.load(1, b"2")
    assert tier.load(1, b"3") and cache.data[:, 1].eq(3).all()
    assert tier.take_transfers() == ("load", "store") and tier.take_transfers() == ()
    for size, message in ((each - 1, "raise it"), (2**60, "lower it")):
        with pytest.raises(SettingsError, match=message):
            HostTier(CpuBackend(), [cache], size)


def under_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a transfer that brings back the block stored before the wanted one."""
    right = HostTier.copy

    def shifted(self: HostTier, transfer: str, block: int, place: int) -> None:
        right(self, transfer, block, (place + (transfer == "load")) % self.places)

    monkeypatch.setattr(HostTier, "copy", shifted)


def test_the_check_at_boot(llm, monkeypatch):
    outcome = checks(llm.loop.listener.record)["offloaded"]
    assert outcome == ("ready", "")
    under_another_hash(monkeypatch)
    ready, record, _ = boot(**OFFLOAD | {"num_gpu_blocks_override": 40})
    assert checks(record)["offloaded"][0] == "failed" and "offloaded: " in ready.blocked_reason


@pytest.fixture(scope="module")
def verification() -> tuple[PathRunner, Engine]:
    """Return the engine with few blocks, and paths with its answers to all prompts."""
    size = Size(prompts=16, runs=1, outputs=3, longest=60)
    settings = Settings.load(OPTIONS | OFFLOAD | {"boot_check": "off"})
    engine = Engine(boot_engine, settings)
    prompts = make_prompts(size, engine.vocab_size, engine.ready.max_model_len)
    paths = PathRunner(size, lambda _: prompts, {"texts": PromptSet(prompts, engine.run(prompts))})
    return paths, engine


@pytest.mark.parametrize("planted", [False, True], ids=["", "planted"])
def test_verify(planted, verification, monkeypatch):
    if planted:
        under_another_hash(monkeypatch)
    paths, engine = verification
    (found,) = paths.on(engine, "tight", ["offloaded blocks"])
    assert (found.first is not None) is planted
    assert not found.note.startswith("0 ")


@pytest.mark.parametrize("planted", [False, True], ids=["", "planted: keys without a version"])
def test_weights_of_another_version_are_not_found(planted, llm, changed, fresh, monkeypatch):
    """Keys hold the version of the weights, so a stale block on the host is not found."""
    monkeypatch.setattr(HostTier, "forget", lambda _: None)
    if planted:
        monkeypatch.setattr(PrefixCache, "rekey", lambda self, _: self.pool.forget_contents())
    prompt = {"prompt_token_ids": list(range(40))}
    params = replace_params(6)
    llm.generate(prompt, params, use_tqdm=False)
    answers(llm)  # evicts it
    llm.update_weights(changed)
    found = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.undo()
    llm.update_weights(BUNDLED_PATH)
    assert (found == fresh[1]) is not planted


def replace_params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"pipeline_parallel_size": 2}])
def test_options_that_exclude_offloading_are_refused(options):
    with pytest.raises(SettingsError, match="kv_offloading_size"):
        replace(Settings(), kv_offloading_size=1.0, **options)
