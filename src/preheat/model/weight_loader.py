"""Making the parts of a model from their specs, one tensor after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import (
    Embedding,
    ExpertsLayer,
    ExpertsWeights,
    HeadLayers,
    Layer,
    LayerContext,
    LayerWeights,
    Linear,
    Norm,
    TableLayer,
)
from preheat.backends.names import HOST
from preheat.model.adapters import ModelAdapterSlots
from preheat.model.attention_specs import AttentionSpec
from preheat.model.formats import FORMATS, LinearFormat
from preheat.model.formats_quantized import QuantizedFormat
from preheat.model.from_host import Copy, FromHost
from preheat.model.grid_specs import GridVisionSpec, MergerSpec
from preheat.model.grid_vision import GridVisionWeights, Merger
from preheat.model.latent import Latent
from preheat.model.latent_specs import LatentSpec, UpSpec
from preheat.model.layer_input_specs import LayerEndSpec, LayerInputsSpec
from preheat.model.layer_inputs import InputReader, LayerEnd, LayerInputs
from preheat.model.layers import (
    AttentionWeights,
    Beside,
    DecoderLayer,
    DenseMlp,
    GatheredHead,
    HeadElsewhere,
    HiddenStates,
    Mlp,
    MoeMlp,
    OwnValues,
    RecurrenceWeights,
    SharedExpert,
)
from preheat.model.mlp_specs import DenseSpec, MlpSpec, MoeSpec, SharedSpec
from preheat.model.pooled_head import HeadLayer, HeadNorm
from preheat.model.reading import TensorSource
from preheat.model.recurrence_specs import ConvSpec, DeltaSpec
from preheat.model.shard import head_tile
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.model.tensor_specs import (
    TIED_HEAD,
    DistanceSpec,
    EmbeddingSpec,
    HeadSpec,
    LinearSpec,
    NormSpec,
    PatchSpec,
    VectorSpec,
)
from preheat.model.values import embedding_of, experts_of, latents_of, matmul_of, patches_of
from preheat.model.vision import VisionLayer, VisionWeights
from preheat.model.vision_specs import VisionLayerSpec, VisionSpec
from preheat.model.weights import Weights
from preheat.ops.delta import DeltaWeights
from preheat.ops.kinds import Scheme
from preheat.ops.norm import ReplacingNorm
from preheat.ops.quantization import QuantizedWeight, empty_weight, plain, quantize_weight
from preheat.ops.values import Dtype, WithoutTerms

QUANTIZED_AT_ONCE = 1 << 22
"""Numbers of a tied head that are quantized at once, in float32."""


class WeightLoader:
    """Maker of the parts of a model from their specs.

    The parts are on the backend's device, filled by ``source``. With ``from_host``, a function that copies, tensors are
    filled on the host and then copied to the backend. With a ``collective`` the specs are a shard's. ``adapter_slots``
    make adapter slots in linear layers.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        backend: Backend,
        formats: Mapping[str, LinearFormat] = FORMATS,
        *,
        from_host: Copy | Literal[False] = False,
        collective: Collective | None = None,
        adapter_slots: ModelAdapterSlots | None = None,
    ) -> None:
        self.source, self.dtype, self.backend, self._collective = source, dtype, backend, collective
        self._adapter_slots, self._room = adapter_slots, None if adapter_slots is None else adapter_slots.room
        self._context = LayerContext(collective, None if adapter_slots is None else adapter_slots.rows)
        self._dtype_name = cast(Dtype, str(dtype).removeprefix("torch."))
        self._formats, self._device = formats, backend.device
        self._place: Callable[[Tensor], Tensor] = _as_it_is
        if from_host:
            host = FromHost(backend, from_host)
            self.backend, self._device, self._place = cast(Backend, host), torch.device(HOST), host.place

    def model(self, spec: ModelSpec) -> Weights:
        embedding = self.empty(0, spec.hidden_size) if "embedding" in spec.elsewhere else self.table(spec.embedding)
        if self._adapter_slots is not None:
            value = embedding_of(spec.embedding, self._dtype_name, self._adapter_slots.room)
            layer = self.backend.layer(value, LayerWeights(embedding), self._context)
            self._adapter_slots.add_embedding(spec.embedding, cast(Embedding, layer), self.dtype)
        layers = [self.layer(layer) for layer in spec.layers]
        head = self.head(spec, embedding)
        embedding = self.table_in(spec, head, embedding)
        positions = self.table(spec.positions) if spec.positions else None
        types = self.table(spec.types) if spec.types else None
        vision = self._without_adapters().vision(spec.vision) if spec.vision else None
        return Weights(
            embedding,
            layers,
            self.norm(spec.final_norm),
            head,
            positions,
            vision,
            types,
            [*map(self.head_layer, spec.pooled_head)],
            None if spec.distances is None else self.distances(spec.distances),
            None if spec.inputs is None else self.inputs(spec.inputs),
        )

    def inputs(self, spec: LayerInputsSpec) -> LayerInputs:
        """Return the makers of the inputs of all layers."""
        return LayerInputs(self.table(spec.table), self.linear(spec.projection), self.norm(spec.norm), spec.factor)

    def end(self, spec: LayerEndSpec) -> LayerEnd:
        """Return the last steps of a layer."""
        scalar, own = self._place(self.tensor(f"{spec.scalar.name}.weight", *spec.scalar.shape)), spec.reader
        if own is None:
            return LayerEnd(scalar)
        return LayerEnd(scalar, InputReader(self.linear(own.gate), self.linear(own.projection), self.norm(own.norm)))

    def _without_adapters(self) -> WeightLoader:
        """Return a loader for layers without adapter slots."""
        other = copy(self)
        other._adapter_slots = other._room = None
        return other

    def table(self, spec: EmbeddingSpec) -> Tensor:
        """Return a table of embeddings, without unused rows and with spare ones."""
        table = self.tensor(f"{spec.name}.weight", *spec.shape)[spec.unused :]
        return self._place(F.pad(table, (0, 0, 0, spec.spare)) if spec.spare else table)

    def vision(self, spec: VisionSpec | GridVisionSpec) -> VisionWeights | GridVisionWeights:
        if isinstance(spec, GridVisionSpec):
            return GridVisionWeights(
                patches=self.patches(spec.patches),
                positions=self.table(spec.positions),
                layers=[self.vision_layer(layer) for layer in spec.layers],
                merger=self.merger(spec.merger),
                deep=[self.merger(each) for each in spec.deep],
            )
        return VisionWeights(
            patches=self.patches(spec.patches),
            cls=self._place(self.tensor(f"{spec.cls.name}.weight", *spec.cls.shape)),
            positions=self.table(spec.positions),
            pre_norm=self.norm(spec.pre_norm),
            layers=[self.vision_layer(layer) for layer in spec.layers],
            projector=self.dense(spec.projector),
        )

    def patches(self, spec: PatchSpec) -> Layer:
        """Return the layer that reads patches of images."""
        kernel = self.tensor(f"{spec.name}.weight", *spec.shape)
        bias = self.tensor(f"{spec.name}.bias", spec.outputs) if spec.bias else None
        weights = LayerWeights(kernel.view(spec.outputs, -1), bias)
        return self.backend.layer(patches_of(spec, self._dtype_name), weights)

    def merger(self, spec: MergerSpec) -> Merger:
        return Merger(self.norm(spec.norm), self.dense(spec.mlp), spec.norm.size, spec.mlp.gate_up.inputs)

    def vision_layer(self, spec: VisionLayerSpec) -> VisionLayer:
        return VisionLayer(
            self.norm(spec.input_norm), self.linear(spec.qkv), self.linear(spec.o), self.norm(spec.post_norm),
            self.dense(spec.mlp),
        )  # fmt: skip

    def distances(self, spec: DistanceSpec) -> Tensor:
        """Return the biases of distances, fp32 [buckets, heads] on the host."""
        found = torch.empty(spec.shape)
        self.source.fill(f"{spec.name}.weight", found)
        return found

    def head_layer(self, spec: HeadSpec | NormSpec) -> HeadLayer | HeadNorm:
        """Return a layer of the head behind a pooled state, on the host."""
        weight = torch.empty(spec.shape)
        self.source.fill(f"{spec.name}.weight", weight)
        bias = torch.zeros(spec.shape[:1])
        if spec.bias:
            self.source.fill(f"{spec.name}.bias", bias)
        if isinstance(spec, NormSpec):
            return HeadNorm(weight, bias, spec.eps)
        if spec.rows:
            weight, bias = weight[list(spec.rows)], torch.zeros(spec.outputs)
            weight = weight[1:] - weight[:1] if len(weight) > spec.outputs else weight
        return HeadLayer(weight, bias, spec.activation)

    def head(self, spec: ModelSpec, embedding: Tensor) -> Linear:
        """Return the output head.

        Where ranks share it, it gathers all logits.
        """
        if spec.head is None:
            return HiddenStates()
        if "head" in spec.elsewhere:
            return HeadElsewhere()
        head = self._tied_head(spec.head, embedding) if spec.tied else self.linear(spec.head)
        if self._collective is None:
            return head
        width = head_tile(spec.vocab_size, self._collective.world) * len(spec.head.tiles)
        return GatheredHead(head, width, spec.vocab_size, self._collective)

    @staticmethod
    def table_in(spec: ModelSpec, head: Linear, embedding: Tensor) -> Tensor:
        """Return the table of embeddings: a tied ``head``'s own weight if it serves as one, else ``embedding``."""
        own = head.table() if spec.tied and isinstance(head, TableLayer) else None
        return embedding if own is None else own

    def _tied_head(self, spec: LinearSpec, embedding: Tensor) -> Linear:
        """Return the output head of the table ``embedding``, quantized beside the table if ``spec`` says so."""
        rows = embedding
        if self._collective is not None:
            rows = embedding[spec.order[0][0] : spec.order[-1][1]].clone()
        weight = rows if spec.scheme is None else self._quantized(spec.scheme, rows)
        return self.layer_of(replace(spec, parts=((TIED_HEAD, len(embedding)),)), LayerWeights(weight))

    def _quantized(self, scheme: Scheme, rows: Tensor) -> QuantizedWeight:
        """Return ``rows`` quantized by ``scheme``, some rows at a time."""
        out, step = self.empty_weight(scheme, *rows.shape), max(1, QUANTIZED_AT_ONCE // rows.shape[1])
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            quantize_weight(rows[part].float(), out.part(part))
        return out

    def layer_of(self, spec: LinearSpec, weights: LayerWeights) -> Linear:
        """Return the layer of ``spec``, whole or a shard, with these weights."""
        value = matmul_of(spec, self._dtype_name, self._room)
        if weights.rounding is not None:
            value = replace(value, input="rounded")
        layer = self.backend.layer(value, weights, self._context)
        if self._adapter_slots is not None:
            self._adapter_slots.add_linear(spec, layer)
        return layer

    def layer(self, spec: LayerSpec) -> DecoderLayer:
        input_norm = self.norm(spec.input_norm)
        return DecoderLayer(
            input_norm=input_norm,
            attention=self.attention(spec.attention),
            post_norm=self.norm(spec.post_norm) if spec.post_norm else input_norm,
            mlp=self.mlp(spec.mlp),
            attention_out_norm=self.norm(spec.attention_out_norm) if spec.attention_out_norm else None,
            mlp_out_norm=self.norm(spec.mlp_out_norm) if spec.mlp_out_norm else None,
            parallel=spec.parallel,
            end=None if spec.end is None else self.end(spec.end),
        )  # fmt: skip

    def attention(self, spec: AttentionSpec | DeltaSpec) -> AttentionWeights | RecurrenceWeights:
        qkv, o = self.linear(spec.qkv), self.linear(spec.o)
        if isinstance(spec, DeltaSpec):
            return RecurrenceWeights(qkv, o, self.delta(spec))
        sinks = None if spec.sinks is None else self.sinks(spec.sinks)
        latent = None if spec.latent is None else self.latent(spec.latent)
        qk_norm, whole = self.qk_norm(spec), self.whole_qk_norm(spec)
        return AttentionWeights(qkv, o, qk_norm, whole, sinks, latent, self.own_values(spec))

    def own_values(self, spec: AttentionSpec) -> OwnValues | None:
        """Return the steps that make values of the projection, None where it returns them."""
        if spec.value_eps is None or spec.source is not None:
            return None
        ones = torch.ones(spec.head_dim, dtype=self.dtype, device=self._device)
        norm = self.backend.norm(ones, spec.value_eps, "rms_once")
        return OwnValues(norm, spec.num_kv_heads * spec.head_dim, spec.one_kv)

    def delta(self, spec: DeltaSpec) -> DeltaWeights:
        """Return the weights of a recurrence besides its linear layers, fp32."""
        value, heads, conv = spec.value, slice(*spec.own_heads), spec.conv

        def of_heads(leaf: VectorSpec) -> Tensor:
            return self.tensor32(leaf)[heads].clone()

        def of_channels(name: str, *shape: int) -> Tensor:
            found = self._ordered(conv, self._place(self.read(name, *shape)))
            return torch.cat([found[first:last] for first, last in spec.own_channels])

        norm = self._place(self.read(f"{spec.norm.name}.weight", *spec.norm.shape))
        return DeltaWeights(
            value=value,
            taps=of_channels(f"{conv.name}.weight", *conv.shape).squeeze(1),
            rate=-of_heads(spec.rate).exp(),
            bias=of_heads(spec.bias),
            norm=norm if spec.norm.size == value.value_dim else norm.view(-1, value.value_dim)[heads].clone(),
            eps=spec.norm.eps,
            conv_bias=of_channels(f"{conv.name}.bias", conv.channels) if conv.bias else None,
            skip=None if spec.skip is None else of_heads(spec.skip),
        )

    def mlp(self, spec: MlpSpec) -> Mlp:
        if isinstance(spec, DenseSpec):
            return self.dense(spec)
        weights = self._formats[spec.experts.format].experts(spec.experts, self)
        if spec.correction is not None:
            weights = weights._replace(correction=self.tensor32(spec.correction))
        if spec.weighted is not None:
            weights = weights._replace(factors=self.tensor32(spec.weighted))
        beside = None if spec.beside is None else Beside(
            **{each.name: self.norm(getattr(spec.beside, each.name)) for each in fields(spec.beside)}
        )  # fmt: skip
        shared = self.shared(spec.shared) if spec.shared else None
        experts = self.experts(spec, weights)
        return MoeMlp(self.linear(spec.router), experts, shared, beside)

    def experts(self, spec: MoeSpec, weights: ExpertsWeights) -> ExpertsLayer:
        """Return the routed experts of ``spec``.

        They have adapter slots if there are kernels for them.
        """
        value = experts_of(spec, self._dtype_name, self._room)
        if self._adapter_slots is not None and isinstance(found := self.backend.supports(value), WithoutTerms):
            self._adapter_slots.without_experts, value = found.reason, experts_of(spec, self._dtype_name)
        layer = self.backend.experts(value, weights, self._context)
        if self._adapter_slots is not None and value.down.terms:
            self._adapter_slots.add_experts(spec.experts, layer)
        return layer

    def dense(self, spec: DenseSpec) -> DenseMlp:
        return DenseMlp(self.linear(spec.gate_up), self.linear(spec.down))

    def shared(self, spec: SharedSpec) -> SharedExpert:
        gate = spec.gate
        opens = None if gate is None else self._place(self.tensor(f"{gate.name}.weight", *gate.shape))
        return SharedExpert(self.dense(spec.block), opens, self.backend.add_shared)

    def linear(self, spec: LinearSpec) -> Linear:
        return self._formats[spec.format].load(spec, self)

    def norm(self, spec: NormSpec) -> Norm:
        if spec.kind == "identity":
            return self.backend.norm(torch.ones(spec.shape, dtype=self.dtype, device=self._device), spec.eps, spec.kind)
        weight = self._ordered(spec, self.tensor(f"{spec.name}.weight", *spec.shape))
        bias = self.tensor(f"{spec.name}.bias", *spec.shape) if spec.bias else None
        norm = self.backend.norm(weight, spec.eps, spec.kind, bias)
        return ReplacingNorm(norm) if spec.replaces else norm

    def qk_norm(self, spec: AttentionSpec) -> Norm | None:
        """Return one norm for all query and key heads.

        Queries come first. None without a norm.
        """
        if spec.qk_norm is None:
            return None
        own = (self._ordered(norm, self.tensor(f"{norm.name}.weight", *norm.shape)) for norm in spec.qk_norm)
        sizes = spec.num_heads, spec.num_kv_heads
        weight = torch.cat([norm.expand(size, -1) for norm, size in zip(own, sizes, strict=False)])
        return self.backend.norm(weight, spec.qk_norm[0].eps, spec.qk_norm[0].kind)

    @staticmethod
    def _ordered(spec: NormSpec | ConvSpec, weight: Tensor) -> Tensor:
        """Return the stored ``weight`` in the layer's order."""
        return torch.cat([weight[first:last] for first, last in spec.order]) if spec.order else weight

    def whole_qk_norm(self, spec: AttentionSpec) -> tuple[Norm, Norm] | None:
        """Return the norms of all query heads together, and of all key heads together, if there are any."""
        if spec.whole_qk_norm is None:
            return None
        q, k = spec.whole_qk_norm
        return self.norm(q), self.norm(k)

    def sinks(self, spec: VectorSpec) -> Tensor:
        """Return the sinks of attention, fp32 [heads of the shard]."""
        stored = self.tensor(f"{spec.name}.weight", *spec.shape)
        return self._place(stored[slice(*spec.kept or (None,))].float())

    def tensor32(self, spec: VectorSpec) -> Tensor:
        """Return numbers that stay in fp32."""
        return self._place(self.read(f"{spec.name}.weight", *spec.shape))

    def latent(self, spec: LatentSpec) -> Latent:
        """Return the maps of attention over latent vectors."""
        keys, vals = self.up(spec.up)
        q = None if spec.q is None else self.linear(spec.q)
        q_norm = None if spec.q_norm is None else self.norm(spec.q_norm)
        return Latent(keys, vals, spec.up.heads, spec.up.rank, spec.rope, self.norm(spec.norm), q, q_norm)

    def up(self, spec: UpSpec) -> tuple[HeadLayers, HeadLayers]:
        """Return the maps to keys and to values, a linear layer for each head."""
        value = latents_of(spec, self._dtype_name)
        stored = self._stored_up(spec).view(spec.stored_heads, -1, spec.rank)
        own = stored[spec.first : spec.first + spec.heads]
        keys = self.backend.heads(value.keys, own[:, : spec.key].mT.contiguous())
        return keys, self.backend.heads(value.values, own[:, spec.key :].contiguous())

    def _stored_up(self, spec: UpSpec) -> Tensor:
        """Return the maps of all heads; each product of a code and its scale is rounded to the dtype once."""
        if spec.scheme is None:
            return self.tensor(f"{spec.name}.weight", *spec.shape)
        stored = self._formats[spec.format]
        assert isinstance(stored, QuantizedFormat)
        weight = self.empty_weight(spec.scheme, *spec.shape)
        stored.read(spec.name, weight, self)
        return plain(weight).to(self.dtype)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return the checkpoint's tensor ``name``."""
        out = self.empty(*shape)
        self.source.fill(name, out)
        return out

    def read(self, name: str, *shape: int) -> Tensor:
        """Return the checkpoint's tensor ``name`` in float32, for temporary use."""
        return self._read(name, shape, torch.float32)

    def read_bytes(self, name: str, *shape: int) -> Tensor:
        """Return the checkpoint's tensor ``name`` in uint8, for temporary use."""
        return self._read(name, shape, torch.uint8)

    def read_words(self, name: str, *shape: int) -> Tensor:
        """Return the checkpoint's tensor ``name`` in int32, for temporary use."""
        return self._read(name, shape, torch.int32)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self._device)
        self.source.fill(name, out)
        return out

    def empty_weight(self, scheme: Scheme, *shape: int) -> QuantizedWeight:
        """Return an uninitialized quantized weight, on the device of loading."""
        return empty_weight(scheme, *shape, dtype=self.dtype, device=self._device)

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor of the model's dtype, for loading."""
        return torch.empty(shape, dtype=self.dtype, device=self._device)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
