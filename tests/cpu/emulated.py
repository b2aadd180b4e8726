"""A program for 64-bit Linux on Arm that runs compiled functions on a memory image, under an emulator."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LINKER = shutil.which("aarch64-linux-gnu-ld")
MISSING = "needs qemu-aarch64 and aarch64-linux-gnu-ld: apt install qemu-user binutils-aarch64-linux-gnu"

_PROGRAM = """
@memory = global [{size} x i8] zeroinitializer, align 64
@frame = global [64 x i64] [{frame}]
@layer = global [64 x i64] [{layer}]

@system = constant [6 x i32] [{system}]

define void @_start() {{
  %read = call i64 @system(i64 63, i64 0, ptr @memory, i64 {size})
  call void @start(ptr @frame, ptr @{function}, ptr @layer, i64 0)
  %written = call i64 @system(i64 64, i64 1, ptr @memory, i64 {size})
  %end = call i64 @system(i64 93, i64 0, ptr @memory, i64 0)
  unreachable
}}

define i32 @sched_yield() {{
  ret i32 0
}}
"""
"""The program fills its memory from the standard input, runs a function, and writes the memory out.

63, 64 and 93 are the calls of Linux to read, write and exit.
"""

_SYSTEM = (0xAA0003E8, 0xAA0103E0, 0xAA0203E1, 0xAA0303E2, 0xD4000001, 0xD65F03C0)
"""Instructions of a system call: the number to x8, three arguments to x0, x1 and x2, svc 0, ret."""


class Memory:
    """A memory image, made of arrays at offsets that are multiples of 64."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, array: np.ndarray) -> int:
        """Append an array and return its offset."""
        at = len(self.data)
        self.data += array.tobytes() + bytes(-array.nbytes % 64)
        return at


def program(function: str, memory: Memory, frame: Mapping[int, int], layer: Mapping[int, int]) -> str:
    """Return a program in LLVM's language. Fields of frames are numbers, or -1 - offset for addresses."""

    def words(fields: Mapping[int, int]) -> str:
        def word(value: int) -> str:
            if value >= 0:
                return f"i64 {value}"
            return f"i64 ptrtoint (ptr getelementptr (i8, ptr @memory, i64 {-1 - value}) to i64)"

        return ", ".join(word(fields.get(place, 0)) for place in range(64))

    system = ", ".join(f"i32 {each}" for each in _SYSTEM)
    return _PROGRAM.format(
        system=system, size=len(memory.data), frame=words(frame), layer=words(layer), function=function
    )


def run(code: bytes, memory: Memory, folder: Path) -> bytes:
    """Link ``code`` and run it under the emulator; return the memory after it."""
    assert EMULATOR is not None, MISSING
    assert LINKER is not None, MISSING
    (folder / "code.o").write_bytes(code)
    (folder / "memory").write_bytes(memory.data)
    subprocess.run([LINKER, "--omagic", "-o", folder / "program", folder / "code.o"], check=True)
    with open(folder / "memory", "rb") as given, open(folder / "after", "wb") as after:
        subprocess.run([EMULATOR, folder / "program"], stdin=given, stdout=after, check=True, timeout=120)
    return (folder / "after").read_bytes()
