"""The layers that ``--quantization inc`` rounds, and their scales. No torch here: a plan needs them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from preheat.backends.base.facts import Facts
from preheat.errors import SettingsError
from preheat.model import inc, inc_files
from preheat.model.inc_files import IncConfig
from preheat.model.kv_scales import attention_module, with_scales
from preheat.model.specs import ModelSpec
from preheat.settings import Settings


class Rounded(NamedTuple):
    """A spec with rounded layers, the configuration that names them, and the scale of each layer's inputs."""

    spec: ModelSpec
    config: IncConfig
    scales: Mapping[str, float]


def rounded(settings: Settings, spec: ModelSpec, facts: Facts) -> Rounded | None:
    """Return ``spec`` with the layers that the settings round, or None if they round none.

    The backend has these ``facts``. Raises SettingsError for files that cannot be read, and for layers without ranges.
    """
    if settings.quantization != "inc" or settings.quant_config is None:
        return None
    config = inc_files.read_config(settings.quant_config)
    if config.mode == "MEASURE":
        raise SettingsError(
            f"{config.path} is for measuring: run preheat calibrate with it, then name the file of mode QUANTIZE",
            param="quant_config",
        )
    ranges = inc_files.read_ranges(config) if config.method not in inc_files.WITHOUT_RANGES else {}
    inc.warn_of_device(config, facts.name)
    scales = inc.linear_scales(config, spec, ranges)
    kernel = facts.quantized.get(inc.SCHEME.kind)
    spec = inc.with_inc(spec, scales, coded=kernel is not None and kernel.keeps_codes)
    if settings.kv_cache_dtype == "fp8_inc":
        modules = [attention_module(each) for each in spec.attentions]
        spec = with_scales(spec, inc.cache_scales(config, modules, ranges))
    return Rounded(spec, config, scales)
