"""Layers and caches that a card cannot run. No torch."""

from __future__ import annotations

from preheat.backends.cuda.card import Card, refused
from preheat.backends.support import matmuls
from preheat.ops.values import Cache, Experts, Recurrence, Value

WIDE_FLOAT32 = 147_456
"""Bytes of shared memory that prompts need in float32 with heads of more than 128 numbers."""

NARROWEST_STATE, WIDEST_STATE = 4, 256
"""Numbers of a head of keys or values in a layer with states; programs hold states in registers."""


def lacking(card: Card, value: Value) -> str | None:
    """Return why ``card`` cannot run ``value``, by name, or None."""
    if isinstance(value, Cache):
        return _cache(card, value)
    if isinstance(value, Recurrence):
        return _recurrence(value)
    if isinstance(value, Experts) and not value.gate_up.finish.bias:
        activation = value.gate_up.finish.activation or "silu_and_mul"
        if activation != "silu_and_mul":
            return f"experts with {activation} and no biases have no kernel on a GPU yet: use --device cpu"
    if card.float8:
        return None
    for part in matmuls(value):
        scheme = part.weight.scheme
        if scheme is not None and scheme.code == "fp8":
            return refused(card, f"layers in {scheme.kind} ({scheme.name})")
    return None


def _recurrence(value: Recurrence) -> str | None:
    sizes = value.key_dim, value.value_dim
    if max(sizes) <= WIDEST_STATE and min(sizes) >= NARROWEST_STATE:
        return None
    return (
        f"states with heads of {value.key_dim} by {value.value_dim} numbers are not supported on a GPU, only "
        f"{NARROWEST_STATE} to {WIDEST_STATE} are: use --device cpu"
    )


def _cache(card: Card, cache: Cache) -> str | None:
    if cache.distances:
        return "biases of attention by distance, MPNet's, have no kernel on a GPU yet: use --device cpu"
    if cache.dtype == "fp8_e4m3" and not card.float8:
        return refused(card, "a KV cache in fp8_e4m3")
    if cache.latent:
        eight = cache.dtype.startswith("fp8")
        return f"a cache of latent vectors in {cache.dtype} has no kernel on a GPU yet: use auto" if eight else None
    if cache.model == "float32" and cache.head_dim > 128 and card.shared_bytes < WIDE_FLOAT32:
        return (
            f"heads of {cache.head_dim} numbers in float32 need {WIDE_FLOAT32 // 1024} KB of shared memory, and "
            f"compute capability {card.version} has {card.shared_bytes // 1024}: use --dtype bfloat16"
        )
    return None
