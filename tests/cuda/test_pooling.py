"""Engines that pool, on a GPU: the same bits alone and among others, close to the hidden states of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat import LLM
from preheat.schedule.pooled import Pooled
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_embeddings import LAST, MEAN, by_chunks, hidden_states, same, vectors

DEVICE = "cuda"
VOCAB, LENGTH = 199, 256
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "skip_tokenizer_init": True, "runner": "pooling", "max_model_len": LENGTH, "max_num_seqs": 16,
    "max_num_batched_tokens": 256, "block_size": 64, "num_gpu_blocks_override": 200, "boot_check": "off",
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "chunks, few blocks": {"block_size": 16, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40,
                           "max_num_seqs": 4},
    "eager": {"enforce_eager": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_checkpoint(MODELS["llama"], folder)
    return folder


def prompts() -> list[list[int]]:
    """Return prompts of one token, of several chunks, and some with the beginnings of others."""
    chance = random.Random(3)
    drawn = [[chance.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 17, 40, 130, 200, LENGTH - 1)]
    return [*drawn, [*drawn[4][:96], 5], drawn[4][:100], drawn[5]]


@pytest.mark.parametrize("config", [LAST, MEAN], ids=["last", "mean"])
def test_the_same_bits_in_every_way(checkpoint: Path, config: dict[str, str]) -> None:
    """Alone, all at once, again with a warm prefix cache, in other steps; nothing is cold."""
    some = prompts()
    warm = {"skip_warmup": False, "boot_check": "full", "on_cold": "raise"}
    llm = LLM(str(checkpoint), pooler_config=config, **OPTIONS | warm)
    alone: list[np.ndarray] = []
    for ids in some:
        llm.reset_prefix_cache()
        alone += vectors(llm, [ids])
    assert same(vectors(llm, some), alone)
    assert same(vectors(llm, some[::-1])[::-1], alone)
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values()), record.events
    for name, more in OTHERS.items():
        assert same(vectors(LLM(str(checkpoint), pooler_config=config, **OPTIONS | more), some), alone), name


@pytest.mark.parametrize("config", [LAST, MEAN], ids=["last", "mean"])
def test_close_to_transformers(checkpoint: Path, config: dict[str, str]) -> None:
    """bf16 beside fp32: directions agree to a cosine of 0.999."""
    llm = LLM(str(checkpoint), pooler_config=config | {"normalize": True}, **OPTIONS)
    for ids in prompts()[2:6]:
        states = hidden_states(checkpoint, ids).numpy()
        right = states[-1] if config is LAST else states.mean(0)
        cosine = float(vectors(llm, [ids])[0] @ (right / np.linalg.norm(right)))
        assert cosine > 0.999, (len(ids), cosine)


def test_the_comparison_can_fail(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a sum of sums in the order of the chunks."""
    monkeypatch.setattr(Pooled, "add", by_chunks)
    budgets = ({"max_num_batched_tokens": 48, "max_num_seqs": 4}, {"max_num_batched_tokens": 256})
    found = [vectors(LLM(str(checkpoint), pooler_config=MEAN, **OPTIONS | more), prompts()) for more in budgets]
    assert not same(*found)
