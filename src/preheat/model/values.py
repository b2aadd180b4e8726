"""Values of a model's layers, made before weights are read.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from preheat.errors import ModelError
from preheat.model.latent_specs import UpSpec
from preheat.model.mlp_specs import ExpertsSpec, MoeSpec
from preheat.model.recurrence_specs import DeltaSpec
from preheat.model.spec_tree import leaves
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, PatchSpec
from preheat.ops.values import (
    Cache,
    Dtype,
    Experts,
    Finish,
    Groups,
    Latents,
    LayerEnd,
    LowRank,
    Matmul,
    Refused,
    Routing,
    Shared,
    SumOrder,
    Support,
    Value,
    WeightFormat,
)


@dataclass(frozen=True)
class AdapterLimits:
    """Limits of adapters.

    There are ``slots`` adapters of at most ``rank``, with matrices of ``dtype``. ``divided``: in layers that ranks
    divide by outputs, the first matrices are divided among the ranks, too.
    """

    slots: int
    rank: int
    dtype: Dtype
    divided: bool = False


def matmul_of(spec: LinearSpec, dtype: Dtype, room: AdapterLimits | None = None) -> Matmul:
    """Return the value of the layer of ``spec``, whole or a shard.

    The model is of ``dtype``.
    """
    found = Matmul(
        outputs=spec.outputs,
        inputs=spec.inputs,
        weight=WeightFormat(dtype, spec.scheme),
        input=(spec.scheme.activations if spec.scheme else None) or "plain",
        order=_order(spec.inputs, spec.k_splits, spec.columns, spec.stored_inputs)._replace(tiles=spec.tiles),
        finish=Finish(spec.bias, spec.activation, spec.clip, spec.factor, spec.cap),
    )
    if room is None:
        return found
    shared: Shared = "inputs" if spec.k_splits else "ranks" if room.divided and spec.tiles else "whole"
    term = LowRank(part_outputs(spec), room.slots, room.rank, room.dtype, shared=shared)
    return replace(found, terms=(term,))


def part_outputs(spec: LinearSpec) -> tuple[int, ...]:
    """Return the number of the layer's outputs from each part."""
    found = dict.fromkeys((name for name, _ in spec.parts), 0)
    for name, (first, last) in spec.pieces():
        found[name] += last - first
    return tuple(found.values())


def embedding_of(spec: EmbeddingSpec, dtype: Dtype, room: AdapterLimits) -> Matmul:
    """Return the value of a table of embeddings with adapters.

    Its term is looked up by token ids.
    """
    term = LowRank((spec.size,), room.slots, room.rank, room.dtype, source="tokens")
    return Matmul(outputs=spec.size, inputs=spec.vocab_size, weight=WeightFormat(dtype), terms=(term,))


def patches_of(spec: PatchSpec, dtype: Dtype) -> Matmul:
    """Return the value of the layer that reads an image's patches."""
    finish = Finish(bias=True) if spec.bias else Finish()
    return Matmul(outputs=spec.outputs, inputs=spec.inputs, weight=WeightFormat(dtype), finish=finish)


def experts_of(spec: MoeSpec, dtype: Dtype, room: AdapterLimits | None = None) -> Experts:
    """Return the value of routed experts, whole or a shard."""
    own = spec.experts
    routing = Routing(
        spec.top_k, spec.renormalize, spec.round_weights, spec.scoring, spec.groups, spec.top_groups, spec.best,
        spec.factor,
    )  # fmt: skip
    order = _order(own.inner, own.k_splits, own.kept, own.stored_inner)
    halves = (own.inner // own.k_splits,) * (2 * own.k_splits) if own.k_splits else ()
    gate_up, down = (_expert(own, size, spec.top_k, dtype) for size in own.matrices)
    gate_up = replace(gate_up, order=SumOrder(tiles=halves), finish=Finish(own.bias, own.activation))
    down = replace(down, order=order, finish=Finish(own.bias))
    if room is not None:
        shared: Shared = "ranks" if room.divided else "whole"
        first = LowRank((own.inner, own.inner), room.slots, room.rank, room.dtype, shared=shared)
        last = LowRank((own.hidden,), room.slots, room.rank, room.dtype)
        if own.k_splits:
            last = replace(last, shared="inputs", joins="combined")
        gate_up, down = replace(gate_up, terms=(first,)), replace(down, terms=(last,))
    return Experts(
        gate_up=gate_up, down=down, routing=routing, corrected=spec.correction is not None,
        weighted=spec.weighted is not None, own=(own.numbers.start, own.numbers.stop) if own.stored_experts else None,
    )  # fmt: skip


def latents_of(spec: UpSpec, dtype: Dtype) -> Latents:
    """Return the value of attention over latent vectors, whole or a shard."""
    keys = Matmul(outputs=spec.rank, inputs=spec.key, weight=WeightFormat(dtype))
    values = Matmul(outputs=spec.value, inputs=spec.rank, weight=WeightFormat(dtype))
    return Latents(heads=spec.heads, keys=keys, values=values)


def _expert(spec: ExpertsSpec, size: tuple[int, int], top_k: int, dtype: Dtype) -> Matmul:
    return Matmul(
        outputs=size[0],
        inputs=size[1],
        weight=WeightFormat(dtype, spec.scheme),
        input=(spec.scheme.activations if spec.scheme else None) or "plain",
        groups=Groups(spec.num_experts, top_k),
    )


def _order(inputs: int, own: int, columns: tuple[int, int] | None, stored: int) -> SumOrder:
    """Return the order of a layer's sum.

    The layer has ``inputs`` inputs, the ``columns`` of ``stored`` ones. ``own`` is the number of K splits on the rank;
    0: the layer is not split.
    """
    if not own or columns is None:
        return SumOrder()
    size = inputs // own
    first = columns[0] // size
    return SumOrder(stored // size, (first, first + own))


def values_of(spec: ModelSpec, dtype: Dtype, room: AdapterLimits | None = None) -> Iterator[tuple[str, Value]]:
    """Yield all linear layers, routed experts and recurrences as values, by path.

    Paths are the spec's. Layers of a vision tower have no adapter slots.
    """
    blocks = {f"layers.{number}.mlp.experts": layer.mlp for number, layer in enumerate(spec.layers)}
    for path, leaf in leaves(spec):
        if isinstance(leaf, LinearSpec):
            yield path, matmul_of(leaf, dtype, None if path.startswith("vision.") else room)
        elif isinstance(leaf, UpSpec):
            yield path, latents_of(leaf, dtype)
        elif isinstance(leaf, PatchSpec):
            yield path, patches_of(leaf, dtype)
        elif isinstance(block := blocks.get(path), MoeSpec):
            yield path, experts_of(block, dtype, room)
        elif room is not None and path == "embedding":
            yield path, embedding_of(spec.embedding, dtype, room)
    for number, layer in enumerate(spec.layers):
        if isinstance(layer.attention, DeltaSpec):
            yield f"layers.{number}.attention", layer.attention.value
        if layer.end is not None:
            yield f"layers.{number}.end", LayerEnd(inputs=spec.inputs.size if spec.inputs and layer.end.reader else 0)


def caches_of(spec: ModelSpec, dtype: Dtype) -> Iterator[tuple[str, Cache]]:
    """Yield the KV caches of all layers by path."""
    for number, layer in enumerate(spec.layers):
        kv = layer.attention.kv
        if not kv.num_kv_heads:
            continue
        stored = dtype if kv.dtype == "auto" else kv.dtype
        cache = Cache(
            head_dim=kv.head_dim, dtype=stored, model=dtype, distances=spec.distances is not None, latent=kv.latent
        )
        yield f"layers.{number}.attention", cache


def check_supported(spec: ModelSpec, dtype: Dtype, supports: Callable[[Value], Support]) -> None:
    """Raise ModelError for a layer or a cache that the device cannot run.

    It names the layer, the device and the reason.
    """
    for path, value in (*values_of(spec, dtype), *caches_of(spec, dtype)):
        if isinstance(found := supports(value), Refused):
            raise ModelError(f"{path}: {found.reason}")
