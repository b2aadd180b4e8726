"""The trial engine has the kernels of the engine that serves, and nothing of it stays."""

import gc
import weakref
from contextlib import nullcontext

import pytest

from preheat import LLM
from preheat.backends.cpu.backend import CpuBackend
from preheat.execution.executor import Executor
from preheat.warmup import trial

SMALL = {
    "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 16, "boot_check": "off",
    "cache_dir": "off",
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Return the executors whose programs were compiled, on a host that pretends to compile kernels."""
    found = []

    def note(self, programs, threads, layers=()):
        found.append((weakref.ref(self), list(programs), list(layers)))

    monkeypatch.setattr(CpuBackend, "compiling", lambda self, threads, layers=(): nullcontext())
    monkeypatch.setattr(Executor, "compile", note)
    return found


def boot(**options):
    gc.disable()
    try:
        return LLM(**SMALL | {"skip_warmup": False} | options)
    finally:
        gc.enable()


@pytest.mark.parametrize("collects", [True, False], ids=["", "control"])
def test_nothing_of_the_trial_engine_stays(compiled, monkeypatch, collects):
    alive = []
    run = trial.compile_kernels

    def watched(*given):
        run(*given)
        alive.append(compiled[0][0]() is not None)

    monkeypatch.setattr("preheat.warmup.fitting.compile_kernels", watched)
    if not collects:
        monkeypatch.setattr(trial.gc, "collect", lambda: 0)
    boot()
    assert alive == [not collects]


def test_all_programs_and_layers_are_compiled_before_anything_runs(compiled, monkeypatch):
    ran = []
    monkeypatch.setattr(
        Executor, "execute", lambda self, batch, run=Executor.execute: ran.append(1) or run(self, batch)
    )
    plan = boot().loop.packer.plan
    (_, programs, layers), *later = compiled
    assert {plan.program_of(item.program) for item in plan.items if item.program} <= set(programs)
    assert layers and ran and not later


@pytest.mark.parametrize("guided", [True, False])
def test_the_trial_engine_has_masks_where_the_engine_has(compiled, monkeypatch, guided):
    made = []
    sampler = CpuBackend.sampler

    def note(self, *given, masked=False, **more):
        made.append(masked)
        return sampler(self, *given, masked=masked, **more)

    monkeypatch.setattr(CpuBackend, "sampler", note)
    boot(**({} if guided else {"structured_outputs_config": {"backend": "none"}}))
    assert len(made) > 1 and set(made) == {guided}
