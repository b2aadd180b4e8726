"""The kind of a model's layer that compiled functions run, from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from preheat.backends.base.functions import LayerParts
from preheat.backends.base.layers import Norm
from preheat.backends.cpu.llvm.kinds import LANES, Cached, LayerKind, Routed, RowNorm, Shared, Stored
from preheat.backends.cpu.llvm.layer import PanelExperts, PanelLayer
from preheat.backends.cpu.llvm.packed import PackedNorm
from preheat.limits import Limits
from preheat.ops.norm import ReplacingNorm


def panels_of(layer: LayerParts) -> dict[str, PanelLayer]:
    """Return the linear layers of a layer, by their name in its frame."""
    found = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
    if layer.routed is not None:
        found["router"] = layer.routed.router
        if layer.routed.shared is not None:
            found |= {"shared_gate_up": layer.routed.shared.gate_up, "shared_down": layer.routed.shared.down}
    return {name: each for name, each in found.items() if isinstance(each, PanelLayer)}


def experts_of(layer: LayerParts) -> PanelExperts:
    """Return the experts of a layer that has some."""
    assert layer.routed is not None
    assert isinstance(layer.routed.experts, PanelExperts)
    return layer.routed.experts


def _routed(layer: LayerParts) -> Routed | None:
    """Return the kind of a layer's routed experts, None in a dense layer."""
    if layer.routed is None:
        return None
    panels, value = {name: each.how for name, each in panels_of(layer).items()}, experts_of(layer).value
    shared = None
    if layer.routed.shared is not None:
        assert layer.routed.shared.gate is not None, "refused by supports"
        stored = cast(Stored, str(layer.routed.shared.gate.dtype).removeprefix("torch."))
        shared = Shared(panels["shared_gate_up"], panels["shared_down"], stored)
    routing = value.routing
    return Routed(panels["router"], value.down.groups.experts, routing.top_k, routing.renormalize, shared)


def routed_sizes(kinds: Sequence[LayerKind]) -> dict[str, int]:
    """Return the numbers of a row in the buffers of routed experts."""
    found = dict.fromkeys(("logits", "shares", "outputs", "shared_inner", "shared_outputs", "shared_shares"), 0)
    for kind in kinds:
        if kind.routed is None:
            continue
        shared = kind.routed.shared
        sizes: tuple[int, ...] = (kind.routed.experts, kind.visits, kind.visits * kind.hidden)
        sizes += (0, 0, 0) if shared is None else (shared.down.inputs, kind.hidden, LANES)
        found = {name: max(size, more) for (name, size), more in zip(found.items(), sizes, strict=True)}
    return found


def kind_of(layer: LayerParts, limits: Limits) -> LayerKind:
    """Return the kind of a layer."""
    products = {name: each.how for name, each in panels_of(layer).items()}
    if layer.routed is not None:
        products |= {"gate_up": experts_of(layer).gate_up, "down": experts_of(layer).down}
    attention = layer.attention
    cached = str(attention.cache.dtype).removeprefix("torch.")
    return LayerKind(
        hidden=products["o"].results,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        dim=attention.head_dim,
        cached=cast(Cached, cached),
        block_size=limits.block_size,
        turns=attention.rope is not None,
        by_token=attention.by_token,
        alibi=attention.alibi is not None,
        sinks=attention.sinks is not None,
        norm=_how(layer.input_norm) if products["qkv"].inputs == products["o"].results else None,
        qk_norm=_how(attention.qk_norm),
        o_norm=_how(layer.o_norm),
        post_norm=_row_norm(layer.post_norm),
        down_norm=_how(layer.down_norm),
        qkv=products["qkv"],
        o=products["o"],
        gate_up=products["gate_up"],
        down=products["down"],
        routed=_routed(layer),
        causal=attention.causal,
        distances=0 if attention.distances is None else attention.distances.shape[1],
        whole_qk_norm=_whole(layer),
        grows=attention.growth is not None,
        parallel=layer.parallel,
    )


def _whole(layer: LayerParts) -> tuple[RowNorm, RowNorm] | None:
    """Return the norms of all query heads together and of all key heads together."""
    if layer.whole_qk_norm is None:
        return None
    q, k = layer.whole_qk_norm
    return packed_of(q).how, packed_of(k).how


def packed_of(norm: Norm) -> PackedNorm:
    """Return the norm as it lies in memory."""
    packed = norm.norm if isinstance(norm, ReplacingNorm) else norm
    assert isinstance(packed, PackedNorm)
    return packed


def _row_norm(norm: Norm) -> RowNorm:
    return packed_of(norm).how._replace(replaces=isinstance(norm, ReplacingNorm))


def _how(norm: Norm | None) -> RowNorm | None:
    return None if norm is None else _row_norm(norm)
