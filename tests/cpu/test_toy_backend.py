"""A platform is one class.

A toy backend boots the bundled model and finds the tokens of the CPU backend.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.cpu.toy_backend
from preheat import LLM, SamplingParams, llm, startup
from preheat.frontend.outputs import RequestOutput
from tests.cpu.toy_backend import ToyAttention, ToyBackend

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96, "block_size": 16,
    "boot_check": "off",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=3, top_p=0.9, repetition_penalty=1.2, max_tokens=8, logprobs=2)
PROMPTS = ["def add(a, b):", "import os\nimport sys\n\n\ndef main() -> None:\n    for name in os.listdir():\n", "x"]


def answers(engine: LLM) -> list[RequestOutput]:
    """Return answers of several rows, prompts in chunks, penalties and logprobs."""
    found = engine.generate([*PROMPTS, PROMPTS[0]], [GREEDY, GREEDY, GREEDY, SEEDED], use_tqdm=False)
    engine.loop.scheduler.check()
    return found


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot engines on the toy backend."""
    monkeypatch.setattr(llm, "boot_engine", partial(startup.boot_engine, backend=ToyBackend()))


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return answers(LLM(device="cpu", **OPTIONS))


@pytest.mark.usefixtures("toy")
def test_it_finds_the_tokens_of_the_cpu(expected: list[RequestOutput]) -> None:
    engine = LLM(**OPTIONS)
    assert isinstance(engine.loop.executor.backend, ToyBackend)
    found = answers(engine)
    assert tokens_of(found) == tokens_of(expected)
    ours, theirs = (outputs[-1].outputs[0].logprobs for outputs in (found, expected))
    assert ours is not None and theirs is not None
    for one, other in zip(ours, theirs, strict=True):
        assert {token: entry.rank for token, entry in one.items()} == {t: entry.rank for t, entry in other.items()}
        assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-4)


@pytest.mark.usefixtures("toy")
def test_the_comparison_can_fail(expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: block tables of another step, so that all sequences read the pad block."""
    write = ToyAttention.write

    def blank(self: ToyAttention, turn: int, tables: Any) -> None:
        write(self, turn, tables)
        self.tables[turn][:] = 0

    monkeypatch.setattr(ToyAttention, "write", blank)
    assert tokens_of(answers(LLM(**OPTIONS))) != tokens_of(expected)


@pytest.mark.usefixtures("toy")
def test_it_warms_up_as_any_platform_does() -> None:
    engine = LLM(
        **OPTIONS | {"max_num_seqs": 1, "max_model_len": 32}, skip_warmup=False, determinism_warmup_iterations=0
    )
    assert engine.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


def test_the_toy_backend_stays_below_180_lines() -> None:
    assert len(Path(tests.cpu.toy_backend.__file__).read_text().splitlines()) < 180
    assert ToyBackend().device == torch.device("cpu")
