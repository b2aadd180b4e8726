"""The specs of a layer with a state in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.model.kv_spec import KVSpec
from preheat.ops.values import Recurrence

if TYPE_CHECKING:
    from preheat.model.specs import LinearSpec, NormSpec, VectorSpec


@dataclass(frozen=True)
class ConvSpec:
    """A convolution of each of ``channels`` over the last ``taps`` tokens; ``name`` is the checkpoint's module."""

    name: str
    channels: int
    taps: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.channels, 1, self.taps

    @property
    def params(self) -> int:
        return self.channels * self.taps


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """A gated delta rule in place of attention, see :mod:`preheat.ops.delta`.

    ``qkv`` returns queries, keys, values, gates, betas and decays in this order. ``rate`` are the logarithms of the
    negative rates of decay. A sequence has a state of ``value``, and neither keys nor values in the KV cache.
    """

    value: Recurrence
    qkv: LinearSpec
    o: LinearSpec
    conv: ConvSpec
    rate: VectorSpec
    bias: VectorSpec
    norm: NormSpec

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
