"""A head of EAGLE-3: the spec of its checkpoint, and its loading.

Sources: the paper (arXiv 2503.01840) and the checkpoints of its authors, ``LlamaForCausalLMEagle3``. A head drafts for
a target model. A feature of the target is ``fc`` of the residual stream before three of its layers, side by side. The
head is one decoder layer, ``midlayer``. Its queries, keys and values read twice the hidden size: the norm of a token's
embedding, and ``hidden_norm`` of the feature at the position before it. The residual stream begins as the feature;
attention and the feed-forward block add to it. Its norm gives logits over the head's own vocabulary, where id i is the
target's id i + ``d2t[i]``. The residual stream before the norm stands for the feature of the next position, because the
target has not computed it yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.layers import Linear, Norm
from preheat.errors import ModelError, SettingsError
from preheat.model.config import Config
from preheat.model.draft_head import LoadedHead, Reads
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.families.common import Names, llama_like, norm
from preheat.model.files import find_model, read_config
from preheat.model.formats import expected_tensors
from preheat.model.loader import LoadedModel
from preheat.model.reading import Shape
from preheat.model.sources import SafetensorsFiles, check_shapes
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import LinearSpec, NormSpec
from preheat.model.weight_loader import WeightLoader
from preheat.model.weights import Weights
from preheat.settings import Settings

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NAMES = Names(embedding="embed_tokens", layer="midlayer.", final_norm="norm", head="lm_head")
RENAMES = (Rename(r"layers\.0\.(.*)", (r"midlayer.\1",)),)
"""Some exporters number the only layer."""
TO_TARGET, TO_DRAFT = "d2t", "t2d"


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """An EAGLE-3 head.

    ``decoder`` is its layer with its embeddings, final norm and output head; the outputs of the head are the draft
    vocabulary. Features are ``fc`` of the residual stream before the target's ``layers``. ``norm_before_residual``: the
    residual stream begins as the norm of the feature.
    """

    decoder: ModelSpec
    fc: LinearSpec
    hidden_norm: NormSpec
    layers: tuple[int, ...]
    norm_before_residual: bool

    @property
    def head(self) -> LinearSpec:
        """The output head, over the draft vocabulary."""
        assert self.decoder.head is not None  # it draws tokens
        return self.decoder.head

    @property
    def draft_vocab_size(self) -> int:
        return self.head.outputs

    def tensors(self, *, embedding: bool, tables: bool) -> dict[str, Shape]:
        """Return name and shape of every tensor of a checkpoint.

        ``embedding`` and ``tables``: whether it has its own embeddings, and tables between the vocabularies.
        """
        found = expected_tensors(self)
        if not embedding:
            del found[f"{self.decoder.embedding.name}.weight"]
        if tables:
            found |= {TO_TARGET: (self.draft_vocab_size,), TO_DRAFT: (self.decoder.vocab_size,)}
        return found


@dataclass(frozen=True, kw_only=True)
class EagleHead(LoadedHead):
    """A loaded head of EAGLE-3."""

    eagle: EagleSpec
    hidden_norm: Norm

    @property
    def outer_linears(self) -> list[object]:
        head = self.weights.head
        return [self.fc, head.linear if isinstance(head, DraftHead) else head]

    @property
    def reads(self) -> Reads:
        return Reads(self.eagle.layers, self.fc)

    def begin(self, embedded: Tensor, residual: Tensor, joined: Tensor) -> Tensor | None:
        """Begin the residual stream as the feature; the layer reads the norms of embedding and feature side by side."""
        hidden, normed = residual.shape[1], self.hidden_norm(residual)
        joined[:, :hidden].copy_(self.weights.layers[0].input_norm(embedded))
        joined[:, hidden:].copy_(normed)
        if self.eagle.norm_before_residual:
            residual.copy_(normed)
        return joined

    def following(self, residual: Tensor, hidden: Tensor) -> Tensor:
        return residual


@dataclass(frozen=True)
class DraftHead:
    """An output head over the tokens ``ids`` int64 [outputs] of the vocabulary.

    All other tokens have a logit of minus infinity.
    """

    linear: Linear
    ids: Tensor
    vocab_size: int

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self.linear(x)
        out = logits.new_empty(len(x), self.vocab_size) if out is None else out
        return out.fill_(-torch.inf).index_copy_(1, self.ids, logits)


def eagle_spec(values: Mapping[str, Any], target: ModelSpec) -> EagleSpec:
    """Return the head of a parsed ``config.json`` for the model ``target``.

    Raises ModelError naming the field that is missing or not supported, and SettingsError for a head of another model.
    """
    if ARCHITECTURE not in (names := values.get("architectures") or []):
        raise ModelError(
            f"method eagle3 drafts with a head of {ARCHITECTURE}, and config.json has architectures {names}"
        )
    config = Config(ARCHITECTURE, values).with_defaults(max_position_embeddings=2048, num_hidden_layers=1)
    config.require_unquantized()
    for name in ("tie_word_embeddings", "norm_before_fc", "fc_norm", "norm_output"):
        config.refuse(name)
    if config.num_layers() != 1:
        raise ModelError(f"a head of EAGLE-3 has one layer, and num_hidden_layers is {config.num_layers()}")
    hidden, vocab_size = config.size("hidden_size"), config.size("vocab_size")
    of_target = config.size("target_hidden_size", hidden)
    _must_fit("vocabulary of {:,} tokens", vocab_size, target.vocab_size)
    _must_fit("hidden size of {:,}", of_target, target.hidden_size)
    layers = _layers(config, len(target.layers))
    bias = config.flag("attention_bias")
    decoder = llama_like(config, NAMES, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))
    config.refuse_unread()
    layer = decoder.layers[0]
    qkv = replace(layer.attention.qkv, inputs=2 * hidden)
    head = LinearSpec(
        parts=((NAMES.head, config.size("draft_vocab_size", vocab_size, most=vocab_size)),), inputs=hidden
    )
    return EagleSpec(
        decoder=replace(decoder, layers=(replace(layer, attention=replace(layer.attention, qkv=qkv)),), head=head),
        fc=LinearSpec(parts=(("fc", hidden),), inputs=len(layers) * of_target),
        hidden_norm=norm(config, f"{NAMES.layer}hidden_norm", hidden),
        layers=layers,
        norm_before_residual=config.flag("norm_before_residual"),
    )


def _must_fit(what: str, own: int, other: int) -> None:
    if own != other:
        raise SettingsError(
            f"the head was made for a model with a {what.format(own)}, and this model has {other:,}: choose the head "
            "of this model",
            param="speculative_config",
        )


def _layers(config: Config, count: int) -> tuple[int, ...]:
    """Return the layers with inputs that the head reads.

    The model has ``count`` layers. Ids at the top of a config are these layers (vLLM). Ids in ``eagle_config`` are one
    less: the residual stream is read after these layers (SGLang, SpecForge).
    """
    of_outputs = config.mapping("eagle_config").get(LAYER_IDS) or ()
    layers = [*config.ids(LAYER_IDS)] or [each + 1 for each in of_outputs] or [2, count // 2, count - 3]
    if any(not 0 < layer < count for layer in layers):
        raise ModelError(
            f"the head reads the residual stream before layers {layers}, and the model has {count}: each must be "
            f"between 1 and {count - 1}; {LAYER_IDS} in the head's config.json names them"
        )
    return tuple(layers)


def is_head(settings: Settings) -> bool:
    """Whether the model of ``settings`` is a head."""
    return ARCHITECTURE in (read_config(find_model(settings, with_weights=False)).get("architectures") or [])


def load_head(settings: Settings, backend: Backend, target: LoadedModel) -> EagleHead:
    """Return the head that ``settings`` name as their model.

    It runs in the dtype of ``target``. The head shares the embeddings of ``target`` unless it has its own. Raises
    ModelError or SettingsError naming the mistake.
    """
    dummy = settings.load_format == "dummy"
    folder = find_model(settings, with_weights=not dummy)
    spec = eagle_spec(read_config(folder), target.spec)
    embedding = f"{NAMES.embedding}.weight"
    with backend.uploading() as copy:
        files = None if dummy else SafetensorsFiles(folder, copy, RENAMES)
        stored = files.shapes if files is not None else {}
        tables = spec.draft_vocab_size != target.spec.vocab_size or TO_TARGET in stored
        if files is not None:
            check_shapes(ARCHITECTURE, spec.tensors(embedding=embedding in stored, tables=tables), stored)
        loader = WeightLoader(files or DummyTensors(settings.seed or 0), target.dtype, backend)
        own = loader.tensor(embedding, *spec.decoder.embedding.shape) if embedding in stored else _shared(spec, target)
        ids = _ids(spec, files) if tables else None
        weights = _weights(spec, loader, own, ids if ids is None else ids.to(backend.device))
        fc, hidden_norm = loader.linear(spec.fc), loader.norm(spec.hidden_norm)
        if files is not None:
            files.check_finite()
    feature = spec.decoder.hidden_size * backend.activation_dtype(target.dtype).itemsize
    per_token = spec.decoder.kv_bytes_per_token(target.dtype.itemsize) + feature
    return EagleHead(
        folder, spec.decoder, target.dtype, target.dtype_name, weights,
        (settings.block_size or backend.facts.block_size) * per_token, eagle=spec, fc=fc, hidden_norm=hidden_norm,
    )  # fmt: skip


def _shared(spec: EagleSpec, target: LoadedModel) -> Tensor:
    """Return the target's embeddings. Raises ModelError if they do not fit."""
    if spec.decoder.hidden_size != target.spec.hidden_size:
        raise ModelError(
            f"the head has no {NAMES.embedding} and a hidden size of {spec.decoder.hidden_size}: the model's "
            f"embeddings, of {target.spec.hidden_size}, do not fit"
        )
    return target.weights.embedding


def _weights(spec: EagleSpec, loader: WeightLoader, embedding: Tensor, ids: Tensor | None) -> Weights:
    decoder = spec.decoder
    head = loader.linear(spec.head)
    return Weights(
        embedding=embedding,
        layers=[loader.layer(decoder.layers[0])],
        final_norm=loader.norm(decoder.final_norm),
        head=head if ids is None else DraftHead(head, ids, decoder.vocab_size),
    )


def _ids(spec: EagleSpec, files: SafetensorsFiles | None) -> Tensor:
    """Return the target's ids of the draft vocabulary, int64 [draft vocabulary].

    For random weights they are spread evenly. Raises ModelError if the two tables contradict each other.
    """
    places, vocab_size = torch.arange(spec.draft_vocab_size), spec.decoder.vocab_size
    if files is None:
        return places * (vocab_size // len(places))
    offsets, known = torch.empty_like(places), torch.empty(vocab_size, dtype=torch.bool)
    files.fill(TO_TARGET, offsets)
    files.fill(TO_DRAFT, known)
    ids = places + offsets
    if not torch.equal(ids.sort().values, known.nonzero()[:, 0]):
        raise ModelError(f"{TO_TARGET} and {TO_DRAFT} of the head contradict each other: export the checkpoint again")
    return ids
