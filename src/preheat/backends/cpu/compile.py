"""Execution mode ``compile``: the regions of a decoder layer go through ``torch.compile``.

Compilation is regional: a region is compiled for a number of tokens at its first run with that number. Every layer of
the same kind runs the same code, because weights are arguments. Shapes are static. Operations stay as they are
(:mod:`preheat.ops.opaque`), so compiled code has the bits of eager code. Attention, whose work follows the context,
runs between the regions. Inductor keeps its results in ``TORCHINDUCTOR_CACHE_DIR``, for the next boot.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from preheat.backends.base.facts import Mode
from preheat.backends.base.layers import Region
from preheat.errors import SettingsError
from preheat.ops.opaque import register_operations


class Regional:
    """``region``, compiled for each number of tokens at its first call."""

    def __init__(self, region: Region, backend: str = "inductor") -> None:
        assert isinstance(region, FunctionType)
        self._region, self._backend, self._programs = region, backend, dict[int, Region]()

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        program = self._programs.get(len(x)) or self._program(len(x))
        return program(x.contiguous(), *args)  # another layout would be another program

    def _program(self, tokens: int) -> Region:
        """Compile the region in a code object of its own.

        Dynamo keeps compiled code by code object, tries one program after the other, and gives up beyond a few. With a
        code object for each number of tokens, the right program is found at once, however many there are.
        """
        register_operations()
        region = self._region
        code: CodeType = region.__code__.replace(co_name=f"{region.__name__}_{tokens}")
        copy = FunctionType(code, region.__globals__, None, region.__defaults__, region.__closure__)
        program = self._programs[tokens] = torch.compile(copy, backend=self._backend, fullgraph=True, dynamic=False)
        return program


def region_builder(mode: Mode, cache: Path | None) -> Callable[[Region], Region]:
    """Return the function that builds a decoder's regions in ``mode``.

    It keeps them in ``cache``, unless the environment names another place. Raises SettingsError if it finds no
    compiler.
    """
    if mode != "compile":
        return lambda region: region
    check_compiler()
    if cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    importlib.import_module("torch._inductor.compile_fx")  # its seconds are no part of the first region's
    return Regional


def check_compiler() -> None:
    """Raise SettingsError unless Inductor finds its C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise SettingsError(
            "execution mode compile needs a C++ compiler, and none is installed: install g++ or clang++, "
            "name yours in the variable CXX, or use execution mode eager",
            param="execution_mode",
        ) from None
