"""Notes of a server's process: long work, and work on files, in the thread of its event loop.

``LOOP_WATCH`` names the file of the notes, a line each. They begin when the server takes requests. Python's audit
events tell of files. JSON is measured where it is read and written.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from preheat.server import app
from preheat.server.http import decoding
from preheat.server.openai import answers

MOST_BYTES = 1 << 17
"""Most bytes of JSON that the event loop may read or write by itself."""

FILES = ("open", "os.", "shutil.", "glob.", "pathlib.", "tempfile.", "subprocess.", "socket.getaddrinfo")


def start(path: str) -> None:
    """Begin to write notes to ``path`` once the server takes requests."""
    notes, loop, armed = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), threading.get_ident(), False

    def note(what: str) -> None:
        """Write a line with the functions of this project that lead to ``what``, unless it is an import."""
        if armed and threading.get_ident() == loop:
            frames = [frame.f_code for frame, _ in traceback.walk_stack(None)]
            if not any(code.co_filename.startswith("<frozen importlib") for code in frames):
                ours = [code for code in frames[1:] if "preheat" in code.co_filename][:6]
                way = " < ".join(f"{os.path.basename(code.co_filename)}:{code.co_name}" for code in ours)
                os.write(notes, f"{what}: {way}\n".encode())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(FILES):
            note(f"{event} {str(arguments[:1])[:80]}")

    def measured(work: Callable[..., Any], size: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def measure(given: Any, *more: Any, **options: Any) -> Any:
            made = work(given, *more, **options)
            if len(size(given, made)) > MOST_BYTES:
                note(f"{len(size(given, made))} bytes of {work.__qualname__}")
            return made

        return measure

    def begin() -> None:
        nonlocal armed
        collect()
        armed = True

    read, write = (lambda given, _: given), (lambda _, made: made)
    replace(decoding.decode, measured(decoding.decode, read))
    replace(answers.encode, measured(answers.encode, write))
    for library in (json, msgspec.json):
        for name, size in (("decode", read), ("loads", read), ("encode", write), ("dumps", write)):
            if hasattr(library, name):
                setattr(library, name, measured(getattr(library, name), size))
    collect, app.collect_seldom = app.collect_seldom, begin
    sys.addaudithook(audit)


def replace(old: object, new: object) -> None:
    """Put ``new`` in place of ``old`` in all modules of this project."""
    for module in [module for name, module in sys.modules.items() if name.startswith("preheat")]:
        for name, value in vars(module).copy().items():
            if value is old:
                setattr(module, name, new)


if "LOOP_WATCH" in os.environ:
    start(os.environ["LOOP_WATCH"])
