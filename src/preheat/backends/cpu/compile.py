"""Execution mode ``compile``: the regions of a decoder layer go through ``torch.compile``.

Regional: a region is compiled for a number of tokens when it first runs with it, and every layer of that kind runs the
same code, because weights are arguments. Shapes are static. Operations stay as they are (:mod:`preheat.ops.opaque`), so
compiled code has the bits of eager code; attention, whose work follows the context, runs between the regions.
Inductor keeps what it built in ``TORCHINDUCTOR_CACHE_DIR``, for the next boot.
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

from preheat.backends.base import Mode, Region
from preheat.errors import SettingsError


class Regional:
    """``region``, compiled for each number of tokens when it is first called with it."""

    def __init__(self, region: Region, backend: str = "inductor") -> None:
        assert isinstance(region, FunctionType)
        self._region, self._backend, self._programs = region, backend, dict[int, Region]()

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        program = self._programs.get(len(x)) or self._program(len(x))
        return program(x.contiguous(), *args)  # another layout would be another program

    def _program(self, tokens: int) -> Region:
        """The region in a code object of its own.

        Dynamo keeps what it compiled by code object, tries one after the other and gives up beyond a few; this way each
        number of tokens finds its own at once, however many there are.
        """
        region = self._region
        code: CodeType = region.__code__.replace(co_name=f"{region.__name__}_{tokens}")
        copy = FunctionType(code, region.__globals__, None, region.__defaults__, region.__closure__)
        program = self._programs[tokens] = torch.compile(copy, backend=self._backend, fullgraph=True, dynamic=False)
        return program


def region_builder(mode: Mode, cache: Path | None = None) -> Callable[[Region], Region]:
    """What builds a decoder's regions in ``mode``, keeping them in ``cache`` unless the environment names another
    place. SettingsError where it cannot.
    """
    if mode != "compile":
        return lambda region: region
    check_compiler()
    if cache is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    importlib.import_module("torch._inductor.compile_fx")  # seconds, which are no part of the first region's
    return Regional


def check_compiler() -> None:
    """Raise SettingsError unless Inductor finds the C++ compiler that it needs on a CPU."""
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
