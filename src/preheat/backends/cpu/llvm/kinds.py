"""What the compiled functions of a model are made for: kinds of layers and products, as values. No llvmlite."""

from __future__ import annotations

from typing import Literal, NamedTuple

from preheat.ops.kinds import Activation, NormKind

PANEL = 32
"""Outputs of a weight that lie side by side for each input."""

LANES = 16

Stored = Literal["float32", "bfloat16", "float16", "int8", "int4", "fp4"]
"""Numbers in memory. Numbers of int8, int4 and fp4 are codes with scales."""

Cached = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
"""Numbers of a KV cache."""


IN_WORD = 8
"""Codes of four bits in a word: so many inputs of one output, the first in the lowest bits."""


class Scales(NamedTuple):
    """Scales of codes: one for each output and ``group`` inputs, as numbers of ``stored``.

    ``zeros``: each scale has a zero point. ``indexed``: a list names the group of each input; else a group is ``group``
    inputs in order.
    """

    group: int
    stored: Stored = "float32"
    zeros: bool = False
    indexed: bool = False


class Terms(NamedTuple):
    """Room for the terms of adapters: ``parts`` of the outputs, and the most ``tiles`` of ranks of an adapter."""

    parts: int
    tiles: int


class Product(NamedTuple):
    """A weight [outputs, inputs] in panels, and the steps after its sums.

    A bias comes first, then an activation. With a gated activation the outputs are gates and ups. Results are kept
    between -``clip`` and ``clip``, or are multiplied by ``factor``. ``scales`` belong to codes. Other numbers have
    none.
    """

    inputs: int
    outputs: int
    stored: Stored
    bias: bool = False
    activation: Activation | None = None
    clip: float | None = None
    factor: float | None = None
    scales: Scales | None = None
    terms: Terms | None = None

    @property
    def gated(self) -> bool:
        """Whether the outputs are gates and ups."""
        return self.activation is not None and self.activation.endswith("_and_mul")

    @property
    def results(self) -> int:
        """Numbers that a row has after the activation."""
        return self.outputs // 2 if self.gated else self.outputs

    @property
    def padded(self) -> int:
        """Outputs of whole panels; gates and ups have panels of their own."""
        return -(-self.results // PANEL) * PANEL * (2 if self.gated else 1)

    @property
    def shrunk(self) -> int:
        """Numbers of a row that is shrunk by an adapter."""
        return 0 if self.terms is None else self.terms.parts * self.terms.tiles * LANES


class Shared(NamedTuple):
    """An expert that all tokens visit, with a gate of ``stored`` numbers."""

    gate_up: Product
    down: Product
    stored: Stored


class Routed(NamedTuple):
    """Routed experts: a token visits ``top_k`` of ``experts``, chosen by the product ``router``.

    ``gate_up`` and ``down`` of the layer are then the products of one expert.
    """

    router: Product
    experts: int
    top_k: int
    renormalize: bool
    shared: Shared | None = None


class RowNorm(NamedTuple):
    """A norm of rows of ``size`` numbers; ``bias``: a bias follows the factors.

    ``replaces``: the norm takes the place of the rows.
    """

    kind: NormKind
    size: int
    eps: float
    bias: bool = False
    replaces: bool = False


class LayerKind(NamedTuple):
    """A decoder layer. Windows, scales, slopes and rope tables are data.

    ``turns``: queries and keys have rotary positions. ``alibi``: scores have ALiBi's terms. ``sinks``: heads have one.
    ``qk_norm`` norms each head of queries and keys, ``whole_qk_norm`` all heads of queries together and all heads of
    keys together. ``grows``: queries are multiplied by a factor of their position. ``o_norm`` norms the output of
    attention, ``down_norm`` the output of the other block. Without a ``norm`` the layer is given its inputs, beside the
    residual stream. ``parallel``: the second norm reads the stream as the front found it. A ``causal`` token sees no
    key behind it. ``distances`` are the columns of a table of biases by distance, 0 for none. ``by_token``: a token of
    the step turns by the row of its own number, [cosines, sines] of a whole head each, and not by its position.
    """

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    cached: Cached
    block_size: int
    turns: bool
    alibi: bool
    sinks: bool
    norm: RowNorm | None
    qk_norm: RowNorm | None
    o_norm: RowNorm | None
    post_norm: RowNorm
    down_norm: RowNorm | None
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    routed: Routed | None = None
    whole_qk_norm: tuple[RowNorm, RowNorm] | None = None
    grows: bool = False
    parallel: bool = False
    causal: bool = True
    distances: int = 0
    by_token: bool = False

    @property
    def visits(self) -> int:
        """Feed-forward blocks that a token visits."""
        return 1 if self.routed is None else self.routed.top_k


FRAME = {
    name: at
    for at, name in enumerate(
        "x attended qkv inner normed scores positions tables rows threads counters added adapted slots shrunk logits "
        "chosen shares order starts visited visit_slots outputs shared_inner shared_outputs shared_shares given "
        "ends".split()
    )
}  # fmt: skip
"""Fields of the frame of a step, words of 64 bits."""

JOB, FUNCTION, LAYER = 32, 40, 41
"""Fields that threads watch: the number of the latest job, its function and the layer's frame."""

LIST, LENGTH, POSTED = 48, 49, 50
"""Fields of the latest list of jobs: its address, the number of its jobs, and the number of the list."""

TAKEN, ENDED = 56, 57
"""Fields that the thread writes that runs a list: the number of the latest list begun, and of the latest one done."""

COUNTERS = 32
"""Counters of a job: one for each phase of a function."""

LINE = 8
"""Words of a cache line."""

LAYER_FRAME = {
    name: at
    for at, name in enumerate(
        "norm qkv qkv_bias q_norm k_norm cos sin cache window o o_bias post_norm gate_up gate_up_bias down "
        "down_bias o_norm down_norm slopes scales qkv_terms o_terms gate_up_terms down_terms gate_up_step down_step "
        "router router_terms shared_gate_up shared_gate_up_terms shared_down shared_down_terms shared_gate growth "
        "taken taken_x taken_attended sinks router_bias distances group".split()
    )
}  # fmt: skip
"""Fields of a layer's frame: addresses, and the window in tokens, 0 for none.

``group`` is the place of the layer's block table among the blocks of a sequence's tables.

A norm's factors are followed by its bias. ``slopes`` are ALiBi's, one for each head. ``growth`` are the factors of
queries, one for each position. ``distances`` are the biases of distances, a row for each head. ``scales`` are the
scores' factor, and the factors of stored keys and values. A ``step`` is the number of bytes from an expert's weight to
the next one's. ``taken`` are the numbers of rows that are copied, ``taken_x`` and ``taken_attended`` the places of the
copies.
"""

SPLIT = 256
"""Keys of a KV split: a split has a softmax of its own, and splits are merged in rising order."""

TERMS = {name: at for at, name in enumerate("first second tiles scales rounded parts lanes".split())}
"""Fields of the frame of a layer's adapter slots: addresses, see :mod:`preheat.backends.cpu.llvm.adapters`."""

assert len(FRAME) <= JOB, "fields of the step's frame overlap the fields that threads watch"
