"""The specs of attention and of rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from preheat.model.kv_spec import KVSpec
from preheat.model.latent_specs import LatentSpec
from preheat.model.tensor_specs import LinearSpec, NormSpec, VectorSpec

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding.

    ``theta`` is its base. Its frequencies are scaled for longer contexts. ``original_length`` is the context length
    before scaling. ``low_freq_factor`` and ``high_freq_factor`` belong to kind llama3, the fields up to ``truncate`` to
    yarn (``attention_factor`` None: derived from ``factor``). Kind longrope divides each pair's frequency by its
    ``short_factor``, or by its ``long_factor`` if sequences may be longer than ``original_length``. ``partial``: the
    part of a head's dimensions that turns. ``interleaved``: in a checkpoint, partners are neighbors. ``sections``: a
    token has a place on three axes, and a pair turns by its place on one of them (:mod:`preheat.model.turns`). With
    kind proportional the first pairs of a whole head turn, and the others have frequency 0.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial: float = 1.0
    interleaved: bool = False
    sections: tuple[int, ...] = ()

    def turned(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that turn.

        In a checkpoint they are the first dimensions of the head. A layer has the first partner of each pair at the
        beginning of the head, and the second ones in its middle. So partners are half a head apart.
        """
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)


@dataclass(frozen=True)
class QueryGrowth:
    """Growth of queries with their position: a factor of 1 + ``rate`` * log(1 + floor(position / ``length``))."""

    rate: float
    length: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer.

    ``window`` is the sliding window in tokens, None for full attention. ``qk_norm`` are the norms of each query head
    and of each key head, ``whole_qk_norm`` of all query heads together and of all key heads together. ``qkv`` returns
    queries, keys and values in this order. Rotated queries are multiplied by their ``growth``. ``scale`` multiplies the
    scores. Then ``alibi`` adds each head's slope times the distance of the positions, key less query. A ``causal``
    token sees itself and the ``window`` - 1 tokens before it; any other token sees as many tokens behind it, too.
    ``sinks`` are scores without a key, one for each head, that join the softmax. With ``latent``, ``qkv`` returns the
    inputs of the queries and then the latent vector. ``gated``: behind the values, ``qkv`` returns a gate of each
    output, and the outputs are multiplied by the sigmoids of the gates.
    With ``source``, the number of a layer before, the layer reads the keys and values of that layer; ``qkv`` returns
    queries alone, and ``qk_norm`` has the norm of queries. ``one_kv``: ``qkv`` returns keys that are values too.
    ``value_eps`` is the epsilon of a norm of each head's values, which has no weights.
    """

    num_heads: int
    kv: KVSpec
    window: int | None
    rope: RopeSpec | None
    qk_norm: tuple[NormSpec, ...] | None
    qkv: LinearSpec
    o: LinearSpec
    scale: float
    alibi: tuple[float, ...] | None = None
    whole_qk_norm: tuple[NormSpec, NormSpec] | None = None
    growth: QueryGrowth | None = None
    causal: bool = True
    sinks: VectorSpec | None = None
    latent: LatentSpec | None = None
    gated: bool = False
    source: int | None = None
    one_kv: bool = False
    value_eps: float | None = None

    @property
    def rope_dim(self) -> int:
        """Numbers at the end of a head that may turn."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def attended(self) -> int:
        """Numbers of a token's output of attention, before its last maps."""
        return self.num_heads * self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.kv.head_dim

    @property
    def activations(self) -> int:
        """Intermediate numbers per token: queries, keys, values and the output of attention."""
        own = self.latent
        more = 0 if own is None else 2 * self.attended + self.head_dim + (own.q.outputs if own.q else 0)
        return self.qkv.outputs + self.o.inputs + more
