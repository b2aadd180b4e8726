"""Weights: from a checkpoint's files, or drawn at random, into the joined matrices that the decoder runs.

Tensors are read one at a time straight into their place, so that no second copy of the model is ever held.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

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
from preheat.model.spec import ModelSpec
from preheat.ops.linear import Linear
from preheat.ops.norm import RMSNorm

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``qk_norm`` norms each query and key head by itself; None without."""

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    o: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model: ``embedding`` [vocab, hidden], its layers, the final norm and the output head."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: RMSNorm
    head: Linear


class Source(Protocol):
    """Where tensors come from."""

    def fill(self, name: str, out: Tensor) -> None:
        """Write tensor ``name`` into ``out``, which has its shape, converting to the dtype of ``out``."""


def load_weights(
    spec: ModelSpec, directory: Path, dtype: torch.dtype, load_format: str = "auto", seed: int = 0
) -> Weights:
    """The weights of ``spec`` in ``dtype``, read from ``directory`` or, for ``load_format`` dummy, drawn by ``seed``.

    Raises ModelError, naming the tensors, if the checkpoint lacks one, has one too many or one of another shape.
    """
    if load_format == "dummy":
        return _build(spec, DummyTensors(seed), dtype)
    if load_format not in ("auto", "safetensors"):
        message = f"load format {load_format!r} is not supported; use auto, safetensors or dummy"
        raise ModelError(message, param="load_format")
    return _build(spec, SafetensorsFiles(spec, directory), dtype)


class SafetensorsFiles:
    """The files of a checkpoint, opened and found to hold exactly the tensors that the spec asks for."""

    def __init__(self, spec: ModelSpec, directory: Path) -> None:
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
        out.copy_(self._files[name].get_tensor(name))


class DummyTensors:
    """Random weights that behave like a model's: normal with std 1/sqrt(inputs), norms scattered around 1.

    A tensor is a function of its name, its shape, the dtype and the seed, so the order of loading does not matter.
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


def _build(spec: ModelSpec, source: Source, dtype: torch.dtype) -> Weights:
    embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype)
    source.fill(EMBEDDING, embedding)
    layers = [_layer(spec, layer_layout(spec, index), source, dtype) for index in range(spec.num_layers)]
    final_norm = RMSNorm(_vector(FINAL_NORM, spec.hidden_size, source, dtype), spec.rms_norm_eps)
    head = Linear(embedding) if spec.tie_word_embeddings else _linear(head_layout(spec), source, dtype)
    return Weights(embedding, layers, final_norm, head)


def _layer(spec: ModelSpec, layout: Layer, source: Source, dtype: torch.dtype) -> LayerWeights:
    qk_norm = None
    if layout.q_norm and layout.k_norm:
        q, k = (_vector(name, spec.head_dim, source, dtype) for name in (layout.q_norm, layout.k_norm))
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        qk_norm = RMSNorm(weight, spec.rms_norm_eps)
    return LayerWeights(
        input_norm=RMSNorm(_vector(layout.input_norm, spec.hidden_size, source, dtype), spec.rms_norm_eps),
        qkv=_linear(layout.qkv, source, dtype),
        qk_norm=qk_norm,
        o=_linear(layout.o, source, dtype),
        post_norm=RMSNorm(_vector(layout.post_norm, spec.hidden_size, source, dtype), spec.rms_norm_eps),
        gate_up=_linear(layout.gate_up, source, dtype),
        down=_linear(layout.down, source, dtype),
    )


def _vector(name: str, size: int, source: Source, dtype: torch.dtype) -> Tensor:
    out = torch.empty(size, dtype=dtype)
    source.fill(name, out)
    return out


def _linear(matrix: Matrix, source: Source, dtype: torch.dtype) -> Linear:
    """One joined matrix, each part read into its rows."""
    weight = torch.empty(matrix.rows, matrix.columns, dtype=dtype)
    bias = torch.empty(matrix.rows, dtype=dtype) if matrix.bias else None
    start = 0
    for name, rows in matrix.parts:
        source.fill(f"{name}.weight", weight[start : start + rows])
        if bias is not None:
            source.fill(f"{name}.bias", bias[start : start + rows])
        start += rows
    return Linear(weight, bias)
