"""Compile functions for a processor in a child process, keep the machine code, and load it.

LLVM ends its process when it cannot generate code, so a child compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import CFUNCTYPE, c_int64, c_void_p
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from preheat.errors import PreheatError
from preheat.utils.files import read_file, write_whole

TARGETS = {
    "avx2": ("x86-64-v3", "-avx512f"),
    "sse": ("x86-64-v2", "-fma,-avx"),
}
"""Processors that tests compile for beside this one: name and features. Without fused multiply-add the C library's
``fmaf`` takes its place.
"""

_MADE: dict[tuple[str, str], bytes] = {}
"""The machine code that this process has: an engine is built twice, once to be measured."""

compilations = 0
"""Models whose functions this process had compiled."""

_SECONDS = 300.0
_KEY_BYTES, _MOST_BYTES = 16, 1 << 26


class Code:
    """Loaded machine code. Keep it as long as its functions may run."""

    def __init__(self, machine_code: bytes, target: str = "") -> None:
        _initialize()
        host = _machine(target)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), host)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
        self._engine.finalize_object()
        self.start = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(self.address("start"))
        self.work = CFUNCTYPE(c_int64, c_void_p, c_int64, c_int64, c_int64)(self.address("work"))

    def address(self, name: str) -> int:
        """Return the address of a function."""
        found = int(self._engine.get_function_address(name))
        assert found, f"there is no function {name}"
        return found


def compile_code(source: str, folder: Path | None, target: str = "") -> tuple[bytes, bool]:
    """Return the machine code of LLVM's ``source``, and whether ``folder`` had it. ``target``: see :data:`TARGETS`.

    Raises PreheatError if LLVM cannot compile it.
    """
    if (known := _MADE.get((source, target))) is not None:
        return known, True
    key = blake2b(repr((source, target, describe(target))).encode(), digest_size=_KEY_BYTES).hexdigest()
    kept = None if folder is None else folder / f"{key}.o"
    if (found := _read(kept)) is not None:
        return _MADE.setdefault((source, target), found), True
    made = _MADE[source, target] = _in_child(source, target)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, _digest(made) + made)
    return made, False


def _read(path: Path | None) -> bytes | None:
    """Return the machine code in ``path``, None if it has none or other bytes than were written."""
    if path is None or not path.exists():
        return None
    try:
        data = read_file(path, path.parent, most=_MOST_BYTES)
    except OSError:
        return None
    code = data[_KEY_BYTES:]
    return code if data[:_KEY_BYTES] == _digest(code) else None


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_KEY_BYTES).digest()


def _in_child(source: str, target: str) -> bytes:
    global compilations  # noqa: PLW0603 - the counter of cold events, which lives as long as the process
    compilations += 1
    command = [sys.executable, "-P", "-m", "preheat.backends.cpu.llvm.machine", target]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, input=source.encode(), capture_output=True, timeout=_SECONDS, check=False, env=environment
    )
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise PreheatError(
            f"execution mode llvm: LLVM {version()} cannot compile the model's layers for {describe(target)} (status "
            f"{done.returncode}: {said[0]}); use --execution-mode eager"
        )
    return done.stdout


def version() -> str:
    """Return LLVM's version."""
    return ".".join(map(str, llvm.llvm_version_info))


def describe(target: str = "") -> str:
    """Return the processor that code is compiled for, with LLVM's version."""
    name, features = _processor(target)
    return f"{name}, {features}, LLVM {version()}"


@cache
def _processor(target: str) -> tuple[str, str]:
    if target:
        return TARGETS[target]
    features = llvm.get_host_cpu_features().flatten()
    return llvm.get_host_cpu_name(), f"{features},-prefer-256-bit"


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _machine(target: str) -> Any:
    name, features = _processor(target)
    return llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=3)


def main() -> None:
    """Compile standard input to standard output."""
    _initialize()
    machine = _machine(sys.argv[1])
    module = llvm.parse_assembly(sys.stdin.read())
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    sys.stdout.buffer.write(machine.emit_object(module))


if __name__ == "__main__":
    main()
