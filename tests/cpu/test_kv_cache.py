"""Swaps on real tensors: every padded size, every layer, keys and values."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
import torch

from preheat import LLM
from preheat.core import Swaps
from preheat.execution.executor import Executor
from preheat.execution.kv_cache import KVCache
from preheat.plan.cache_items import SWAP_SIZES, SwapItem
from preheat.plan.item import Item
from preheat.schedule.defrag import pad_pairs
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.run import WarmUp


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=64, num_gpu_blocks_override=2)


@functools.cache
def noise(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def executor(llm: LLM, num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> Executor:
    """Return the engine's executor, over a cache of ``num_blocks`` blocks of 16 random tokens."""
    own = llm.loop.executor
    cache = KVCache(own.decoder.spec, num_blocks, 16, dtype, torch.device("cpu"))
    cache.data.copy_(noise(cache.data.shape))
    return Executor(own.backend, own.decoder, cache, own.sampler, own.buffers)


def warm_up(runner: Executor) -> WarmUp:
    """Return the parts of a warm-up that swaps need."""
    warm = WarmUp.__new__(WarmUp)
    warm.steps, warm.level = DummySteps.__new__(DummySteps), logging.INFO
    warm.steps.executor = runner
    return warm


ITEMS = [SwapItem(size) for size in SWAP_SIZES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 512])
def test_pairs_change_places_and_nothing_else_does(llm: LLM, count: int, dtype: torch.dtype) -> None:
    runner = executor(llm, 1100, dtype)
    before = runner.cache.data.clone()
    pairs = np.random.default_rng(count).permutation(np.arange(1, 1100))[: 2 * count].reshape(-1, 2).astype(np.int32)
    size = next(size for size in SWAP_SIZES if size >= count)
    runner.swap(Swaps(pairs, size))
    here, there = torch.from_numpy(pairs).long().unbind(1)
    expected = before.clone()
    expected[:, here], expected[:, there] = before[:, there], before[:, here]
    assert torch.equal(runner.cache.data, expected)
    runner.swap(Swaps(pairs, size))
    assert torch.equal(runner.cache.data, before)


def test_every_size_runs_and_the_cache_is_as_it_was(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    runner = executor(llm, 3)
    before = runner.cache.data.clone()
    exchanged = before[:, [1, 0, 2]]
    warm, seen = warm_up(runner), []

    def run_one(item: Item) -> None:
        item.run(warm)
        seen.append(torch.equal(runner.cache.data, before if len(seen) % 2 else exchanged))

    with caplog.at_level(logging.INFO):
        assert SwapItem.run_kind(ITEMS, run_one, warm) == 7
    assert seen == [True] * 7
    assert torch.equal(runner.cache.data, before), "seven sizes and the first once more"
    assert [record.getMessage() for record in caplog.records] == [
        "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]",
        "Defragmenter warmup completed successfully",
    ]


@pytest.mark.parametrize("broken", [[], [8], [512], [16, 64], [*SWAP_SIZES]])
def test_failed_swaps_leave_the_cache_unchanged(llm: LLM, broken: list[int]) -> None:
    runner = executor(llm, 2)
    before = runner.cache.data.clone()
    warm = warm_up(runner)

    def run_one(item: Item) -> None:
        if item.shape["size"] in broken:
            raise ValueError("broken")
        item.run(warm)

    assert SwapItem.run_kind(ITEMS, run_one, warm) == 7 - len(broken)
    assert torch.equal(runner.cache.data, before)


def test_control_padding_the_pair_would_contradict_it(llm: LLM) -> None:
    """Control: block 0 pads the swaps of a graph, so a swap of (1, 0) is contradicted.

    Hence warm-up swaps only this pair. Swaps that are not padded move it.
    """
    runner = executor(llm, 2)
    before = runner.cache.data.clone()
    pairs = np.array([[1, 0]], np.int32)
    runner.cache.swap(torch.from_numpy(pad_pairs(pairs, 8)).long())
    assert not torch.equal(runner.cache.data, before[:, [1, 0]])
    runner.cache.data.copy_(before)
    runner.swap(Swaps(pairs, 8))
    assert torch.equal(runner.cache.data, before[:, [1, 0]])
    runner.cache.data.copy_(before)


def test_one_block_is_not_enough(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert SwapItem.run_kind(ITEMS, Item.run, warm_up(executor(llm, 1))) == 0
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]"),
        ("WARNING", "Skipping defragmenter warmup, insufficient blocks (1)"),
    ]
