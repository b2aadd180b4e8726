"""A model as a tree of specs: the model and its layers, over the specs of their parts.

A family (:mod:`preheat.model.families`) builds the tree from a ``config.json``, with the checkpoint's tensor names.
Loader, cost model and tuner walk it (:mod:`preheat.model.spec_tree`). No torch here: planning needs the sizes long
before the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from preheat.cache_groups import Entry
from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.grid_specs import GridVisionSpec
from preheat.model.kv_spec import KVDtype, KVSpec
from preheat.model.latent_specs import UpSpec
from preheat.model.layer_input_specs import LayerEndSpec, LayerInputsSpec
from preheat.model.mlp_specs import ExpertsSpec, MlpSpec, MoeSpec
from preheat.model.recurrence_specs import DeltaSpec
from preheat.model.spec_tree import Leaf, leaves, with_leaves
from preheat.model.tensor_specs import TIED_HEAD, DistanceSpec, EmbeddingSpec, HeadSpec, LinearSpec, NormSpec
from preheat.model.vision_specs import VisionSpec
from preheat.ops.kinds import Scheme
from preheat.ops.values import Recurrence

Dtype = Literal["float32", "bfloat16", "float16"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual addition, norm, feed-forward block, residual addition.

    ``attention_out_norm`` norms the output of attention before its addition, ``mlp_out_norm`` the output of the block.
    ``parallel``: the block reads the residual stream as attention found it, by a ``post_norm`` of its own or, without
    one, by the ``input_norm``. ``end`` has last steps.
    """

    attention: AttentionSpec | DeltaSpec
    mlp: MlpSpec
    input_norm: NormSpec
    post_norm: NormSpec | None
    attention_out_norm: NormSpec | None = None
    mlp_out_norm: NormSpec | None = None
    parallel: bool = False
    end: LayerEndSpec | None = None

    @property
    def step_params(self) -> int:
        """Weights that a step reads besides experts.

        Biases and norms of heads are too few to count.
        """
        linears = sum(leaf.weights for _, leaf in leaves(self) if isinstance(leaf, LinearSpec | UpSpec))
        return linears + self._norm_params

    @property
    def _norm_params(self) -> int:
        return self.input_norm.size + (self.post_norm.size if self.post_norm else 0)

    @property
    def expert_params(self) -> int:
        """Weights of all experts."""
        return self.mlp.experts.params if isinstance(self.mlp, MoeSpec) else 0

    def step_bytes(self, itemsize: int) -> int:
        """Return the bytes that a step reads besides experts."""
        linears = sum(leaf.weight_bytes(itemsize) for _, leaf in leaves(self) if isinstance(leaf, LinearSpec | UpSpec))
        return linears + self._norm_params * itemsize

    def expert_bytes(self, itemsize: int) -> int:
        """Return the bytes of all experts."""
        return self.mlp.experts.weight_bytes(itemsize) if isinstance(self.mlp, MoeSpec) else 0

    @property
    def expert_share(self) -> float:
        """Share of the experts that a token visits."""
        return self.mlp.share if isinstance(self.mlp, MoeSpec) else 0.0

    @property
    def activations(self) -> int:
        """The most intermediate numbers per token at any time.

        Residual and normed input are not counted.
        """
        return max(self.attention.activations, self.mlp.activations)

    @property
    def kv(self) -> KVSpec:
        return self.attention.kv


def attention_of(layer: LayerSpec) -> AttentionSpec:
    """Return the attention of ``layer``, which has no state."""
    assert isinstance(layer.attention, AttentionSpec)
    return layer.attention


@dataclass(frozen=True)
class Rename:
    """Another layout of a checkpoint: new names of a stored tensor.

    A tensor name that matches ``stored``, a regular expression, is read as ``names``; the rows are divided evenly among
    them. If the names contain {}, the tensor is a stack, and {} the index.
    """

    stored: str
    names: tuple[str, ...]


def renamed(module: str, renames: Iterable[Rename]) -> str:
    """Return the name of a checkpoint's ``module`` after ``renames``."""
    for rename in renames:
        if match := re.fullmatch(rename.stored, f"{module}.weight"):
            return match.expand(rename.names[0]).removesuffix(".weight")
    return module


@dataclass(frozen=True)
class TaskSpec:
    """The task with number ``index`` of a checkpoint with weights for tasks.

    Each weight is the stored one and ``factor`` times the product of the task's two narrow matrices.
    """

    index: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, or an encoder.

    ``head`` returns the logits; if embeddings are tied its only part is the embedding's module. Without a head (None)
    the output is the hidden states after the final norm, see :func:`without_head`. ``max_position_embeddings`` is the
    longest sequence, rope scaling included. ``dtype`` is the checkpoint's. ``eos_ids`` end a sequence.
    ``positions`` are learned and added to the embeddings, and so are ``types``, the parts of a pair of texts.
    ``renames`` are the other layouts of the family's checkpoints. ``ignored`` are regular expressions; a tensor is no
    weight if its whole name matches one. ``vision`` is for models that see images. The fields ``elsewhere`` have sizes
    but no weights here: another stage of a pipeline has them. ``pools_first``: a text is sampled at its first token in
    place of its last. The layers of ``pooled_head`` follow a text's state.
    ``distances`` are biases of the attention of all layers. ``inputs`` are made for each layer. ``task`` is added to
    the weights as they are read.
    """

    architecture: str
    embedding: EmbeddingSpec
    inputs: LayerInputsSpec | None = None
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    head: LinearSpec | None
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    dtype: Dtype
    positions: EmbeddingSpec | None = None
    types: EmbeddingSpec | None = None
    renames: tuple[Rename, ...] = ()
    ignored: tuple[str, ...] = ()
    vision: VisionSpec | GridVisionSpec | None = None
    elsewhere: tuple[str, ...] = ()
    pools_first: bool = False
    pooled_head: tuple[HeadSpec | NormSpec, ...] = ()
    distances: DistanceSpec | None = None
    task: TaskSpec | None = None

    @property
    def image_tokens(self) -> int:
        """The most positions of an image in the prompt; 0: the model sees no images."""
        return self.vision.tokens if self.vision else 0

    @property
    def any_size(self) -> bool:
        """Whether images have as many positions as their size asks for."""
        return self.vision is not None and self.vision.any_size

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of modules beside the model's files."""
        return tuple(dict.fromkeys(each.name.partition("/")[0] for each in self.pooled_head if "/" in each.name))

    @property
    def encodes(self) -> bool:
        """Whether tokens see the tokens behind them, so that a text is read in one step."""
        return not self.layers[0].attention.causal

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.embedding.size

    @property
    def tied(self) -> bool:
        """Whether the output head is the table of embeddings."""
        return self.head is not None and self.head.parts[0][0] == self.embedding.name

    @property
    def output_size(self) -> int:
        """Width of a token's output: logits, or its hidden state."""
        return self.hidden_size if self.head is None else self.vocab_size

    @property
    def num_params(self) -> int:
        """Numbers in the checkpoint."""
        return sum(leaf.params for path, leaf in leaves(self) if not (self.tied and path == "head"))

    def weight_bytes(self, itemsize: int) -> dict[Scheme | None, int]:
        """Return the bytes of all weights on a device by scheme.

        None stands for plain weights.
        """
        found: dict[Scheme | None, int] = {None: 0}
        for path, leaf in leaves(self):
            if not isinstance(leaf, LinearSpec | ExpertsSpec) or leaf.scheme is None:
                found[None] += 0 if self.tied and path == "head" else leaf.params * itemsize
                continue
            found[leaf.scheme] = found.get(leaf.scheme, 0) + leaf.weight_bytes(itemsize)
            if isinstance(leaf, LinearSpec) and leaf.bias:
                found[None] += leaf.outputs * itemsize
        return found

    def quantized_weights(self, scheme: Scheme) -> int:
        """Return the number of weights quantized by ``scheme``."""
        found = (
            leaf for _, leaf in leaves(self) if isinstance(leaf, LinearSpec | ExpertsSpec) and leaf.scheme == scheme
        )
        return sum(leaf.weights if isinstance(leaf, LinearSpec) else leaf.params for leaf in found)

    def linears(self) -> Iterator[tuple[str, LinearSpec]]:
        """Yield every linear layer of the decoder with its path.

        A path is such as "layers.0.attention.qkv"; "head" is last.
        """
        linears = ((path, leaf) for path, leaf in leaves(self) if isinstance(leaf, LinearSpec))
        return ((path, linear) for path, linear in linears if not path.startswith("vision."))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of KV cache per token in all layers.

        ``itemsize`` are the bytes of the model's dtype.
        """
        return sum(layer.kv.bytes(itemsize) for layer in self.layers if layer.attention.source is None)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Attention of the layers that have keys and values."""
        return tuple(each.attention for each in self.layers if isinstance(each.attention, AttentionSpec))

    @cached_property
    def first_of_kinds(self) -> tuple[int, ...]:
        """The first layer of each kind."""
        kinds = [layer_kind(layer) for layer in self.layers]
        return tuple(sorted(kinds.index(kind) for kind in set(kinds)))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of a sequence in place of keys and values."""
        return len(self.attentions) < len(self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        return any(isinstance(layer.mlp, MoeSpec) for layer in self.layers)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state in all layers.

        ``itemsize`` are the bytes of the model's dtype.
        """
        return sum(each.state_bytes(itemsize) for each in self.recurrences)

    @property
    def recurrences(self) -> list[Recurrence]:
        """The recurrence of each layer with states."""
        return [each.attention.value for each in self.layers if isinstance(each.attention, DeltaSpec)]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Shapes of a token's entries, one for each layer; empty without an entry of its own."""
        own = ((layer.kv, layer.attention.source) for layer in self.layers)
        return tuple(kv.entry if kv.values and source is None else () for kv, source in own)

    # For code that supports only one kind of layer.

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        return _one("num_key_value_heads", [each.kv.num_kv_heads for each in self.attentions])

    @property
    def head_dim(self) -> int:
        return _one("head_dim", [each.kv.head_dim for each in self.attentions])

    @property
    def kv_dtype(self) -> KVDtype:
        return _one("the KV cache's dtypes", [each.kv.dtype for each in self.attentions])

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return tuple(layer.attention.window for layer in self.layers)


def without_head(spec: ModelSpec, max_length: int | None = None, *, first: bool = False) -> ModelSpec:
    """Return ``spec`` with hidden states as output, at a text's last token, or at its ``first`` one.

    Texts have at most ``max_length`` tokens. A model that reads less keeps its own length. The checkpoint's output head
    is not loaded. Raises ModelError for the first token of a decoder, which sees no other token.
    """
    if first and not spec.encodes:
        raise ModelError(
            "pooling CLS takes the first token, and the first token of a decoder sees no other: write LAST or MEAN"
        )
    parts = () if spec.head is None else ((TIED_HEAD, 0),) if spec.tied else spec.head.parts
    stored = tuple(rf"{re.escape(name)}\..*" for name, _ in parts)
    length = min(spec.max_position_embeddings, max_length or spec.max_position_embeddings)
    ignored = (*spec.ignored, *stored)
    return replace(spec, head=None, ignored=ignored, max_position_embeddings=length, pools_first=first)


def base_model(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` for the checkpoint of a headless model class.

    Its names lack the first part.
    """
    prefix = spec.embedding.name.partition(".")[0] + "."
    rename = Rename(rf"(?!{re.escape(prefix)})(.+)", (rf"{prefix}\1",))
    return replace(without_head(spec), renames=(*spec.renames, rename))


def layer_kind(layer: LayerSpec) -> LayerSpec:
    """Return the fields of ``layer`` that decide its kernels.

    These are all fields but names in the checkpoint and the cache's scales. Layers of one kind run the same kernels.
    """
    attention = layer.attention
    if isinstance(attention, AttentionSpec):
        attention = replace(attention, kv=replace(layer.kv, scales=(1.0, 1.0)))
    return with_leaves(replace(layer, attention=attention), lambda _, leaf: _unnamed(leaf))


def _unnamed(leaf: Leaf) -> Leaf:
    if isinstance(leaf, LinearSpec):
        return replace(leaf, parts=tuple(("", outputs) for _, outputs in leaf.parts))
    return replace(leaf, gate="", up="", down="") if isinstance(leaf, ExpertsSpec) else replace(leaf, name="")


def _one(name: str, values: Iterable[T]) -> T:
    """Return the value that all layers share. Raises ModelError if layers differ."""
    first, *others = dict.fromkeys(values)
    if others:
        raise ModelError(f"{name} that differ between layers are not supported")
    return first
