"""The parts of a model's layers, as a backend's attention and functions take them."""

from __future__ import annotations

from collections.abc import Sequence

from preheat.backends.base.attention import AttentionLayer
from preheat.backends.base.functions import LayerParts, RoutedParts, SharedParts
from preheat.execution.kv_cache import KVCache
from preheat.model.attention_specs import AttentionSpec
from preheat.model.decoder import Decoder
from preheat.model.layers import DenseMlp, MoeMlp


def attention_layers(decoder: Decoder, cache: KVCache) -> list[AttentionLayer]:
    """Return the input of the attention of each layer that has keys."""
    caches = zip(cache.group_of_layer, cache.layers, strict=True)
    turns = decoder.turns
    ropes = decoder.ropes if turns is None else [turns.rows] * len(decoder.ropes)
    parts = ropes, decoder.alibi, decoder.growth, decoder.weights.layers
    each = zip((layer.attention for layer in decoder.spec.layers), *parts, strict=True)
    keyed = ((spec, *others) for spec, *others in each if isinstance(spec, AttentionSpec))
    layers = ((*next(caches), *of) for of in keyed)
    return [
        AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            cache=layer_cache,
            dtype=decoder.dtype,
            rope=rope,
            qk_norm=weights.attention.qk_norm,
            alibi=alibi,
            kv_scales=spec.kv.scales,
            causal=spec.causal,
            growth=growth,
            sinks=weights.attention.sinks,
            distances=decoder.distances,
            still=spec.head_dim - spec.rope_dim,
            group=group,
            by_token=turns is not None,
            own=spec.source is None,
        )
        for group, layer_cache, spec, rope, alibi, growth, weights in layers
    ]


def layer_parts(decoder: Decoder, attention: Sequence[AttentionLayer]) -> list[LayerParts]:
    """Return the parts of each layer, for a backend that runs layers as functions."""
    found = []
    for layer, each in zip(decoder.weights.layers, attention, strict=True):
        mlp = layer.mlp if isinstance(layer.mlp, DenseMlp) else None
        found.append(
            LayerParts(
                attention=each,
                input_norm=layer.input_norm,
                post_norm=layer.post_norm,
                qkv=layer.attention.qkv,
                o=layer.attention.o,
                gate_up=None if mlp is None else mlp.gate_up,
                down=None if mlp is None else mlp.down,
                routed=None if isinstance(layer.mlp, DenseMlp) else _routed_parts(layer.mlp),
                o_norm=layer.attention_out_norm,
                down_norm=layer.mlp_out_norm,
                whole_qk_norm=layer.attention.whole_qk_norm,
                parallel=layer.parallel,
            )
        )
    return found


def _routed_parts(block: MoeMlp) -> RoutedParts:
    """Return the parts of a block of experts."""
    shared = block.shared
    parts = None if shared is None else SharedParts(shared.block.gate_up, shared.block.down, shared.gate)
    return RoutedParts(block.router, block.experts, parts)
