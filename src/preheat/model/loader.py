"""Loading a model: its spec, then its weights, from a checkpoint's files or drawn at random, as layers that run.

Tensors are read one at a time straight into their place on the device, so that no second copy of the model is ever
held, neither there nor on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from preheat.backends.cpu.linear import Linear as HostLinear
from preheat.errors import ModelError
from preheat.model.config import resolve_dtype
from preheat.model.families import read_spec
from preheat.model.files import find_checkpoint, read_config
from preheat.model.formats import FORMATS, LinearFormat
from preheat.model.layers import AttentionWeights, DenseMlp, Layer, Linear, Weights
from preheat.model.sources import DummyTensors, SafetensorsFiles, Source, check_tensors
from preheat.model.specs import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec
from preheat.ops.activation import Gated
from preheat.ops.norm import RMSNorm
from preheat.settings import Settings

logger = logging.getLogger(__name__)


class LoadDevice(Protocol):
    """What loading needs of a backend."""

    device: torch.device

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
        """The linear layer of ``weight`` [outputs, inputs] and ``bias`` [outputs], which may be kept or packed anew.
        ``gated``: the first half of its outputs is the gate of the second, and SwiGLU of both is what it gives.
        """

    def norm(self, weight: Tensor, eps: float) -> RMSNorm:
        """The norm with ``weight`` [size], or [heads, size] for a norm of its own for each head."""

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        """While weights are loaded: ``copy(source, out)`` brings a tensor of the host into its place."""


class Host:
    """The CPU."""

    device = torch.device("cpu")

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
        linear = HostLinear(weight, bias)
        return Gated(linear) if gated else linear

    def norm(self, weight: Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps)

    def uploading(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        return nullcontext(copy_on_host)


def copy_on_host(source: Tensor, out: Tensor) -> None:
    """Copy a tensor of a file into its place, converting to its dtype."""
    out.copy_(source)


HOST = Host()


@dataclass(frozen=True)
class Model:
    """A checkpoint, loaded to run in ``dtype``. ``bytes_per_block`` are those of a block of the KV cache."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    dtype_name: str
    weights: Weights
    bytes_per_block: int

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device


def load_model(settings: Settings, device: LoadDevice, *, native_bfloat16: bool) -> Model:
    """The model that the settings name, on a device that multiplies bfloat16 natively or not."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=settings.load_format != "dummy")
    spec = read_spec(read_config(folder))
    name, remark = resolve_dtype(settings.dtype, spec.dtype, native_bfloat16)
    if remark:
        logger.info("%s", remark)
    dtype: torch.dtype = getattr(torch, name)
    weights = load_weights(spec, folder, dtype, settings.load_format, settings.seed or 0, device=device)
    return Model(folder, spec, dtype, name, weights, settings.block_size * spec.kv_bytes_per_token(dtype.itemsize))


def load_weights(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    *,
    device: LoadDevice = HOST,
    formats: Mapping[str, LinearFormat] = FORMATS,
) -> Weights:
    """The weights of ``spec`` in ``dtype`` on ``device``, read from ``directory`` or, for ``load_format`` dummy, drawn
    there by ``seed``. ``formats`` are the ways in which linear layers may be stored.

    Raises ModelError, naming the tensors, if the checkpoint lacks one, has one too many or one of another shape.
    """
    if load_format == "dummy":
        return WeightLoader(DummyTensors(seed), dtype, device, formats).model(spec)
    if load_format not in ("auto", "safetensors"):
        message = f"load format {load_format!r} is not supported; use auto, safetensors or dummy"
        raise ModelError(message, param="load_format")
    with device.uploading() as copy:
        files = SafetensorsFiles(directory, copy)
        check_tensors(spec, files.shapes, formats)
        return WeightLoader(files, dtype, device, formats).model(spec)


class WeightLoader:
    """Makes the parts of a model from their specs: allocates them on ``device`` and has ``source`` fill them."""

    def __init__(
        self, source: Source, dtype: torch.dtype, device: LoadDevice, formats: Mapping[str, LinearFormat] = FORMATS
    ) -> None:
        self.source, self.dtype, self.device = source, dtype, device
        self._formats = formats

    def model(self, spec: ModelSpec) -> Weights:
        embedding = self.tensor(f"{spec.embedding.name}.weight", *spec.embedding.shape)
        layers = [self.layer(layer) for layer in spec.layers]
        head = self.device.linear(embedding) if spec.tied else self.linear(spec.head)
        return Weights(embedding, layers, self.norm(spec.final_norm), head)

    def layer(self, spec: LayerSpec) -> Layer:
        return Layer(
            input_norm=self.norm(spec.input_norm),
            attention=self.attention(spec.attention),
            post_norm=self.norm(spec.post_norm),
            mlp=self.mlp(spec.mlp),
        )

    def attention(self, spec: AttentionSpec) -> AttentionWeights:
        return AttentionWeights(self.linear(spec.qkv), self.linear(spec.o), self.qk_norm(spec))

    def mlp(self, spec: MlpSpec) -> DenseMlp:
        return DenseMlp(self.linear(spec.gate_up), self.linear(spec.down))

    def linear(self, spec: LinearSpec) -> Linear:
        return self._formats[spec.format].load(spec, self)

    def norm(self, spec: NormSpec) -> RMSNorm:
        return self.device.norm(self.tensor(f"{spec.name}.weight", *spec.shape), spec.eps)

    def qk_norm(self, spec: AttentionSpec) -> RMSNorm | None:
        """One norm for all heads that have one, queries first."""
        if spec.qk_norm is None:
            return None
        q, k = (self.tensor(f"{norm.name}.weight", *norm.shape) for norm in spec.qk_norm)
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return self.device.norm(weight, spec.qk_norm[0].eps)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The checkpoint's tensor ``name``."""
        out = self.empty(*shape)
        self.source.fill(name, out)
        return out

    def empty(self, *shape: int) -> Tensor:
        """Room on the device, in the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device.device)
