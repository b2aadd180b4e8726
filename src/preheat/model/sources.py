"""The sources of a model's tensors: a checkpoint's safetensors files, or a random generator."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from preheat.errors import ModelError
from preheat.model.files import indexed_names, weight_files
from preheat.model.formats import FORMATS, LinearFormat, Shape, expected_tensors
from preheat.model.specs import ModelSpec

_NAMES_SHOWN = 8


class TensorSource(Protocol):
    """Provides tensors by name."""

    def fill(self, name: str, out: Tensor) -> None:
        """Write tensor ``name`` into ``out``, which has its shape, converting to the dtype of ``out``."""


class SafetensorsFiles:
    """The files of a checkpoint. ``shapes`` are those of its tensors, by name; ``copy(source, out)`` copies one."""

    def __init__(self, directory: Path, copy: Callable[[Tensor, Tensor], object]) -> None:
        self._copy = copy
        self._files: dict[str, Any] = {}  # safetensors' handles, by tensor name
        self.shapes: dict[str, Shape] = {}
        for path in weight_files(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except Exception as error:  # the library has no error class of its own
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self.shapes:
                    raise ModelError(f"{directory}: tensor {name} is in more than one file")
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
        if missing := sorted(indexed_names(directory) - self.shapes.keys()):
            raise ModelError(f"{directory}: the index names tensors that no file has: {_some(missing)}")

    def fill(self, name: str, out: Tensor) -> None:
        self._copy(self._files[name].get_tensor(name), out)


class DummyTensors:
    """Random weights that behave like a model's: normal with std 1/sqrt(inputs), norms around 1.

    A tensor depends only on its name, shape, dtype, the seed and the kind of device, not on the order of loading.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill(self, name: str, out: Tensor) -> None:
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if name.endswith(".bias"):
            out.normal_(std=0.1, generator=generator)
        elif out.dim() == 1:
            out.normal_(mean=1.0, std=0.1, generator=generator)
        else:
            out.normal_(std=out.shape[1] ** -0.5, generator=generator)


def check_tensors(spec: ModelSpec, shapes: Mapping[str, Shape], formats: Mapping[str, LinearFormat] = FORMATS) -> None:
    """Raise ModelError unless ``shapes`` are those of ``spec``, apart from tensors that are known to be harmless."""
    expected = expected_tensors(spec, formats)
    problems = []
    if missing := sorted(expected.keys() - shapes.keys()):
        problems.append(f"missing tensors: {_some(missing)}")
    if unknown := sorted(name for name in shapes.keys() - expected.keys() if not _harmless(name, spec)):
        problems.append(f"unknown tensors: {_some(unknown)}")
    wrong = [
        f"{name} has shape {list(shapes[name])}, needs {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if wrong:
        problems.append(_some(wrong))
    if problems:
        raise ModelError(f"the checkpoint does not fit {spec.architecture}: {'; '.join(problems)}")


def _harmless(name: str, spec: ModelSpec) -> bool:
    """Buffers that old exporters wrote, and an output head that repeats the tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")


def _some(items: list[str]) -> str:
    more = len(items) - _NAMES_SHOWN
    return ", ".join(items[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
