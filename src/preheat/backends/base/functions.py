"""The protocol of decoder layers as functions, and the parts of such a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from preheat.backends.base.attention import Attention, AttentionLayer
from preheat.backends.base.layers import ExpertsLayer, Linear, Norm

if TYPE_CHECKING:
    from torch import Tensor


class SharedParts(NamedTuple):
    """An expert that all tokens visit; ``gate`` is [1, hidden], if there is one."""

    gate_up: Linear
    down: Linear
    gate: Tensor | None


class RoutedParts(NamedTuple):
    """The parts of a feed-forward block of experts."""

    router: Linear
    experts: ExpertsLayer
    shared: SharedParts | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one decoder layer.

    ``gate_up`` and ``down`` are the feed-forward block, None if it is ``routed``. ``o_norm`` norms the output of
    attention before its addition to the residual stream, ``down_norm`` the output of the block. ``whole_qk_norm`` norms
    all query heads together, and all key heads together. ``parallel``: the second norm reads the residual stream as
    attention found it.
    """

    attention: AttentionLayer
    input_norm: Norm
    post_norm: Norm
    qkv: Linear
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    routed: RoutedParts | None
    o_norm: Norm | None
    down_norm: Norm | None
    whole_qk_norm: tuple[Norm, Norm] | None = None
    parallel: bool = False


class LayerFunctions(Protocol):
    """Decoder layers as two functions each."""

    @property
    def attention(self) -> Attention:
        """The attention that tells the functions of a step."""

    def layers(self, part: Sequence[int], residual: Tensor, given: Tensor | None = None) -> Tensor:
        """Run consecutive layers on the residual stream [tokens, hidden] in place; return the stream.

        ``given`` [tokens, inputs] are the inputs of a layer that reads others than the norm of the stream.
        Of the last layer only the front runs: the output of its attention [tokens, heads * dim] is returned, valid
        until the next call. Rows that pad a step are not computed.
        """

    def build(self, function: str, layer: int | None = None) -> str:
        """Compile a ``function``, or the function of a layer, unless it is there. Return its name in the code.

        ``function`` is one of :attr:`Facts.functions`. Equal functions of several layers have one name.
        """

    def tables(self) -> Iterable[Tensor]:
        """Return the tables that functions read and no step writes."""

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return hidden states [rows, hidden] after the last layer and the final norm; ``residual`` is overwritten."""

    def start(self, residual: Tensor, index: Tensor, head: Linear, logits: Tensor) -> Tensor | None:
        """Start all layers and ``head`` on the residual stream [tokens, hidden]; return before they are done.

        The output of the last attention is returned, as :meth:`layers` returns it. ``logits`` [size, vocab] become the
        logits of the tokens ``index``, int32 [size]. Both are there after :meth:`wait`, and no tensor of the step may
        change before. Return None, and start nothing, if the step has adapters or there is no function of ``head``.
        """

    def wait(self) -> None:
        """Wait for the step that was started last; return at once if there is none."""

    def take(self, attended: Tensor, residual: Tensor, index: Tensor) -> Tensor:
        """Return hidden states [size, hidden] of the tokens ``index``, int32 [size], valid until the next call.

        The states have the bits of :meth:`finish` on these tokens alone. ``residual`` is left as it is.
        """
