"""Dtype and scales of the KV cache.

They come from the options and the checkpoint. No torch here. A scale is a constant of the model: from the checkpoint,
or from a calibration (:mod:`preheat.model.inc`), or 1. A scale is never measured on the first requests, because then
one boot could differ from another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from preheat.errors import ModelError, SettingsError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.kv_spec import KVDtype
from preheat.model.specs import LayerSpec, ModelSpec

logger = logging.getLogger(__name__)

Scales = tuple[float, float]
"""Scale of keys, scale of values."""

FP8: Mapping[str, KVDtype] = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_inc": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
"""Dtype stored for each 8-bit value of ``--kv-cache-dtype``."""

SAME = {"float16": "bfloat16"}
"""Dtypes that run as another dtype."""

STORED = re.compile(r".*\.([kvq]_scale|kv_scale|prob_scale|(k|v)_proj\.output_scale)")
"""Names of a checkpoint's scales for attention.

Scales of queries and weights (q_scale, prob_scale) are for kernels that multiply in eight bits; none do so here.
"""


def with_kv_dtype(spec: ModelSpec, asked: str, dtype: str) -> ModelSpec:
    """Return ``spec`` with the cache dtype of ``--kv-cache-dtype``.

    The model runs in ``dtype``. Scales are 1. Raises SettingsError for a dtype that is neither of eight bits nor the
    model's.
    """
    if asked in FP8:
        return _with_kv(spec, lambda layer: replace(layer.kv, dtype=FP8[asked]))
    if asked not in ("auto", dtype, SAME.get(dtype)) and SAME.get(asked) != dtype:
        raise SettingsError(
            f"kv_cache_dtype {asked} differs from the model's dtype, {dtype}: write auto, or one of {', '.join(FP8)}",
            param="kv_cache_dtype",
        )
    return spec


def with_scales(spec: ModelSpec, scales: Sequence[Scales]) -> ModelSpec:
    """Return ``spec`` with these scales, one pair for each layer with keys."""
    layers = iter(scales)
    return _with_kv(spec, lambda layer: replace(layer.kv, scales=next(layers)))


def _with_kv(spec: ModelSpec, kv: Callable[[LayerSpec], object]) -> ModelSpec:
    layers = tuple(
        replace(layer, attention=replace(layer.attention, kv=kv(layer)))  # type: ignore[arg-type]
        if isinstance(layer.attention, AttentionSpec)
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def attention_module(spec: AttentionSpec) -> str:
    """Return the checkpoint's module of attention.

    It is the parent of the layer's projections.
    """
    return spec.qkv.parts[0][0].rpartition(".")[0]


def names(spec: AttentionSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return possible names of the scales of keys, and of values.

    They belong to one layer. The first name that the checkpoint has counts. The last name is the older single scale for
    both.
    """
    module = attention_module(spec)
    found = []
    for kind in "kv":
        own = f"{module}.{kind}_proj"
        found.append(
            (
                f"{module}.{kind}_scale",
                f"{module}.attn.{kind}_scale",
                f"{own}.{kind}_scale",
                f"{own}.output_scale",
                f"{module}.qkv_proj.{kind}_scale",
                f"{module}.kv_scale",
            )
        )
    return found[0], found[1]


def checkpoint_scales(spec: ModelSpec, stored: Collection[str], read: Callable[[str], float]) -> list[Scales] | None:
    """Return the stored scales of all layers; None without any.

    ``stored`` are the names of the checkpoint's tensors. Raises ModelError, naming the tensor, if only some layers have
    scales, or if a tensor is no scale.
    """
    layers, missing = [], []
    for attention in spec.attentions:
        found = [next((name for name in each if name in stored), None) for each in names(attention)]
        missing += [each[0] for each, name in zip(names(attention), found, strict=True) if name is None]
        layers.append([1.0 if name is None else _positive(name, read(name)) for name in found])
    if len(missing) == 2 * len(layers):
        return None
    if missing:
        raise ModelError(f"the checkpoint has scales for parts of the KV cache only: {missing[0]} is missing")
    return [(key, value) for key, value in layers]


def resolve_scales(spec: ModelSpec, stored: Collection[str], read: Callable[[str], float]) -> ModelSpec:
    """Return ``spec`` with the checkpoint's scales, for an 8-bit cache.

    Without stored scales they are 1, with a warning. Raises SettingsError for a dtype that cannot have scales.
    """
    found = checkpoint_scales(spec, stored, read)
    if spec.kv_dtype == "auto":
        if found:
            logger.info("The checkpoint has scales for a KV cache of eight bits: --kv-cache-dtype fp8 uses them")
        return spec
    if found is None:
        logger.warning(
            "The KV cache is stored in %s with scales of 1.0: the checkpoint has none. If answers suffer, calibrate: "
            "preheat calibrate, see docs/fp8-kv-cache.md", spec.kv_dtype,
        )  # fmt: skip
        return spec
    if spec.kv_dtype == "fp8_e5m2" and any(pair != (1.0, 1.0) for pair in found):
        raise SettingsError(
            "kv_cache_dtype fp8_e5m2: the checkpoint's scales were measured for the range of e4m3; write fp8_e4m3",
            param="kv_cache_dtype",
        )
    return with_scales(spec, found)


def identity(spec: ModelSpec) -> dict[str, str] | None:
    """Return an identity of the cache's dtype and scales.

    None for the model's own dtype. Contents of caches with different identities must not mix.
    """
    if spec.kv_dtype == "auto":
        return None
    text = json.dumps([each.kv.scales for each in spec.attentions])
    return {"dtype": spec.kv_dtype, "scales": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"tensor {name} of the checkpoint is not a scale: {value}")
    return value
