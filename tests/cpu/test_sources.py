"""Each origin of cold events on this machine is provoked for real.

The hooks of the others are tested.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preheat.backends import cold
from preheat.backends.cold import Counted, Tally
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.cold import COLD_SOURCES, count_calls, hook_triton
from preheat.backends.hpu.cold import cold_sources
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.schedule.scheduler import Scheduler
from preheat.warmup.cold_sources import ORIGINS, ColdSources

PAGE = Path(__file__).parents[2] / "docs" / "cold-events.md"


class Named:
    """One of the sources that are watched on a CPU, with the hooks of all of them."""

    def __init__(self, name: str) -> None:
        self.all = ColdSources(CpuBackend())
        self.new_events = self.all.sources[name].new_events


def compile_something() -> None:
    """Trace a new function with Dynamo and hand it to no compiler, so that none is needed."""
    made: dict[str, Any] = {}
    exec(compile("def double(x):\n    return x * 2", "made.py", "exec"), made)
    torch.compile(made["double"], backend="eager", dynamic=False)(torch.ones(3))


def test_every_platform_watches_every_origin():
    on_cpu = CpuBackend().cold_sources()
    for on in (on_cpu, COLD_SOURCES):
        assert set(on) == set(ORIGINS)
        for watch in on.values():
            assert watch.text
            assert (watch.make is None) == (watch.how == "none")
    watched = [name for name in ORIGINS if on_cpu[name].how != "none"]
    assert list(ColdSources(CpuBackend()).sources) == watched == ["dynamo", "llvm", "import"]


def test_the_page_shows_the_table():
    platforms = (CpuBackend().cold_sources(), COLD_SOURCES, cold_sources(None, int))
    rows = [
        f"| {name} | {what} | {' | '.join(f'**{on[name].how}**: {on[name].text}' for on in platforms)} |"
        for name, what in ORIGINS.items()
    ]
    shown = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [a-z ]+ \| .*\*\*", line)]
    assert shown == rows


def test_a_compiled_frame_is_reported_once_with_its_location():
    compile_something()  # before ready: does not count
    source = Named("dynamo")
    assert source.new_events() == ()
    compile_something()
    (said,) = source.new_events()
    assert re.fullmatch(r"double \(made\.py:1\) was compiled, \d+/\d+", said)
    assert source.new_events() == ()


def test_a_recompilation_is_reported_and_a_second_call_is_not():
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(add, backend="aot_eager", dynamic=False)
    compiled(torch.ones(5))
    source = Named("dynamo")
    compiled(torch.ones(5))
    assert source.new_events() == ()
    compiled(torch.ones(6))
    assert len(source.new_events()) == 1


def test_counters_that_someone_cleared_still_tell():
    compile_something()
    source = Named("dynamo")
    torch._dynamo.utils.counters.clear()
    compile_something()
    assert len(source.new_events()) == 1


def test_watching_imports_no_compiler_and_reports_a_first_compilation():
    code = (
        "import sys, torch; from preheat.backends.cpu.backend import CpuBackend\n"
        "from preheat.warmup.cold_sources import ColdSources\n"
        "found = ColdSources(CpuBackend())\n"
        "assert not found.new_events()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(3))\n"
        "told = [name for name, _ in found.new_events()]\n"
        "assert told == ['dynamo'], told"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_imports_of_a_step_are_reported(tmp_path, monkeypatch):
    for name in ("late_inner", "late_other", "late_mine"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "late_outer").mkdir()
    (tmp_path / "late_outer" / "__init__.py").write_text("import late_inner")
    (tmp_path / "late_outer" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    step: dict[str, Any] = {"__name__": f"{cold.STEP[0]}scheduler"}
    exec("def run(call): call()", step)
    source = Named("import")

    def needs() -> None:
        import late_outer.part  # noqa: F401

    def needs_more() -> None:
        importlib.import_module("late_other")

    import late_mine  # noqa: F401

    assert source.new_events() == ()
    step["run"](needs)
    assert source.new_events() == ["late_outer.part was imported"]  # and not its own imports
    step["run"](needs)
    assert source.new_events() == ()
    step["run"](needs_more)
    assert source.new_events() == ["late_other was imported"]


def test_the_loop_calls_functions_of_a_step():
    called = (Scheduler.schedule, Packer.pack, Executor.execute, Scheduler.process_results)
    assert [function.__module__.startswith(cold.STEP) for function in called] == [True] * 4


class Recorder:
    """Class in place of CUDAGraph, with a method without a hook."""

    def capture_begin(self, pool: Any = None) -> Any:
        return pool


def test_calls_of_a_method_are_counted_and_still_made():
    class Mine(Recorder):
        pass

    tally = Tally()
    source = Counted("graph capture", tally.read, tally.last)
    end = count_calls(Mine, "capture_begin", tally, "captured")
    assert Mine().capture_begin(pool=7) == 7
    assert Mine().capture_begin(8) == 8
    assert source.new_events() == ["captured", "captured"]
    assert source.new_events() == ()
    Recorder().capture_begin()
    assert source.new_events() == ()
    end_again = count_calls(Mine, "capture_begin", Tally(), "captured")
    end()
    assert Mine().capture_begin(9) == 9
    end_again()
    assert source.new_events() == ()


def test_hooks_are_removed_with_their_owner():
    before = list(sys.meta_path)
    watched = ColdSources(CpuBackend())
    assert len(sys.meta_path) == len(before) + 1
    watched.close()
    watched.close()
    assert sys.meta_path == before
    watched = ColdSources(CpuBackend())
    del watched
    assert sys.meta_path == before


def test_a_hook_keeps_the_count_when_words_run_out():
    tally = Tally()
    source = Counted("x", tally.read, tally.last)
    for number in range(cold.MAX_DETAILS + 5):
        tally.add(str(number))
    assert len(source.new_events()) == cold.MAX_DETAILS
    assert tally.count == cold.MAX_DETAILS + 5
    assert source.new_events() == ()


def test_costly_counters_are_read_every_nth_step_without_loss():
    tally, reads = Tally(), []
    source = Counted("x", lambda: reads.append(1) or tally.read(), tally.last, every=4)
    said = []
    for step in range(12):
        if step in (1, 2, 9):
            tally.add(str(step))
        said.append(list(source.new_events()))
    assert [step for step, words in enumerate(said) if words] == [3, 11]
    assert said[3] + said[11] == ["1", "2", "9"]
    assert len(reads) == 1 + 12 // 4


def test_forgotten_events_are_not_reported_later():
    tally = Tally()
    source = Counted("x", tally.read, tally.last, every=4)
    tally.add("before")
    source.forget()
    tally.add("after")
    assert [list(source.new_events()) for _ in range(4)] == [[], [], [], ["after"]]


def triton_event(knobs: Any, **how: Any) -> None:
    knobs.compilation.listener(
        src=SimpleNamespace(name="add_kernel"), metadata={}, metadata_group={}, times=None, **how
    )


def test_the_triton_hook_leaves_others_in_place():
    heard: list[bool] = []
    loads: list[Any] = []
    knobs = SimpleNamespace(
        compilation=SimpleNamespace(listener=lambda *, cache_hit, **_: heard.append(cache_hit)),
        runtime=SimpleNamespace(kernel_load_end_hook=SimpleNamespace(add=loads.append, remove=loads.remove)),
    )
    tally = Tally()
    source = Counted("triton", tally.read, tally.last)
    listener = knobs.compilation.listener
    end = hook_triton(knobs, tally)
    triton_event(knobs, cache_hit=False)
    triton_event(knobs, cache_hit=True)
    loads[0](None, None, "add_kernel", {}, "hash")
    assert heard == [False, True]
    assert source.new_events() == [
        "add_kernel was compiled",
        "add_kernel was read from the cache",
        "add_kernel was loaded",
    ]
    end()
    assert knobs.compilation.listener is listener
    assert loads == []


def test_triton_itself_calls_the_hook(tmp_path, monkeypatch):
    """Triton calls the hook when it compiles for a GPU.

    That needs no GPU.
    """
    triton = pytest.importorskip("triton", reason="no Triton for this machine")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    tally = Tally()
    hook_triton(triton.knobs, tally)
    kernel = triton.JITFunction(_nothing)
    for _ in range(2):
        triton.compile(ASTSource(kernel, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
    assert tally.last(2) == ["_nothing was compiled", "_nothing was read from the cache"]


def _nothing(x):
    pass
