"""Embeddings on a GPU: against the hidden states of transformers, and one set of bits whatever shares a step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preheat import LLM, PoolingParams
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.prompts import REDUCED, make_prompts
from preheat.verify.verification import Verification
from preheat.warmup.record import Record
from tests.cpu.checkpoints import save_checkpoint
from tests.cuda.test_families import DEVICE, LENGTH, VOCAB, model_of

OPTIONS: dict[str, Any] = {
    "device": DEVICE, "skip_tokenizer_init": True, "max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 16,
    "max_model_len": LENGTH, "num_gpu_blocks_override": 300, "runner": "pooling", "boot_check": "off",
}  # fmt: skip
LAST, MEAN = {"pooling_type": "LAST"}, {"pooling_type": "MEAN"}
RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def saved(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("model")
        save_checkpoint(model_of(name), folder)
        return folder

    return saved


def prompts() -> list[list[int]]:
    """Of one token, of several chunks, and some that begin as others."""
    chance = random.Random(3)
    drawn = [[chance.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 17, 64, 200, 700)]
    return [*drawn, [*drawn[4][:96], 5], drawn[4][:100], drawn[5], *drawn[:3]]


def vectors(llm: LLM, some: Sequence[list[int]]) -> list[np.ndarray]:
    given = [{"prompt_token_ids": ids} for ids in some]
    return [output.outputs.data for output in llm.encode(given, use_tqdm=False, pooling_params=RAW)]


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def hidden_states(folder: Path, some: Sequence[list[int]], dtype: torch.dtype) -> list[np.ndarray]:
    """fp32 [tokens, hidden] of each prompt after the final norm, by transformers on the same GPU."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(DEVICE)
    with torch.inference_mode():
        return [model(torch.tensor([ids], device=DEVICE)).last_hidden_state[0].float().cpu().numpy() for ids in some]


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The distance of two vectors beside the length of the second."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma 3"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_close_to_transformers(name: str, dtype: str, bound: float, checkpoint: Any) -> None:
    folder, some = checkpoint(name), prompts()[:6]
    states = hidden_states(folder, some, getattr(torch, dtype))
    last = vectors(LLM(str(folder), pooler_config=LAST, dtype=dtype, **OPTIONS), some)
    mean = vectors(LLM(str(folder), pooler_config=MEAN, dtype=dtype, **OPTIONS), some)
    for ours, average, theirs in zip(last, mean, states, strict=True):
        assert error(ours, theirs[-1]) <= bound
        assert error(average, theirs.mean(0)) <= bound
    assert error(last[3], states[4][-1]) > 0.1  # of another prompt


@pytest.mark.parametrize("config", [LAST, MEAN], ids=["last", "mean"])
def test_the_same_bits_alone_among_others_and_in_other_chunks(config: dict[str, Any], checkpoint: Any) -> None:
    some, folder = prompts(), str(checkpoint("llama"))
    warm = {"skip_warmup": False, "on_cold": "raise", "pooler_config": config}
    llm = LLM(folder, **OPTIONS | warm)
    alone = list[np.ndarray]()
    for ids in some:
        llm.reset_prefix_cache()
        alone += vectors(llm, [ids])
    assert same(vectors(llm, some), alone)
    assert same(vectors(llm, some[::-1])[::-1], alone)
    assert not any(Record.from_json(llm.loop.listener.report()).cold.values())
    assert not same(alone, alone[::-1])
    few = {"num_gpu_blocks_override": 68, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    for more in (few, {"max_num_batched_tokens": 1024, "block_size": 64}, {"async_scheduling": False}):
        assert same(vectors(LLM(folder, pooler_config=config, **OPTIONS | more), some), alone)


def test_verify_finds_nothing(checkpoint: Any) -> None:
    """And the check at boot has run."""
    options = {**OPTIONS, "model": str(checkpoint("llama")), "boot_check": "full", "pooler_config": MEAN}
    settings = Settings.load(options | {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 600})

    def made(engine: Any) -> Any:
        return make_prompts(REDUCED, engine.vocab_size, engine.ready.max_model_len)

    asked = Verification(boot_engine, settings, made, REDUCED)
    results = list(asked.results())
    assert asked.verdict(results).ok, [str(result.first) for result in results]
