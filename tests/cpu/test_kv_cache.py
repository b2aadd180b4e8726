"""Swaps on real tensors: every padded size, every layer, keys and values."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from preheat import LLM
from preheat.core import Swaps
from preheat.execute.executor import Executor
from preheat.execute.kv_cache import KVCache
from preheat.plan.items import SWAP_SIZES
from preheat.warmup.swaps import run_swap, run_swaps


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=64, num_gpu_blocks_override=2)


def executor(llm: LLM, num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> Executor:
    """The engine's own, over a cache of ``num_blocks`` blocks of 16 random tokens."""
    own = llm.loop.executor
    cache = KVCache(own.decoder.spec, num_blocks, 16, dtype, torch.device("cpu"))
    cache.data.normal_(generator=torch.Generator().manual_seed(0))
    return Executor(own.decoder, cache, own.sampler)


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
    runner, ran = executor(llm, 3), []
    before = runner.cache.data.clone()

    def touch(on: Executor, size: int) -> None:
        ran.append(size)
        run_swap(on, size)
        assert torch.equal(on.cache.data[:, [1, 0, 2]], before) == (len(ran) % 2 == 1)

    with caplog.at_level(logging.INFO):
        assert run_swaps(runner, touch=touch)
    assert ran == [8, 16, 32, 64, 128, 256, 512]
    assert torch.equal(runner.cache.data, before)
    assert [record.getMessage() for record in caplog.records] == [
        "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]",
        "Defragmenter warmup completed successfully",
    ]
    run_swap(runner, 8)
    assert not torch.equal(runner.cache.data, before), "without the extra one the blocks stay exchanged"


@pytest.mark.parametrize("failing", [8, 16, 512])
def test_a_size_that_fails_leaves_the_cache_as_it_was(llm: LLM, failing: int) -> None:
    runner = executor(llm, 2)
    before = runner.cache.data.clone()

    def touch(on: Executor, size: int) -> None:
        if size == failing:
            raise RuntimeError("too large")
        run_swap(on, size)

    with pytest.raises(RuntimeError, match="too large"):
        run_swaps(runner, touch=touch)
    assert torch.equal(runner.cache.data, before)


def test_one_block_is_not_enough(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    runner = executor(llm, 1)
    with caplog.at_level(logging.INFO):
        assert not run_swaps(runner)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]"),
        ("WARNING", "Skipping defragmenter warmup, insufficient blocks (1)"),
    ]
