"""Pipeline parallelism on a CPU: stages change no bits, with or without ranks that share a stage's layers."""

from __future__ import annotations

import os
import signal

import pytest

from preheat import LLM, SamplingParams
from preheat.errors import RankDied
from tests.cpu.test_tensor_parallel import OPTIONS, answers, record_of


def close(llm: LLM) -> None:
    if (ranks := getattr(llm.loop.executor, "ranks", None)) is not None:
        ranks.close()


def found(stages: int, size: int = 1, **more: object) -> tuple[str, object]:
    """The digest and the answers of an engine."""
    llm = LLM(pipeline_parallel_size=stages, tensor_parallel_size=size, **OPTIONS | more)
    try:
        return record_of(llm).proof.digest, answers(llm)
    finally:
        close(llm)


@pytest.fixture(scope="module")
def one() -> tuple[str, object]:
    return found(1)


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_have_the_digest_and_the_answers_of_one_engine(stages, one):
    assert found(stages) == one


def test_stages_of_two_ranks_each():
    assert found(2, 2) == found(1, tp_invariant=True)


def test_a_stage_that_is_killed_ends_the_engine():
    llm = LLM(pipeline_parallel_size=2, **OPTIONS)
    os.kill(llm.loop.executor.ranks._processes[0].pid, signal.SIGKILL)
    with pytest.raises(RankDied, match="Rank 1 ended"):
        llm.generate(["x"] * 3, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
