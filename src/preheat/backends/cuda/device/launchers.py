"""Libraries that Triton builds, each loaded as a module of its own.

Triton up to 3.6 builds a launcher for each signature of a kernel, and loads it under the name `__triton_launcher`. A
library of this form, once loaded, is not loaded again. CPython then takes the last module that was loaded under the
name, and puts the functions of the library into it. So of two threads one could find the launcher of the other's kernel
in its module ("function takes exactly 24 arguments (17 given)"). Here the name has the library's place in Triton's
cache, so no two libraries share a module.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from triton.runtime import build


def load(name: str, path: str) -> ModuleType:
    """Return the library at ``path`` as a module; its function PyInit_``name`` makes it."""
    spec = spec_from_file_location(f"{Path(path).parent.name}.{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no library of this Python")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_alone() -> None:
    """Let Triton load libraries by :func:`load`."""
    build._load_module_from_path = load
