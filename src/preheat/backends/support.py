"""Support of a layer by a backend's facts, before weights are read. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from preheat.backends.base.facts import Facts
from preheat.ops.values import (
    NOTHING_MORE,
    Cache,
    Experts,
    Finish,
    Latents,
    LayerEnd,
    Matmul,
    Ok,
    Recurrence,
    Refused,
    Support,
    Value,
    WithoutTerms,
)

DIVIDED = (
    "with --fully-sharded-loras, because ranks would exchange data once more in each such layer, before the "
    "activation: leave the option out"
)


SWIGLU = Finish(activation="silu_and_mul")


def supports(facts: Facts, value: Value) -> Support:
    """Return whether a backend of these ``facts`` runs the layer of ``value``; a backend may know more."""
    parts = matmuls(value)
    for scheme in (part.weight.scheme for part in parts):
        if scheme is not None and scheme.kind not in facts.quantized:
            known = ", ".join(facts.quantized) or "none"
            return Refused(
                f"layers in {scheme.kind} ({scheme.name}) are not supported on {facts.name}; supported: {known}"
            )
    for kind, what, why in (
        (Latents, "attention over latent vectors is", facts.no_latents),
        (LayerEnd, "layers with a scalar or an input of their own are", facts.no_layer_ends),
    ):
        if isinstance(value, kind) and why:
            return Refused(f"{what} not supported on {facts.name}: {why}")
    if isinstance(value, Experts):
        if facts.plain_routers and not (value.routing.is_plain and not value.corrected and not value.weighted):
            more = ", and factors of experts" if value.weighted else ""
            how = f"a router by {value.routing.scoring}, with {value.routing.groups} groups{more},"
            return Refused(f"{how} is not supported on {facts.name}: {facts.plain_routers}")
        if facts.plain_experts and any(part.finish not in (NOTHING_MORE, SWIGLU) for part in parts):
            return Refused(f"experts with biases or a clamped activation are not supported on {facts.name}: "
                           f"{facts.plain_experts}")  # fmt: skip
        if value.down.finish.bias and any(part.terms for part in parts):
            return WithoutTerms("experts with biases are stored as one tensor, and adapters do not name its parts")
    traits = {"states"} if isinstance(value, Recurrence) else {trait for part in parts for trait in _traits(part)}
    found: Support = Ok()
    for names, reason in facts.lacks.items():
        if set(names) <= traits:
            if "adapters" not in names:
                return Refused(f"not on {facts.name}: {reason}")
            found = WithoutTerms(f"on {facts.name}: {reason}")
    if isinstance(value, Experts) and any(term.shared == "ranks" for part in parts for term in part.terms):
        return WithoutTerms(DIVIDED)
    return found


def matmuls(value: Value) -> tuple[Matmul, ...]:
    """Return the layers of ``value``: itself, or the layers of its experts or of a head.

    A cache, a recurrence and a layer's last steps have none.
    """
    if isinstance(value, Cache | Recurrence | LayerEnd):
        return ()
    if isinstance(value, Matmul):
        return (value,)
    return (value.gate_up, value.down) if isinstance(value, Experts) else (value.keys, value.values)


def _traits(value: Matmul) -> Iterator[str]:
    """Yield the traits of a layer, see :data:`preheat.settings.combinations.TRAITS`."""
    if value.terms:
        yield "adapters"
    if value.order.tiles or value.order.is_split:
        yield "tensor_parallel"
    if value.weight.scheme is not None:
        yield value.weight.scheme.kind
