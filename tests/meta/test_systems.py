"""macOS runs the CPU's engine, and Windows is refused in one line: no call of Linux alone is left without a guard."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.source import MODULES, ROOT, name_of

LINUX = {
    "os": {
        "sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "memfd_create", "pidfd_open", "eventfd",
        "copy_file_range", "splice", "posix_fadvise", "posix_fallocate", "unshare", "setns", "getrandom", "pipe2",
        "O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME", "P_PIDFD",
    },
    "mmap": {"MADV_HUGEPAGE", "MADV_POPULATE_WRITE", "MAP_POPULATE", "MAP_HUGETLB", "MADV_DONTFORK"},
    "select": {"epoll", "EPOLLIN"},
    "socket": {"SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "TCP_KEEPIDLE",
               "TCP_USER_TIMEOUT"},
    "fcntl": {"F_SETPIPE_SZ", "F_ADD_SEALS", "F_OFD_SETLK"},
    "resource": {"prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING"},
    "signal": {"sigtimedwait", "sigwaitinfo", "SIGRTMIN", "pidfd_send_signal"},
    "time": {"CLOCK_BOOTTIME"},
}  # fmt: skip
"""Names of the standard library that macOS lacks."""

FILES = {
    "utils.memory": "a file that is missing is answered by a program of macOS",
    "utils.helper": "without the file a helper has no limit of memory",
    "utils.processors": "without the files each processor is a core",
    "backends.cpu.environment": "without the file the instruction set is unknown",
    "utils.shared_files": "without the folder files lie in the folder of temporary files",
    "extras.doctor": "without the folder there is no finding",
    "warmup.store": "without the file the standard library names the processor",
}
"""Modules that read /proc, /sys or /dev/shm, and their answer on macOS."""

OURS = [path for path in MODULES if not name_of(path).startswith(("backends.cuda", "backends.hpu"))]


def unguarded(source: str) -> set[str]:
    """Return the names of Linux alone that ``source`` uses in a function, or a module, that asks for none of them."""
    found: set[str] = set()
    if not any(name in source for names in LINUX.values() for name in names):
        return found

    def walk(node: ast.AST, asked: frozenset[str]) -> None:
        for child in ast.iter_child_nodes(node):
            here = asked | _asked(child) if isinstance(child, GUARDING) else asked
            match child:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if name in LINUX.get(module, ()):
                    if not here & {name, "sys.platform"}:
                        found.add(f"{module}.{name}")
                case ast.ImportFrom(module=module, names=names):
                    found.update(f"{module}.{each.name}" for each in names if each.name in LINUX.get(module or "", ()))
            walk(child, here)

    walk(ast.parse(source), frozenset())
    return found


GUARDING = ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.IfExp | ast.Assign


def _asked(node: ast.AST) -> set[str]:
    """Return the names that ``node`` asks a module for, and "sys.platform" if it asks for the system."""
    found = {"sys.platform" for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr == "platform"}
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
    return found


FOLDERS = ("/proc", "/sys/", "/dev/shm")


def linux_files(source: str) -> bool:
    """Return whether a string of ``source``, other than an explanation, begins with a folder of Linux alone."""
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(FOLDERS)
        for node in ast.walk(ast.parse(source) if any(each in source for each in FOLDERS) else ast.Module([], []))
    )


def test_no_name_of_linux_alone_is_used_without_a_guard():
    assert len(OURS) > 300
    assert {name_of(path): found for path in OURS if (found := unguarded(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.sched_getaffinity(0)", {"os.sched_getaffinity"}),
        ("from os import memfd_create", {"os.memfd_create"}),
        ("import mmap\ndef f():\n    return mmap.MADV_HUGEPAGE", {"mmap.MADV_HUGEPAGE"}),
        ("def f():\n    if hasattr(os, 'sched_getaffinity'):\n        return os.sched_getaffinity(0)", set()),
        ("if sys.platform == 'linux':\n    os.eventfd(0)", set()),
        ("def f():\n    if hasattr(os, 'eventfd'):\n        return os.splice(0, 1, 2)", {"os.splice"}),
    ],
)
def test_the_walk_finds_planted_names(source, found):
    assert unguarded(source) == found


def test_each_reader_of_linux_files_has_an_answer_without_them():
    assert {name_of(path) for path in OURS if linux_files(path.read_text())} == set(FILES)


AS_ON_MACOS = f"""
import importlib, os, sys
for module, names in {LINUX!r}.items():
    made = importlib.import_module(module)
    for name in names:
        if hasattr(made, name):
            delattr(made, name)

def refuse(event, args):
    if event == "open" and str(args[0]).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(2, "no such file, as on macOS", str(args[0]))

import pathlib
exists = pathlib.Path.exists
linux = ("/proc", "/sys", "/dev/shm")
pathlib.Path.exists = lambda self, **how: not str(self).startswith(linux) and exists(self, **how)
"""
"""The standard library and the files of Linux as macOS has them, at the start of a process."""

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               65536.
Pages active:                            300000.
Pages inactive:                          131072.
Pages speculative:                         1024.
Pages wired down:                        120000.
Pages purgeable:                            512.
"Translation faults":                 900000000.
"""
FREE = (65536 + 131072 + 1024 + 512) * 16384


def as_on_macos(tmp_path: Path, code: str, first: str = "import torch, numpy") -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process whose system looks like macOS."""
    (tmp_path / "vm_stat").write_text(f"#!/bin/sh\ncat <<'END'\n{VM_STAT}END\n")
    (tmp_path / "vm_stat").chmod(0o755)
    program = f"{AS_ON_MACOS}\n{first}\nsys.addaudithook(refuse)\n{code}"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )


def test_modules_are_imported_and_memory_is_measured_as_on_macos(tmp_path):
    """All modules outside of the GPU's and Gaudi's folders, the memory, and the findings of the CPU."""
    modules = [
        f"preheat.{name_of(path)}" for path in OURS if not name_of(path).startswith(("serve_ray", "parallel.ray"))
    ]
    done = as_on_macos(tmp_path, f"""
for module in {[each.removesuffix(".__init__") for each in modules if not each.endswith("__main__")]}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("preheat") and error.name not in {tuple(LINUX)}, (module, error)
from preheat.backends.cpu import environment
from preheat.utils import memory
assert memory.free_memory() == {FREE}, memory.free_memory()
assert memory.total_memory() > 0 and memory.used_memory() > 1 << 24
assert memory.peak_memory(lambda: None) >= 0
found = {{each.what: each for each in environment.findings()}}
assert found["instruction set"].found == "unknown" and found["memory"].verdict == "ok", found
print("well")
""")  # fmt: skip
    assert done.stdout == "well\n", done.stderr


def test_the_fake_is_felt(tmp_path):
    """Control: on the fake system calls of Linux alone fail."""
    done = as_on_macos(tmp_path, "print(hasattr(os, 'sched_getaffinity')); open('/proc/meminfo')", first="")
    assert done.stdout == "False\n" and "FileNotFoundError" in done.stderr


@pytest.mark.parametrize("code", ["import preheat.__main__", "import preheat; preheat.LLM"])
def test_windows_is_refused_in_one_line(code):
    program = f"import sys; sys.platform = 'win32'; {code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "on Windows use WSL2" in last
    assert "__main__" not in code or done.stderr.count("\n") == 1
