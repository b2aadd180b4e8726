"""No host copy is written while a device, however late, may still read it, in any engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat import LLM, SamplingParams, StructuredOutputsParams, llm
from preheat.execution.buffers import StepBuffers
from preheat.execution.pooler import Pooler
from tests.cpu.eagle_reference import random_tensors, save_head, save_target
from tests.kernels.backend import boot_on
from tests.kernels.late_device import LateCuda
from tests.kernels.test_device_engine import CONFIG, OPTIONS
from tests.tokenizers import byte_level

PROMPTS = [[5, 6, 7] * 13, [9, 8], [1], [2, 3] * 15]
"""The first is read in three steps, the last in two."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=1, logprobs=2, max_tokens=5, ignore_eos=True)
MASKED = SamplingParams(
    temperature=0, max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"), repetition_penalty=1.2
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    late = LateCuda()
    monkeypatch.setattr(llm, "boot_engine", boot_on(late))
    return late


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 352}))
    byte_level().save(str(folder / "tokenizer.json"))
    return str(folder)


def prompts(count: int = len(PROMPTS)) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in PROMPTS[:count]]


def generated(backend: LateCuda, engine: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    params = [GREEDY, SEEDED, GREEDY, SEEDED][:count]
    with backend.late:
        found = engine.generate(prompts(count), params, use_tqdm=False)
        backend.late.finish()
    return [output.outputs[0].token_ids for output in found]


def pooled(backend: LateCuda, model: str, kind: str, **more: Any) -> list[bytes]:
    with backend.late:
        engine = LLM(model, runner="pooling", pooler_config={"pooling_type": kind}, **OPTIONS | more)
        assert engine.loop.overlap
        found = engine.encode(prompts(), use_tqdm=False)
        backend.late.finish()
    return [output.outputs.data.tobytes() for output in found]


def test_pooling_in_chunks(model: str, backend: LateCuda) -> None:
    """The states of a chunk come to the host, and those of a text in one step are added up on the device."""
    assert pooled(backend, model, "MEAN") == pooled(backend, model, "MEAN", max_num_batched_tokens=40)
    assert backend.late.copies > 20 and not backend.late.rewritten
    pooled(backend, model, "LAST")  # nothing of a chunk is reported, so nothing else waits for its step
    assert not backend.late.rewritten


def test_generating_a_step_ahead(model: str, backend: LateCuda) -> None:
    engine = LLM(model, **OPTIONS)
    assert engine.loop.overlap
    assert generated(backend, engine) == generated(backend, LLM(model, **OPTIONS, async_scheduling=False))
    assert backend.late.copies > 20 and not backend.late.rewritten


def test_masks_and_penalties(model: str, backend: LateCuda) -> None:
    engine = LLM(model, **OPTIONS | {"skip_tokenizer_init": False})
    with backend.late:
        found = engine.generate(prompts(), MASKED, use_tqdm=False)
        backend.late.finish()
    assert {output.outputs[0].text.strip("ab") for output in found} == {""}
    assert not backend.late.rewritten


def test_a_head_that_drafts(tmp_path: Path, backend: LateCuda) -> None:
    """Steps of the head follow each other and the target's steps without waiting for each one.

    Three prompts are enough: one is read in three steps, one beside it, and one takes the slot of the first to end.
    """
    save_target(tmp_path)
    head = save_head(tmp_path / "head", random_tensors())
    options = OPTIONS | {"load_format": "auto", "dtype": "float32", "num_gpu_blocks_override": 9}
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 2}
    alone = generated(backend, LLM(str(tmp_path), device="cpu", execution_mode="eager", **options), 3)
    assert not backend.late.copies  # the CPU is on time
    assert generated(backend, LLM(str(tmp_path), **options, speculative_config=drafts), 3) == alone
    assert backend.late.copies > 20 and not backend.late.rewritten


def unguarded(self: StepBuffers, turn: int) -> Any:
    """Return the host copies in turns, as if the device were never late."""
    self._turn = turn
    return self._arrays[turn]


def test_copies_without_a_guard_are_noticed(model: str, backend: LateCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: pooling reports nothing of a chunk, so nothing waits."""

    def states(self: Pooler, turn: int, count: int) -> np.ndarray:
        return waits(self, turn, count) if count else np.zeros((0, 1), np.float32)

    waits = Pooler.states
    monkeypatch.setattr(Pooler, "states", states)
    monkeypatch.setattr(StepBuffers, "take", unguarded)
    pooled(backend, model, "LAST")
    assert backend.late.rewritten
