"""Compile functions for a processor in a child process, keep the machine code, and load it.

LLVM ends its process when it cannot generate code, so a child compiles: see ``compiler.py``.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_int64, c_void_p
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm

from preheat.backends.cpu.llvm import targets
from preheat.backends.cpu.llvm.targets import Target, version
from preheat.errors import PreheatError
from preheat.utils.children import child_environment, python_command
from preheat.utils.files import read_file, why_unread, write_whole

logger = logging.getLogger(__name__)

_MADE: dict[tuple[str, Target], bytes] = {}
"""The machine code that this process has: an engine is built twice, once to be measured."""

compilations = 0
"""Models whose functions this process had compiled."""

_COUNTING = Lock()
_SECONDS = 300.0
_KEY_BYTES, _MOST_BYTES = 16, 1 << 26


class Code:
    """Loaded machine code of one or more sources. Keep it as long as its functions may run."""

    def __init__(self, *machine_code: bytes) -> None:
        _initialize()
        here = llvm.Target.from_default_triple().create_target_machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), here)
        for each in machine_code:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(each))
        self._engine.finalize_object()

    @cached_property
    def start(self) -> Any:
        """Run a function of a model as a job; see :func:`preheat.backends.cpu.llvm.job.jobs`."""
        return CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int64)(self.address("start"))

    @cached_property
    def run(self) -> Any:
        """Run functions of a model, one after another."""
        return CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64)(self.address("run"))

    @cached_property
    def post(self) -> Any:
        """Publish a list of functions of a model, for the first thread that sees it."""
        return CFUNCTYPE(None, c_void_p, c_void_p, c_int64)(self.address("post"))

    @cached_property
    def join(self) -> Any:
        """Take part in the published list until it is done."""
        return CFUNCTYPE(None, c_void_p)(self.address("join"))

    @cached_property
    def work(self) -> Any:
        """Take part in jobs."""
        return CFUNCTYPE(c_int64, c_void_p, c_int64, c_int64, c_int64)(self.address("work"))

    def address(self, name: str) -> int:
        """Return the address of a function."""
        found = int(self._engine.get_function_address(name))
        assert found, f"there is no function {name}"
        return found


def compile_code(source: str, folder: Path | None, target: Target | None = None) -> tuple[bytes, bool]:
    """Return the machine code of LLVM's ``source``, and whether ``folder`` had it.

    Code for another processor, or by another LLVM, is never taken from the folder. A folder that cannot be written is
    named in the log. ``target``: the processor, or None for this machine's. Raises PreheatError if LLVM cannot compile
    the source.
    """
    target = target or targets.here()
    if (known := _MADE.get((source, target))) is not None:
        return known, True
    key = _digest(repr((source, *target, version())).encode())
    kept = None if folder is None else folder / f"{key.hex()}.o"
    if (found := _read(kept, key)) is not None:
        return _MADE.setdefault((source, target), found), True
    made = _MADE[source, target] = _in_child(source, target)
    if kept is not None:
        _keep(kept, _digest(key + made) + made)
    return made, False


def compile_side_by_side(
    sources: Sequence[str], folder: Path | None, compiled: Callable[..., tuple[bytes, bool]] = compile_code
) -> list[bytes]:
    """Return the machine code of each of ``sources``. Each source that no folder has gets a child process."""
    with ThreadPoolExecutor(len(sources)) as pool:
        return [code for code, _ in pool.map(lambda source: compiled(source, folder), sources)]


def _read(path: Path | None, key: bytes) -> bytes | None:
    """Return the machine code in ``path``, None if it has none or other bytes than were written for ``key``."""
    if path is None:
        return None
    try:
        data = read_file(path, path.parent, most=_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read, so its functions are compiled again: %s", path, why_unread(error))
        return None
    code = data[_KEY_BYTES:]
    if data[:_KEY_BYTES] == _digest(key + code):
        return code
    logger.warning("%s is damaged, so its functions are compiled again", path)
    return None


def _keep(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        logger.warning("The next boot compiles again: %s cannot be written: %s", path, why_unread(error))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_KEY_BYTES).digest()


def _in_child(source: str, target: Target) -> bytes:
    global compilations  # noqa: PLW0603 - the counter of cold events, which lives as long as the process
    with _COUNTING:
        compilations += 1
    command = python_command("preheat.backends.cpu.llvm.compiler", *target)
    environment = child_environment()
    try:
        done = subprocess.run(
            command, input=source.encode(), capture_output=True, timeout=_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise _failed(target, f"it was not done after {_SECONDS:.0f} seconds") from None
    except OSError as error:
        raise _failed(target, f"{sys.executable} cannot be run: {error.strerror}") from None
    if done.returncode or not done.stdout:
        raise _failed(target, f"{_ending(done.returncode)}: {_said(done.stderr.decode(errors='replace'))}")
    return done.stdout


def _said(text: str) -> str:
    """Return the line of ``text`` with the error: the last one that names an error, else the last."""
    lines = text.strip().splitlines() or ["it said nothing"]
    return next((line.strip() for line in reversed(lines) if "error" in line.lower()), lines[-1])


def _ending(status: int) -> str:
    """Return how a process ended, by its status."""
    if status >= 0:
        return f"status {status}"
    hint = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
    return f"ended by {signal.Signals(-status).name}{hint}"


def _failed(target: Target, why: str) -> PreheatError:
    return PreheatError(
        f"execution mode llvm: LLVM {version()} cannot compile the model's layers for {target.processor} "
        f"({target.triple}): {why}; use --execution-mode eager"
    )


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
