"""A GPU that is late computes the same bits: no host copy is written while the GPU may still read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.adapter import write_adapter
from preheat import LLM, LoRARequest
from preheat.execution.buffers import StepBuffers
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.execution.pooler import Pooler
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.warmup.graphs import DeviceGraphs
from tests.cuda.test_engine import CONFIG, THINKING, TIGHT, load
from tests.tokenizers import thinking

LATE = 30_000_000
"""Cycles, about 15 ms: meanwhile the host can prepare dozens of steps, if nothing makes it wait."""
OPTIONS = {name: value for name, value in TIGHT.items() if name != "defrag_threshold"}
"""Options without compaction, because the host waits for compaction."""
POOLING = {"runner": "pooling", "pooler_config": {"pooling_type": "LAST"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    thinking().save(str(folder / "tokenizer.json"))
    return folder


def kinds(model: Path) -> dict[str, dict[str, Any]]:
    return {
        "generating": THINKING,
        "each step waited for": THINKING | {"async_scheduling": False},
        "pooling": POOLING,
        "a draft model": THINKING | {"speculative_config": {"model": str(model), "num_speculative_tokens": 4}},
        "adapters": THINKING | {"enable_lora": True, "max_loras": 2},
    }


def adapters(model: Path) -> list[LoRARequest | None]:
    modules = adapted_modules(read_spec(CONFIG))
    paths = [write_adapter(model / f"adapter {number}", modules, rank=8, seed=number) for number in (1, 2, 3)]
    return [None, *(LoRARequest(f"a{number}", number, str(path)) for number, path in enumerate(paths, 1))]


def bits(llm: LLM, options: dict[str, Any], model: Path) -> list[Any]:
    prompts, params = (part[:16] for part in load())
    llm.reset_prefix_cache()
    if "runner" in options:
        return [output.outputs.data.tobytes() for output in llm.encode(prompts_of(prompts), use_tqdm=False)]
    more: dict[str, Any] = {}
    if "enable_lora" in options:
        some = adapters(model)
        more["lora_request"] = [some[place % len(some)] for place in range(len(prompts))]
    outputs = llm.generate(prompts_of(prompts), params, use_tqdm=False, **more)
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def prompts_of(some: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in some]


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Executor.launch

    def late(self: Executor, batch: InputBatch) -> Any:
        torch.cuda._sleep(LATE)
        return launch(self, batch)

    monkeypatch.setattr(Executor, "launch", late)


@pytest.mark.parametrize("kind", ["generating", "each step waited for", "pooling", "a draft model", "adapters"])
def test_a_late_device_changes_no_bit(kind: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = kinds(model)[kind]
    llm = LLM(str(model), **OPTIONS | options)
    right = bits(llm, options, model)
    make_late(monkeypatch)
    assert bits(llm, options, model) == right


def test_a_boot_on_a_late_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of many steps are captured and run without a wait in between."""
    one = DeviceGraphs._capture_one
    llm = LLM(str(model), **OPTIONS | POOLING)
    right = bits(llm, POOLING, model)

    def late(self: DeviceGraphs, bucket: Any) -> Any:
        torch.cuda._sleep(LATE)
        return one(self, bucket)

    monkeypatch.setattr(DeviceGraphs, "_capture_one", late)
    assert bits(LLM(str(model), **OPTIONS | POOLING), POOLING, model) == right


def test_copies_without_a_guard_are_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an engine that pools, with chunks that report nothing, without any wait.

    Steps of one prompt have the same rows and lengths, so a late read gives wrong numbers and does no harm.
    """
    llm = LLM(str(model), **OPTIONS | POOLING | {"enable_prefix_caching": False})
    long = prompts_of([load()[0][3][:240]])
    right = llm.encode(long, use_tqdm=False)[0].outputs.data.tobytes()
    other = [(token + 1) % 300 for token in long[0]["prompt_token_ids"]]
    llm.encode(prompts_of([other]), use_tqdm=False)  # else the cache would hold the right keys of steps that do not run
    make_late(monkeypatch)

    def take(self: StepBuffers, turn: int) -> Any:
        self._turn = turn
        return self._arrays[turn]

    states = Pooler.states

    def unread(self: Pooler, turn: int, count: int) -> np.ndarray:
        if count:
            torch.cuda.synchronize()
            return states(self, turn, count)
        return np.zeros((0, 0), np.float32)

    monkeypatch.setattr(StepBuffers, "take", take)
    monkeypatch.setattr(Pooler, "states", unread)
    assert llm.encode(long, use_tqdm=False)[0].outputs.data.tobytes() != right
