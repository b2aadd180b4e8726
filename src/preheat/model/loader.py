"""Loading a model: its spec, then its weights, from a checkpoint's files or random.

Tensors are read one at a time straight into their place on the device, so there is never a second copy of the model,
neither there nor on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from preheat.backends.base import Backend, Linear, Norm
from preheat.errors import ModelError
from preheat.model.config import resolve_dtype
from preheat.model.families import read_spec
from preheat.model.files import find_checkpoint, read_config
from preheat.model.formats import FORMATS, LinearFormat
from preheat.model.layers import AttentionWeights, DenseMlp, Layer, Weights
from preheat.model.sources import DummyTensors, SafetensorsFiles, TensorSource, check_tensors
from preheat.model.specs import AttentionSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec
from preheat.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint loaded in ``dtype``. ``bytes_per_block`` is the size of a block of the KV cache."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    dtype_name: str
    weights: Weights
    bytes_per_block: int


def load_model(settings: Settings, backend: Backend) -> LoadedModel:
    """The model that the settings name, on the backend's device."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=settings.load_format != "dummy")
    spec = read_spec(read_config(folder))
    name, remark = resolve_dtype(settings.dtype, spec.dtype, backend.supports_bfloat16())
    if remark:
        logger.info("%s", remark)
    dtype: torch.dtype = getattr(torch, name)
    weights = load_weights(spec, folder, dtype, backend, load_format=settings.load_format, seed=settings.seed or 0)
    bytes_per_block = settings.block_size * spec.kv_bytes_per_token(dtype.itemsize)
    return LoadedModel(folder, spec, dtype, name, weights, bytes_per_block)


def load_weights(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    backend: Backend,
    *,
    load_format: str = "auto",
    seed: int = 0,
    formats: Mapping[str, LinearFormat] = FORMATS,
) -> Weights:
    """The weights of ``spec`` in ``dtype`` on the backend's device, read from ``directory`` or, with ``load_format``
    dummy, random ones of ``seed``. Linear layers may be stored in any of the ``formats``.

    Raises ModelError, naming the tensors, if any is missing, unexpected or of the wrong shape.
    """
    if load_format == "dummy":
        return WeightLoader(DummyTensors(seed), dtype, backend, formats).model(spec)
    if load_format not in ("auto", "safetensors"):
        message = f"load format {load_format!r} is not supported; use auto, safetensors or dummy"
        raise ModelError(message, param="load_format")
    with backend.uploading() as copy:
        files = SafetensorsFiles(directory, copy)
        check_tensors(spec, files.shapes, formats)
        return WeightLoader(files, dtype, backend, formats).model(spec)


class WeightLoader:
    """Makes the parts of a model from their specs, on the backend's device, filled by ``source``."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, backend: Backend, formats: Mapping[str, LinearFormat] = FORMATS
    ) -> None:
        self.source, self.dtype, self.backend = source, dtype, backend
        self._formats = formats

    def model(self, spec: ModelSpec) -> Weights:
        embedding = self.tensor(f"{spec.embedding.name}.weight", *spec.embedding.shape)
        layers = [self.layer(layer) for layer in spec.layers]
        head = self.backend.linear(embedding) if spec.tied else self.linear(spec.head)
        return Weights(embedding, layers, self.norm(spec.final_norm), head)

    def layer(self, spec: LayerSpec) -> Layer:
        return Layer(
            input_norm=self.norm(spec.input_norm),
            attention=AttentionWeights(
                self.linear(spec.attention.qkv), self.linear(spec.attention.o), self.qk_norm(spec.attention)
            ),
            post_norm=self.norm(spec.post_norm),
            mlp=DenseMlp(self.linear(spec.mlp.gate_up), self.linear(spec.mlp.down)),
        )

    def linear(self, spec: LinearSpec) -> Linear:
        return self._formats[spec.format].load(spec, self)

    def norm(self, spec: NormSpec) -> Norm:
        return self.backend.norm(self.tensor(f"{spec.name}.weight", *spec.shape), spec.eps)

    def qk_norm(self, spec: AttentionSpec) -> Norm | None:
        """One norm for all query and key heads, queries first."""
        if spec.qk_norm is None:
            return None
        q, k = (self.tensor(f"{norm.name}.weight", *norm.shape) for norm in spec.qk_norm)
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return self.backend.norm(weight, spec.qk_norm[0].eps)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The checkpoint's tensor ``name``."""
        out = self.empty(*shape)
        self.source.fill(name, out)
        return out

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized tensor on the device, in the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.backend.device)
