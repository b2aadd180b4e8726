"""Compiling in a child, and the folder that keeps machine code: every way in which either goes wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from preheat import LLM
from preheat.errors import PreheatError
from tests.cpu.test_llvm import LLVM, checkpoint

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import functions, job, machine, targets
from preheat.backends.cpu.llvm.kinds import COUNTERS, Product
from preheat.backends.cpu.llvm.targets import TARGETS


@pytest.fixture(autouse=True)
def _own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in children here, whatever the run's other tests compiled."""
    monkeypatch.setattr(machine, "_in_child", inspect.unwrap(machine._in_child))


@pytest.fixture
def source() -> str:
    module = ir.Module("kept")
    module.triple = targets.here().triple
    functions.alone(module, "alone", Product(16, 32, "float32"))
    job.jobs(module, COUNTERS)
    return str(module)


def compiled(source: str, folder: Path | None, target: targets.Target | None = None) -> tuple[bytes, bool]:
    """Compile as a new process would: nothing is known from before."""
    machine._MADE.clear()
    return machine.compile_code(source, folder, target)


def test_code_is_kept_for_the_next_boot(source, tmp_path):
    made, known = compiled(source, tmp_path / "llvm")
    assert not known
    assert len(list((tmp_path / "llvm").iterdir())) == 1
    assert compiled(source, tmp_path / "llvm") == (made, True)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1] + b"x", lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data[1:]]
)
def test_damaged_code_is_compiled_again(damage, source, tmp_path, caplog):
    made, _ = compiled(source, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    assert compiled(source, tmp_path) == (made, False)
    assert "is damaged, so its functions are compiled again" in caplog.text
    assert compiled(source, tmp_path) == (made, True)


def test_code_for_another_processor_or_of_another_llvm_is_never_loaded(source, tmp_path, monkeypatch, caplog):
    here = targets.here()
    made, _ = compiled(source, tmp_path)
    (mine,) = tmp_path.iterdir()
    less = here._replace(features=here.features + ",-fma4")
    for target in (less, here._replace(processor="generic")):
        assert not compiled(source, tmp_path, target)[1]
    monkeypatch.setattr(machine, "version", lambda: "1.2.3")
    assert not compiled(source, tmp_path)[1]
    monkeypatch.undo()
    others = [path for path in tmp_path.iterdir() if path != mine]
    assert len(others) == 3
    mine.write_bytes(others[0].read_bytes())  # renamed by hand, or copied from another machine
    assert compiled(source, tmp_path) == (made, False)
    assert "is damaged" in caplog.text


def test_a_folder_that_cannot_be_written_or_read_costs_a_warning(source, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert not compiled(source, blocked)[1]
    assert "The next boot compiles again" in caplog.text
    caplog.clear()
    compiled(source, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    kept.unlink()
    kept.mkdir()
    assert not compiled(source, tmp_path / "kept")[1]
    assert "cannot be read, so its functions are compiled again" in caplog.text


def test_two_processes_compile_into_one_folder(source, tmp_path):
    code = """
import sys
from pathlib import Path
from preheat.backends.cpu.llvm import machine
print(machine.compile_code(sys.stdin.read(), Path(sys.argv[1]))[0].hex())
"""

    def another(_: int) -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(another, range(2))
    assert first == second != ""
    assert compiled(source, tmp_path) == (bytes.fromhex(first), True)
    assert [path.suffix for path in tmp_path.iterdir()] == [".o"]  # and no part of a file


CHILDREN = {
    "hangs": ("sleep 60", "it was not done after 1 seconds"),
    "is killed": ("kill -9 $$", "ended by SIGKILL, perhaps for want of memory"),
    "ends by a signal": ("echo LLVM ERROR: Cannot select >&2; kill -6 $$", "ended by SIGABRT: LLVM ERROR: Cannot sel"),
    "fails": ("echo MemoryError >&2; exit 1", "status 1: MemoryError"),
    "says nothing": ("exit 0", "status 0: it said nothing"),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_that(name, source, tmp_path, monkeypatch):
    script, message = CHILDREN[name]
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\n{script}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(machine, "_SECONDS", 1.0 if name == "hangs" else 60.0)
    started = time.monotonic()
    with pytest.raises(PreheatError, match=f"cannot compile the model's layers for .*{message}.*; use --execution-mo"):
        compiled(source, None)
    assert time.monotonic() - started < 30


def test_no_child_at_all(source, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(PreheatError, match="/no/python cannot be run: No such file"):
        compiled(source, None)


def test_code_that_cannot_be_made_ends_the_boot_with_a_message(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    right = machine.compile_code
    broken = lambda source, *rest: right(source.replace("ret void", "ret i32 0"), *rest)  # noqa: E731
    monkeypatch.setattr("preheat.backends.cpu.llvm.model.compile_code", broken)
    with pytest.raises(PreheatError, match=r"cannot compile the model's layers .* value doesn't match function result"):
        LLM(str(tmp_path), **LLVM)


def test_code_that_llvm_cannot_select_ends_the_child_alone():
    """LLVM ends its process: in this one it would end the tests."""
    source = """target triple = "x86_64-unknown-linux-gnu"
declare void @llvm.aarch64.clrex()
define void @foreign() {
  call void @llvm.aarch64.clrex()
  ret void
}
"""
    with pytest.raises(PreheatError, match=r"ended by SIGABRT: .*; use --execution-mode eager"):
        compiled(source, None, TARGETS["avx2"])


def test_messages_name_the_processor_and_llvm(source, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    target = TARGETS["neon"]
    with pytest.raises(PreheatError, match=rf"LLVM {targets.version()} .* for generic \(aarch64-unknown-linux-gnu\)"):
        compiled(source, None, target)
