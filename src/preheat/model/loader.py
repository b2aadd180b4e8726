"""Weights: from a checkpoint's files, or drawn at random, into the joined matrices that the decoder runs.

Tensors are read one at a time straight into their place on the device, so that no second copy of the model is ever
held, neither there nor on the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from preheat.backends.base import Backend, Linear, Norm
from preheat.errors import ModelError
from preheat.model.files import indexed_names, weight_files
from preheat.model.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Layer,
    Matrix,
    expected_tensors,
    head_layout,
    layer_layout,
)
from preheat.model.specs import ModelSpec

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``qk_norm`` norms each query and key head by itself; None without. ``gate_up`` ends in SwiGLU, so that
    it gives what ``down`` takes.
    """

    input_norm: Norm
    qkv: Linear
    qk_norm: Norm | None
    o: Linear
    post_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model: ``embedding`` [vocab, hidden], its layers, the final norm and the output head."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Norm
    head: Linear

    def layer_linears(self) -> Iterator[Linear]:
        """The linear layers of all layers."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)


class Source(Protocol):
    """Where tensors come from."""

    def fill(self, name: str, out: Tensor) -> None:
        """Write tensor ``name`` into ``out``, which has its shape, converting to the dtype of ``out``."""


def load_weights(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    backend: Backend,
    *,
    load_format: str = "auto",
    seed: int = 0,
) -> Weights:
    """The weights of ``spec`` in ``dtype`` on the backend's device, read from ``directory`` or, for ``load_format``
    dummy, drawn there by ``seed``.

    Raises ModelError, naming the tensors, if the checkpoint lacks one, has one too many or one of another shape.
    """
    if load_format == "dummy":
        return _Builder(spec, DummyTensors(seed), dtype, backend).build()
    if load_format not in ("auto", "safetensors"):
        message = f"load format {load_format!r} is not supported; use auto, safetensors or dummy"
        raise ModelError(message, param="load_format")
    with backend.uploading() as copy:
        return _Builder(spec, SafetensorsFiles(spec, directory, copy), dtype, backend).build()


class SafetensorsFiles:
    """The files of a checkpoint, opened and found to hold exactly the tensors that the spec asks for.

    ``copy`` brings a tensor of a file into its place.
    """

    def __init__(self, spec: ModelSpec, directory: Path, copy: Callable[[Tensor, Tensor], object]) -> None:
        self._copy = copy
        self._files: dict[str, Any] = {}  # safetensors' handles, by tensor name
        shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except Exception as error:  # a truncated or foreign file; the library has no error class of its own for it
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in shapes:
                    raise ModelError(f"{directory}: tensor {name} is in more than one file")
                shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
        if missing := sorted(indexed_names(directory) - shapes.keys()):
            raise ModelError(f"{directory}: the index names tensors that no file has: {_some(missing)}")
        check_tensors(spec, shapes)

    def fill(self, name: str, out: Tensor) -> None:
        self._copy(self._files[name].get_tensor(name), out)


class DummyTensors:
    """Random weights that behave like a model's: normal with std 1/sqrt(inputs), norms scattered around 1.

    A tensor is a function of its name, its shape, the dtype and the seed, so the order of loading does not matter; on
    another kind of device it is another one.
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


def check_tensors(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless ``shapes`` are what ``spec`` needs, apart from tensors that are known to be harmless."""
    expected = expected_tensors(spec)
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
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == f"{HEAD}.weight")


def _some(items: list[str]) -> str:
    more = len(items) - _NAMES_SHOWN
    return ", ".join(items[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Builder:
    """Allocates what ``spec`` needs on the backend's device and has ``source`` fill it."""

    def __init__(self, spec: ModelSpec, source: Source, dtype: torch.dtype, backend: Backend) -> None:
        self._spec, self._source, self._dtype, self._backend = spec, source, dtype, backend

    def build(self) -> Weights:
        spec = self._spec
        embedding = self._tensor(EMBEDDING, spec.vocab_size, spec.hidden_size)
        layers = [self._layer(layer_layout(spec, index)) for index in range(spec.num_layers)]
        head = self._backend.linear(embedding) if spec.tie_word_embeddings else self._linear(head_layout(spec))
        return Weights(embedding, layers, self._norm(FINAL_NORM), head)

    def _layer(self, layout: Layer) -> LayerWeights:
        return LayerWeights(
            input_norm=self._norm(layout.input_norm),
            qkv=self._linear(layout.qkv),
            qk_norm=self._qk_norm(layout),
            o=self._linear(layout.o),
            post_norm=self._norm(layout.post_norm),
            gate_up=self._linear(layout.gate_up, gated=True),
            down=self._linear(layout.down),
        )

    def _norm(self, name: str) -> Norm:
        return self._backend.norm(self._tensor(name, self._spec.hidden_size), self._spec.rms_norm_eps)

    def _qk_norm(self, layout: Layer) -> Norm | None:
        """One norm for all heads that have one, queries first."""
        if not (layout.q_norm and layout.k_norm):
            return None
        spec = self._spec
        q, k = (self._tensor(name, spec.head_dim) for name in (layout.q_norm, layout.k_norm))
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return self._backend.norm(weight, spec.rms_norm_eps)

    def _linear(self, matrix: Matrix, *, gated: bool = False) -> Linear:
        """One joined matrix, each part read into its rows."""
        weight = self._empty(matrix.rows, matrix.columns)
        bias = self._empty(matrix.rows) if matrix.bias else None
        start = 0
        for name, rows in matrix.parts:
            self._source.fill(f"{name}.weight", weight[start : start + rows])
            if bias is not None:
                self._source.fill(f"{name}.bias", bias[start : start + rows])
            start += rows
        return self._backend.linear(weight, bias, gated=gated)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        out = self._empty(*shape)
        self._source.fill(name, out)
        return out

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._backend.device)
