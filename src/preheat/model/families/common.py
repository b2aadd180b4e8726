"""Common parts of families, from one attention block to a whole model.

A family that differs in one part builds that part itself and takes the others from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec, RopeSpec
from preheat.model.config import Config
from preheat.model.kv_spec import KVSpec
from preheat.model.mlp_specs import DenseSpec, MlpSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec, NormSpec
from preheat.ops.kinds import Activation


@dataclass(frozen=True, kw_only=True)
class Names:
    """A checkpoint's module names.

    The names of a layer's modules have the prefix ``layer``, with its number. ``qkv`` and ``gate_up``: one module in
    place of several.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    final_norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = Names()


def llama_like(
    config: Config,
    names: Names = LLAMA,
    *,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rope: RopeSpec | None = None,
    mlp: Callable[[str, int], MlpSpec] | None = None,
    renames: tuple[Rename, ...] = (),
) -> ModelSpec:
    """Return a model of Llama's architecture.

    ``windows`` are the layers' sliding windows; None for full attention in all. ``rope`` is the config's unless it is
    given. ``mlp(prefix, index)`` is the feed-forward block of a layer, by default a dense one.
    """
    hidden, rope = config.size("hidden_size"), rope or config.rope()

    def layer(index: int, window: int | None) -> LayerSpec:
        prefix = names.layer.format(index)
        return LayerSpec(
            attention=attention(config, names, prefix, window, rope, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm),
            mlp=mlp(prefix, index) if mlp else dense(config, names, prefix, bias=mlp_bias),
            input_norm=norm(config, prefix + names.input_norm, hidden),
            post_norm=norm(config, prefix + names.post_norm, hidden),
        )

    windows = windows or (None,) * config.num_layers()
    layers = tuple(layer(index, window) for index, window in enumerate(windows))
    return model(config, names, layers, max_positions=config.max_positions(rope), renames=renames)


def with_layers(spec: ModelSpec, change: Callable[[int, LayerSpec], LayerSpec]) -> ModelSpec:
    """Return ``spec`` with each layer replaced by ``change(index, layer)``."""
    return replace(spec, layers=tuple(change(index, layer) for index, layer in enumerate(spec.layers)))


def identity(config: Config) -> NormSpec:
    """Return the norm that stands where a block reads the residual stream as it is."""
    return NormSpec("", config.size("hidden_size"), 1.0, kind="identity")


def norms_after(config: Config, layer: LayerSpec, prefix: str) -> LayerSpec:
    """Return ``layer`` with norms after attention and MLP in place of the norms before."""
    own = (f"{prefix}post_{name}_layernorm" for name in ("attention", "feedforward"))
    attention_out, mlp_out = (norm(config, name, config.size("hidden_size")) for name in own)
    before = identity(config)
    return replace(layer, input_norm=before, post_norm=before, attention_out_norm=attention_out, mlp_out_norm=mlp_out)


def normed_whole(config: Config, spec: AttentionSpec, prefix: str) -> AttentionSpec:
    """Return ``spec`` with a norm of all query heads together, and of all key heads together."""
    sizes = ("q", spec.num_heads), ("k", spec.num_kv_heads)
    q, k = (norm(config, f"{prefix}self_attn.{name}_norm", heads * spec.head_dim) for name, heads in sizes)
    return replace(spec, whole_qk_norm=(q, k))


def with_layer_norms(
    config: Config, spec: ModelSpec, names: Names = LLAMA, *, bias: bool, parallel: bool = False, shared: bool = False
) -> ModelSpec:
    """Return ``spec`` with norms that subtract the mean.

    ``parallel``: attention and MLP lie side by side. ``shared``: both read one norm.
    """

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        prefix = names.layer.format(index)
        input_norm, post_norm = (
            layer_norm(config, prefix + name, bias=bias) for name in (names.input_norm, names.post_norm)
        )
        return replace(made, input_norm=input_norm, post_norm=None if shared else post_norm, parallel=parallel)

    return replace(with_layers(spec, layer), final_norm=layer_norm(config, names.final_norm, bias=bias))


def multiplied(layer: LayerSpec, factor: float) -> LayerSpec:
    """Return ``layer`` with ``factor`` on everything that it adds to the residual stream."""
    if factor == 1:
        return layer
    own, mlp = layer.attention, layer.mlp
    if isinstance(mlp, DenseSpec):
        mlp = _multiplied_block(mlp, factor)
    else:  # on the weights of routed experts, and on the expert beside them
        assert mlp.shared is None or mlp.shared.gate is None, "the factor would have to follow the gate"
        shared = mlp.shared and replace(mlp.shared, block=_multiplied_block(mlp.shared.block, factor))
        mlp = replace(mlp, factor=mlp.factor * factor, shared=shared)
    return replace(layer, attention=replace(own, o=replace(own.o, factor=factor)), mlp=mlp)


def _multiplied_block(block: DenseSpec, factor: float) -> DenseSpec:
    return replace(block, down=replace(block.down, factor=factor))


def with_logit_factor(spec: ModelSpec, factor: float) -> ModelSpec:
    """Return ``spec`` with all logits multiplied by ``factor``."""
    assert spec.head is not None
    return spec if factor == 1 else replace(spec, head=replace(spec.head, factor=factor))


def equal_heads(config: Config) -> tuple[int, int]:
    """Return the number of heads and the size of each. Raises ModelError if they do not divide the hidden numbers."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{heads} attention heads cannot share {hidden} hidden numbers evenly")
    return heads, hidden // heads


def attention(
    config: Config, names: Names, prefix: str, window: int | None, rope: RopeSpec, *,
    qkv_bias: bool, o_bias: bool, qk_norm: bool,
) -> AttentionSpec:  # fmt: skip
    """Return grouped-query attention with rotary embedding."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv = KVSpec(config.size("num_key_value_heads", heads), config.size("head_dim", hidden // heads))
    if heads % kv.num_kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv.num_kv_heads} key/value heads evenly")
    q_size, kv_size = heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
    parts: tuple[tuple[str, int], ...] = (
        (prefix + names.q, q_size), (prefix + names.k, kv_size), (prefix + names.v, kv_size)
    )  # fmt: skip
    if names.qkv is not None:
        parts = ((prefix + names.qkv, q_size + 2 * kv_size),)
    norms = norm(config, prefix + names.q_norm, kv.head_dim), norm(config, prefix + names.k_norm, kv.head_dim)
    order = turning_order(rope, heads, kv)
    assert not (order and qk_norm), "norms of heads would need the order of their rows"
    return AttentionSpec(
        num_heads=heads,
        kv=kv,
        window=window,
        rope=rope,
        qk_norm=norms if qk_norm else None,
        qkv=LinearSpec(parts=parts, inputs=hidden, bias=qkv_bias, order=order),
        o=LinearSpec(parts=((prefix + names.o, hidden),), inputs=q_size, bias=o_bias),
        scale=kv.head_dim**-0.5,
    )


@cache
def turning_order(rope: RopeSpec, heads: int, kv: KVSpec) -> tuple[tuple[int, int], ...]:
    """Return the row order of queries and keys.

    It matters if only a part of each head turns, or if partners are neighbors in a checkpoint. See
    :meth:`RopeSpec.turned`. Scores are the same in any order that queries and keys share. Raises ModelError where
    ``rope`` does not fit.
    """
    dim, turned = kv.head_dim, rope.turned(kv.head_dim)
    if dim % 2 or turned % 2 or not 0 < turned <= dim:
        raise ModelError(f"head_dim must be even for rotary embedding, and so must the part that turns: {turned}/{dim}")
    for factors in (rope.short_factor, rope.long_factor):
        if rope.kind == "longrope" and len(factors) != turned // 2:
            raise ModelError(f"longrope needs {turned // 2} short and long factors, got {len(factors)}")
    if turned == dim and not rope.interleaved:
        return ()
    rest = (dim - turned) // 2
    halves: tuple[list[tuple[int, int]], ...] = [(0, turned // 2)], [(turned // 2, turned)]
    if rope.interleaved:
        halves = [(at, at + 1) for at in range(0, turned, 2)], [(at, at + 1) for at in range(1, turned, 2)]
    still = [(turned, turned + rest)] * (rest > 0), [(turned + rest, dim)] * (rest > 0)
    edges = *halves[0], *still[0], *halves[1], *still[1]
    starts = range(0, (heads + kv.num_kv_heads) * dim, dim)
    values = (heads + kv.num_kv_heads) * dim
    return *((at + a, at + b) for at in starts for a, b in edges), (values, values + kv.num_kv_heads * dim)


def dense(
    config: Config, names: Names, prefix: str, *, bias: bool, inner: int | None = None,
    activation: Activation = "silu_and_mul",
) -> DenseSpec:  # fmt: skip
    """Return the gated feed-forward block of ``inner`` numbers, by default ``intermediate_size``."""
    if activation == "silu_and_mul":
        config.require_silu()
    hidden, inner = config.size("hidden_size"), inner or config.size("intermediate_size")
    gate_up: tuple[tuple[str, int], ...] = ((prefix + names.gate, inner), (prefix + names.up, inner))
    if names.gate_up is not None:
        gate_up = ((prefix + names.gate_up, 2 * inner),)
    return DenseSpec(
        gate_up=LinearSpec(parts=gate_up, inputs=hidden, bias=bias, activation=activation),
        down=LinearSpec(parts=((prefix + names.down, hidden),), inputs=inner, bias=bias),
    )


def ungated(
    up: str, down: str, *, hidden: int, inner: int, activation: Activation, bias: bool,
) -> DenseSpec:  # fmt: skip
    """Return the ungated feed-forward block of the modules ``up`` and ``down``."""
    return DenseSpec(
        gate_up=LinearSpec(parts=((up, inner),), inputs=hidden, bias=bias, activation=activation),
        down=LinearSpec(parts=((down, hidden),), inputs=inner, bias=bias),
    )


_GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}


def gelu(config: Config) -> Activation:
    """Return the kind of GELU that ``hidden_act`` names."""
    name = config.get("hidden_act")
    if not isinstance(name, str) or name not in _GELU:
        raise ModelError(f"activation {name!r} is not supported, only {', '.join(_GELU)} are")
    return _GELU[name]


def squared_mlp(config: Config) -> Callable[[str, int], MlpSpec]:
    """Return the maker of feed-forward blocks without a gate, by the square of ReLU."""
    config.refuse("hidden_act", "relu2")
    hidden, inner, bias = config.size("hidden_size"), config.size("intermediate_size"), config.flag("mlp_bias")

    def mlp(prefix: str, _: int) -> MlpSpec:
        up, down = prefix + LLAMA.up, prefix + LLAMA.down
        return ungated(up, down, hidden=hidden, inner=inner, activation="relu2", bias=bias)

    return mlp


def norm(config: Config, name: str, size: int) -> NormSpec:
    """Return a root-mean-square norm."""
    return NormSpec(name, size, config.positive("rms_norm_eps", 1e-6))


def layer_norm(config: Config, name: str, *, bias: bool) -> NormSpec:
    """Return a norm of hidden states that subtracts their mean."""
    eps = config.positive("layer_norm_epsilon", 1e-5)
    return NormSpec(name, config.size("hidden_size"), eps, kind="layer", bias=bias)


def model(
    config: Config, names: Names, layers: tuple[LayerSpec, ...], *,
    max_positions: int, final_norm: NormSpec | None = None, positions: EmbeddingSpec | None = None,
    scale: float | None = None, renames: tuple[Rename, ...] = (), ignored: tuple[str, ...] = (),
) -> ModelSpec:  # fmt: skip
    """Return a whole model around its ``layers``; embeddings are multiplied by ``scale``."""
    vocab_size, hidden = config.size("vocab_size"), config.size("hidden_size")
    head = names.embedding if config.flag("tie_word_embeddings") else names.head
    return ModelSpec(
        architecture=config.architecture,
        embedding=EmbeddingSpec(names.embedding, vocab_size, hidden, scale),
        layers=layers,
        final_norm=final_norm or norm(config, names.final_norm, hidden),
        head=LinearSpec(parts=((head, vocab_size),), inputs=hidden),
        max_position_embeddings=max_positions,
        eos_ids=config.token_ids("eos_token_id"),
        dtype=config.dtype(),
        positions=positions,
        renames=renames,
        ignored=ignored,
    )


def normed_sums(
    config: Config, prefixes: Sequence[str], block: Callable[[str], tuple[AttentionSpec, MlpSpec]], *,
    middle: str = "post_attention_layernorm", last: str = "post_mlp_layernorm",
) -> tuple[tuple[LayerSpec, ...], NormSpec]:  # fmt: skip
    """Return the layers of an encoder that norms the sum of each block and its input, and the final norm.

    Every norm replaces the residual stream. So the norm of the embeddings is the input norm of the first layer. The
    ``last`` norm of a layer is the input norm of the next layer, and the final norm behind the last layer.
    ``middle`` stands behind attention. ``block(prefix)`` returns the attention and the feed-forward block of a
    layer.
    """
    hidden = config.size("hidden_size")

    def norm(name: str) -> NormSpec:
        eps = config.positive("layer_norm_eps", 1e-12)
        return NormSpec(name, hidden, eps, kind="layer", bias=True, replaces=True)

    norms = [norm("embeddings.LayerNorm"), *(norm(prefix + last) for prefix in prefixes)]
    blocks = [block(prefix) for prefix in prefixes]
    layers = tuple(
        LayerSpec(attention=attention, mlp=mlp, input_norm=before, post_norm=norm(prefix + middle))
        for prefix, (attention, mlp), before in zip(prefixes, blocks, norms, strict=False)
    )
    return layers, norms[-1]


def encoder(
    config: Config, table: str, layers: tuple[LayerSpec, ...], final_norm: NormSpec, *,
    max_positions: int, positions: EmbeddingSpec | None = None, types: EmbeddingSpec | None = None,
    renames: tuple[Rename, ...] = (), ignored: tuple[str, ...] = (),
) -> ModelSpec:  # fmt: skip
    """Return a whole encoder around its ``layers``: no output head, and no token that ends a text.

    ``table`` is the name of the table of embeddings.
    """
    return ModelSpec(
        architecture=config.architecture,
        embedding=EmbeddingSpec(table, config.size("vocab_size"), config.size("hidden_size")),
        layers=layers,
        final_norm=final_norm,
        head=None,
        max_position_embeddings=max_positions,
        eos_ids=(),
        dtype=config.dtype(),
        positions=positions,
        types=types,
        renames=renames,
        ignored=ignored,
    )
