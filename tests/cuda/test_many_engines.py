"""Twenty engines of every kind in one process, one after another and side by side, independent of each other."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.backends.cuda.device.streams import POOL_STREAMS
from preheat.engine.loop import Loop
from preheat.execution.pooler import Pooler
from tests.cuda.test_engine import CONFIG, EAGER, ROOMY, TIGHT
from tests.tokenizers import byte_level

ENGINES, ALIVE = 20, 5
PROMPT = list(range(5, 150))
PARAMS = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
          SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True, presence_penalty=0.5)]  # fmt: skip
POOLING = {"runner": "pooling", "pooler_config": {"pooling_type": "LAST"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_level().save(str(folder / "tokenizer.json"))
    return str(folder)


def kinds(model: str) -> dict[str, dict[str, Any]]:
    graphs = {"skip_warmup": False, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}
    return {
        "graphs": ROOMY | graphs,
        "pooling": ROOMY | graphs | POOLING,
        "sleeping": ROOMY | graphs | {"enable_sleep_mode": True},
        "eager": EAGER,
        "a draft model": ROOMY | graphs | {"speculative_config": {"model": model, "num_speculative_tokens": 2}},
        "adapters": ROOMY | graphs | {"enable_lora": True},
        "few blocks": TIGHT,
        "quantized": ROOMY | graphs | {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    }


def bits(llm: LLM) -> Any:
    """Return an engine's answers: texts, tokens and log-probabilities, or vectors."""
    llm.reset_prefix_cache()
    prompts: list[Any] = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:20]}]
    if isinstance(llm.loop.executor.sampler, Pooler):
        return [output.outputs.data.tobytes() for output in llm.encode(prompts, use_tqdm=False)]
    return [output.outputs for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collect garbage before every step, apart from objects that are older than the test."""
    step = Loop.step
    gc.collect()
    gc.freeze()

    def collected(self: Loop) -> bool:
        gc.collect()
        return step(self)

    monkeypatch.setattr(Loop, "step", collected)
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("collecting")
def test_engines_come_and_go(model: str) -> None:
    """Each engine answers when it is new, beside newer ones, and after older and newer ones are gone."""
    alive: list[tuple[LLM, Any]] = []
    right: dict[str, Any] = {}
    for number, (name, options) in zip(range(ENGINES), itertools.cycle(kinds(model).items()), strict=False):
        llm = LLM(model, **options)
        said = bits(llm)
        assert right.setdefault(name, said) == said, (number, name)
        alive.append((llm, said))
        if len(alive) > ALIVE:
            del alive[number % 2 * (ALIVE - 1)]  # the oldest one, or one in the middle
            gc.collect()
            torch.cuda.empty_cache()
        for engine, before in alive:
            assert bits(engine) == before, (number, name)


def test_a_stream_belongs_to_one_live_engine(model: str) -> None:
    """More engines than torch's streams: one engine lives all the time, the graphs of the others are destroyed."""
    options = kinds(model)["graphs"] | {"max_num_seqs": 1, "skip_warmup": True}
    kept = LLM(model, **kinds(model)["graphs"])
    right, stream = bits(kept), torch.cuda.current_stream()
    others = {torch.cuda.current_stream().cuda_stream for _ in range(POOL_STREAMS + 1) if LLM(model, **options)}
    gc.collect()
    torch.cuda.empty_cache()
    assert stream.cuda_stream not in others
    assert bits(kept) == right
