"""The layer of a checkpoint that predicts one token further (MTP), as a head that drafts.

Sources: the paper of DeepSeek-V3 (arXiv 2412.19437), and the checkpoints of DeepSeek and Qwen. A feature is the hidden
state of the model after its final norm. The residual stream begins as ``fc`` of two norms side by side: of a token's
embedding, and of the feature at the position before it. A decoder layer of the family adds to it. A norm of its own
gives the hidden state for the model's output head, and this state stands for the feature of the next position.
Embeddings and output head are the model's: copies in the checkpoint are not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.layers import Linear, Norm
from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.draft_head import LoadedHead, Reads
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.families import FAMILIES, without_images
from preheat.model.files import read_config
from preheat.model.formats import FORMATS, expected_tensors
from preheat.model.layers import GatheredHead
from preheat.model.loader import LoadedModel
from preheat.model.quantization import quantized
from preheat.model.reading import Shape
from preheat.model.sources import SafetensorsFiles, check_shapes
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import LinearSpec, NormSpec
from preheat.model.weight_loader import WeightLoader
from preheat.settings import Settings


class Stored(NamedTuple):
    """Names in the checkpoints of a family; {} is the number of layers before.

    All of them begin with ``at``. ``counted`` is the field of the config with the number of such layers, and ``usual``
    its default.
    """

    at: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str
    counted: str
    usual: int


_QWEN = Stored("mtp.", "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
               "mtp_num_hidden_layers", 1)  # fmt: skip
_OWN = "model.layers.{}."
_DEEPSEEK = Stored(_OWN, _OWN, f"{_OWN}enorm", f"{_OWN}hnorm", f"{_OWN}eh_proj", f"{_OWN}shared_head.norm",
                   "num_nextn_predict_layers", 0)  # fmt: skip

STORED: Mapping[str, Stored] = {
    "Qwen3NextForCausalLM": _QWEN, "Qwen3_5ForCausalLM": _QWEN, "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN, "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "DeepseekV3ForCausalLM": _DEEPSEEK, "Glm4MoeLiteForCausalLM": _DEEPSEEK,
}  # fmt: skip
"""The families with such a layer."""

_COPIES = r"(.*\.)?(embed_tokens|shared_head\.head|rotary_emb)\..*"
"""Tensors that the model has too."""


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """A layer that predicts one token further.

    ``decoder`` is the layer with its norm, and the model's embeddings and output head. ``at`` is the beginning of the
    tensors' names.
    """

    decoder: ModelSpec
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    fc: LinearSpec
    at: str

    @property
    def own(self) -> ModelSpec:
        """The decoder without the parts of the model."""
        return replace(self.decoder, elsewhere=("embedding", "head"))

    @property
    def tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor."""
        return expected_tensors((self.own, self.embedding_norm, self.hidden_norm, self.fc))


@dataclass(frozen=True, kw_only=True)
class MtpHead(LoadedHead):
    """A loaded layer that predicts one token further."""

    embedding_norm: Norm
    hidden_norm: Norm

    @property
    def outer_linears(self) -> list[object]:
        return [self.fc, self.weights.head]

    @property
    def reads(self) -> Reads:
        return Reads()

    def begin(self, embedded: Tensor, residual: Tensor, joined: Tensor) -> Tensor | None:
        """Begin the residual stream as ``fc`` of the norms of embedding and feature side by side."""
        hidden = residual.shape[1]
        joined[:, :hidden].copy_(self.embedding_norm(embedded))
        joined[:, hidden:].copy_(self.hidden_norm(residual))
        residual.copy_(self.fc(joined))
        return None

    def following(self, residual: Tensor, hidden: Tensor) -> Tensor:
        return hidden


def mtp_spec(values: Mapping[str, Any], target: ModelSpec, quantization: str | None = None) -> MtpSpec:
    """Return the layer of a parsed ``config.json`` behind the layers of ``target``.

    ``quantization`` is the method of ``--quantization``. Raises ModelError for a model without such a layer.
    """
    found = next((name for name in values.get("architectures") or [] if name in STORED), None)
    if found is None:
        raise ModelError(
            f"method mtp drafts with a layer of the checkpoint, and {target.architecture} has none: choose another "
            f"method; the layer is known of {', '.join(STORED)}"
        )
    stored, count = STORED[found], len(target.layers)
    own = dict(values.get("text_config", values))
    config = Config(found, own)
    _require_one(config, stored)
    kinds = ["full_attention" if isinstance(each.attention, AttentionSpec) else "linear_attention"
             for each in target.layers]  # fmt: skip
    more = {"layer_types": [*kinds, "full_attention"]} if stored is _QWEN else {}
    if isinstance(dense := own.get("mlp_layer_types"), list):
        more["mlp_layer_types"] = [*dense, "sparse"]
    own |= {"num_hidden_layers": count + 1, **more}
    made = without_images(
        FAMILIES[found](Config(found, {**values, "text_config": own} if "text_config" in values else own))
    )
    layer = _moved(made.layers[-1], f"model.layers.{count}.", stored.layer.format(count))
    hidden = target.hidden_size
    embedding_norm, hidden_norm, norm = (
        replace(made.final_norm, name=name.format(count))
        for name in (stored.embedding_norm, stored.hidden_norm, stored.norm)
    )
    return MtpSpec(
        decoder=quantized(
            replace(made, layers=(layer,), final_norm=norm), Config(found, values).quantization(), quantization
        ),
        embedding_norm=embedding_norm,
        hidden_norm=hidden_norm,
        fc=LinearSpec(parts=((stored.fc.format(count), hidden),), inputs=2 * hidden),
        at=stored.at.format(count),
    )


def _require_one(config: Config, stored: Stored) -> None:
    """Raise ModelError unless the checkpoint has one layer that predicts, over the model's embeddings."""
    config.refuse("mtp_use_dedicated_embeddings")
    count = config.get(stored.counted) if config.has(stored.counted) else stored.usual
    if count != 1:
        raise ModelError(
            f"config.json: {stored.counted} is {count!r}, and method mtp needs one layer that predicts: choose another "
            "method"
        )


def _moved(node: Any, before: str, after: str) -> Any:
    """Return the spec ``node`` with names that begin with ``after`` in place of ``before``."""
    if isinstance(node, str):
        return after + node.removeprefix(before) if node.startswith(before) else node
    if isinstance(node, tuple):
        return tuple(_moved(each, before, after) for each in node)
    if not is_dataclass(node) or isinstance(node, type):
        return node
    return replace(node, **{each.name: _moved(getattr(node, each.name), before, after) for each in fields(node)})


def load_mtp(settings: Settings, backend: Backend, target: LoadedModel) -> MtpHead:
    """Return the layer of the settings' checkpoint that predicts one token further.

    It runs in the dtype of ``target``. Raises ModelError naming the mistake.
    """
    dummy = settings.load_format == "dummy"
    spec = mtp_spec(read_config(target.folder, settings.hf_overrides), target.spec, settings.quantization)
    with backend.uploading() as copy:
        files = None if dummy else SafetensorsFiles(target.folder, copy, spec.decoder.renames)
        if files is not None:
            _check(spec, files.shapes)
        loader = WeightLoader(files or DummyTensors(settings.seed or 0), target.dtype, backend, target.formats)
        weights = loader.model(spec.own)
        norms = loader.norm(spec.embedding_norm), loader.norm(spec.hidden_norm)
        fc, head = loader.linear(spec.fc), _whole_head(target, loader)
        if files is not None:
            files.check_finite()
    feature = spec.decoder.hidden_size * backend.activation_dtype(target.dtype).itemsize
    per_token = spec.decoder.kv_bytes_per_token(target.dtype.itemsize) + feature
    weights = replace(weights, embedding=target.weights.embedding, head=head)
    return MtpHead(
        target.folder, spec.decoder, target.dtype, target.dtype_name, weights,
        (settings.block_size or backend.facts.block_size) * per_token, formats=FORMATS, fc=fc,
        embedding_norm=norms[0], hidden_norm=norms[1],
    )  # fmt: skip


def _whole_head(target: LoadedModel, loader: WeightLoader) -> Linear:
    """Return the output head of ``target``; where ranks share it, a whole one, because one rank alone drafts."""
    if not isinstance(target.weights.head, GatheredHead):
        return target.weights.head
    return loader.head(target.stored, target.weights.embedding)


def _check(spec: MtpSpec, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError unless the tensors of the layer are in a checkpoint with ``shapes``."""
    mine = {name: shape for name, shape in shapes.items() if name.startswith(spec.at)}
    if not mine:
        raise ModelError(
            f"method mtp needs the tensors {spec.at}*, and the checkpoint has none: fetch a checkpoint with them, or "
            "choose another method"
        )
    check_shapes("the layer of method mtp", spec.tensors, mine, lambda name: re.fullmatch(_COPIES, name) is not None)
