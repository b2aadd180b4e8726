"""Listeners of every step: the log of compilations and of fallbacks, and the trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.engine.listeners import StepLog
from preheat.utils.trace import untraced

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Let Dynamo forget the compiled code of earlier tests."""
    torch._dynamo.reset()


def steps(llm: LLM) -> int:
    """Return the number of steps of one request."""
    before = llm.loop.scheduler.stats().steps
    llm.generate("def f():", PARAMS, use_tqdm=False)
    return llm.loop.scheduler.stats().steps - before


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(name)]


def in_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, extra: Callable[[], Any]) -> None:
    """Have ``extra`` happen in every step of ``llm``."""
    right = llm.loop.executor.launch

    def launch(batch: Any) -> Any:
        extra()
        return right(batch)

    monkeypatch.setattr(llm.loop.executor, "launch", launch)


def broken_graph() -> Callable[[], Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    run = torch.compile(function, backend="eager")
    return lambda: run(torch.ones(2))


def compiled_once() -> Callable[[], Any]:
    run = torch.compile(lambda x: x + 1, backend="eager")
    return lambda: run(torch.ones(2))


CASES = [
    ("log_step_graph_compilation", "STEP_GRAPH_COMPILATION", compiled_once),
    ("log_step_cpu_fallbacks", "STEP_CPU_FALLBACKS", broken_graph),
]


@pytest.mark.parametrize(("option", "name", "event"), CASES)
def test_steps_with_a_logged_event_are_named(option, name, event, caplog, monkeypatch):
    llm = LLM(**SMALL, **{option: True})
    with caplog.at_level(logging.INFO):
        steps(llm)
        assert logged(caplog, name) == []
        in_a_step(llm, monkeypatch, event())
        steps(llm)
    (line,) = logged(caplog, name)  # compiled in the first step, found in the others
    assert line.startswith(f"{name}: 1")
    assert "tokens sampled" in line


@pytest.mark.parametrize(("option", "name", "event"), CASES)
def test_every_step(option, name, event, caplog, monkeypatch):
    llm = LLM(**SMALL, **{f"{option}_all": True})
    in_a_step(llm, monkeypatch, event())
    with caplog.at_level(logging.INFO):
        count = steps(llm)
    first, *others = logged(caplog, name)
    assert len(others) == count - 1 > 0
    assert first.startswith(f"{name}: 1")
    assert all(line.startswith(f"{name}: 0") for line in others)


def test_the_report_passes_through():
    listener = LLM(**SMALL, log_step_graph_compilation=True).loop.listener
    assert isinstance(listener, StepLog)
    assert listener.report().startswith(b"{")


@pytest.mark.parametrize(("mode", "warned"), [("eager", True), ("compile", False)])
def test_a_mode_that_cannot_fall_back_says_so(mode, warned, caplog):
    LLM(**SMALL, execution_mode=mode, log_step_cpu_fallbacks=True)
    assert bool([text for text in caplog.messages if "no operation can fall back" in text]) is warned


@pytest.mark.parametrize(("mode", "late"), [("eager", False), ("llvm", True)])
def test_a_trace_of_the_engine(mode: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of compiled functions goes on, so that the next call processes its results first."""
    monkeypatch.chdir(tmp_path)
    llm = LLM(**SMALL, profiler_enabled=True, execution_mode=mode)
    count = steps(llm)
    (path,) = tmp_path.glob("preheat_trace_*.json")
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    named: dict[str, list[Any]] = {}
    for event in events:
        named.setdefault(event["name"], []).append(event)
    assert {"Importing torch", "Loading model weights", "Initializing cache engine"} <= named.keys()
    parts = ("pack", "launch", "process_results")
    assert {name: len(named[name]) for name in parts} == dict.fromkeys(parts, count)
    assert [len(named[name]) for name in ("step", "schedule")] == [count + late] * 2
    for i, step in enumerate(named["step"]):
        run = [named[part][i] for part in ("schedule", "pack", "launch") if i < len(named[part])]
        processed = named["process_results"][max(i - late, 0) : i + 1 - late]
        times = [(part["ts"], part["ts"] + part["dur"]) for part in (processed + run if late else run + processed)]
        edges = [step["ts"], *(edge for pair in times for edge in pair), step["ts"] + step["dur"]]
        assert edges == sorted(edges)
    said = named["pack"][-1]["args"]
    assert said == {"rows": 1, "tokens": 1, "bucket": "(decode, 1)"}


def test_without_the_options_calls_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = LLM(**SMALL).loop
    assert loop.call is untraced
    assert not isinstance(loop.listener, StepLog)
    assert list(tmp_path.iterdir()) == []
