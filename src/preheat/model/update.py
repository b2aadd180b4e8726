"""New weights for a loaded model, in place.

Programs know the addresses of its tensors. The model's parts with new tensors are loaded a second time, by the loader
and in the formats of the boot. Then old and new numbers are swapped. Before the swap nothing is written, and a second
swap undoes the first. The update takes the memory of the new parts once more while it lasts; an update of a few layers
at a time takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import HasWeights, Layer
from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.formats import LinearFormat, Plain, expected_tensors
from preheat.model.kv_scales import STORED
from preheat.model.latent import Latent
from preheat.model.latent_specs import LatentSpec
from preheat.model.layer_input_specs import LayerEndSpec
from preheat.model.loader import LoadedModel
from preheat.model.mlp_specs import DenseSpec, MlpSpec
from preheat.model.reading import Piece, Shape
from preheat.model.sources import StoredTensors, is_harmless
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import EmbeddingSpec, HeadSpec, LinearSpec, NormSpec, VectorSpec
from preheat.model.ties import HEAD, same_rows
from preheat.model.weight_loader import WeightLoader
from preheat.utils.text import some

Make = Callable[[WeightLoader], object]


@dataclass(frozen=True)
class Part:
    """A part of a model that is loaded as one.

    ``spec`` names its tensors, ``loaded`` is the loaded part, and ``make`` loads it again.
    """

    spec: object
    loaded: object
    make: Make

    def tensors(self, formats: Mapping[str, LinearFormat]) -> dict[str, Shape]:
        """Return name and shape of the part's tensors in a checkpoint."""
        return dict(expected_tensors(self.spec, formats))

    def may_be_partial(self, formats: Mapping[str, LinearFormat]) -> bool:
        """Whether rows without a new tensor can keep the loaded numbers.

        The loaded part must have its rows as they are stored.
        """
        spec = self.spec
        return isinstance(spec, LinearSpec) and type(formats[spec.format]) is Plain and not (spec.order or spec.sharded)


def parts(spec: ModelSpec, model: Any) -> Iterator[Part]:
    """Yield the parts of the weights ``model`` of ``spec``.

    Tied embeddings and head are one part.
    """
    if spec.tied:
        yield Part(spec.embedding, (model.embedding, model.head), lambda loader: _tied(spec, loader))
    else:
        yield Part(spec.embedding, model.embedding, lambda loader: loader.table(spec.embedding))
        if spec.head is not None:
            yield _linear(spec.head, model.head)
    for table, loaded in ((spec.positions, model.positions), (spec.types, model.types)):
        if table is not None:
            yield _table(table, loaded)
    for layer, loaded in zip(spec.layers, model.layers, strict=True):
        attention = layer.attention
        yield _linear(attention.qkv, loaded.attention.qkv)
        yield _linear(attention.o, loaded.attention.o)
        if attention.qk_norm is not None:
            yield Part(attention.qk_norm, loaded.attention.qk_norm, partial(_qk_norm, attention))
        if attention.whole_qk_norm is not None:
            pairs = zip(attention.whole_qk_norm, loaded.attention.whole_qk_norm, strict=True)
            yield from (_norm(*each) for each in pairs)
        if (sinks := attention.sinks) is not None:
            yield Part(sinks, loaded.attention.sinks, partial(_sinks, sinks))
        if (latent := attention.latent) is not None:
            yield from _latent(latent, loaded.attention.latent)
        for name in ("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm"):
            if (norm := getattr(layer, name)) is not None and norm.params:
                yield _norm(norm, getattr(loaded, name))
        yield from _mlp(layer.mlp, loaded.mlp)
    yield from _layer_inputs(spec, model)
    yield _norm(spec.final_norm, model.final_norm)
    if spec.distances is not None:
        raise ModelError("new weights for a model with biases of distances are not supported: start another engine")
    for head, loaded in zip(spec.pooled_head, model.pooled_head, strict=True):
        yield _head_layer(head, loaded)
    if (vision := spec.vision) is not None:
        yield Part(vision, model.vision, lambda loader: loader.vision(vision))


def _table(spec: EmbeddingSpec, loaded: object) -> Part:
    return Part(spec, loaded, lambda loader: loader.table(spec))


def _head_layer(spec: HeadSpec | NormSpec, loaded: object) -> Part:
    return Part(spec, loaded, lambda loader: loader.head_layer(spec))


def _qk_norm(spec: AttentionSpec, loader: WeightLoader) -> object:
    return loader.qk_norm(spec)


def _sinks(spec: VectorSpec, loader: WeightLoader) -> object:
    return loader.sinks(spec)


def _layer_inputs(spec: ModelSpec, model: Any) -> Iterator[Part]:
    """Yield the parts that make and read inputs of each layer, with the other last steps of layers."""
    for layer, loaded in zip(spec.layers, model.layers, strict=True):
        if layer.end is not None:
            yield Part(layer.end, loaded.end, partial(_end, layer.end))
    if (inputs := spec.inputs) is not None:
        yield Part(inputs, model.inputs, lambda loader: loader.inputs(inputs))


def _end(spec: LayerEndSpec, loader: WeightLoader) -> object:
    return loader.end(spec)


def _latent(spec: LatentSpec, loaded: Latent) -> Iterator[Part]:
    """Yield the parts of attention over latent vectors."""
    yield Part(spec.up, (loaded.keys, loaded.vals), lambda loader: loader.up(spec.up))
    yield _norm(spec.norm, loaded.norm)
    if spec.q is not None and spec.q_norm is not None:
        yield _linear(spec.q, loaded.q)
        yield _norm(spec.q_norm, loaded.q_norm)


def _tied(spec: ModelSpec, loader: WeightLoader) -> object:
    table = loader.table(spec.embedding)
    head = loader.head(spec, table)
    return loader.table_in(spec, head, table), head


def _linear(spec: LinearSpec, loaded: object) -> Part:
    return Part(spec, loaded, lambda loader: loader.linear(spec))


def _norm(spec: NormSpec, loaded: object) -> Part:
    return Part(spec, loaded, lambda loader: loader.norm(spec))


def _mlp(spec: MlpSpec, loaded: Any) -> Iterator[Part]:
    """Yield the parts of a feed-forward block.

    Experts and their router are loaded as one.
    """
    if isinstance(spec, DenseSpec):
        yield _linear(spec.gate_up, loaded.gate_up)
        yield _linear(spec.down, loaded.down)
    else:
        yield Part(spec, loaded, lambda loader: loader.mlp(spec))


class Update:
    """The tensors of ``source`` for the weights of ``model``, loaded beside them.

    With a ``collective`` the model is the shard of its rank. ``whole``: the old weights are gone, so no tensor may be
    missing. Raises ModelError, naming the tensors, for a tensor that the model does not have or that has another shape.
    It is also raised for a number that is not finite, and for a part that needs more tensors. Nothing is written then.
    """

    def __init__(
        self, model: LoadedModel, source: StoredTensors, backend: Backend, *, on_host: Any = False,
        whole: bool = False, collective: Collective | None = None,
    ) -> None:  # fmt: skip
        self._pairs: dict[object, tuple[Tensor, Tensor]] = {}
        given = {name for name in source.shapes if not is_harmless(name, model.spec)}
        _check_known(model, source, given, whole=whole)
        _check_head(model, source)
        found = [part for part in parts(model.spec, model.weights) if given & part.tensors(model.formats).keys()]
        _check_room(found, backend)
        for part in found:
            lacking = part.tensors(model.formats).keys() - given
            if lacking and not part.may_be_partial(model.formats):
                raise ModelError(
                    f"{some(sorted(part.tensors(model.formats).keys() & given))} cannot be updated alone: give "
                    f"{some(sorted(lacking))} too, as they are one layer"
                )
            filled = Patched(source, part) if lacking else source
            loader = WeightLoader(filled, model.dtype, backend, model.formats, from_host=on_host, collective=collective)
            self._pair(part.loaded, part.make(loader))
        source.check_finite()
        backend.synchronize()

    def _pair(self, loaded: object, made: object) -> None:
        for old, new in zip(tensors_of(loaded), tensors_of(made), strict=True):
            if old.dtype != new.dtype or (old.layout is torch.strided and old.shape != new.shape):
                raise ModelError(f"a tensor of shape {list(new.shape)} cannot replace one of shape {list(old.shape)}")
            here = id(old) if is_packed(old) else (old.data_ptr(), old.shape)
            self._pairs.setdefault(here, (old, new))  # a part may have a tensor under two names

    def swap(self) -> None:
        """Swap old and new numbers; tensors that programs read keep their addresses."""
        for old, new in self._pairs.values():
            if is_packed(old):
                old.data, new.data = new.data, old.data
            else:
                before = old.clone()
                old.copy_(new)
                new.copy_(before)


class Patched:
    """``source``, completed by the loaded rows of a linear ``part``.

    The part is plain; loaded rows take the place of missing tensors.
    """

    def __init__(self, source: StoredTensors, part: Part) -> None:
        assert isinstance(part.spec, LinearSpec)
        self._source, self._rows = source, dict[str, Tensor]()
        weight, bias = cast(Layer, part.loaded).stored()
        at = 0
        for name, outputs in part.spec.parts:
            self._rows[f"{name}.weight"] = weight[at : at + outputs]
            if bias is not None:
                self._rows[f"{name}.bias"] = bias[at : at + outputs]
            at += outputs

    def fill(self, name: str, out: Tensor, piece: Any = None) -> None:
        """See :class:`preheat.model.sources.TensorSource`."""
        if name in self._source.shapes:
            self._source.fill(name, out, piece)
        else:
            out.copy_(self._rows[name])


def _check_known(model: LoadedModel, source: StoredTensors, given: set[str], *, whole: bool) -> None:
    """Raise ModelError for names or shapes that do not fit the model."""
    expected = expected_tensors(model.stored, model.formats)
    problems = []
    if unknown := sorted(given - expected.keys()):
        problems.append(f"unknown tensors: {some(unknown)}")
    shapes = [
        f"{name} has shape {list(source.shapes[name])}, needs {list(expected[name])}"
        for name in sorted(given & expected.keys())
        if source.shapes[name] != expected[name] and not prod(source.shapes[name]) == 1 == prod(expected[name])
    ]
    if shapes:
        problems.append(some(shapes))
    if whole and (missing := sorted(expected.keys() - given)):
        problems.append(f"missing tensors, and the weights are dropped: {some(missing)}")
    if not given:
        problems.append("there are no tensors of the model")
    scales = sorted(name for name in source.shapes if STORED.fullmatch(name))
    if scales and model.spec.kv_dtype != "auto":
        problems.append(f"scales of the KV cache cannot be updated: {some(scales)}")
    if problems:
        raise ModelError(f"the weights do not fit {model.spec.architecture}: {'; '.join(problems)}")


def _check_head(model: LoadedModel, source: StoredTensors) -> None:
    """Raise ModelError for a head that a tied model would ignore.

    The head differs from the table of embeddings, so the model would never read it.
    """
    if not model.spec.tied or HEAD not in source.shapes:
        return
    table, shape = f"{model.spec.embedding.name}.weight", source.shapes[HEAD]
    if table in source.shapes:
        same = same_rows(source, HEAD, table, model.dtype)
    else:
        loaded = model.weights.embedding
        head = source.read(HEAD, Piece(shape, (0, shape[0]))).to(loaded)
        same = torch.equal(head, loaded.reshape(-1, head.shape[1])[: len(head)])
    if not same:
        raise ModelError(
            f"{HEAD} differs from {table}, and the model was loaded with one tensor for both: send {table} first or "
            "with it, or load a checkpoint with a head of its own"
        )


def _check_room(found: list[Part], backend: Backend) -> None:
    """Raise ModelError if the new parts do not fit beside the model."""
    needed = sum(tensor.numel() * tensor.element_size() for part in found for tensor in tensors_of(part.loaded))
    free = backend.free_memory()
    if needed > free:
        raise ModelError(
            f"the new weights take {needed / 2**30:,.1f} GiB beside the old ones until they change places, and "
            f"{free / 2**30:,.1f} GiB are free: update fewer layers at a time"
        )


def tensors_of(node: object) -> Iterator[Tensor]:
    """Yield the tensors below ``node``, a part of a loaded model.

    An update replaces these tensors, and a sleep drops them. A layer names its own tensors
    (:class:`preheat.backends.base.layers.HasWeights`). The order of tensors depends only on the values of layers, and
    on the classes of the other parts.
    """
    for part in _parts_of(node):
        if not isinstance(part, Tensor):
            yield from part.weights()
        elif is_packed(part) or part.is_contiguous():  # else it is a view of a layer's tensor: the table in a tied head
            yield part


def reset_state(node: object) -> None:
    """Reset the state of all layers below ``node``.

    Their memory was lost before.
    """
    for part in _parts_of(node):
        for tensor in () if isinstance(part, Tensor) else part.state():
            tensor.zero_()


def _parts_of(node: object) -> Iterator[Tensor | HasWeights]:
    """Yield the layers below ``node``, and every tensor outside of a layer."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, list | tuple):
        for child in node:
            yield from _parts_of(child)
    elif callable(getattr(node, "weights", None)):
        yield cast(HasWeights, node)
    elif type(node).__module__.startswith("preheat."):
        names = [*getattr(type(node), "__slots__", ()), *getattr(node, "__dict__", ())]
        for name in names:
            yield from _parts_of(getattr(node, name))


def is_packed(tensor: Tensor) -> bool:
    """Whether a library has laid out ``tensor``.

    Such a tensor has no storage of ours, and is replaced as a whole.
    """
    return tensor.layout is not torch.strided
