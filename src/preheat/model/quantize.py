"""Rounding of a model's linear layers while they are loaded, by ``--quantization``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from preheat.backends.base.facts import Facts
from preheat.model import inc
from preheat.model.formats import FORMATS, LinearFormat
from preheat.model.formats_inc import Inc
from preheat.model.rounded import rounded
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
    found = rounded(settings, spec, facts)
    if found is None:
        return spec, Quantized(FORMATS, {})
    spec, config, scales = found
    text = json.dumps([config.method, config.traits, sorted(scales.items())])
    numerics = {"inc": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
    return spec, Quantized({**FORMATS, inc.FORMAT: Inc(config, scales)}, numerics)
