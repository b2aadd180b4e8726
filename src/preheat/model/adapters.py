"""Adapter slots on the device, and loading an adapter into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.adapters import AdapterRows, AdapterSlots, AdapterStep, ReadableSlots
from preheat.backends.base.attention import StepInputs
from preheat.backends.base.backend import Backend
from preheat.backends.base.layers import Embedding, ExpertsLayer, Layer
from preheat.errors import InvalidRequest, SettingsError
from preheat.model.mlp_specs import ExpertsSpec
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec
from preheat.model.values import AdapterLimits
from preheat.ops.embedding import rounded
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import TILE, Dtype
from preheat.settings import Settings
from preheat.utils.text import some

Packed = Sequence[Any]
"""An adapter on the host in the form of a slot.

It has the packed matrices of each layer, None if the layer is unchanged.
"""


class AdapterModule(NamedTuple):
    """A module of the checkpoint that an adapter may change.

    ``layer`` is the number of its layer, ``part`` its part there. ``order`` lists the module's rows in the layer's
    order, only the rank's own rows on a shard; None: all rows as stored. ``columns`` are the rank's inputs, None: all.
    Scales of adapters are multiplied by ``scale``. ``held``: the rank has the module; other ranks have other experts.
    """

    layer: int
    part: int
    order: Tensor | None
    inputs: int
    outputs: int
    scale: float = 1.0
    columns: tuple[int, int] | None = None
    held: bool = True


class ModelAdapterSlots:
    """The adapter slots of all layers of a model.

    Their limits are ``room``. The loader adds each layer that has slots. ``rows`` hold the adapter slot of each row of
    a step.
    """

    def __init__(self, rows: AdapterRows, room: AdapterLimits) -> None:
        self.rows, self.room = rows, room
        self.count, self.max_rank, self.dtype = room.slots, room.rank, cast(torch.dtype, getattr(torch, room.dtype))
        self._modules: dict[str, AdapterModule] = {}
        self._layers: list[AdapterSlots] = []
        self._embedding: Embedding | None = None
        self.without_experts = ""
        """Reason why experts have no adapter slots, if they have none."""

    @property
    def bytes(self) -> int:
        """Bytes of all adapter slots on the device."""
        return sum(layer.bytes for layer in self._layers)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the memory of all adapter slots, each with the modules of its layer."""
        names: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            names.setdefault(module.layer, []).append(name)
        for number, layer in enumerate(self._layers):
            for tensor in cast(ReadableSlots, layer).tensors():
                yield f"the adapter slots of {some(names[number])}", tensor

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of each module that an adapter may change.

        Keys are the names in the checkpoint.
        """
        return {name: (module.outputs, module.inputs) for name, module in self._modules.items()}

    def add_linear(self, spec: LinearSpec, layer: Layer) -> None:
        """Add the slots of ``layer``, the layer of ``spec``."""
        orders, inputs = _orders(spec), spec.stored_inputs or spec.inputs
        for part, (name, size) in enumerate(spec.parts):
            self._modules[name] = AdapterModule(
                len(self._layers), part, orders[part], inputs, size, columns=spec.columns
            )
        self._add(layer)

    def add_embedding(self, spec: EmbeddingSpec, layer: Embedding, dtype: torch.dtype) -> None:
        """Add the slots of the table of embeddings of ``spec``.

        The table is of ``dtype``.
        """
        scale = 1.0 if spec.scale is None else rounded(spec.scale, dtype)
        self._modules[spec.name] = AdapterModule(len(self._layers), 0, None, spec.vocab_size, spec.size, scale)
        self._embedding = layer
        self._add(layer)

    def add_experts(self, spec: ExpertsSpec, layer: ExpertsLayer) -> None:
        """Add the slots of the experts of ``spec``."""
        rows = None if spec.kept is None else torch.arange(*spec.kept)
        gated = AdapterModule(len(self._layers), 0, rows, spec.hidden, spec.whole_inner)
        down = AdapterModule(len(self._layers), 0, None, spec.whole_inner, spec.hidden, columns=spec.kept)
        modules = gated, gated, down
        for at, name in enumerate(spec.modules):
            number, part = divmod(at, len(modules))
            own = (number - spec.first) * len(modules) + part
            self._modules[name] = modules[part]._replace(part=own, held=number in spec.numbers)
        self._add(layer)

    def _add(self, layer: Layer | ExpertsLayer | Embedding) -> None:
        assert layer.slots is not None, "the value of the layer has terms"
        self._layers.append(layer.slots)

    def embed(self, inputs: StepInputs, last_token: Tensor, out: Tensor) -> None:
        """Add the adapters' terms of the tokens to the embeddings ``out`` [tokens, hidden]."""
        assert self._embedding is not None
        self._embedding.add(inputs.tokens, inputs.slots, last_token, out)

    def pack(self, factors: Mapping[str, LowRankPair]) -> Packed:
        """Return an adapter's matrices in the form that :meth:`load` takes.

        ``factors`` has them by module. Any thread may call it. Raises InvalidRequest for modules without a slot, or
        matrices that do not fit.
        """
        self._check(factors)
        parts: list[dict[int, LowRankPair]] = [{} for _ in self._layers]
        for name, each in factors.items():
            module = self._modules[name]
            if not module.held:
                continue
            a = each.a if module.columns is None else each.a[:, slice(*module.columns)]
            b = each.b if module.order is None else each.b[module.order]
            parts[module.layer][module.part] = LowRankPair(a, b, each.scale * module.scale)
        return [layer.pack(each) if each else None for layer, each in zip(self._layers, parts, strict=True)]

    def load(self, slot: int, packed: Packed) -> None:
        """Put an adapter into ``slot``; copies are started, not waited for."""
        for layer, each in zip(self._layers, packed, strict=True):
            if each is None:
                layer.clear(slot)
            else:
                layer.write(slot, each)

    def _check(self, factors: Mapping[str, LowRankPair]) -> None:
        """Raise InvalidRequest unless an adapter fits."""
        for name, each in factors.items():
            module = self._modules.get(name)
            if module is None:
                raise InvalidRequest(f"the model has no module {name!r} that an adapter may change")
            rank = len(each.a)
            if each.a.shape != (rank, module.inputs) or each.b.shape != (module.outputs, rank) or rank > self.max_rank:
                raise InvalidRequest(
                    f"the adapter's matrices of {name} are {list(each.a.shape)} and {list(each.b.shape)}: they must be "
                    f"[r, {module.inputs}] and [{module.outputs}, r] with r at most {self.max_rank}"
                )

    def clear(self, slot: int) -> None:
        """Empty ``slot``: nothing is added to its rows."""
        for layer in self._layers:
            layer.clear(slot)

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        """See :class:`preheat.backends.base.adapters.AdapterRows`."""
        self.rows.describe(turn, step, slots)

    def use(self, step: AdapterStep | None) -> None:
        """See :class:`preheat.backends.base.adapters.AdapterRows`."""
        self.rows.use(step)


def _orders(spec: LinearSpec) -> list[Tensor | None]:
    """Return each part's rows in the layer's order.

    A shard has only the rank's own rows. None stands for the stored order. Raises SettingsError if rows of one module
    lie among the rows of another.
    """
    if not spec.order:
        return [None] * len(spec.parts)
    found: dict[str, list[Tensor]] = {}
    names = [name for name, _ in spec.parts]
    for name, rows in spec.pieces():
        found.setdefault(name, []).append(torch.arange(*rows))
        if name != names[len(found) - 1]:
            raise SettingsError(
                f"enable_lora: the rows of {name} lie among the rows of another module; leave enable_lora out",
                param="enable_lora",
            )
    return [torch.cat(found[name]) for name in names]


def check_tiles(settings: Settings) -> None:
    """Raise SettingsError if a rank would have no tile of adapters.

    Only adapters divided among ranks can be too small.
    """
    least = settings.tensor_parallel_size * TILE
    if settings.fully_sharded_loras and settings.max_lora_rank < least:
        raise SettingsError(
            f"fully_sharded_loras gives each rank whole tiles of {TILE} ranks of an adapter: raise max_lora_rank "
            f"({settings.max_lora_rank}) to {least} or more, or leave fully_sharded_loras out",
            param="max_lora_rank",
        )


def make_adapter_slots(settings: Settings, backend: Backend, dtype: Dtype) -> ModelAdapterSlots | None:
    """Return empty adapter slots as the settings ask.

    The model is of ``dtype``. None if adapters are off. Raises SettingsError where adapters cannot be served.
    """
    if not settings.enable_lora:
        return None
    check_tiles(settings)
    assert backend.adapters is not None, "its facts say that it lacks adapters"
    facts = backend.facts
    tokens = settings.max_num_batched_tokens or facts.max_num_batched_tokens
    tokens = max(tokens, settings.max_num_seqs or facts.max_num_seqs, facts.min_tokens)
    own = dtype if settings.lora_dtype == "auto" else cast(Dtype, settings.lora_dtype)
    room = AdapterLimits(settings.max_loras, settings.max_lora_rank, own, settings.fully_sharded_loras)
    return ModelAdapterSlots(backend.adapters.rows(tokens, settings.max_loras), room)
