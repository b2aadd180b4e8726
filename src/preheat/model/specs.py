"""A model's parts as a tree of specs.

The tree has a ModelSpec, LayerSpec, AttentionSpec, DenseSpec, MoeSpec, LinearSpec, NormSpec and others. A family
(:mod:`preheat.model.families`) builds the tree from a ``config.json``, with the checkpoint's tensor names. Loader, cost
model and tuner walk it. No torch here: planning needs the sizes long before the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from preheat.cache_groups import Entry
from preheat.errors import ModelError
from preheat.model.kv_spec import KVDtype, KVSpec
from preheat.model.latent_specs import LatentSpec, UpSpec
from preheat.model.layer_input_specs import LayerEndSpec, LayerInputsSpec
from preheat.model.recurrence_specs import ConvSpec, DeltaSpec
from preheat.ops.kinds import Activation, NormKind, Scheme, Scoring

if TYPE_CHECKING:
    from preheat.model.grid_specs import GridVisionSpec

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
Dtype = Literal["float32", "bfloat16", "float16"]
T = TypeVar("T")
N = TypeVar("N")


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A linear layer y = x W^T + b.

    ``parts`` are the checkpoint's modules (name, outputs), stacked from top to bottom. ``format`` is the storage of the
    modules (:mod:`preheat.model.formats`); ``scheme`` is their quantization, None without. The outputs go through
    ``activation``, or are kept between -``clip`` and ``clip``, or are multiplied by ``factor``, or are kept below
    ``cap`` by tanh. ``order`` lists ranges of the stacked rows [from, to) in the layer's order; empty: the stacked
    order.

    A shard (:mod:`preheat.model.shard`) has some of the rows, listed in ``order``, or some of the inputs: ``columns``
    [from, to) of the checkpoint's ``stored_inputs``. ``tiles`` are then the numbers of rows computed by one product
    each, and ``k_splits`` the number of K splits, each summed by itself (:mod:`preheat.ops.matmul`).
    """

    parts: tuple[tuple[str, int], ...]
    inputs: int
    bias: bool = False
    activation: Activation | None = None
    clip: float | None = None
    factor: float | None = None
    cap: float | None = None
    order: tuple[tuple[int, int], ...] = ()
    format: str = "plain"
    scheme: Scheme | None = None
    columns: tuple[int, int] | None = None
    stored_inputs: int = 0
    tiles: tuple[int, ...] = ()
    k_splits: int = 0

    @cached_property
    def outputs(self) -> int:
        """Rows of W."""
        return sum(end - start for start, end in self.order) if self.order else self.stored_outputs

    @property
    def stored_outputs(self) -> int:
        """Rows of the checkpoint's ``parts``."""
        return sum(outputs for _, outputs in self.parts)

    @property
    def sharded(self) -> bool:
        """Whether a rank reads only a part of the checkpoint's matrix."""
        return self.columns is not None or self.outputs != self.stored_outputs

    def pieces(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the sources of the layer's rows, from top to bottom.

        A source is a module, and its rows [from, to).
        """
        for start, end in self.order or ((0, self.stored_outputs),):
            first = 0
            for name, outputs in self.parts:
                rows = max(start - first, 0), min(end - first, outputs)
                if rows[0] < rows[1]:
                    yield name, rows
                first += outputs

    @property
    def gated(self) -> bool:
        """Whether the layer ends with SwiGLU.

        Kernels may compute it with the product.
        """
        return self.activation == "silu_and_mul"

    @property
    def weights(self) -> int:
        """Numbers in W."""
        return self.outputs * self.inputs

    @property
    def params(self) -> int:
        """Numbers in W and b."""
        return self.weights + self.bias * self.outputs

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of W on a device.

        W is in the model's dtype unless it is quantized.
        """
        return self.scheme.bytes(self.outputs, self.inputs) if self.scheme else self.weights * itemsize


@dataclass(frozen=True)
class NormSpec:
    """A norm of rows of ``size`` numbers; ``name`` is the checkpoint's module.

    A norm of kind identity has no module. ``replaces``: the residual stream goes on from the norm, as in a layer that
    norms its outputs. ``order`` lists ranges of the stored numbers [from, to) in the layer's order; empty: the stored
    order.
    """

    name: str
    size: int
    eps: float
    kind: NormKind = "rms"
    bias: bool = False
    replaces: bool = False
    order: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def params(self) -> int:
        return 0 if self.kind == "identity" else self.size * (1 + self.bias)


TIED_HEAD = "lm_head"
"""Module name of a tied output head, absent in a checkpoint."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """A table of embeddings of tokens or of positions, [vocab_size, size].

    ``name`` is the checkpoint's module. A token's row is multiplied by ``scale``. The first ``unused`` rows stand for
    no position, and ``spare`` rows of zeros are put behind the last one.
    """

    name: str
    vocab_size: int
    size: int
    scale: float | None = None
    unused: int = 0
    spare: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.vocab_size, self.size

    @property
    def params(self) -> int:
        return self.vocab_size * self.size


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


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A feed-forward block: ``gate_up``, including the activation, then ``down``.

    Without a gate, ``gate_up`` is only up.
    """

    gate_up: LinearSpec
    down: LinearSpec

    @property
    def activations(self) -> int:
        """Intermediate numbers per token: gate, up, and the output of the activation."""
        return self.gate_up.outputs + self.down.inputs


STACKED, STACKED_MXFP4 = "stacked", "stacked-mxfp4"
"""Formats of experts whose checkpoint has a stack of all experts, :mod:`preheat.model.formats_stacked`."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer: feed-forward blocks of ``inner`` numbers with a gated ``activation``.

    In the checkpoint each expert has the modules ``gate``, ``up`` and ``down``; {} in their names is the expert's
    number. Formats of stacked experts have gate and up in one module. ``bias``: both layers have one. A shard has
    ``kept`` [from, to) of the checkpoint's ``stored_inner`` numbers, summed in ``k_splits`` splits.

    ``dealt``: ranks have whole experts instead. A shard then has ``num_experts`` experts of the checkpoint's
    ``stored_experts``, from number ``first`` on.
    """

    gate: str
    up: str
    down: str
    num_experts: int
    hidden: int
    inner: int
    bias: bool = False
    activation: Activation = "silu_and_mul"
    format: str = "plain"
    scheme: Scheme | None = None
    kept: tuple[int, int] | None = None
    stored_inner: int = 0
    k_splits: int = 0
    dealt: bool = False
    first: int = 0
    stored_experts: int = 0

    @property
    def params(self) -> int:
        return self.num_experts * (3 * self.hidden * self.inner + self.bias * (2 * self.inner + self.hidden))

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of one expert's weights: gates above ups, and downs."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)

    @property
    def whole_inner(self) -> int:
        """Inner numbers of the checkpoint's experts."""
        return self.stored_inner or self.inner

    @property
    def numbers(self) -> range:
        """Numbers of the experts, as the router has them."""
        return range(self.first, self.first + self.num_experts)

    @property
    def whole_experts(self) -> int:
        """Number of the checkpoint's experts."""
        return self.stored_experts or self.num_experts

    @property
    def modules(self) -> Iterator[str]:
        """The modules of all experts of the checkpoint."""
        return (name.format(each) for each in range(self.whole_experts) for name in (self.gate, self.up, self.down))

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of all experts on a device."""
        if self.scheme is None:
            return self.params * itemsize
        return self.num_experts * sum(self.scheme.bytes(*matrix) for matrix in self.matrices)


@dataclass(frozen=True)
class GateSpec:
    """One row of ``size`` weights for a gate.

    Its product with a token says how far the gate opens. ``name`` is the checkpoint's module.
    """

    name: str
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.size

    @property
    def params(self) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True)
class SharedSpec:
    """An expert that all tokens visit, and its ``gate``.

    The gate sets its share in each token; without one (None) the share is one.
    """

    block: DenseSpec
    gate: GateSpec | None = None


@dataclass(frozen=True, kw_only=True)
class BesideSpec:
    """Norms of a block of experts that reads the residual stream itself, beside its shared expert.

    ``router``, ``experts`` and ``shared`` are the norms of what each reads, ``experts_out`` and ``shared_out`` of what
    they return.
    """

    router: NormSpec
    experts: NormSpec
    experts_out: NormSpec
    shared: NormSpec
    shared_out: NormSpec


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A feed-forward block of experts; ``router`` chooses ``top_k`` for each token (:mod:`preheat.ops.moe`).

    ``renormalize``: the weights of the chosen experts sum to one. ``round_weights``: the weights are rounded to the
    model's dtype. ``scoring``, the groups and ``factor`` are as in :class:`preheat.ops.values.Routing`. ``correction``
    is added to the scores for the choice alone. ``weighted`` has a factor of each expert's weight, after all others.
    With ``beside`` the block reads the residual stream, and has a shared expert.
    """

    router: LinearSpec
    experts: ExpertsSpec
    top_k: int
    renormalize: bool
    round_weights: bool
    shared: SharedSpec | None = None
    scoring: Scoring = "softmax"
    groups: int = 1
    top_groups: int = 1
    best: int = 1
    factor: float = 1.0
    correction: VectorSpec | None = None
    weighted: VectorSpec | None = None
    beside: BesideSpec | None = None

    @property
    def activations(self) -> int:
        """Intermediate numbers per token.

        These are inputs or outputs of the chosen experts, and their inner numbers.
        """
        chosen = self.top_k * (self.experts.hidden + self.experts.inner) + self.router.outputs
        return chosen + (self.shared.block.activations + self.experts.hidden if self.shared else 0)

    @property
    def share(self) -> float:
        """Share of the experts that a token visits."""
        return self.top_k / self.experts.whole_experts


MlpSpec = DenseSpec | MoeSpec


@dataclass(frozen=True)
class PatchSpec:
    """The map from patches of an image to ``outputs`` numbers each.

    Patches are squares of ``size`` pixels in ``channels`` colors and do not overlap. ``name`` is the checkpoint's
    module, a convolution. With ``frames`` a patch has as many pictures, which follow one another; 0: the module has no
    such axis.
    """

    name: str
    outputs: int
    channels: int
    size: int
    frames: int = 0
    bias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        frames = (self.frames,) if self.frames else ()
        return self.outputs, self.channels, *frames, self.size, self.size

    @property
    def inputs(self) -> int:
        """Numbers in a patch."""
        return self.channels * max(self.frames, 1) * self.size**2

    @property
    def params(self) -> int:
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True)
class VectorSpec:
    """``size`` numbers; ``name`` is the checkpoint's module."""

    name: str
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def params(self) -> int:
        return self.size


@dataclass(frozen=True)
class DistanceSpec:
    """Biases of attention by distance, [buckets, heads]; distances from ``most`` on are alike."""

    name: str
    buckets: int
    heads: int
    most: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.buckets, self.heads

    @property
    def params(self) -> int:
        return self.buckets * self.heads


HeadActivation = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True)
class HeadSpec:
    """A layer of the head behind a pooled state, [outputs, inputs]; ``name`` is the checkpoint's module.

    A module of a folder beside the model's files is written FOLDER/NAME. With ``rows`` the weight is these rows of a
    table of ``height`` rows, or for a single output of two rows the second less the first.
    """

    name: str
    outputs: int
    inputs: int
    activation: HeadActivation | None = None
    bias: bool = True
    rows: tuple[int, ...] = ()
    height: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.height or self.outputs, self.inputs

    @property
    def params(self) -> int:
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True, kw_only=True)
class VisionLayerSpec:
    """A layer of a vision tower.

    It is like a decoder layer, but every position attends to every other.
    """

    input_norm: NormSpec
    qkv: LinearSpec
    o: LinearSpec
    post_norm: NormSpec
    mlp: DenseSpec


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """An encoder of square images to embeddings of a prompt.

    An image has ``image_size`` pixels a side. The encoder has the needed ``layers`` of a vision tower, and a
    ``projector``. A tower's first position is ``cls``, the others are patches, from left to right, then down.
    ``keeps_cls``: the prompt has the ``cls`` position too. ``image_token`` stands for an image in a prompt, and for
    each of its positions.
    """

    image_size: int
    num_heads: int
    patches: PatchSpec
    cls: VectorSpec
    positions: EmbeddingSpec
    pre_norm: NormSpec
    layers: tuple[VisionLayerSpec, ...]
    projector: DenseSpec
    keeps_cls: bool
    image_token: int

    any_size: ClassVar[bool] = False

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patches.size) ** 2

    @property
    def num_positions(self) -> int:
        """Positions of the tower, for an image."""
        return self.positions.vocab_size

    @property
    def tokens(self) -> int:
        """Positions of the prompt, for an image."""
        return self.num_patches + self.keeps_cls

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        """Shape of an image's pixels; they are fp32."""
        return self.patches.channels, self.image_size, self.image_size

    @property
    def scale(self) -> float:
        """Factor of the scores of attention."""
        return float((self.patches.outputs // self.num_heads) ** -0.5)

    @property
    def step_params(self) -> int:
        """Weights that encoding reads."""
        return self.patches.params + sum(leaf.weights for _, leaf in leaves(self) if isinstance(leaf, LinearSpec))

    @property
    def activations(self) -> int:
        """The most intermediate numbers of an image.

        These are the states of its positions, and one layer's scores.
        """
        wide = max(self.layers[0].qkv.outputs, self.layers[0].mlp.activations, self.projector.activations)
        return self.num_positions * (2 * self.patches.outputs + wide + 2 * self.num_heads * self.num_positions)


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
    longest sequence, rope scaling included. ``dtype`` is the checkpoint's. ``eos_ids`` end a sequence; ``bos_id``
    begins one if the tokenizer says so. ``positions`` are learned and added to the embeddings, and so are ``types``,
    the parts of a pair of texts. ``renames`` are the other layouts of the family's checkpoints. ``ignored`` are regular
    expressions; a tensor is no weight if its whole name matches one. ``vision`` is for models that see images. The
    fields ``elsewhere`` have sizes but no weights here: another stage of a pipeline has them. ``pools_first``: a text
    is sampled at its first token in place of its last. The layers of ``pooled_head`` follow a text's state.
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
    bos_id: int | None
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

    @property
    def first_of_kinds(self) -> tuple[int, ...]:
        """The first layer of each kind."""
        kinds = [layer_kind(layer) for layer in self.layers]
        return tuple(sorted(kinds.index(kind) for kind in set(kinds)))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of a sequence in place of keys and values."""
        return len(self.attentions) < len(self.layers)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state in all layers.

        ``itemsize`` are the bytes of the model's dtype.
        """
        states = (each.attention.value for each in self.layers if isinstance(each.attention, DeltaSpec))
        return sum(each.state_bytes(itemsize) for each in states)

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
    def kv_sides(self) -> int:
        return _one("rows of a head's entry", [each.kv.sides for each in self.attentions])

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


Leaf = (
    LinearSpec
    | NormSpec
    | EmbeddingSpec
    | ExpertsSpec
    | GateSpec
    | PatchSpec
    | VectorSpec
    | ConvSpec
    | HeadSpec
    | DistanceSpec
    | UpSpec
)
"""The specs with tensors of their own."""


def leaves(node: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield every leaf below ``node`` with its path, in field order."""
    if isinstance(node, Leaf):
        yield path, node
        return
    children: Iterable[tuple[object, Any]] = ()
    if isinstance(node, tuple):
        children = enumerate(node)
    elif names := _field_names(cast(Any, type(node))):
        absent = getattr(node, "elsewhere", ())
        children = ((name, getattr(node, name)) for name in names if name not in absent)
    for name, child in children:
        if isinstance(child, tuple) or _field_names(cast(Any, type(child))):  # most fields are numbers and words
            yield from leaves(child, _below(path, name))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, none of another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def with_leaves(node: N, change: Callable[[str, Leaf], Leaf], path: str = "") -> N:
    """Return ``node`` with every leaf replaced by ``change(path, leaf)``.

    Paths are as in :func:`leaves`.
    """
    found: Any = node
    if isinstance(node, Leaf):
        found = change(path, node)
    elif isinstance(node, tuple):
        found = tuple(with_leaves(child, change, _below(path, at)) for at, child in enumerate(node))
    elif is_dataclass(node):
        children = {field.name: getattr(node, field.name) for field in fields(node)}
        found = replace(found, **{at: with_leaves(child, change, _below(path, at)) for at, child in children.items()})
    return cast(N, found)


def with_linears(node: N, change: Callable[[str, LinearSpec], LinearSpec]) -> N:
    """Return ``node`` with every linear layer changed, like :func:`with_leaves`."""
    return with_leaves(node, lambda path, leaf: change(path, leaf) if isinstance(leaf, LinearSpec) else leaf)


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


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _one(name: str, values: Iterable[T]) -> T:
    """Return the value that all layers share. Raises ModelError if layers differ."""
    first, *others = dict.fromkeys(values)
    if others:
        raise ModelError(f"{name} that differ between layers are not supported")
    return first
