"""Models and heads that draft for a model of two ranks: the first rank alone has and runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM
from preheat.parallel.leader import ParallelExecutor
from tests.cpu import test_eagle, test_mtp
from tests.cpu.checkpoints import MODELS
from tests.cpu.mtp_checkpoints import copying, save_with_layer
from tests.cpu.test_boot_check import SMALL

RANKS = {"tensor_parallel_size": 2}
EAGLE = test_eagle.saved


@contextmanager
def two_ranks(model: str, **options: Any) -> Iterator[LLM]:
    llm = LLM(model, **options, **RANKS)
    try:
        yield llm
    finally:
        executor = llm.loop.executor
        assert isinstance(executor, ParallelExecutor)
        executor.ranks.close()


@pytest.fixture(scope="module", params=test_mtp.FAMILIES)
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("right")
    save_with_layer(MODELS[request.param], folder, copying)
    return str(folder)


def test_a_layer_that_predicts_ahead_drafts_for_two_ranks(right: str) -> None:
    """Answers are those of one rank without drafts, and most drafts are kept."""
    plain = test_mtp.answers(LLM(right, **test_mtp.OPTIONS, tp_invariant=True))
    with two_ranks(right, **test_mtp.drafting()) as llm:
        assert test_mtp.answers(llm) == plain
        stats = llm.loop.scheduler.stats()
        assert stats.accepted_tokens > stats.draft_tokens / 2
        llm.loop.scheduler.check()


@pytest.mark.parametrize("family", test_mtp.FAMILIES)
def test_the_layer_reads_hidden_states_that_ranks_compute_together(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of drafts are those of transformers.

    Control: states of next positions that are not normed.
    """
    reference = save_with_layer(MODELS[family], tmp_path)
    for planted in (False, True):
        if planted:
            test_mtp.other_states(monkeypatch)
        with two_ranks(str(tmp_path), **test_mtp.drafting()) as llm:
            found = test_eagle.heard(llm)
            (output,) = llm.generate([{"prompt_token_ids": test_mtp.PROMPTS[2]}], test_mtp.PARAMS[0], use_tqdm=False)
        reference.read(test_mtp.PROMPTS[2] + output.outputs[0].token_ids)
        agreeing = test_mtp.agreeing(reference, found)
        assert agreeing <= 0.5 if planted else agreeing == 1.0


def test_a_head_of_eagle_reads_the_states_of_two_ranks(EAGLE: test_eagle.Saved) -> None:
    """Its logits are those of plain torch, at every draft."""
    config = {"method": "eagle3", "model": EAGLE.head, "num_speculative_tokens": 3}
    with two_ranks(EAGLE.target, **test_eagle.OPTIONS, speculative_config=config) as llm:
        found = test_eagle.heard(llm)
        llm.generate(*test_eagle.asked(), use_tqdm=False)
        assert len(found) > 100
        assert test_eagle.agreeing(EAGLE.reference, found) == 1.0


@pytest.mark.parametrize("ranks", [RANKS, {"pipeline_parallel_size": 2}], ids=["layers", "stages"])
def test_a_model_that_drafts_for_itself_is_always_right(ranks: dict[str, int], tmp_path: Path) -> None:
    """Nothing is cold, and the digest is that of one rank without drafts."""
    options: dict[str, Any] = SMALL | {"execution_mode": "eager", "num_threads": 1, "dtype": "float32"}
    config = {"method": "draft_model", "model": "bundled", "num_speculative_tokens": 3}
    prompts = [{"prompt_token_ids": each} for each in test_mtp.PROMPTS]
    plain = LLM(**options, tp_invariant="tensor_parallel_size" in ranks)
    wanted = [each.outputs[0].token_ids for each in plain.generate(prompts, test_mtp.PARAMS, use_tqdm=False)]
    llm = LLM(**options, **ranks, speculative_config=config)
    found = [each.outputs[0].token_ids for each in llm.generate(prompts, test_mtp.PARAMS, use_tqdm=False)]
    stats = llm.loop.scheduler.stats()
    assert found == wanted and llm.state.digest == plain.state.digest
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert not llm.loop.listener.record.cold
    llm.loop.executor.ranks.close()
