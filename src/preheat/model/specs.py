"""A model's parts as a tree: ModelSpec, LayerSpec, AttentionSpec and DenseSpec, LinearSpec and NormSpec.

A family (:mod:`preheat.model.families`) builds the tree from a ``config.json``, with the checkpoint's tensor names.
Loader, cost model and tuner walk it. No torch here: planning needs the sizes long before the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal, TypeVar

from preheat.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Dtype = Literal["float32", "bfloat16", "float16"]
Activation = Literal["silu_and_mul"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A linear layer y = x W^T + b: the checkpoint's ``parts`` (module name, outputs), stacked from top to bottom.

    ``format`` is how these modules are stored (:mod:`preheat.model.formats`). With activation "silu_and_mul" the first
    half of the outputs is the gate of the second, and the layer returns SwiGLU of both.
    """

    parts: tuple[tuple[str, int], ...]
    inputs: int
    bias: bool = False
    activation: Activation | None = None
    format: str = "plain"

    @property
    def outputs(self) -> int:
        """Rows of W."""
        return sum(outputs for _, outputs in self.parts)

    @property
    def gated(self) -> bool:
        return self.activation == "silu_and_mul"

    @property
    def weights(self) -> int:
        """How many numbers W has."""
        return self.outputs * self.inputs

    @property
    def params(self) -> int:
        """How many numbers W and b have."""
        return self.weights + self.bias * self.outputs


@dataclass(frozen=True)
class NormSpec:
    """A root-mean-square norm of rows of ``size`` numbers; ``name`` is the checkpoint's module."""

    name: str
    size: int
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def params(self) -> int:
        return self.size


@dataclass(frozen=True)
class EmbeddingSpec:
    """The table of token embeddings, [vocab_size, size]; ``name`` is the checkpoint's module."""

    name: str
    vocab_size: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.vocab_size, self.size

    @property
    def params(self) -> int:
        return self.vocab_size * self.size


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base ``theta`` and how the frequencies are scaled for longer contexts.

    ``original_length`` is the context length before scaling. ``low_freq_factor`` and ``high_freq_factor`` belong to
    kind llama3, the fields after them to yarn (``attention_factor`` None: derived from ``factor``).
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class KVSpec:
    """A layer's entry of a token in the KV cache: a key and a value of ``head_dim`` numbers for each head."""

    num_kv_heads: int
    head_dim: int

    @property
    def values(self) -> int:
        """Numbers per token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal attention of one layer.

    ``window`` is the sliding window in tokens, None for full attention. ``qk_norm`` are the norms of each query head
    and of each key head. ``qkv`` returns queries, keys and values in this order. ``scale`` multiplies the scores.
    """

    num_heads: int
    kv: KVSpec
    window: int | None
    rope: RopeSpec
    qk_norm: tuple[NormSpec, NormSpec] | None
    qkv: LinearSpec
    o: LinearSpec
    scale: float

    @property
    def num_kv_heads(self) -> int:
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.kv.head_dim

    @property
    def activations(self) -> int:
        """Intermediate numbers per token: queries, keys, values and the output of attention."""
        return self.qkv.outputs + self.o.inputs


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A feed-forward block: ``gate_up``, which includes the activation, then ``down``."""

    gate_up: LinearSpec
    down: LinearSpec

    @property
    def activations(self) -> int:
        """Intermediate numbers per token: gate, up, and the output of the activation."""
        return self.gate_up.outputs + self.down.inputs


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual addition, norm, feed-forward block, residual addition."""

    attention: AttentionSpec
    mlp: DenseSpec
    input_norm: NormSpec
    post_norm: NormSpec

    @property
    def step_params(self) -> int:
        """How many weights a step reads; biases and norms of heads are too few to count."""
        linears = sum(leaf.weights for _, leaf in leaves(self) if isinstance(leaf, LinearSpec))
        return linears + self.input_norm.size + self.post_norm.size

    @property
    def activations(self) -> int:
        """The most intermediate numbers per token at any time, besides residual and normed input."""
        return max(self.attention.activations, self.mlp.activations)

    @property
    def kv(self) -> KVSpec:
        return self.attention.kv


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    ``head`` returns the logits; if embeddings are tied its only part is the embedding's module.
    ``max_position_embeddings`` is the longest sequence, rope scaling included. ``dtype`` is the checkpoint's.
    ``eos_ids`` end a sequence; ``bos_id`` begins one if the tokenizer says so.
    """

    architecture: str
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    head: LinearSpec
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: Dtype

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.embedding.size

    @property
    def tied(self) -> bool:
        """Whether the output head is the table of embeddings."""
        return self.head.parts[0][0] == self.embedding.name

    @property
    def num_params(self) -> int:
        """How many numbers the checkpoint has."""
        return sum(leaf.params for path, leaf in leaves(self) if not (self.tied and path == "head"))

    def linears(self) -> Iterator[tuple[str, LinearSpec]]:
        """Every linear layer with its path, such as "layers.0.attention.qkv"; the last one is "head"."""
        return ((path, leaf) for path, leaf in leaves(self) if isinstance(leaf, LinearSpec))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of KV cache per token in all layers, in a dtype of ``itemsize`` bytes."""
        return sum(layer.kv.values for layer in self.layers) * itemsize

    # For code that supports only one kind of layer.

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        return _one("num_key_value_heads", [layer.kv.num_kv_heads for layer in self.layers])

    @property
    def head_dim(self) -> int:
        return _one("head_dim", [layer.kv.head_dim for layer in self.layers])

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return tuple(layer.attention.window for layer in self.layers)


Leaf = LinearSpec | NormSpec | EmbeddingSpec
"""The specs with tensors of their own."""


def leaves(node: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every leaf below ``node`` with its path, in the order of the fields."""
    if isinstance(node, Leaf):
        yield path, node
        return
    children: Iterable[tuple[object, object]] = ()
    if isinstance(node, tuple):
        children = enumerate(node)
    elif is_dataclass(node):
        children = ((field.name, getattr(node, field.name)) for field in fields(node))
    for name, child in children:
        yield from leaves(child, f"{path}.{name}" if path else str(name))


def _one(name: str, values: Iterable[T]) -> T:
    """The value that all layers share."""
    first, *others = dict.fromkeys(values)
    if others:
        raise ModelError(f"{name} that differ between layers are not supported")
    return first
