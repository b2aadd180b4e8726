"""``preheat verify``'s paths with interrupted answers, and the planted fault of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from preheat.grammar.state import State
from preheat.ops.sampler import TokenCounts
from preheat.schedule.sequence import Sequence
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.compare import PathResult
from preheat.verify.crowded_paths import Crowd, grammars_interrupted, penalties_interrupted
from preheat.verify.drive import Engine

pytestmark = pytest.mark.usefixtures("two_layers")

OUTPUTS = 16
OPTIONS = {
    "max_num_seqs": 8, "max_model_len": 96, "block_size": 16, "num_gpu_blocks_override": 12, "skip_warmup": True,
    "boot_check": "off", "on_cold": "off", "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(boot_engine, Settings.load(OPTIONS))


def results(engine: Engine) -> dict[str, PathResult]:
    engine.loop.executor.sampler.forget()
    found = (path(engine, OUTPUTS) for path in (penalties_interrupted, grammars_interrupted))
    return {result.path: result for result in found if result is not None}


def test_all_is_well_and_answers_are_interrupted(engine):
    found = results(engine)
    assert list(found) == ["penalties, interrupted", "grammars, interrupted"]
    assert [result.first for result in found.values()] == [None, None]
    assert all(int(result.note.split()[0]) > 2 for result in found.values())


def test_an_engine_with_enough_blocks_interrupts_nothing(engine, monkeypatch):
    limits = replace(engine.loop.scheduler.limits, max_num_seqs=1)
    monkeypatch.setattr(engine.loop.scheduler, "limits", limits)
    assert Crowd.of(engine, OUTPUTS) is None


def first_token_is_prompt(patch):
    """Plant penalties that count a resumed answer's first token as a prompt token."""
    right = TokenCounts.reset
    patch.setattr(
        TokenCounts, "reset",
        lambda self, slot, prompt, output: right(self, slot, np.append(prompt, output[:1]), output[1:]),
    )  # fmt: skip


def grammar_begins_again(patch):
    """Plant a grammar that begins again when its sequence is preempted."""
    begin, right, begun = State.__init__, Sequence.preempted, {}

    def kept(self, backend, matcher, request):
        begin(self, backend, matcher, request)
        begun[request.id] = self.matcher.deep_copy()

    def preempted(self, *args):
        if self.grammar is not None:
            self.grammar.matcher = begun[self.request.id].deep_copy()
        return right(self, *args)

    patch.setattr(State, "__init__", kept)
    patch.setattr(Sequence, "preempted", preempted)


@pytest.mark.parametrize(
    ("plant", "path"),
    [(first_token_is_prompt, "penalties, interrupted"), (grammar_begins_again, "grammars, interrupted")],
)
def test_each_planted_fault_is_found_by_its_path_alone(engine, plant, path, monkeypatch):
    plant(monkeypatch)
    found = results(engine)
    assert [name for name, result in found.items() if result.first] == [path]
    assert found[path].identical < found[path].prompts
