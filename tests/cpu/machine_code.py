"""Machine code for any processor, to be read: its assembly, and the symbols that it needs."""

from __future__ import annotations

import pickle
import re
import struct
import subprocess
import sys

from preheat.backends.cpu.llvm.targets import Target

_WRITE = """
import pickle, sys
from preheat.backends.cpu.llvm import compiler, targets
module, made = compiler.optimized(sys.stdin.read(), targets.Target(*sys.argv[1:]))
sys.stdout.buffer.write(pickle.dumps((made.emit_assembly(module), made.emit_object(module))))
"""
_MACH_O, _SYMTAB, _TYPE = b"\xcf\xfa\xed\xfe", 2, 0x0E


def written(source: str, target: Target) -> tuple[str, bytes]:
    """Return assembly and object file of ``source`` for ``target``; a child compiles, as LLVM may end its process."""
    command = [sys.executable, "-c", _WRITE, *target]
    done = subprocess.run(command, input=source.encode(), capture_output=True, check=True, timeout=120)
    text, code = pickle.loads(done.stdout)
    return text, code


def instructions(text: str) -> list[str]:
    """Return the names of all instructions of an assembly, in order."""
    return re.findall(r"^\t([a-z][a-z0-9.]*)", text, re.MULTILINE)


def undefined(code: bytes) -> set[str]:
    """Return the symbols that an object file of ELF or Mach-O takes from elsewhere."""
    return _undefined_mach_o(code) if code[:4] == _MACH_O else _undefined_elf(code)


def _undefined_elf(code: bytes) -> set[str]:
    (first,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, first + size * number) for number in range(count)]
    found = set()
    for section in sections:
        if section[1] == 2:  # SHT_SYMTAB
            names = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                name, _, _, home = struct.unpack_from("<IBBH", code, at)
                if name and home == 0:
                    found.add(_text(code, names + name))
    return found


def _undefined_mach_o(code: bytes) -> set[str]:
    (commands,) = struct.unpack_from("<I", code, 16)
    found, at = set(), 32
    for _ in range(commands):
        kind, size = struct.unpack_from("<II", code, at)
        if kind == _SYMTAB:
            symbols, count, names, _ = struct.unpack_from("<IIII", code, at + 8)
            for number in range(count):
                name, what = struct.unpack_from("<IB", code, symbols + 16 * number)
                if not what & _TYPE:  # neither absolute nor in a section
                    found.add(_text(code, names + name).removeprefix("_"))
        at += size
    return found


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()
