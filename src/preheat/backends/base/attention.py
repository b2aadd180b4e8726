"""The protocols of attention and recurrences, and the rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from preheat.backends.base.layers import Norm
from preheat.ops.values import Recurrence

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from preheat.core import StepStates
    from preheat.ops.delta import DeltaStates, DeltaWeights


class BlockTables(Protocol):
    """The running sequences' block tables, see :class:`preheat.schedule.slots.Slots`.

    A device with one table reads ``block_table``, the first group's of ``tables``.
    """

    block_size: int
    block_table: np.ndarray
    tables: np.ndarray
    table_version: np.ndarray
    table_writes: int


@dataclass(slots=True)
class StepRows:
    """A step's rows for attention.

    Row i computes ``extend[i]`` tokens, from position ``first[i]`` on, of the sequence in slot ``slots[i]``. ``ends``
    int64 counts the step's tokens up to each row's last. The first ``num_decode`` rows decode, one token each. The step
    is padded to ``tokens``, and belongs to a program of ``width``, see :class:`StepInputs`. ``states`` are the state
    slots that the rows use, None if each row uses its own.
    """

    slots: np.ndarray
    first: np.ndarray
    extend: np.ndarray
    ends: np.ndarray
    num_decode: int
    tokens: int
    width: int = 0
    states: StepStates | None = None


@dataclass(slots=True)
class AttentionWork:
    """The pieces of work of a step.

    ``lists[i]`` int32 [n, 2] are written behind the step's tokens, see :class:`preheat.execution.buffers.StepBuffers`.
    ``steady``: the work stays valid for so many more steps of the same rows, all decoding; negative: it is for this
    step alone. ``table_writes``: it is valid only while the block tables have been written so often; negative: writes
    do not matter.
    """

    lists: list[np.ndarray]
    steady: int
    table_writes: int


@dataclass(frozen=True)
class StepInputs:
    """A program's input on the device, all int32.

    ``tokens`` [T] are ids, or -1 for the slot's latest token drawn by the device, or below -1 embeddings of images, see
    :meth:`Operations.embed`. ``slots`` [T] name each token's sequence, ``positions`` [T] its place in the sequence;
    padding has the slot beyond all others. ``lists`` are attention's lists of work, and ``counts`` their numbers of
    entries in use. ``rows`` is the program's largest number of rows. ``width`` is the largest number of tokens of a row
    where all rows decode: 1, or more with drafts; 0 where rows may read prompts. ``longest`` and ``blocks`` belong to
    the bucket, and are 0 where the bucket has none. ``places`` [axes, T] are the places by which tokens turn, None if
    they turn by their position.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    lists: tuple[Tensor, ...]
    counts: Tensor
    rows: int
    width: int
    longest: int = 0
    blocks: int = 0
    places: Tensor | None = None

    @property
    def decode(self) -> bool:
        """Return whether all rows have one token."""
        return self.width == 1


@dataclass(frozen=True)
class AttentionLayer:
    """Tensors and constants of one layer's attention.

    ``cache`` [blocks, 2, kv heads, block size, dim]; ``rope`` [positions, 2, 1, dim], see
    :func:`preheat.model.rope.rope_table`; ``qk_norm`` norms each query and key head before rotary embedding. ``alibi``
    fp32 [heads]: slope * (key's position - query's) is added to a head's scaled scores, in fp32, before their maximum
    is taken. ``growth`` [positions] are factors of rotated queries; a product is rounded to ``dtype``. Where attention
    is not ``causal``, a token sees all tokens of its row of the step, also the tokens behind it, within ``window`` - 1
    tokens on each side; a step has all tokens of such a row. ``sinks`` fp32 [heads]: a head's sink is a score without a
    key. It joins the softmax as the last KV split: its sum of weights is one, its output zero.
    ``distances`` fp32 [heads, columns] are added to scaled scores, see :mod:`preheat.ops.distances`. A ``cache`` with
    one index in place of two has keys that are values too. The first ``still`` numbers of a head do not turn, and
    ``rope`` has the others. ``group`` is the number of the layer's cache group, with its block table. With ``by_token``
    row i of ``rope`` belongs to token i of the step, in place of position i: each step writes it. A layer that is not
    ``own`` reads the keys and values in its ``cache``, and stores none.

    Queries and outputs are of ``dtype``. In a cache of eight bits, keys and values are divided by ``kv_scales`` and
    rounded to the cache's dtype, see :mod:`preheat.ops.float8`. Attention reads only stored keys and values, also for a
    prompt's own chunk: ``scale`` times the keys' scale multiplies the scores, the values' scale the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    cache: Tensor
    dtype: torch.dtype
    rope: Tensor | None
    qk_norm: Norm | None
    alibi: Tensor | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    growth: Tensor | None = None
    causal: bool = True
    sinks: Tensor | None = None
    distances: Tensor | None = None
    still: int = 0
    group: int = 0
    by_token: bool = False
    own: bool = True


Attend = Callable[[int, "Tensor"], "Tensor"]
"""``attend(layer, qkv)``: the attention of one layer, [tokens, heads * dim].

It norms and rotates the queries and keys of ``qkv`` [tokens, heads + 2 * kv heads, dim], stores keys and values, and
attends with the queries. A layer without its own keys and values is given queries alone.
"""


class Attention(Protocol):
    """Attention of all layers over the paged cache."""

    def list_sizes(self, tokens: int, rows: int, *, width: int) -> tuple[int, ...]:
        """Return the capacity of each list of work.

        Steps have ``tokens`` tokens in at most ``rows`` rows, and belong to programs of ``width``, see
        :class:`StepInputs`.
        """

    def plan(self, step: StepRows, tables: BlockTables) -> AttentionWork:
        """Cut ``step`` into work, on the host."""

    def write(self, turn: int, tables: BlockTables) -> None:
        """Bring host copy ``turn`` of the device's tables up to date."""

    def send(self, turn: int, work: AttentionWork, inputs: StepInputs) -> None:
        """Send work and tables to the device, before the step's programs run; returns before they arrive."""

    def attend(self, inputs: StepInputs, out: Tensor) -> Attend:
        """Return the function that the decoder calls in each layer of a program with these inputs.

        ``out`` [tokens, heads * dim] may be used for the results.
        """

    def clear(self) -> None:
        """Set every block table on the device to the pad block."""


class Recurrences(Protocol):
    """Recurrences of all layers with states, by kernels of the device. See :mod:`preheat.ops.delta`."""

    def states(self, value: Recurrence, slots: int, dtype: torch.dtype) -> DeltaStates:
        """Return the zero states of a layer, in the device's own layout."""

    def plan(self, step: StepRows, states: StepStates) -> Any:
        """Return the rows of ``step`` in the form of the device, on the host."""

    def send(self, turn: int, rows: Any) -> None:
        """Send the ``rows`` of a step in host copy ``turn``; returns before they arrive."""

    def run(self, inputs: StepInputs, x: Tensor, weights: DeltaWeights, states: DeltaStates, out: Tensor) -> Tensor:
        """Fill ``out`` [tokens, value heads * value dim] for ``x`` [tokens, inputs], and move the states on.

        The rows that were sent last are computed. A padding token's output is zero.
        """

    def clear(self) -> None:
        """Let no program compute a row until rows are sent."""
