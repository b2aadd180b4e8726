"""Two boots of the engine on the CUDA backend without a GPU: the second one repeats no sampling program."""

from __future__ import annotations

from preheat import LLM, llm
from preheat.backends.cuda.sampling.sampler import CudaSampler
from preheat.warmup.record import ItemRecord, Record
from preheat.warmup.run import REPEATED
from tests.kernels.backend import InterpretedCuda, boot_on
from tests.kernels.test_device_engine import OPTIONS, answers, model, tokens_of  # noqa: F401 - a fixture

WARM = OPTIONS | {"skip_warmup": False, "on_cold": "raise", "max_num_seqs": 3}


def sampler_entries(engine: LLM) -> list[ItemRecord]:
    entries = Record.from_json(engine.loop.listener.report()).entries
    return [entry for entry in entries if entry.kind == "sampler" and entry.shape["rows"]]


def test_a_second_boot_repeats_no_sampling_program(model, tmp_path, monkeypatch):  # noqa: F811
    """It runs each program, and each setting once; requests are as hot, and their tokens equal."""
    monkeypatch.setattr(llm, "boot_engine", boot_on(InterpretedCuda()))
    runs: list[tuple[int, object]] = []
    sample = CudaSampler.sample

    def counted(self, level, logits):
        runs.append((len(logits), level))
        return sample(self, level, logits)

    monkeypatch.setattr(CudaSampler, "sample", counted)
    first = LLM(model, cache_dir=str(tmp_path), **WARM)
    every, programs = len(runs), set(runs)
    assert {(entry.outcome, entry.reason) for entry in sampler_entries(first)} == {("ready", "")}
    runs.clear()
    second = LLM(model, cache_dir=str(tmp_path), **WARM)
    assert set(runs) == programs
    assert len(runs) < every
    found = {(entry.outcome, entry.reason) for entry in sampler_entries(second)}
    assert found == {("reused", ""), ("reused", REPEATED)}
    repeated = [entry for entry in sampler_entries(second) if entry.reason]
    assert {entry.shape["rows"] for entry in repeated} == {2}  # neither the fewest nor the most
    assert tokens_of(answers(second)) == tokens_of(answers(first))
