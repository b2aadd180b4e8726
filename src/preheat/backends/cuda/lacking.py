"""Layers and caches that a card cannot run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from preheat.backends.cuda.device.card import Card, refused
from preheat.backends.support import matmuls
from preheat.ops.values import Cache, Experts, Recurrence, Value

WIDE_FLOAT32 = 147_456
"""Bytes of shared memory that prompts need in float32 with heads of more than 128 numbers."""

KEYS, VALUES = (64, 256), (4, 256)
"""Least and most numbers of a head of keys and of values in a layer with states.

Programs hold states in registers. The compiler keeps the order of sums over 64 numbers or more. With 16 it did not: on
an H200 the bits depended on the columns of a program.
"""


def lacking(card: Card, value: Value) -> str | None:
    """Return why ``card`` cannot run ``value``, by name, or None."""
    own = _BY_KIND.get(type(value))
    reason = None if own is None else own(card, value)
    if reason is not None or card.float8:
        return reason
    for part in matmuls(value):
        scheme = part.weight.scheme
        if scheme is not None and scheme.code == "fp8":
            return refused(card, f"layers in {scheme.kind} ({scheme.name})")
    return None


def lacking_terms(value: Value) -> str | None:
    """Return why a GPU cannot add the terms of ``value``, or None.

    There are no kernels for the terms of quantized experts that ranks share, nor of experts with another activation.
    """
    if not isinstance(value, Experts) or not value.down.terms:
        return None
    if value.down.order.is_split and value.down.weight.scheme is not None:
        return "with this device, quantization and ranks"
    activation = value.gate_up.finish.activation or "silu_and_mul"
    return None if activation == "silu_and_mul" else f"with this device and experts with {activation}"


def _experts(_: Card, value: Experts) -> str | None:
    activation = value.gate_up.finish.activation or "silu_and_mul"
    if not value.down.order.is_split or activation == "silu_and_mul":
        return None
    return f"experts with {activation} that ranks share have no kernel on a GPU yet: use --device cpu"


def _recurrence(_: Card, value: Recurrence) -> str | None:
    if KEYS[0] <= value.key_dim <= KEYS[1] and VALUES[0] <= value.value_dim <= VALUES[1]:
        return None
    return (
        f"states with heads of {value.key_dim} by {value.value_dim} numbers are not supported on a GPU, only "
        f"{KEYS[0]} to {KEYS[1]} by {VALUES[0]} to {VALUES[1]} are: use --device cpu"
    )


def _cache(card: Card, cache: Cache) -> str | None:
    if cache.distances:
        return "biases of attention by distance, MPNet's, have no kernel on a GPU yet: use --device cpu"
    if cache.dtype == "fp8_e4m3" and not card.float8:
        return refused(card, "a KV cache in fp8_e4m3")
    if cache.latent:
        eight = cache.dtype.startswith("fp8")
        return f"a cache of latent vectors in {cache.dtype} has no kernel on a GPU yet: use auto" if eight else None
    if cache.model == "float32" and cache.head_dim > 256:
        return f"heads of {cache.head_dim} numbers in float32 do not fit a GPU's shared memory: use --dtype bfloat16"
    if cache.model == "float32" and cache.head_dim > 128 and card.shared_bytes < WIDE_FLOAT32:
        return (
            f"heads of {cache.head_dim} numbers in float32 need {WIDE_FLOAT32 // 1024} KB of shared memory, and "
            f"compute capability {card.version} has {card.shared_bytes // 1024}: use --dtype bfloat16"
        )
    return None


_BY_KIND: Mapping[type, Callable[[Card, Any], str | None]] = {
    Cache: _cache,
    Experts: _experts,
    Recurrence: _recurrence,
}
"""What a card says to a kind of value, besides its quantization."""
