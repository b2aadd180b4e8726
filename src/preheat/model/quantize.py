"""Rounding of a model's linear layers while they are loaded, by ``--quantization``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from preheat.backends.base.facts import Facts
from preheat.errors import SettingsError
from preheat.model import inc
from preheat.model.formats import FORMATS, LinearFormat
from preheat.model.formats_inc import Inc
from preheat.model.kv_scales import attention_module, with_scales
from preheat.model.specs import ModelSpec
from preheat.settings import Settings


class Quantized(NamedTuple):
    """The formats of a spec, and digests of rounding.

    Bits depend on the digests. Digests are plain data.
    """

    formats: Mapping[str, LinearFormat]
    numerics: Mapping[str, object]


def quantize(settings: Settings, spec: ModelSpec, facts: Facts) -> tuple[ModelSpec, Quantized]:
    """Return ``spec`` with the settings' formats and scales.

    The backend has these ``facts``.
    """
    if settings.quantization != "inc" or settings.quant_config is None:
        return spec, Quantized(FORMATS, {})
    config = inc.read_config(settings.quant_config)
    if config.mode == "MEASURE":
        raise SettingsError(
            f"{config.path} is for measuring: run preheat calibrate with it, then name the file of mode QUANTIZE",
            param="quant_config",
        )
    ranges = inc.read_ranges(config) if config.method not in inc.WITHOUT_RANGES else {}
    inc.warn_of_device(config, facts.name)
    scales = inc.linear_scales(config, spec, ranges)
    kernel = facts.quantized.get(inc.SCHEME.kind)
    spec = inc.with_inc(spec, scales, coded=kernel is not None and kernel.keeps_codes)
    if settings.kv_cache_dtype == "fp8_inc":
        modules = [attention_module(each) for each in spec.attentions]
        spec = with_scales(spec, inc.cache_scales(config, modules, ranges))
    text = json.dumps([config.method, config.traits, sorted(scales.items())])
    numerics = {"inc": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
    return spec, Quantized({**FORMATS, inc.FORMAT: Inc(config, scales)}, numerics)
