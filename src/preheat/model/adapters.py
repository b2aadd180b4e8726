"""Places for adapters on the device: which linear layers have them, and how an adapter is put into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base import (
    Adapted,
    AdaptedEmbedding,
    AdapterOps,
    AdapterStep,
    Backend,
    Collective,
    Experts,
    ExpertsSize,
    Linear,
    StepInputs,
)
from preheat.errors import InvalidRequest, SettingsError
from preheat.model.specs import EmbeddingSpec, LinearSpec, MoeSpec
from preheat.ops.embedding import rounded
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import TILE
from preheat.settings import Settings

Packed = Sequence[Any]
"""An adapter on the host as a place holds it: for each layer what it packed, or None if it is left alone."""


class Seat(NamedTuple):
    """A module of the checkpoint: the number of the layer that has it, as which part, and in which order it has the
    rows, of which a rank may have some; ``columns`` are its inputs, None: all. Scales of adapters are multiplied by
    ``scale``.
    """

    layer: int
    part: int
    order: Tensor | None
    inputs: int
    outputs: int
    scale: float = 1.0
    columns: tuple[int, int] | None = None


class AdapterSeats:
    """All places of a model: ``places`` adapters of rank ``max_rank`` at most, in ``dtype``, for steps of at most so
    many ``tokens``. The loader asks :meth:`linear` for each layer. In layers that ranks divide by rows, the first
    matrices are divided ``among`` them, too.
    """

    def __init__(
        self,
        ops: AdapterOps,
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        tokens: int,
        *,
        among: Collective | None = None,
    ) -> None:
        self._among = among
        self._ops, self.places, self.max_rank, self.dtype = ops, places, max_rank, dtype
        self._rows, self._seats = ops.rows(tokens, places), dict[str, Seat]()
        self._layers: list[Adapted] = []
        self._embedding: AdaptedEmbedding | None = None
        self.without_experts = ""
        """Why experts have no places, if they have none."""

    @property
    def bytes(self) -> int:
        """Bytes of all places on the device."""
        return sum(layer.bytes for layer in self._layers)

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of each module that an adapter may change, by its name in the checkpoint."""
        return {name: (seat.outputs, seat.inputs) for name, seat in self._seats.items()}

    def linear(self, spec: LinearSpec, linear: Linear) -> Linear:
        """``linear``, the layer of ``spec`` without its activation, with places for adapters and the activation."""
        orders, inputs = _orders(spec), spec.stored_inputs or spec.inputs
        outputs = [size if rows is None else len(rows) for (_, size), rows in zip(spec.parts, orders, strict=True)]
        layer = self._ops.linear(
            linear, spec.inputs, outputs, self._rows, places=self.places, max_rank=self.max_rank,
            dtype=self.dtype, activation=spec.activation, clip=spec.clip, tiles=spec.tiles,
            among=self._among if spec.tiles else None,
        )  # fmt: skip
        for part, (name, size) in enumerate(spec.parts):
            self._seats[name] = Seat(len(self._layers), part, orders[part], inputs, size, columns=spec.columns)
        self._layers.append(layer)
        return layer

    def embedding(self, spec: EmbeddingSpec, table: Tensor) -> None:
        """Places for the ``table`` of ``spec``."""
        self._embedding = self._ops.embedding(
            table, self._rows, places=self.places, max_rank=self.max_rank, dtype=self.dtype
        )
        scale = 1.0 if spec.scale is None else rounded(spec.scale, table.dtype)
        self._seats[spec.name] = Seat(len(self._layers), 0, None, spec.vocab_size, spec.size, scale)
        self._layers.append(self._embedding)

    def experts(self, spec: MoeSpec, experts: Experts) -> Experts:
        """``experts``, those of ``spec``, with places if they can have some."""
        own, inner = spec.experts, spec.experts.whole_inner
        if self._among is not None:
            self.without_experts = (
                "with --fully-sharded-loras, for which ranks would exchange once more in each of these layers, before "
                "the activation: leave it out"
            )
            return experts
        layer = self._ops.experts(
            experts, ExpertsSize(own.num_experts, own.hidden, own.inner, spec.top_k, own.scheme), self._rows,
            places=self.places, max_rank=self.max_rank, dtype=self.dtype,
        )  # fmt: skip
        if layer is None:
            self.without_experts = "with this device, quantization and ranks"
            return experts
        rows = None if own.kept is None else torch.arange(*own.kept)
        gated = Seat(len(self._layers), 0, rows, own.hidden, inner)
        seats = gated, gated, Seat(len(self._layers), 0, None, inner, own.hidden, columns=own.kept)
        for part, name in enumerate(own.modules):
            self._seats[name] = seats[part % len(seats)]._replace(part=part)
        self._layers.append(layer)
        return layer

    def embed(self, inputs: StepInputs, last_token: Tensor, out: Tensor) -> None:
        """Add to the embeddings ``out`` [tokens, hidden] what adapters have for their tokens."""
        assert self._embedding is not None
        self._embedding.add(inputs.tokens, inputs.slots, last_token, out)

    def pack(self, factors: Mapping[str, LowRankPair]) -> Packed:
        """What :meth:`load` puts into a place, of an adapter's matrices by module; any thread may ask. Raises
        InvalidRequest for modules that have no place, or matrices that do not fit.
        """
        self._check(factors)
        parts: list[dict[int, LowRankPair]] = [{} for _ in self._layers]
        for name, each in factors.items():
            seat = self._seats[name]
            a = each.a if seat.columns is None else each.a[:, slice(*seat.columns)]
            b = each.b if seat.order is None else each.b[seat.order]
            parts[seat.layer][seat.part] = LowRankPair(a, b, each.scale * seat.scale)
        return [layer.pack(each) if each else None for layer, each in zip(self._layers, parts, strict=True)]

    def load(self, place: int, packed: Packed) -> None:
        """Put an adapter into ``place``: copies are asked for, not waited for."""
        for layer, each in zip(self._layers, packed, strict=True):
            if each is None:
                layer.clear(place)
            else:
                layer.write(place, each)

    def _check(self, factors: Mapping[str, LowRankPair]) -> None:
        """Raise InvalidRequest unless an adapter fits."""
        for name, each in factors.items():
            seat = self._seats.get(name)
            if seat is None:
                raise InvalidRequest(f"the model has no module {name!r} that an adapter may change")
            rank = len(each.a)
            if each.a.shape != (rank, seat.inputs) or each.b.shape != (seat.outputs, rank) or rank > self.max_rank:
                raise InvalidRequest(
                    f"the adapter's matrices of {name} are {list(each.a.shape)} and {list(each.b.shape)}: they must be "
                    f"[r, {seat.inputs}] and [{seat.outputs}, r] with r at most {self.max_rank}"
                )

    def clear(self, place: int) -> None:
        """Nothing is added to rows of ``place``."""
        for layer in self._layers:
            layer.clear(place)

    def describe(self, turn: int, step: AdapterStep, places: np.ndarray) -> None:
        """See :class:`preheat.backends.base.AdapterRows`."""
        self._rows.describe(turn, step, places)

    def use(self, step: AdapterStep | None) -> None:
        """See :class:`preheat.backends.base.AdapterRows`."""
        self._rows.use(step)


def _orders(spec: LinearSpec) -> list[Tensor | None]:
    """For each part the order in which the layer has its rows, or those of its rows that a rank has; None: as they are
    stored.
    """
    if not spec.order:
        return [None] * len(spec.parts)
    found: dict[str, list[Tensor]] = {}
    names = [name for name, _ in spec.parts]
    for name, rows in spec.pieces():
        found.setdefault(name, []).append(torch.arange(*rows))
        if name != names[len(found) - 1]:
            raise SettingsError(f"enable_lora: rows of {name} are among those of another module", param="enable_lora")
    return [torch.cat(found[name]) for name in names]


def check_tiles(settings: Settings) -> None:
    """Raise SettingsError if adapters that ranks divide would leave one of them none."""
    least = settings.tensor_parallel_size * TILE
    if settings.fully_sharded_loras and settings.max_lora_rank < least:
        raise SettingsError(
            f"fully_sharded_loras gives each rank whole tiles of {TILE} ranks of an adapter: raise max_lora_rank "
            f"({settings.max_lora_rank}) to {least} or more, or leave fully_sharded_loras out",
            param="max_lora_rank",
        )


def make_seats(
    settings: Settings, backend: Backend, dtype: torch.dtype, collective: Collective | None = None
) -> AdapterSeats | None:
    """Places for the adapters that the settings ask for, none yet, in a model of ``dtype``, whose layers those of the
    ``collective`` share; None: adapters are off. Raises SettingsError where they cannot be served.
    """
    if not settings.enable_lora:
        return None
    check_tiles(settings)
    assert backend.adapters is not None, "its facts say that it lacks adapters"
    facts = backend.facts
    tokens = settings.max_num_batched_tokens or facts.max_num_batched_tokens
    tokens = max(tokens, settings.max_num_seqs or facts.max_num_seqs, facts.min_tokens)
    own = dtype if settings.lora_dtype == "auto" else getattr(torch, settings.lora_dtype)
    among = collective if settings.fully_sharded_loras else None
    return AdapterSeats(backend.adapters, settings.max_loras, settings.max_lora_rank, own, tokens, among=among)
