"""The specs of a layer with a state in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from preheat.model.kv_spec import KVSpec
from preheat.model.tensor_specs import LinearSpec, NormSpec, VectorSpec
from preheat.ops.values import Recurrence


@dataclass(frozen=True)
class ConvSpec:
    """A convolution of each of ``channels`` over the last ``taps`` tokens; ``name`` is the checkpoint's module.

    ``order`` lists ranges of the stored channels [from, to) in the layer's order; empty: the stored order.
    """

    name: str
    channels: int
    taps: int
    bias: bool = False
    order: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.channels, 1, self.taps

    @property
    def params(self) -> int:
        return self.channels * (self.taps + self.bias)


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """A recurrence in place of attention, see :mod:`preheat.ops.delta`.

    ``qkv`` returns queries, keys, values, gates, betas if the rule has them, and decays in this order. ``rate`` are the
    logarithms of the negative rates of decay. ``skip`` is there if the rule has it. A sequence has a state of
    ``value``, and neither keys nor values in the KV cache. A rank has some key heads with their value heads, from
    ``first_head`` on; ``conv``, ``rate``, ``bias``, ``norm`` and ``skip`` are of all heads.
    """

    value: Recurrence
    qkv: LinearSpec
    o: LinearSpec
    conv: ConvSpec
    rate: VectorSpec
    bias: VectorSpec
    norm: NormSpec
    skip: VectorSpec | None = None
    first_head: int = 0

    kv: ClassVar[KVSpec] = KVSpec(0, 0)
    window: ClassVar[None] = None
    rope: ClassVar[None] = None
    alibi: ClassVar[None] = None
    growth: ClassVar[None] = None
    sinks: ClassVar[None] = None
    qk_norm: ClassVar[None] = None
    whole_qk_norm: ClassVar[None] = None
    latent: ClassVar[None] = None
    source: ClassVar[None] = None
    causal: ClassVar[bool] = True

    @property
    def attended(self) -> int:
        """Numbers of a token's output."""
        return self.value.value_size

    @property
    def own_channels(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the channels that the heads have, in the layer's order: of queries, of keys and of values."""
        own = self.value
        keys = self.conv.channels * own.key_size // own.channels
        key, value = self.first_head * own.key_dim, self.own_heads[0] * own.value_dim
        starts = (key, own.key_size), (keys + key, own.key_size), (2 * keys + value, own.value_size)
        return tuple((start, start + size) for start, size in starts)

    @property
    def own_heads(self) -> tuple[int, int]:
        """The range of value heads among all."""
        first = self.first_head * (self.value.value_heads // self.value.key_heads)
        return first, first + self.value.value_heads

    @property
    def rope_dim(self) -> int:
        """Numbers that may turn: none of them do."""
        return self.head_dim

    @property
    def head_dim(self) -> int:
        """Numbers of a token behind the projection, as one head."""
        return self.value.inputs

    @property
    def activations(self) -> int:
        """Intermediate numbers per token: the projection, the convolution and the output."""
        return self.qkv.outputs + self.value.channels + self.o.inputs
